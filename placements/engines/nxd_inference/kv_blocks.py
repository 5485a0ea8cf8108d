"""The KV cache of NxD Inference in blocks, as ``engine_options: {prefix_cache: true}`` stores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

OPTIONS = ("pa_block_size", "pa_num_blocks", "prefix_buckets")
"""Options of NeuronConfig that have an effect only with a prefix cache."""

BLOCK = 32
"""Tokens of a block by default, as in AWS's back end for vLLM."""

SHORTEST = 128
"""Tokens of the shortest prefill bucket: with a prefix, a shorter one is compiled as a step of several tokens, which
fails (``attention_base.forward``). Fewer tokens than this in a slot cannot be divided into the cache's tiles
(``BlockKVCacheManager._init_kv_shape_for_prefix_caching``)."""

UNTESTED = (
    "attn_block_tkg_nki_kernel_enabled",
    "attn_tkg_builtin_kernel_enabled",
    "attn_tkg_nki_kernel_enabled",
    "cp_degree",
    "disable_kv_cache_tiling",
    "k_cache_transposed",
    "kv_cache_padding_size",
    "layer_boundary_markers",
    "token_generation_batches",
    "windowed_context_encoding_size",
)
"""Options that change the KV cache or how it is read, and have not been tested with blocks."""


class KvBlocks(NamedTuple):
    """The blocks of a replica's KV cache."""

    size: int  # tokens
    number: int  # without the one that the package adds, where rows without a request write

    @property
    def tokens(self) -> int:
        """The tokens that the device has memory for."""
        return (self.number + 1) * self.size


class PrefixCacheRefusal(NamedTuple):
    """A setting that a prefix cache does not support: its path in the model, why, and the remedy."""

    path: tuple[str, ...]
    what: str
    hint: str


def kv_blocks(options: Mapping[str, Any], slots: int, max_len: int) -> KvBlocks:
    """Returns the blocks by ``engine_options``: by default as many as all slots need at ``max_len``."""
    size = _whole(options.get("pa_block_size"), BLOCK)
    return KvBlocks(size, _whole(options.get("pa_num_blocks"), slots * -(-max_len // size)))


def prefix_buckets(options: Mapping[str, Any], prefill: Sequence[int]) -> tuple[int, ...]:
    """Returns the prefix lengths that graphs are compiled for, by default those of the prompts except the longest."""
    size = _whole(options.get("pa_block_size"), BLOCK)
    return tuple(options.get("prefix_buckets") or (length for length in prefill[:-1] if length % size == 0))


def refusals(
    options: Mapping[str, Any], slots: int, max_len: int, prefill: Sequence[int], others: Mapping[str, Any]
) -> Iterator[PrefixCacheRefusal]:
    """Yields what a prefix cache does not support.

    Without ``prefill``, its buckets are the doubling ones. ``others`` are fields of the model that must not be set, by
    name. Options of a wrong type are passed over.
    """
    at, (size, number) = "engine_options", kv_blocks(options, slots, max_len)
    doubling = (SHORTEST << power for power in range(max_len.bit_length()))
    prefill = prefill or [*(length for length in doubling if length < max_len), max_len]
    for field, value in others.items():
        if value is not None:
            yield PrefixCacheRefusal(
                (field,), f"{field} is not supported together with a prefix cache", f"remove {field}"
            )
    if slots == 1:
        fact = "a prefix cache needs at least two slots: with one, AWS reports wrong answers"
        yield PrefixCacheRefusal(("max_batch",), fact, "set max_batch: 2 or more")
    if max_len < SHORTEST:
        fact = f"a prefix cache needs slots of at least {SHORTEST} tokens, not {max_len}"
        yield PrefixCacheRefusal(("max_len",), fact, f"set max_len: {SHORTEST} or more")
    if prefill[0] < SHORTEST:
        fact = f"with a prefix cache a prefill bucket needs at least {SHORTEST} tokens, not {prefill[0]}"
        yield PrefixCacheRefusal(("buckets",), fact, "remove the shorter buckets")
    if size & (size - 1):
        fact = f"engine_options.pa_block_size is {size}; it must be a power of two"
        yield PrefixCacheRefusal((at, "pa_block_size"), fact, f"use {BLOCK}")
        return  # the other options are counted in blocks
    if number < (least := slots * -(-max_len // size)):
        fact = f"engine_options.pa_num_blocks is {number}, but {slots} slots of {max_len} tokens need {least} blocks"
        yield PrefixCacheRefusal((at, "pa_num_blocks"), fact, f"use at least {least}, or remove it")
    prefixes, longest = options.get("prefix_buckets"), prefill[-1]
    if isinstance(prefixes, list) and all(type(length) is int for length in prefixes):
        wrong = [length for length in prefixes if length % size or not 0 < length < longest]
        if wrong or prefixes != sorted(set(prefixes)):
            fact = f"engine_options.prefix_buckets is {prefixes}; it must be ascending multiples of the {size} tokens "
            yield PrefixCacheRefusal(
                (at, "prefix_buckets"), fact + f"of a block below the longest prompt, {longest}", ""
            )
    if not prefix_buckets(options, prefill):
        fact = "no prefix can be cached: no prefill bucket but the longest is a multiple of "
        yield PrefixCacheRefusal(
            (at, "prefix_cache"), fact + f"the {size} tokens of a block", "set engine_options.prefix_buckets"
        )
    for name in UNTESTED:
        if options.get(name) not in (None, False, 0) and (name, options[name]) != ("cp_degree", 1):
            yield PrefixCacheRefusal(
                (at, name), f"engine_options.{name} is not tested with a prefix cache", "remove it"
            )


def _whole(value: Any, default: int) -> int:
    return value if type(value) is int and value > 0 else default
