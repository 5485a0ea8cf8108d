"""Kernels, which do not run, except for stand-ins with ``on_cpu``: see ``closed_layer``."""

from __future__ import annotations

from typing import Any

from closed_layer import blank

__getattr__ = blank(__name__)


class Kernel:
    """A kernel: it has a name and a grid, and a call of it fails without a stand-in."""

    def __init__(self, function: Any) -> None:
        self.func_name = getattr(function, "__name__", str(function))
        self._on_cpu = function if getattr(function, "on_cpu", False) is True else None

    def __getitem__(self, grid: Any) -> Kernel:
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self._on_cpu is not None:
            return self._on_cpu(*arguments, **keywords)
        raise NotImplementedError(f"the kernel {self.func_name} has no stand-in")


def jit(function: Any = None, **options: Any) -> Any:
    """Returns the kernel of a function, or a decorator with options."""
    return Kernel if function is None else Kernel(function)
