"""The JSON of messages that have models of a spec in them, for child processes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def encoded(message: msgspec.Struct) -> bytes:
    """Returns a message as JSON."""
    return msgspec.json.encode(message, enc_hook=_as_builtin)


def decoded(data: bytes | str, kind: type[T]) -> T:
    """Returns the message that `encoded` has written. Raises msgspec.MsgspecError and pydantic's ValidationError."""
    return msgspec.json.decode(data, type=kind, dec_hook=_from_builtin)


def _as_builtin(value: Any) -> Any:
    """Returns the fields of a model of a spec, a pydantic model, which only processes with one import."""
    return value.model_dump(mode="json", exclude_defaults=True)


def _from_builtin(kind: Any, value: Any) -> Any:
    return kind.model_validate(value, strict=False)
