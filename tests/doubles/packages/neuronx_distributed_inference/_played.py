"""How the stand-in becomes one recorded version: signatures, names that this version lacks, its metadata."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from neuron_double import bound as bound_module
from neuron_double.bound import bound, recorded
from neuron_double.bound import version as played_version

PACKAGE = "neuronx_distributed_inference"
F = TypeVar("F", bound=Callable[..., Any])


def version() -> str:
    return played_version(PACKAGE)


def contract() -> Any:
    return bound_module._contracts().contract(PACKAGE)


def has(dotted: str) -> bool:
    """Returns whether the version that is played has that module's member."""
    return bool(contract().has(f"{PACKAGE}.{dotted}", version()))


def played(dotted: str) -> Callable[[F], F]:
    """Binds every call against the recorded signature of the version, and shows that signature to who asks for it."""

    def decorate(function: F) -> F:
        checked: Any = bound(f"{PACKAGE}.{dotted}")(function)
        if has(dotted):
            checked.__signature__ = recorded(PACKAGE, f"{PACKAGE}.{dotted}", version())
        return checked  # type: ignore[no-any-return]

    return decorate


def kwargs_options(dotted: str) -> dict[str, str]:
    """What a class takes out of its ``**kwargs`` in this version: name -> source text of the default."""
    history = contract().options(f"{PACKAGE}.{dotted}", version())
    if history:
        return dict(history)
    listed = contract()._lookup(f"{PACKAGE}.{dotted}", version()).get("kwargs_options") or []
    return {option["name"]: option["default"] for option in listed if "default" in option}


class _PlayedDistribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        played_version = bound_module.package_version(PACKAGE)
        played_version = played_version if played_version.count(".") > 1 else f"{played_version}.0"
        return f"Metadata-Version: 2.1\nName: neuronx-distributed-inference\nVersion: {played_version}\n"

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder:
    """Tells importlib.metadata the version that is played; the folder on disk can only name one."""

    def find_spec(self, *_: Any) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        name = (getattr(context, "name", None) or "").replace("-", "_").lower()
        return [_PlayedDistribution()] if name == PACKAGE and PACKAGE in sys.modules else []


def register_version() -> None:
    if not any(type(finder).__name__ == "_Finder" and type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
