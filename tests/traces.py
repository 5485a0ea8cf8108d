"""Traces of an engine: its steps, the calls of a package in each, and what they return.

They are recorded over a package's own code and compared with runs over its double. ``python -m tests.traces`` records
them anew, where the packages' sources are named (CONTRIBUTING.md).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent / "golden" / "traces"
ENGINE, PACKAGE = 1, 2  # levels: calls within a call of the same level or a lower one are not recorded


class Trace:
    """The calls of watched functions, in order, each a dictionary of plain values.

    A step ``gives`` its greedy tokens, and a package's call the dtype and shape of a tensor: rows that no step
    asked for have no meaning.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        """The functions are watched until ``patch`` is undone."""
        self.calls: list[dict[str, Any]] = []
        self._patch, self._level = patch, 0

    def watch(self, level: int, owner: type, *names: str, gives: Callable[[Any], Any] | None = None) -> None:
        """Records calls of the methods ``names`` of ``owner``, which may be inherited, but not by what derives.

        ``gives`` returns the plain value of a result.
        """
        gives = gives or (chosen if level == ENGINE else shaped)
        for name in names:
            method = inspect.getattr_static(owner, name)
            label = name if level == ENGINE else f"{owner.__name__}.{name}"
            function = getattr(method, "__func__", method)
            recorded = self._recorded(level, label.removesuffix(".__init__"), function, gives)
            self._patch.setattr(owner, name, classmethod(recorded) if isinstance(method, classmethod) else recorded)

    def _recorded(
        self, level: int, label: str, method: Callable[..., Any], gives: Callable[[Any], Any]
    ) -> Callable[..., Any]:
        @functools.wraps(method)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self._level >= level:
                return method(*args, **kwargs)
            entry: dict[str, Any] = {"step" if level == ENGINE else "call": label}
            entry["with"] = described([*args[1:], *([kwargs] if kwargs else [])])
            self.calls.append(entry)
            before, self._level = self._level, level
            try:
                result = method(*args, **kwargs)
            except Exception as error:  # any refusal of a package is part of the trace
                entry["raises"] = getattr(error, "id", type(error).__name__)
                raise
            finally:
                self._level = before
            if (given := gives(result)) is not None:
                entry["gives"] = given
            return result

        return recorded


def described(value: Any) -> Any:
    """Returns a plain value, for a tensor ``{dtype: values}``."""
    if isinstance(value, torch.Tensor):
        return {_name(value.dtype): value.tolist()}
    if isinstance(value, Mapping):
        return {name: described(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [described(item) for item in value]
    if isinstance(value, str) and value.startswith("/"):
        return "<path>"
    if isinstance(value, Enum):
        return described(value.value)
    if isinstance(value, torch.dtype):
        return _name(value)
    return value if isinstance(value, str | int | float | None) else f"<{type(value).__name__}>"


def chosen(result: Any) -> Any:
    """Returns the likeliest tokens of logits ``[..., vocab]``; ids as they are."""
    return result.argmax(-1).tolist() if isinstance(result, torch.Tensor) else result


def shaped(result: Any) -> Any:
    """Returns dtype and shape of a tensor, None for anything else."""
    return {_name(result.dtype): list(result.shape)} if isinstance(result, torch.Tensor) else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def written(calls: Sequence[Mapping[str, Any]]) -> str:
    """Returns the text of a trace, with one call on each line."""
    return "[\n" + ",\n".join(json.dumps(call, separators=(",", ":")) for call in calls) + "\n]\n"


def recorded(name: str) -> str:
    """Returns the text of a recorded trace."""
    return (FOLDER / f"{name}.json").read_text()


def record(name: str, trace: Trace) -> None:
    """Writes a trace of the package's own code, if this module runs as a command."""
    if os.environ.get("RECORD_TRACES"):
        (FOLDER / f"{name}.json").write_text(written(trace.calls))


if __name__ == "__main__":
    os.environ["RECORD_TRACES"] = "1"
    sys.exit(pytest.main(["-m", "real", *map(str, Path(__file__).parent.rglob("test_*_traces.py")), *sys.argv[1:]]))
