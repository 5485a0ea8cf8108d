"""The running sum along the last dimension, for types of floating point."""

import torch


def cumsum(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns the sums of ``[rows, columns]``."""
    assert axis == tensor.dim() - 1
    assert tensor.is_floating_point()
    return tensor.cumsum(axis)
