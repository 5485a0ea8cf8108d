"""Operations with kernels of their own on the device: torch computes them."""

from __future__ import annotations

from typing import Any

import torch
from closed_layer import blank

from torch_neuronx.xla_impl.base import xla_hlo_call

__all__ = ["Argmax", "ConcatenateOp", "RmsNorm", "Softmax", "TopK", "nki_jit", "xla_hlo_call"]
__getattr__ = blank(__name__)


class RmsNorm:
    """The root mean square norm, in float32."""

    @staticmethod
    def apply(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, dim: int) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        normal = wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + epsilon)
        return normal.to(hidden.dtype) * weight


class Argmax:
    """The first index of the largest value."""

    @staticmethod
    def apply(tensor: torch.Tensor, dim: int, keepdim: bool = False) -> torch.Tensor:
        return tensor.argmax(dim, keepdim)


class TopK:
    """The largest values and their indices, in falling order. Raises RuntimeError if there are fewer than ``k``."""

    @staticmethod
    def apply(tensor: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(tensor, k, dim)
        return values, indices


class Softmax:
    """The softmax."""

    @staticmethod
    def apply(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.softmax(tensor, dim)


class ConcatenateOp:
    """The concatenation."""

    @staticmethod
    def apply(*tensors: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat(tensors, dim)


def nki_jit(*arguments: Any, **options: Any) -> Any:
    """A decorator, with or without options; kernels are not run."""
    return arguments[0] if arguments else lambda function: function
