"""Operations that the package writes in HLO: torch computes them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from closed_layer import blank

__getattr__ = blank(__name__)


def xla_hlo_call(function: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """Returns the function of tensors that ``function`` describes in HLO."""

    @functools.wraps(function)
    def call(*operands: torch.Tensor) -> torch.Tensor:
        return function(*(Operand(operand) for operand in operands)).value

    return call


class Operand:
    """A value of an HLO computation, with its type and its shape."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.scribe = Scribe()

    @property
    def dtype(self) -> Type:
        return Type(self.value.dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


class Scribe:
    """The types by their names in HLO."""

    u32 = property(lambda self: Type(torch.int64))
    s32 = property(lambda self: Type(torch.int32))
    f32 = property(lambda self: Type(torch.float32))


class Type:
    """A type of elements, and a shape: the operations whose result has them. Results of another shape are errors."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...] = ()) -> None:
        self._dtype, self._shape = dtype, shape

    def __getitem__(self, shape: Any) -> Type:
        return Type(self._dtype, tuple(shape) if isinstance(shape, tuple | list) else (shape,))

    def Constant(self, constant_value: float) -> Operand:
        return Operand(torch.full(self._shape, constant_value, dtype=self._dtype))

    def DynamicUpdateSlice(self, operand: Operand, update: Operand, *starts: Operand) -> Operand:
        """As XLA does it, a start is moved so that the whole update fits."""
        result = operand.value.clone()
        assert result.dtype == update.value.dtype == self._dtype, (result.dtype, update.value.dtype)
        sizes = zip(starts, operand.sizes, update.sizes, strict=True)
        begins = [max(0, min(int(start.value), size - length)) for start, size, length in sizes]
        result[tuple(slice(begin, begin + length) for begin, length in zip(begins, update.sizes, strict=True))] = (
            update.value
        )
        return self._checked(result)

    def Rng(self, low: Operand, high: Operand, distribution: int) -> Operand:
        """Uniform numbers."""
        assert distribution == 1, distribution
        numbers = torch.rand(self._shape) * (high.value - low.value) + low.value
        return self._checked(numbers.to(self._dtype))

    def _checked(self, value: torch.Tensor) -> Operand:
        if tuple(value.shape) != self._shape or value.dtype != self._dtype:
            raise RuntimeError(f"HLO of {self._dtype} {self._shape} has {value.dtype} {tuple(value.shape)}")
        return Operand(value)
