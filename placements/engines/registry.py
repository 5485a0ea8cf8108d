"""The registry of engines: one line for each, in the order in which texts list them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from placements.engines.capabilities import Capabilities

NAMES = (
    "cpu",
    "echo",
    "transformers-neuronx",
    "nxd-inference",
    "vllm",
    "server",
    "optimum-neuron",
    "torch-neuronx",
)
"""The engines that a spec can name besides ``auto``. Each has a folder here and one in `workers.engines`."""


def _capabilities(name: str) -> Capabilities:
    folder = name.replace("-", "_")
    found: Capabilities = import_module(f"placements.engines.{folder}.capabilities").CAPABILITIES
    return found


ENGINES: Mapping[str, Capabilities] = MappingProxyType({name: _capabilities(name) for name in NAMES})
