"""The form in which the arguments and results of actor calls cross processes of different versions of corewright."""

from __future__ import annotations

import copyreg
from typing import Any, TypeVar

import msgspec

from workers.messages.json_form import as_builtin, from_builtin

T = TypeVar("T")


def actor_message(kind: type[T]) -> type[T]:
    """Decorates a struct that Ray passes from process to process: it is pickled as msgpack.

    The receiver may have another version with the same `wire.PROTOCOL`: a field that it does not have is ignored, and
    one that is missing has its default. A struct's own pickle would fail.
    """
    copyreg.pickle(kind, _reduced)
    return kind


def _reduced(message: object) -> tuple[Any, ...]:
    return _decoded, (type(message), msgspec.msgpack.encode(message, enc_hook=as_builtin))


def _decoded(kind: type[T], data: bytes) -> T:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=from_builtin)
