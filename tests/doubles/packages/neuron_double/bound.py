"""Calls that are bound against the recorded signatures before they are carried out."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
VERSION_OF = {
    "transformers_neuronx": "NEURON_DOUBLE_TNX_VERSION",
    "neuronx_distributed_inference": "NEURON_DOUBLE_NXDI_VERSION",
    "optimum": "NEURON_DOUBLE_OPTIMUM_VERSION",
}


@functools.cache
def _contracts() -> ModuleType:
    """tests/contracts.py by its place: another ``tests`` may come first on the path of the process."""
    path = Path(__file__).parents[3] / "contracts.py"
    spec = importlib.util.spec_from_file_location("neuron_double._contracts", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def version(package: str) -> str:
    """The recorded version that the stand-in of ``package`` (its import name) plays: "0.8", "0.13-main"."""
    return os.environ.get(VERSION_OF[package]) or str(_contracts().contract(package).primary)


def package_version(package: str) -> str:
    """What its metadata say: "0.8.0"."""
    return str(_contracts().contract(package).package_version(version(package)))


def options(package: str, dotted: str) -> dict[str, str]:
    """What a class of that version takes from its ``**kwargs``: name -> source text of the default."""
    return dict(_contracts().contract(package).options(dotted, version(package)))


def recorded(engine: str, dotted: str, version: str | None = None) -> inspect.Signature:
    """``engine``: as in a spec, or the package's import name. Raises LookupError where that version lacks it."""
    signature: inspect.Signature = _contracts().contract(engine).signature(dotted, version)
    return signature


def bound(dotted: str) -> Callable[[F], F]:
    """Decorates the stand-in of ``dotted``: a call that the recorded signature does not take is a TypeError.

    In a version that has no such thing, a call is an AttributeError. ``inspect.signature`` tells what is recorded of
    the version that is played when the stand-in is imported.
    """
    package = dotted.split(".")[0]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                signature = recorded(package, dotted, version(package))
            except LookupError as error:
                raise AttributeError(str(error)) from error
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{dotted}{signature}: {error}") from error
            return function(*args, **kwargs)

        with contextlib.suppress(LookupError):
            checked.__signature__ = recorded(package, dotted, version(package))  # type: ignore[attr-defined]
        return checked  # type: ignore[return-value]

    return decorate


def plays(name: str, *methods: str) -> Callable[[C], C]:
    """Decorates a class that has these methods itself or from a base: each is bound as that of ``name``, and gets its
    arguments by name, so that one function serves classes whose signatures differ."""

    def by_name(dotted: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            named = dict(
                recorded(name.split(".")[0], dotted, version(name.split(".")[0])).bind(*args, **kwargs).arguments
            )
            return function(named.pop("self"), **named.pop("kwargs", {}), **named)

        return bound(dotted)(called)

    def decorate(cls: C) -> C:
        for method in methods:
            setattr(cls, method, by_name(f"{name}.{method}", getattr(cls, method)))
        return cls

    return decorate
