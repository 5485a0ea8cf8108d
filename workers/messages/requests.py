"""Generation requests and the events that answer them, as values that cross a socket."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import msgspec

from workers.messages.encoder_protocol import EncodeInput


class FinishReason(str, Enum):
    """Why a request ended. The first two are OpenAI's; clients never see the others as a finish reason."""

    STOP = "stop"  # an EOS id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the slot's max_len
    CANCELLED = "cancelled"  # the client disconnected
    INVALID = "invalid"  # the replica cannot serve such a request; TokenEvent.error has the reason
    REFUSED = "refused"  # the replica accepts no new requests; another one may
    UNSERVED = "unserved"  # the replica's server did not begin this request; another attempt may succeed
    BUSY = "busy"  # other gateways have filled its slots; `Room` follows when one is free
    ERROR = "error"  # the engine failed; TokenEvent.error has the cause


GUIDE = "guide"  # the field of a constraint, which clients send in one of several fields


class InvalidField(ValueError):
    """A field of a request has a value that the engine cannot use."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class AnswerMarkers(msgspec.Struct, frozen=True, omit_defaults=True):
    """The texts by which a model's template divides an answer, around the part that is constrained."""

    calls: tuple[str, ...] = ()  # each begins a call, which is not constrained; it may be in place of the answer
    open: str = ""  # begins the reasoning, which may be left out; empty: it cannot begin in the answer
    close: str = ""  # ends the reasoning; empty: there is none
    opened: bool = False  # the prompt ends inside the reasoning


class AnswerConstraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The text or value that an answer must match, in the form ``kind``."""

    text: str
    # `json`: a JSON schema. `grammar`: of Lark or GBNF. `choice`: a JSON array of texts. `structural_tag`: vLLM's JSON
    # with `structures` and `triggers`.
    kind: Literal["json", "regex", "grammar", "choice", "structural_tag"] = "json"
    markers: AnswerMarkers = AnswerMarkers()
    relaxed: str = ""  # the keywords of schemas that were left out, separated by commas


class ReasoningLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit on all reasoning in an answer together, after which the reasoning ends if the host samples."""

    tokens: int
    open: str  # the text that begins reasoning
    close: str  # the text that ends it
    opened: bool = False  # the prompt ends inside the reasoning


class Forwarded(msgspec.Struct, frozen=True):
    """A client's request to OpenAI's API that a replica forwards to its server."""

    route: str  # such as "/v1/chat/completions"
    body: bytes  # JSON


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt to be continued, already tokenized and checked against the replica's lengths.

    ``len(prompt_ids) + max_tokens`` must not exceed the engine's ``max_len``, and ``prompt_ids`` is not empty.
    ``max_tokens`` 0 only processes the prompt. These conditions do not apply to requests with ``forwarded``, which the
    server checks itself, and with ``inputs``, which are encoded. Such requests use only id, max_tokens, adapter and
    trace.
    """

    id: str
    prompt_ids: list[int]
    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    temperature_is_default: bool = False  # the client gave none, so a greedy-only engine may use 0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # on prompt and output, as transformers'
    presence_penalty: float = 0.0  # on the output alone, as OpenAI's
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0  # 0 is off
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    logprobs: int | None = None  # None: none; n: of each token, and of the n most probable beside it
    prompt_logprobs: int | None = None  # likewise, of the prompt's tokens; no prefix of it is taken from a cache
    guide: AnswerConstraint | None = None
    reasoning_limit: ReasoningLimit | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int | None = None
    adapter: str = ""  # the name of a LoRA adapter; empty: the model itself
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    trace: str | None = None  # W3C's `traceparent` of the parent span; None: the request is not traced
    whole: bool = False  # the client reads nothing before the end: after the first token the rest comes in one event
    forwarded: Forwarded | None = None
    inputs: list[EncodeInput] = []


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token, and of the most probable ones in its place (natural logarithm)."""

    id: int
    logprob: float | None  # None: of the first token of a prompt, which nothing predicts
    text: str
    bytes: list[int]  # of the token's own UTF-8, complete or not
    top: list[tuple[int, float, str, list[int]]]  # id, logprob, text, bytes; most probable first
    rank: int | None = None  # of a prompt's token: how many ids are at least as probable; None: unknown


class AnswerPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Part of a server's answer to a forwarded request, or of the float32 numbers of encoded inputs, row by row.

    Counts are the server's; until it reports them, each event with text counts as one token."""

    data: bytes = b""
    tokens: int = 0  # generated since the last part; negative: a correction
    prompt_tokens: int | None = None  # in the last part, if the server reports them
    status: int = 0  # HTTP's, of a request that the server rejected
    work_s: float = 0.0  # in the last part of encoded inputs: seconds of the engine that they need in full batches
    batches_s: float = 0.0  # likewise: the duration of the batches that they were in


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of one engine step for one request.

    ``text`` holds only final characters: complete ones that can no longer become part of a stop string. ``token_ids``
    are all ids produced in this step, including the EOS that ends an answer (usage counts it, the text leaves it out).
    """

    id: str
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []  # one for each of token_ids, where they were requested
    prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's next tokens, in events before that of the first token
    finish: FinishReason | None = None
    error: str | None = None
    param: str = ""  # the field of the request that is invalid; empty: no single one
    part: AnswerPart | None = None  # of a forwarded request
    stop: str = ""  # the stop string that has ended the answer
