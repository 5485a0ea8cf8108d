"""Bucket lists. ``find`` takes the largest where none is large enough, and says nothing."""

from __future__ import annotations

from collections.abc import Sequence

from neuron_double.bound import bound


@bound("transformers_neuronx.bucket.token_sizes")
def token_sizes(buckets_or_size: int | Sequence[int]) -> list[int]:
    if isinstance(buckets_or_size, Sequence):
        return sorted(buckets_or_size)
    sizes, size = [], 128
    while size < buckets_or_size:
        sizes.append(size)
        size *= 2
    return [*sizes, buckets_or_size]


@bound("transformers_neuronx.bucket.context_sizes")
def context_sizes(buckets_or_size: int | Sequence[int] | None, token_buckets: Sequence[int] | None = None) -> list[int]:
    if isinstance(buckets_or_size, Sequence):
        return sorted(buckets_or_size)
    if buckets_or_size is None:
        return [size // 2 for size in token_buckets or ()]
    return [buckets_or_size] if buckets_or_size > 0 else []


@bound("transformers_neuronx.bucket.batch_sizes")
def batch_sizes(batch_size: int | Sequence[int]) -> list[int]:
    return sorted(batch_size) if isinstance(batch_size, Sequence) else [batch_size]


@bound("transformers_neuronx.bucket.find")
def find(buckets: Sequence[int] | None, size: int) -> int | None:
    if not buckets:
        return None
    return next((bucket for bucket in buckets if bucket >= size), buckets[-1])
