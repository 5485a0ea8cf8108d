"""The record of what an engine can do, which each engine's folder fills in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from placements.facts.encoders import Kind
from placements.facts.versions import reaches, series

Dtype = Literal["bf16", "fp16", "fp32"]
BYTES: Mapping[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
Quantization = Literal["int8", "fp8"]
DraftMethod = Literal["draft_model", "eagle", "eagle3"]
SourceForm = Literal["hf", "split", "optimum-first", "optimum", "sharded", "precompiled"]
"""What a source holds: weights for transformers; one file for each weight; an export of Optimum Neuron before 0.4, or
of 0.4; the weights of each core, by NxD Inference; or a model that NxD Inference compiled."""
NEURON_INDEX = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
"""The option of pip for AWS's packages: other indexes have placeholders of the same names."""
SHORTEST_BUCKET = 128
"""Tokens of the shortest length in the default lists of transformers-neuronx (``bucket``) and NxD Inference
(``modules/autobucketing``)."""

_NONE: Mapping[str, Any] = MappingProxyType({})


class OptionRange(NamedTuple):
    """The range of a numeric entry of ``engine_options``."""

    least: int
    most: int
    whole: bool


class Unused(NamedTuple):
    """Fields of a model, as paths with dots, that have no effect on an engine."""

    fields: tuple[str, ...]
    hint: str = "remove it"  # may have {field}
    why: str = ""  # follows "FIELD has no effect on the engine NAME"
    id: str = "setting-unsupported"
    encoding: bool = False  # only on other kinds than generate, which the text then names instead of the engine


ON_CPUS = (
    Unused(("sampling", "fuse_qkv", "compiler"), "remove {field}, or use a Neuron engine"),
    Unused(("quantize", "quantize_kv"), "remove {field}, or use a Neuron engine", id="quantize-unsupported"),
)
"""Settings of Neuron devices, which engines on the host's CPUs do not use."""


_BY_TRANSFORMERS = "with the class of transformers, which may lose precision on Neuron devices"
LLAMA_ROPES: Mapping[str, str] = MappingProxyType(
    {"llama3": "", **dict.fromkeys(("linear", "dynamic", "yarn", "longrope"), _BY_TRANSFORMERS)}
)
"""The types that the class of Llama computes, in NxD Inference (``NeuronLlamaAttention.get_rope``) and Optimum Neuron
0.4."""


class ClassOptions(NamedTuple):
    """Options that only the models of some families have."""

    table: str  # the class of the package that reads them
    models: str  # which models, in words
    families: tuple[str, ...]


