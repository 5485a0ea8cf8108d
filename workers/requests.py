"""What a client asks of a replica, and what the replica answers, as values that cross a socket."""

from __future__ import annotations

from enum import Enum

import msgspec


class FinishReason(str, Enum):
    """Why a request ended. The first two are OpenAI's; clients never see the others as a finish reason."""

    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the slot's max_len
    CANCELLED = "cancelled"  # the client went away
    ERROR = "error"  # the engine failed; TokenEvent.error says how


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to be continued, already tokenized and checked against the replica's lengths.

    ``len(prompt_ids) + max_tokens`` must not exceed the engine's ``max_len``, and ``prompt_ids`` is not empty.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine step gave one request.

    ``text`` is only what is certain: characters that are complete and can no longer become part of a stop string.
    ``token_ids`` are all ids produced in this step, the EOS that ends an answer among them (usage counts it, the text
    does not hold it).
    """

    id: str
    text: str = ""
    token_ids: list[int] = []
    finish: FinishReason | None = None
    error: str | None = None
