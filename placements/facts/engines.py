"""Facts about engines: their options, packages, supported families and versions, and the choice of ``auto``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from placements.facts import tnx_families
from placements.facts.topology import TOPOLOGIES, Host

Engine = Literal[
    "auto", "cpu", "echo", "transformers-neuronx", "nxd-inference", "vllm", "server", "optimum-neuron", "torch-neuronx"
]
Dtype = Literal["bf16", "fp16", "fp32"]

ENGINES: tuple[Engine, ...] = get_args(Engine)
NAMED_ENGINES: tuple[Engine, ...] = tuple(engine for engine in ENGINES if engine != "auto")
BYTES: Mapping[Dtype, int] = {"bf16": 2, "fp16": 2, "fp32": 4}


class OptionRange(NamedTuple):
    """The range of a numeric entry of ``engine_options``."""

    least: int
    most: int
    whole: bool


ENGINE_OPTIONS: Mapping[Engine, Mapping[str, OptionRange | None]] = {
    "cpu": {"prefill_chunk": OptionRange(1, 1 << 24, whole=True), "prefix_cache": None, "compile": None},
    "echo": {"step_ms": OptionRange(0, 3_600_000, whole=False)},
    "optimum-neuron": {"prefill_chunk_size": OptionRange(0, 1 << 24, whole=True)},
    "torch-neuronx": {"compiled_batch": OptionRange(1, 1024, whole=True)},
}
"""The ``engine_options`` of corewright's own engines, of Optimum Neuron and of torch-neuronx; None: a boolean.
``prefill_chunk``: tokens of a prompt in one forward pass; ``prefix_cache``: reuse the longest prefix that a slot still
holds; ``compile``: compile each bucket with torch.compile; ``step_ms``: the duration of a step of the echo engine, to
simulate a slow engine; ``prefill_chunk_size``: tokens of a prompt in one run, from Optimum Neuron 0.4.6 on; 0: all;
``compiled_batch``: inputs of a compiled batch."""

PACKAGES: Mapping[Engine, str] = {
    "transformers-neuronx": "transformers_neuronx",
    "nxd-inference": "neuronx_distributed_inference",
    "optimum-neuron": "optimum.neuron",
}
"""The supported Neuron engines, and the import name of each one's package."""


SHORTEST_BUCKET = 128
"""Tokens of the shortest length in the default lists of transformers-neuronx (``bucket``) and NxD Inference
(``modules/autobucketing``)."""

CPU_TRANSFORMERS = "4.57"
"""The first release of transformers that the cpu engine runs with. Other parts of corewright accept earlier ones, which
images of the Neuron SDK have."""


def distribution(engine: Engine) -> str:
    """Returns the distribution name of an engine's package."""
    return PACKAGES[engine].replace("_", "-").replace(".", "-")


HOST_ENGINES: frozenset[Engine] = frozenset({"cpu", "echo"})  # run on the host's CPUs
SERVER_ENGINES: frozenset[Engine] = frozenset({"vllm", "server"})  # a server of its own on the replica's cores
CODE_ENGINES: frozenset[Engine] = frozenset({"auto", "cpu", "vllm"})  # may run a checkpoint's code; auto may be cpu
UNWARMED_ENGINES = SERVER_ENGINES | {"auto", "echo"}  # whose replicas import nothing that takes long, or are unknown
NXD_ENGINES: frozenset[Engine] = frozenset({"nxd-inference", "optimum-neuron"})  # built on NeuronX Distributed


def resolve(engine: Engine, host: Host, kind: str) -> Engine:
    """Resolves ``auto`` on a host for a model's kind: cpu without an accelerator. On Neuron hosts it is torch-neuronx
    for a kind other than generate, else it stays ``auto``.

    The Neuron engine of an image is known only on the host itself, and does not affect placement.
    """
    if engine != "auto":
        return engine
    if host.emulated or host.topology is None:
        return "cpu"
    return "auto" if kind == "generate" else "torch-neuronx"


def takes_cores(engine: Engine, host: Host) -> bool:
    """Returns whether a replica holds NeuronCores there: on emulated hosts always, on real ones with Neuron engines."""
    return host.topology is not None and (host.emulated or engine not in HOST_ENGINES)


def needs_neuron(engine: Engine) -> bool:
    """Returns whether the engine requires real Neuron devices."""
    return engine != "auto" and engine not in HOST_ENGINES | SERVER_ENGINES


def default_dtype(engine: Engine) -> Dtype:
    """Returns the default dtype of a resolved engine: fp32 on the host's CPUs, bf16 on Neuron."""
    return "fp32" if engine in HOST_ENGINES else "bf16"


# Families of the engines

