"""Where torch on a CPU refuses what the device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MOVES = (
    torch.gather,
    torch.Tensor.gather,
    torch.scatter,
    torch.Tensor.scatter,
    torch.index_select,
    torch.Tensor.index_select,
)


class DeviceSemantics(TorchFunctionMode):
    """fp8 is moved like other types. A read beyond the end is an error, as on the device (`NRT_EXEC_OOB`, 1006)."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function not in MOVES:
            return function(*arguments, **(keywords or {}))
        operands = dict(zip(("input", "dim", "index", "src"), arguments, strict=False)) | (keywords or {})
        dtype = operands["input"].dtype
        if dtype in FP8:
            parts = [name for name in ("input", "src") if name in operands]
            operands |= {name: operands[name].view(torch.uint8) for name in parts}
        result = function(*operands.values())
        return result.view(dtype) if dtype in FP8 else result
