"""Applies the defaults of a model's name to the requests that are sent to it: a value of the request comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orchestrator.gateway.anthropic.chat_request import MessagesChat
from orchestrator.gateway.lmi import LmiCompletion
from orchestrator.gateway.openai.protocol import Chat, ChatMessage, ChatRequest, CompletionRequest

Defaults = Mapping[str, Any]
SYSTEM, MAX_TOKENS = "system", "max_tokens"
_OF_THE_PROMPT = frozenset({SYSTEM, "chat_template_kwargs"})
_SYSTEM_ROLES = frozenset({"system", "developer"})


def apply_to_prompt(body: Chat, defaults: Defaults) -> None:
    """Sets the fields of a chat's prompt that it does not have. A chat with a system message keeps it as it is."""
    if _adds_system(body.messages, defaults):
        body.messages = [ChatMessage("system", defaults[SYSTEM]), *body.messages]
    if body.chat_template_kwargs is None:
        body.chat_template_kwargs = defaults.get("chat_template_kwargs")


def apply_to(body: ChatRequest | CompletionRequest, defaults: Defaults) -> None:
    """Sets the fields that the request does not have, except the most tokens of its answer."""
    if not defaults:
        return
    if isinstance(body, ChatRequest):
        apply_to_prompt(body, defaults)
    for field, value in defaults.items():
        if field not in _OF_THE_PROMPT and field != MAX_TOKENS and getattr(body, field) is None:
            setattr(body, field, value)
    if isinstance(body, LmiCompletion) and body.leaves_temperature:
        body.temperature = defaults.get("temperature", body.temperature)


def default_tokens(body: ChatRequest | CompletionRequest, defaults: Defaults) -> int | None:
    """Returns the most tokens of an answer whose request has no `max_tokens`, as far as the model has room for them;
    None for no other limit. Messages always have their own."""
    own = body.default_tokens
    return own if isinstance(body, MessagesChat) else defaults.get(MAX_TOKENS, own)


def with_defaults(body: bytes, defaults: Defaults) -> bytes:
    """Returns the body of a chat that is forwarded, with the fields that it does not have."""
    if not defaults:
        return body
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    chat = msgspec.json.decode(body, type=_Forwarded)
    if _adds_system(chat.messages, defaults):
        system = {"role": "system", "content": defaults[SYSTEM]}
        messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
        fields["messages"] = msgspec.Raw(msgspec.json.encode([system, *messages]))
    for field, value in defaults.items():
        sent = ("max_tokens", "max_completion_tokens") if field == MAX_TOKENS else (field,)
        if field != SYSTEM and all(bytes(fields.get(name, _NULL)) == _NULL for name in sent):
            fields[field] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


_NULL = b"null"


class _Sent(msgspec.Struct):
    role: str


def _adds_system(messages: Sequence[ChatMessage | _Sent], defaults: Defaults) -> bool:
    return SYSTEM in defaults and not any(message.role in _SYSTEM_ROLES for message in messages)


class _Forwarded(msgspec.Struct):
    """The fields of a forwarded chat that are read here."""

    messages: list[_Sent]
