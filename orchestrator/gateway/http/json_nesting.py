"""Limits the nesting of JSON that clients send, before anything decodes it.

Decoders, encoders, pickle and chat templates each have their own limit of recursion, from 300 levels on: what one
accepts fails in the next. The limit here is far below all of them.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

import msgspec

MAX_DEPTH = 100  # lists and objects inside each other; a JSON schema may have 32 levels of schemas
MAX_CONTAINERS = 2**17  # lists and objects together: counting their nesting takes 5 ms

_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: 1 and -1
_OTHERS = bytes(set(range(256)) - set(b'[{]}"'))


def checked(data: bytes) -> bytes:
    """Returns ``data``, which need not be JSON. Raises msgspec.DecodeError for JSON over a limit."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return data
    without_escapes = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    brackets_and_quotes = without_escapes.translate(_STEPS, _OTHERS).replace(b'""', b"")  # two enclose no bracket
    steps = b"".join(brackets_and_quotes.split(b'"')[::2])  # every second part is a text
    if steps.count(1) > MAX_CONTAINERS:
        raise msgspec.DecodeError(f"more than {MAX_CONTAINERS} lists and objects")
    if max(accumulate(array("b", steps)), default=0) > MAX_DEPTH:
        raise msgspec.DecodeError(f"lists and objects in more than {MAX_DEPTH} levels")
    return data
