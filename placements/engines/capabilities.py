"""The record of what an engine can do, which each engine's folder fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, NamedTuple

from placements.facts.encoders import Kind

Dtype = Literal["bf16", "fp16", "fp32"]
SourceForm = Literal["hf", "split", "optimum-first", "optimum", "sharded", "precompiled"]
"""What a source holds: weights for transformers; one file for each weight; an export of Optimum Neuron before 0.4, or
of 0.4; the weights of each core, by NxD Inference; or a model that NxD Inference compiled."""
NEURON_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
"""The option of pip for AWS's packages: other indexes have placeholders of the same names."""


class OptionRange(NamedTuple):
    """The range of a numeric entry of ``engine_options``."""

    least: int
    most: int
    whole: bool


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, on every machine and in every version."""

    engine: str  # its name in specs
    runs_on: Literal["cpus", "neuron", "server"]  # the host's CPUs, real Neuron devices, or a server with its own ways
    kinds: tuple[Kind, ...] = ("generate",)
    dtype: Dtype = "bf16"  # the default
    package: str | None = None  # the import name of AWS's or Hugging Face's package; None: corewright's own code
    requires: tuple[str, ...] = ()  # distributions without which it does not start
    install: str = ""  # how its package comes onto a host
    transformers: str | None = None  # the first release that its code runs with
    loads: tuple[SourceForm, ...] = ("hf",)  # the sources that it can load
    loads_arriving: bool = False  # ``load`` waits for each file of a checkpoint that is still being fetched
    tokenizer: Literal["checkpoint", "bytes"] | None = "checkpoint"  # of texts; None: only the server makes tokens
    compiles_weights: bool = False  # its compiled artifacts contain the weights
    uses_neuron_cache: bool = False  # its graphs are in Neuron's cache; the others keep complete folders
    options: Mapping[str, OptionRange | None] = field(default_factory=lambda: MappingProxyType({}))  # None: a boolean
    runs_code: bool = False  # it may run Python code of a checkpoint
    imports_long: bool = True  # its replicas gain from a warm process

    @property
    def module(self) -> str:
        """The name of its folders in `placements.engines` and `workers.engines`."""
        return self.engine.replace("-", "_")
