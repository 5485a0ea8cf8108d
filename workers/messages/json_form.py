"""The form of messages that have models of a spec in them, which are pydantic's, not msgspec's."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def encoded(message: msgspec.Struct) -> bytes:
    """Returns a message as JSON."""
    return msgspec.json.encode(message, enc_hook=as_builtin)


def decoded(data: bytes | str, kind: type[T]) -> T:
    """Returns the message that `encoded` has written. Raises msgspec.MsgspecError and pydantic's ValidationError."""
    return msgspec.json.decode(data, type=kind, dec_hook=from_builtin)


def as_builtin(value: Any) -> Any:
    """Returns the fields of a model of a spec. Only processes with one import pydantic."""
    return value.model_dump(mode="json", exclude_defaults=True)


def from_builtin(kind: Any, value: Any) -> Any:
    """Returns the model of a spec with these fields, without those that its class does not have."""
    return kind.model_validate(value, strict=False, extra="ignore")
