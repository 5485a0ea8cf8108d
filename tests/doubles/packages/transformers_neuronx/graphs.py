"""The graphs that a model compiles to: their text, their NEFFs, and what they take of the devices.

A graph's text holds all that its shapes come from and no weights, so equal texts are equal graphs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuron_double.bound import package_version
from neuron_double.compiler import cached_compile
from neuron_double.runtime import runtime

NO_MATCH = (
    "Could not find a matching NEFF for your HLO in this directory. Ensure that the model you are trying to load is "
    'the same type and has the same parameters as the one you saved or call "save" on this model to reserialize it.'
)
CODE_BYTES = 1 << 20  # of a graph on each core


@dataclass
class Kernel:
    """One graph."""

    text: str
    neff: bytes | None = None

    @property
    def file(self) -> str:
        return f"{hashlib.sha256(self.text.encode()).hexdigest()[:20]}.neff"


def kernels(model: Any, kinds: Sequence[tuple[str, int, int]]) -> list[Kernel]:
    """``kinds``: (what, bucket, part or length) of each graph of ``model``."""
    config = model.config.to_dict()
    shared = {
        "package": package_version("transformers_neuronx"),
        "class": type(model).__name__,
        "tp": model.tp_degree,
        "amp": model.amp,
        "batch": model.batch,
        "neuron_config": model.neuron_config.text(),
        "config": {name: config[name] for name in sorted(config) if isinstance(config[name], int | float)},
    }
    return [Kernel(json.dumps({**shared, "kind": kind}, sort_keys=True)) for kind in kinds]


def compiler_flags() -> str:
    flags = os.environ.get("NEURON_CC_FLAGS", "")
    for name, value in (("--model-type", "transformer"), ("--auto-cast", "none")):
        if name not in flags:
            flags += f" {name}={value}"
    return f"{flags} --execute-repetition=1".strip()


def compile_all(graphs: Sequence[Kernel], tp: int) -> None:
    for graph in graphs:
        if graph.neff is None:
            graph.neff = cached_compile(graph.text, compiler_flags(), tp)


def read_neffs(graphs: Sequence[Kernel], directory: Path) -> None:
    """Raises FileNotFoundError where one of them is not there, or the directory itself is not."""
    for graph in graphs:
        try:
            graph.neff = (directory / graph.file).read_bytes()
        except FileNotFoundError:
            raise FileNotFoundError(NO_MATCH) from None


def write_neffs(graphs: Sequence[Kernel], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for graph in graphs:
        assert graph.neff is not None, "cannot save a model which has not been successfully compiled"
        (directory / graph.file).write_bytes(graph.neff)


def take_memory(model: Any, weights: Any) -> None:
    """Weights and KV cache on each core, by their real sizes."""
    config, numbers = model.config, sum(parameter.numel() for parameter in weights.parameters())
    heads = config.num_attention_heads
    numbers_each = config.hidden_size // heads * getattr(config, "num_key_value_heads", heads)
    cells = 2 * config.num_hidden_layers * numbers_each * model.token_buckets[-1] * model.batch
    runtime().allocate((numbers + cells) * (4 if model.amp == "f32" else 2) // model.tp_degree, "tensors")


def load_neffs(graphs: Sequence[Kernel]) -> None:
    for graph in graphs:
        assert graph.neff is not None
        runtime().load_neff(graph.neff)
        runtime().allocate(CODE_BYTES, "model code")
