"""Which cache line each row of a call is, and which bucket it goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuronx_distributed_inference._played import version


class ModelWrapper:
    """One kind of graph. ``compiler_args`` are the flags that it is compiled with; NEURON_CC_FLAGS is not read."""

    def __init__(self, neuron_config: Any, tag: str) -> None:
        self.tag = tag
        level = "-O1" if tag == "context_encoding_model" else "-O2"
        self.compiler_args = (
            f"--auto-cast=none --model-type=transformer --lnc={neuron_config.logical_nc_config} {level} "
        )
        if neuron_config.kv_cache_quant or (neuron_config.quantized and neuron_config.quantization_dtype == "f8e4m3"):
            self.compiler_args += "--internal-hlo2tensorizer-options='--experimental-unsafe-fp8e4m3fn-as-fp8e4m3' "


@dataclass(frozen=True)
class Lines:
    """The cache lines of the rows, and those that are written although nobody asked."""

    rows: list[int]
    overwritten: list[int]  # with row 0's tokens, at row 0's position


def lines_of(seq_ids: Sequence[int], batch: int, scatters: bool, masks_idle: bool) -> Lines:
    """For one run of a graph that was compiled for ``batch`` rows.

    A full batch is taken as it comes: row i is cache line i, whatever ``seq_ids`` says, unless the graph ``scatters``
    (context encoding with continuous batching). A smaller one is filled up with the lines that it lacks, as copies of
    row 0, which are written too unless ``apply_seq_ids_mask`` is on. Raises ValueError for a larger one.
    """
    count = len(seq_ids)
    if count > batch:
        raise ValueError(f"batch size {count} exceeds the compiled batch size {batch}")
    if count == batch:
        return Lines(list(seq_ids) if scatters else list(range(batch)), [])
    idle = [line for line in range(batch) if line not in seq_ids]
    return Lines(list(seq_ids), [] if masks_idle else idle)


def target_bucket(buckets: Sequence[int], length: int, ahead: int, truncates: bool, tag: str) -> int:
    """The first bucket that is longer, so a length that equals one goes to the next; only the largest takes its own.

    Raises ValueError beyond the largest, unless it ``truncates``.
    """
    for bucket in buckets:
        if length + ahead < bucket:
            return bucket
    if length + ahead > buckets[-1] and not truncates:
        raise ValueError(f"Input len {length} exceeds largest bucket ({buckets[-1]}) for {tag}")
    return buckets[-1]


def mask_width(mask: Any, position: int, neuron_config: Any) -> int:
    """By what a step's bucket is chosen: the width of ``mask``, or of the one that the package infers.

    An inferred mask ends before the highest position; in 0.2 it is as long as the slots.
    """
    if mask is not None:
        return int(mask.shape[1])
    return int(neuron_config.n_positions) if version() == "0.2" else position
