"""Selects the parser of a model's tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from orchestrator.gateway.openai.toolcalls.events import ToolParser
from orchestrator.gateway.openai.toolcalls.parsers import (
    HermesParser,
    LlamaParser,
    MistralParser,
    NamedParser,
    RequiredParser,
)

Format = Literal["hermes", "llama3", "mistral"]
FORMATS: Mapping[Format, type[HermesParser | LlamaParser | MistralParser]] = MappingProxyType(
    {"hermes": HermesParser, "llama3": LlamaParser, "mistral": MistralParser}
)

_SIGNS: tuple[tuple[Format, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>", '"parameters": dictionary of argument name')),
)
_OTHERS = ("<function=", "<arg_key>")  # models that write XML inside <tool_call>: Qwen3-Coder, GLM
_ALPHANUMERIC = string.ascii_letters + string.digits


def detect_format(chat_template: str | None) -> Format | None:
    """Returns the call format of a chat template, by the markers in its text; None for an unknown format."""
    text = chat_template or ""
    if any(sign in text for sign in _OTHERS):
        return None
    return next((format for format, signs in _SIGNS if any(sign in text for sign in signs)), None)


def make_parser(
    format: Format | None, calling: str, *, streamed: bool, only_one: bool = False, name: str = ""
) -> ToolParser:
    """Returns the parser of one answer. ``calling``: auto, required, or named, which needs the ``name``.

    Only ``auto`` needs a format: a required or named call is JSON with any model. The call's id suits the format's chat
    templates.
    """
    new_id = _mistral_id if format == "mistral" else _id
    if calling == "named":
        return NamedParser(new_id, name)
    if calling == "required":
        return RequiredParser(new_id, streamed=streamed, only_one=only_one)
    if format is None:
        raise ValueError("the format of this model's calls is unknown")
    return FORMATS[format](new_id, streamed=streamed, only_one=only_one)


def _id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Returns an id of nine characters: Mistral's chat templates reject others."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
