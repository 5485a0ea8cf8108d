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

from transformers_neuronx.utils import BYTES, get_qkv_padding

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
    """``kinds``: (what, bucket, batch) of each graph of ``model``."""
    config = model.config.to_dict()
    shared = {
        "package": package_version("transformers_neuronx"),
        "class": type(model).__name__,
        "tp": model.tp_degree,
        "amp": model.amp,
        "unroll": model.unroll,
        "neuron_config": model.neuron_config.text(),
        "config": {name: config[name] for name in sorted(config) if isinstance(config[name], int | float)},
    }
    return [
        Kernel(json.dumps({**shared, "kind": kind, "bucket": bucket, "batch": batch}, sort_keys=True))
        for kind, bucket, batch in kinds
    ]


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


def take_memory(model: Any, weights: Any, batch: int, longest: int) -> None:
    """Weights and KV cache on each core, by their real sizes; the token embedding stays on the host by default."""
    config, neuron_config = model.config, model.neuron_config
    embedding = weights.get_input_embeddings().weight
    quantized = neuron_config.quant is not None and model.quantizes
    amp = BYTES[model.amp]
    total = 0
    for parameter in weights.parameters():
        if parameter is embedding and not neuron_config.on_device_embedding:
            continue
        total += parameter.numel() * (1 if quantized and parameter.dim() > 1 else amp)
    heads = model.n_head
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    _, stored = get_qkv_padding(heads, kv_heads, model.tp_degree, neuron_config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    quantization = neuron_config.kv_cache_quant
    element_bytes = BYTES[quantization.quant_dtype] if quantization is not None else amp
    cache = 2 * config.num_hidden_layers * stored * head_dim * longest * batch * element_bytes
    runtime().allocate((total + cache) // model.tp_degree, "tensors")


def load_neffs(graphs: Sequence[Kernel]) -> None:
    for graph in graphs:
        assert graph.neff is not None
        runtime().load_neff(graph.neff)
        runtime().allocate(CODE_BYTES, "model code")
