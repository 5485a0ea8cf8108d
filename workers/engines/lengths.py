"""The compiled lengths of an engine, checked."""

from __future__ import annotations

from collections.abc import Sequence

from workers.batching.buckets import checked_buckets
from workers.messages.engine_protocol import EngineLoadError


def check_size(engine: str, slots: int, max_len: int) -> None:
    """Raises EngineLoadError for a number of slots or a length that no engine supports."""
    if slots < 1 or max_len < 2:
        message = f"{engine} needs at least 1 slot and a max_len of 2, not {slots} and {max_len}"
        raise EngineLoadError("bad-engine-size", message)


def checked_lengths(
    prefill: Sequence[int], decode: Sequence[int], max_len: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the buckets of prompts and of the KV cache. Raises EngineLoadError."""
    try:
        lengths = checked_buckets("prefill", prefill, max_len), checked_buckets("decode", decode, max_len)
    except ValueError as error:
        raise EngineLoadError("bad-buckets", str(error)) from error
    if lengths[1][-1] != max_len:
        message = f"the largest decode bucket is {lengths[1][-1]}, less than max_len {max_len}"
        raise EngineLoadError("bad-buckets", message, f"add {max_len}")
    return lengths
