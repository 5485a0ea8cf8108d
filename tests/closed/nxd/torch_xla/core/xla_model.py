"""The collectives of the ranks, and the few questions about the process that a model's code has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from closed_layer import blank
from torch_neuronx.ranks import exchange

__getattr__ = blank(__name__)

REDUCE_SUM, REDUCE_MAX, REDUCE_MIN = "sum", "max", "min"
_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    REDUCE_SUM: lambda parts: parts.sum(0, dtype=parts.dtype),
    REDUCE_MAX: lambda parts: parts.amax(0),
    REDUCE_MIN: lambda parts: parts.amin(0),
}
Groups = Sequence[Sequence[int]]


def all_reduce(
    reduce_type: str, inputs: Any, scale: float = 1.0, groups: Groups | None = None, pin_layout: bool = True
) -> Any:
    """Returns the reduction; a list of tensors is also changed in place."""
    if isinstance(inputs, torch.Tensor):
        return _reduced(reduce_type, inputs, groups) * scale
    for tensor in inputs:
        tensor.copy_(_reduced(reduce_type, tensor, groups) * scale)
    return inputs


def all_gather(
    value: torch.Tensor,
    dim: int = 0,
    groups: Groups | None = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Returns the values of all ranks of the group along ``dim``."""
    return _filled(output, torch.cat(exchange(value, groups)[0], dim))


def reduce_scatter(
    reduce_type: str,
    input: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups | None = None,
    output: torch.Tensor | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Returns this rank's part of the reduction."""
    place = exchange(input, groups)[1]
    parts = _reduced(reduce_type, input, groups).chunk(shard_count, scatter_dim)
    return _filled(output, parts[place] * scale)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Returns this rank's part of each rank's value."""
    values, place = exchange(value, groups)
    return torch.cat([part.chunk(split_count, split_dimension)[place] for part in values], concat_dimension)


def _reduced(reduce_type: str, value: torch.Tensor, groups: Groups | None) -> torch.Tensor:
    return _REDUCTIONS[reduce_type](torch.stack(exchange(value, groups)[0]))


def _filled(output: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if output is None else output.copy_(value)


def mark_step() -> None:
    """Nothing: all operations are executed at once."""


def xla_device() -> torch.device:
    return torch.device("cpu")


def is_master_ordinal(local: bool = True) -> bool:
    return True


def master_print(*texts: object) -> None:
    """Nothing."""