class Traces(NamedTuple):
    """The shapes that an encoder is compiled for."""

    lengths: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do. Methods say what depends on machines, versions or a checkpoint; engines override them."""

    engine: str  # its name in specs
    runs_on: Literal["cpus", "neuron", "server"]  # the host's CPUs, real Neuron devices, or a server with its own ways
    kinds: tuple[Kind, ...] = ("generate",)
    dtype: Dtype = "bf16"  # the default
    package: str | None = None  # the import name of AWS's or Hugging Face's package; None: corewright's own code
    requires: tuple[str, ...] = ()  # distributions without which it does not start; the first is its package
    install: str = ""  # how its package comes onto a host
    transformers: str | None = None  # the first release that its code runs with
    loads: tuple[SourceForm, ...] = ("hf",)  # the sources that it can load
    loads_arriving: bool = False  # ``load`` waits for each file of a checkpoint that is still being fetched
    tokenizer: Literal["checkpoint", "bytes"] | None = "checkpoint"  # of texts; None: only the server makes tokens
    uses_neuron_cache: bool = False  # its graphs are in Neuron's cache; the others keep complete folders
    options: Mapping[str, OptionRange | None] = field(default_factory=lambda: _NONE)  # None: a boolean
    runs_code: bool = False  # it may run Python code of a checkpoint
    imports_long: bool = True  # its replicas gain from a warm process
    warm: bool = False  # hosts keep a warm process by default

    # checkpoints
    families: tuple[str, ...] = ()  # values of model_type; (): all
    refused: Mapping[str, str] = field(default_factory=lambda: _NONE)  # family -> why it is not served
    outside: str = ""  # why no family but ``families`` is served
    own_families: bool = False  # it also serves families that corewright has no facts of
    weights: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _NONE)
    """Family -> methods of quantized weights that it reads, see `Checkpoint.quantized_by`."""
    ropes: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: _NONE)
    """Family -> types of rotary positions that it computes besides "default" -> what may differ; "": nothing."""
    stores_shards: bool = False  # compiled artifacts hold the weights of each core, and are found by their digests
    exports_graphs: bool = False  # its package registers compiled graphs without their weights

    # settings of a model
    drafts: tuple[DraftMethod, ...] = ()  # speculative decoding
    quantize: tuple[Quantization, ...] = ()
    quantize_kv: tuple[Quantization, ...] = ()
    shares_heads: bool = False  # it has ``group_query_attention``
    serves_adapters: bool = False  # LoRA
    unquantized: Mapping[str, str] = field(default_factory=lambda: _NONE)  # family -> why it cannot be quantized
    compiler_flags: frozenset[str] = frozenset()  # of neuronx-cc, which it sets itself
    sets_workers: bool = True  # it has ``compiler.workers``
    penalizes: bool = True  # it applies penalties to logits
    scores_prompts: bool = False  # it computes the logprobs of a prompt's own tokens, at once or in single steps
    unused: tuple[Unused, ...] = ()
    class_options: tuple[ClassOptions, ...] = ()  # see `placements.engines.options`
    pads_to_longest: bool = False  # it pads the inputs of a batch to the longest of them
    why_no_encoder: str = ""  # why its decoders give no embeddings

    # its environment
    launches: bool = False  # ``engines`` names the interpreter and the command of its server
    not_on: frozenset[str] = frozenset()  # families of machines
    versions: tuple[str, ...] = ()  # supported series, oldest first; (): any
    beside: str | None = None  # the engine in whose environment on AWS's images it also runs
    absent: str = ""  # where it can be had, if no environment of AWS's images is named after it

    @property
    def module(self) -> str:
        """The name of its folders in `placements.engines` and `workers.engines`."""
        return self.engine.replace("-", "_")

    @property
    def reads_checkpoint(self) -> bool:
        """Returns whether it loads any source."""
        return bool(self.loads)

    @property
    def loads_compiled(self) -> bool:
        """Returns whether it loads sources that its package has compiled elsewhere."""
        return "precompiled" in self.loads

    @property
    def forwards(self) -> bool:
        """Returns whether requests are forwarded as they were sent, to a command that may load any files."""
        return self.tokenizer is None

    def runs_in(self, machines: str, version: str | None = None) -> bool:
        """Returns whether it runs on a family of machines, in a version (None: in any)."""
        return machines not in self.not_on

    def serves(self, model_type: str, machines: str | None = None, version: str | None = None) -> bool:
        """Returns whether it has a class for the family, on these machines, in that version.

        ``machines`` None: on any machine. ``version`` None: in any version that runs on them.
        """
        if machines is not None and not self.runs_in(machines, version):
            return False
        return not self.families or model_type in self.families

    def newest(self, machines: str) -> str:
        """Returns the last series that runs on a family of machines; "" if its options are those of every version."""
        return ""

    def version_among(self, packages: Mapping[str, str]) -> str | None:
        """Returns its version among installed distributions; None: it is not installed."""
        return packages.get(self.requires[0]) if self.requires else None

    def unsupported(self, version: str, machines: str) -> str | None:
        """Returns why a version does not work on a family of machines; None: it does, or the version is not known."""
        return None if self.runs_in(machines, version or None) else f"{version} does not run on {machines}"

    def maintenance(self, version: str, machines: str) -> str:
        """Returns text after the version on why it gets only fixes on a family of machines; "" if it is supported."""
        return ""

    def planned_as(self, version: str) -> str:
        """Returns the last known series for a version that is newer than it; "" for a version that is known."""
        return self.versions[-1] if self.versions and not reaches(self.versions[-1], series(version)) else ""

    def step_widths(self, draft_k: int | None) -> tuple[int, ...]:
        """Returns the tokens of decoding steps that it distinguishes from prompts by their width only."""
        return ()

    def traces(self, buckets: Sequence[int], longest: int, rows: int, options: Mapping[str, object]) -> Traces | None:
        """Returns the shapes of an encoder with ``rows`` in a batch; None if it is not compiled."""
        return None

    def compiles(self, options: Mapping[str, object], *, emulated: bool) -> bool:
        """Returns whether a start with these ``engine_options`` compiles artifacts that are kept."""
        return self.runs_on == "neuron"

    def misread(self, config: Mapping[str, Any], transformers: str | None) -> str:
        """Returns what it reads wrongly of a decoded config.json with that version of transformers (None: unknown);
        "" if nothing."""
        return ""

    def hides_settings(self, packages: Mapping[str, str]) -> bool:
        """Returns whether an installed package hides settings of config.json from it."""
        return False
