"""The installed torch-neuronx: its import, and the functions that the engine calls.

The package is closed; these functions and their keywords are those that AWS documents.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Mapping
from typing import Any

from placements.facts.engines import CPU_TRANSFORMERS, reaches
from workers.engines.manifest_parts import version_of
from workers.messages.engine_protocol import EngineLoadError

NAME, DISTRIBUTION = "torch_neuronx", "torch-neuronx"
WHERE = (
    "it comes with AWS's Neuron images, or: python -m pip install torch-neuronx neuronx-cc --extra-index-url "
    "https://pip.repos.neuron.amazonaws.com"
)
CALLS: Mapping[str, tuple[str, ...]] = {
    "trace": ("compiler_workdir", "compiler_args", "inline_weights_to_neff", "cpu_backend"),
    "dynamic_batch": (),
    "replace_weights": (),
    "move_trace_to_device": (),
}
"""The functions that the engine calls -> the keywords that it passes."""


def import_package() -> Any:
    """Returns the package. torch then loads traces, each to a core at once. Raises EngineLoadError."""
    if importlib.util.find_spec(NAME) is None:
        raise _missing(NAME)
    try:
        package = importlib.import_module(NAME)
        version = str(importlib.import_module("transformers").__version__)
    except ImportError as error:
        raise _missing(error.name or NAME) from error
    if lacking := [call for call, keywords in CALLS.items() if not _has(package, call, keywords)]:
        keywords = ", ".join(CALLS[lacking[0]])
        what = f"torch-neuronx {version_of(DISTRIBUTION)} has no {lacking[0]}({keywords})"
        raise EngineLoadError("engine-not-installed", what, f"install a later release; {WHERE}")
    if not reaches(version, CPU_TRANSFORMERS):
        what = f"the torch-neuronx engine needs transformers {CPU_TRANSFORMERS} or later, not {version}"
        hint = f"run python -m pip install 'transformers>={CPU_TRANSFORMERS}' in the replica's Python"
        raise EngineLoadError("engine-not-installed", what, hint)
    return package


def _has(package: Any, call: str, keywords: tuple[str, ...]) -> bool:
    function = getattr(package, call, None)
    if function is None:
        return False
    try:
        return {*keywords} <= inspect.signature(function).parameters.keys()
    except (TypeError, ValueError):  # it does not say
        return True


def _missing(name: str) -> EngineLoadError:
    return EngineLoadError("engine-not-installed", f"the torch-neuronx engine needs {name}", WHERE)