NXD_VERSIONS = ("0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
"""The supported series of NxD Inference, oldest first. The own code of earlier ones has not been run."""

NXD_FAMILIES: Mapping[str, str] = {"llama": "0.4", "mixtral": "0.4", "qwen2": "0.5", "qwen3": "0.5", "mistral": "0.4"}
"""model_type -> the first series of NxD Inference that serves it, from ``utils.constants.MODEL_TYPES`` of the series
above, for the families in `checkpoints`. No family was dropped again. Mistral has its own class from 0.9 on; before
that, Llama's class serves it."""

NXD_WINDOW = "0.7"
"""The first series of NxD Inference that keeps the sliding window of Mistral: Llama's class reads it from then on."""

NXD_FUSED_QKV: Mapping[str, str] = {"llama": "0.4", "qwen2": "0.7", "qwen3": "0.9"}
"""Class of a family -> the first series of NxD Inference in which it joins the weights of Q, K and V
(`convert_state_dict_to_fused_qkv`). A compile with any other class ends with a KeyError."""

NXD_UNQUANTIZED: Mapping[str, str] = {
    "mixtral": "it joins the weights of the experts, but not their scales",
    "qwen2": "it does not divide the biases of quantized layers",
}
"""Families that no series of NxD Inference quantizes -> why. A compile ends with "Cannot find ...gate_up_proj.scale",
or with NotImplementedError in `quantization_layers.set_bias_to_state_dict`."""

NXD_QUANTIZED_OPTIONS = ("quantized_checkpoints_path", "quantization_dtype")
"""Options of NxD Inference's NeuronConfig that require ``quantize``."""

NXD_QUANTIZED_DTYPES: Mapping[str, tuple[str, ...]] = {"int8": ("int8",), "fp8": ("f8e4m3", "f8e5m2")}
"""``quantize`` -> values of ``quantization_dtype``, the default first."""

NXD_E5M2 = "0.7"
"""The first series of NxD Inference that computes with f8e5m2: earlier ones convert all types except f8e4m3 to int8
(`model_wrapper.DecoderModelInstance.load_module`)."""

TNX_FAMILIES = tuple(tnx_families.FAMILIES)
"""Families of transformers-neuronx."""

TNX_CONTINUOUS = tuple(name for name, family in tnx_families.FAMILIES.items() if family.continuous)
"""Families with continuous batching. The others run static batches."""

TNX_UNPADDED = tuple(name for name, family in tnx_families.FAMILIES.items() if family.serial)
"""Families without padded heads, quantization, lists of lengths and saved artifacts."""

TNX_UNQUANTIZED = tuple(name for name, family in tnx_families.FAMILIES.items() if not family.quantizes)
"""Families whose matrices transformers-neuronx cannot quantize."""

TNX_QUANTIZED_KV = tuple(name for name, family in tnx_families.FAMILIES.items() if family.quantizes_kv)
"""Families with an fp8 KV cache. The package converts to int8 without a scale, which destroys the keys."""

TNX_SAMPLING = tuple(name for name, family in tnx_families.FAMILIES.items() if family.samples)
"""Families that sample on the device."""

TNX_DRAFTING = tuple(name for name, family in tnx_families.FAMILIES.items() if family.speculates)
"""Families that the package supports in speculative decoding, as the model and as its draft."""

OptimumEra = Literal["tnx", "nxd"]
"""Optimum Neuron over transformers-neuronx, or with its own backend on NeuronX Distributed."""

OPTIMUM_FAMILIES: Mapping[OptimumEra, tuple[str, ...]] = {
    "tnx": ("bloom", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen2"),
    "nxd": ("llama", "mixtral", "qwen2", "qwen3"),
}
"""Families of optimum-neuron 0.0.28 and 0.4.5, of those in `checkpoints`."""

OPTIMUM_FIRST = (0, 4, 2)
"""The first version of Optimum Neuron whose NxD backend has the interface that is used here."""
TRACED_FAMILIES = ("bert", "distilbert", "mpnet", "roberta", "xlm-roberta")
"""Encoders that torch-neuronx traces. Their graphs have fixed shapes, and optimum-neuron exports them in this way."""

TRACED_REFUSED: Mapping[str, str] = {
    "deberta-v2": "AWS documents no trace of it",
    "modernbert": "AWS documents no trace of it",
    **dict.fromkeys(("mistral", "qwen2", "qwen3"), "AWS documents no trace of a decoder that gives embeddings"),
}
"""Families that the cpu engine encodes with, and torch-neuronx does not -> why."""

_NXD_LAST: Mapping[str, str] = {"inf2": "0.8", "trn1": "0.8"}
"""Machine family -> the last series of NxD Inference: the models of 0.9 require Trn2 (its release notes)."""


class NoEngine(NamedTuple):
    """Why no engine can be chosen: a problem's id, text and hint."""

    id: str
    what: str
    hint: str


def series(version: str) -> str:
    """Returns the series of a version, as in these tables: "0.8.16251+f3ca5575" -> "0.8"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _order(name: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in name.split("."))


Release = tuple[int, int]
NXD_RELEASES: tuple[Release, ...] = tuple((major, minor) for major, minor in map(_order, NXD_VERSIONS))


def nxd_release(version: str) -> Release:
    """Returns the series of ``NXD_VERSIONS`` whose options a version has: "0.8.16251+f3ca" is (0, 8).

    The newest series for a version that is newer or not a number; the oldest series for an older one.
    """
    parts = series(version).split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        return NXD_RELEASES[-1]
    return max((release for release in NXD_RELEASES if release <= _order(series(version))), default=NXD_RELEASES[0])


def optimum_era(version: str) -> OptimumEra | None:
    """Returns the era of a version of Optimum Neuron; None for one that is not supported."""
    order = _order(".".join(version.split("+")[0].split(".")[:3]))
    if order == (0, 0, 28):
        return "tnx"
    return "nxd" if OPTIMUM_FIRST <= order < (0, 5) else None


def reaches(version: str, first: str) -> bool:
    """Returns whether a version belongs to the series ``first`` or a later one."""
    return _order(series(version)) >= _order(first)


def newest_nxd(machines: str) -> str:
    """Returns the last known series of NxD Inference that runs on a family of machines."""
    return _NXD_LAST.get(machines, NXD_VERSIONS[-1])


def runs_on(engine: Engine, machines: str, version: str | None = None) -> bool:
    """Returns whether the engine, in that version (None: in any version), runs on this family of machines.

    The last SDK of transformers-neuronx does not compile for trn2; for NxD Inference see ``_NXD_LAST``.
    """
    if engine == "transformers-neuronx":
        return machines != "trn2"
    if engine == "nxd-inference" and version is not None:
        return machines not in _NXD_LAST or reaches(_NXD_LAST[machines], series(version))
    return True


AUTO_ENGINES: tuple[Engine, ...] = ("nxd-inference", "transformers-neuronx")
"""The candidates of ``auto`` on Neuron devices, the preferred (newer) one first."""


def serves(engine: Engine, model_type: str, machines: str | None = None, version: str | None = None) -> bool:
    """Returns whether the engine has a class for the family, on these machines, in that version.

    ``machines`` None: on any machine. ``version`` None: in any version that runs on them. ``auto``: any of its
    candidates. Always true for cpu and echo.
    """
    if engine == "auto":
        return any(serves(candidate, model_type, machines, version) for candidate in AUTO_ENGINES)
    if machines is not None and not runs_on(engine, machines, version):
        return False
    if engine == "transformers-neuronx":
        return model_type in TNX_FAMILIES
    if engine == "torch-neuronx":
        return model_type in TRACED_FAMILIES
    if engine == "optimum-neuron":
        eras = OPTIMUM_FAMILIES if version is None else [era] if (era := optimum_era(version)) else []
        return any(model_type in OPTIMUM_FAMILIES[era] for era in eras)
    if engine != "nxd-inference":
        return True
    if model_type not in NXD_FAMILIES:
        return False
    newest = version or (NXD_VERSIONS[-1] if machines is None else newest_nxd(machines))
    return reaches(newest, NXD_FAMILIES[model_type])


def may_run(engine: Engine, host: Host, model_type: str | None) -> bool:
    """Returns whether the engine, resolved there, can run a model of the family (None: unknown) on such a host."""
    topology = host.topology
    if topology is None or engine in HOST_ENGINES:
        return True
    return runs_on(engine, topology.family) and (model_type is None or serves(engine, model_type, topology.family))


def choose_engine(model_type: str | None, instance: str | None, versions: Mapping[Engine, str]) -> Engine | NoEngine:
    """Returns the engine that ``auto`` selects on a real host with the installed engines, ``versions``.

    1. NxD Inference, if its version runs on the machine and serves the family.
    2. transformers-neuronx, under the same condition.
    3. Otherwise a NoEngine with the reason.

    ``model_type`` None: config.json was not read, so that every family is accepted. ``instance`` is the type of the
    machine; an unknown type is not judged.
    """
    topology = TOPOLOGIES.get(instance or "")
    machines = None if topology is None else topology.family
    installed = [candidate for candidate in AUTO_ENGINES if candidate in versions]
    if not installed:
        return NoEngine(
            "engine-not-installed",
            f"engine auto: neither {' nor '.join(AUTO_ENGINES)} is installed on this host",
            "use a Neuron SDK image with one of them, or set its interpreter under engines",
        )
    running = [
        candidate for candidate in installed if machines is None or runs_on(candidate, machines, versions[candidate])
    ]
    listing = " and ".join(f"{candidate} {versions[candidate]}" for candidate in running or installed)
    if not running:
        verb = "does" if len(installed) == 1 else "do"
        fact = f"engine auto: {listing} {verb} not run on {machines}"
        return NoEngine("engine-unsupported-here", fact, _supported_here(str(machines)))
    for engine in running:
        if model_type is None or serves(engine, model_type, machines, versions[engine]):
            return engine
    servable = [
        candidate
        for candidate in AUTO_ENGINES
        if candidate not in running and serves(candidate, str(model_type), machines)
    ]
    verb = "does" if len(running) == 1 else "do"
    hint = f"install {servable[0]}" if servable else f"no engine serves {model_type} here; use another machine or model"
    return NoEngine("family-unsupported", f"engine auto: {listing} {verb} not serve {model_type}", hint)


def _supported_here(machines: str) -> str:
    if machines == "trn2":
        return "use nxd-inference"
    return f"use nxd-inference up to {_NXD_LAST[machines]}, or transformers-neuronx"
