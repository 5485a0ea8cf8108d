"""Where torch on a CPU refuses what the device does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GATHERS = (torch.gather, torch.Tensor.gather)
MOVES = (*GATHERS, torch.scatter, torch.Tensor.scatter, torch.index_select, torch.Tensor.index_select)


class DeviceSemantics(TorchFunctionMode):
    """A read from beyond the end reads the last element, and fp8 is moved like other types."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function is torch.Tensor.__getitem__:
            return function(arguments[0], _within(arguments[1], arguments[0].shape))
        if function not in MOVES:
            return function(*arguments, **(keywords or {}))
        operands = dict(zip(("input", "dim", "index", "src"), arguments, strict=False)) | (keywords or {})
        dtype = operands["input"].dtype
        if function in GATHERS:
            last = operands["input"].shape[operands["dim"]] - 1
            operands["index"] = operands["index"].clamp(0, last)
        if dtype in FP8:
            parts = [name for name in ("input", "src") if name in operands]
            operands |= {name: operands[name].view(torch.uint8) for name in parts}
        result = function(*operands.values())
        return result.view(dtype) if dtype in FP8 else result


def _within(index: Any, shape: Sequence[int]) -> Any:
    """Returns the index with numbers from beyond the end of their dimension replaced by the last."""
    if not isinstance(index, tuple):
        return _within((index,), shape)[0]
    parts = list(index)
    for place, part in enumerate(parts):
        if part is None or part is Ellipsis or getattr(part, "dtype", None) == torch.bool:
            break  # what follows is of a dimension that is not counted from the first
        if isinstance(part, torch.Tensor):
            parts[place] = part.clamp(-shape[place], shape[place] - 1)
    return tuple(parts)
