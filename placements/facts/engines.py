"""Which engines exist, and what of their choice decides a placement: dtype, and whether they take cores."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple, get_args

from placements.facts import tnx_families
from placements.facts.topology import TOPOLOGIES, Host

Engine = Literal["auto", "cpu", "echo", "transformers-neuronx", "nxd-inference", "optimum-neuron", "torch-neuronx"]
Dtype = Literal["bf16", "fp16", "fp32"]

ENGINES: tuple[Engine, ...] = get_args(Engine)
NAMED_ENGINES: tuple[Engine, ...] = tuple(engine for engine in ENGINES if engine != "auto")
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
BYTES: Mapping[Dtype, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4})


class Option(NamedTuple):
    """A number that one engine's ``engine_options`` may hold, and its range."""

    least: int
    most: int
    whole: bool


ENGINE_OPTIONS: Mapping[Engine, Mapping[str, Option | None]] = MappingProxyType(
    {
        "cpu": MappingProxyType(
            {"prefill_chunk": Option(1, 1 << 24, whole=True), "prefix_cache": None, "compile": None}
        ),
        "echo": MappingProxyType({"step_ms": Option(0, 3_600_000, whole=False)}),
    }
)
"""What ``engine_options`` may hold, None for what is true or false: ``prefill_chunk``, how many tokens of a prompt go
through the model together; ``prefix_cache``, whether a prompt that begins with what a slot still holds is read from
there on; ``compile``, whether torch.compile makes code of each bucket; ``step_ms``, the time that each of echo's steps
takes, to play a slow engine."""

PACKAGES: Mapping[Engine, str] = MappingProxyType(
    {"transformers-neuronx": "transformers_neuronx", "nxd-inference": "neuronx_distributed_inference"}
)
"""The Neuron engines that this version drives, and the package of each by the name that it is imported by."""


def distribution(engine: Engine) -> str:
    """What the package of an engine is installed as."""
    return PACKAGES[engine].replace("_", "-")


HOST_ENGINES: frozenset[Engine] = frozenset({"cpu", "echo"})  # they compute on the host's CPUs
NXD_ENGINES: frozenset[Engine] = frozenset({"nxd-inference", "optimum-neuron"})  # built on NeuronX Distributed


def resolve(engine: Engine, host: Host) -> Engine:
    """What ``auto`` means on this host: cpu where no accelerator is. On Neuron it stays ``auto``.

    Which Neuron engine an image holds is known only on the host itself, and decides no placement.
    """
    return "cpu" if engine == "auto" and (host.emulated or host.topology is None) else engine


def takes_cores(engine: Engine, host: Host) -> bool:
    """Whether a replica holds NeuronCores there: always on an emulated host; on a real one only the Neuron engines."""
    return host.topology is not None and (host.emulated or resolve(engine, host) not in HOST_ENGINES)


def needs_neuron(engine: Engine) -> bool:
    """Whether the engine can run only where real Neuron devices are."""
    return engine != "auto" and engine not in HOST_ENGINES


def default_dtype(engine: Engine) -> Dtype:
    """fp32 for the engines of the host's CPUs, bf16 on Neuron. Expects a resolved engine."""
    return "fp32" if engine in HOST_ENGINES else "bf16"


# Which engine serves which family

NXD_VERSIONS = ("0.2", "0.3", "0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
"""The supported series of NxD Inference, oldest first. 0.1 requires transformers 4.45, older than corewright's."""

NXD_FAMILIES: Mapping[str, str] = MappingProxyType(
    {"llama": "0.2", "mixtral": "0.2", "qwen2": "0.5", "qwen3": "0.5", "mistral": "0.2"}
)
"""model_type -> the first series of NxD Inference that serves it, of those that were read: its
``utils.constants.MODEL_TYPES``, of the families that `checkpoints` knows. None was dropped again. Mistral is there from
0.9; before, its class is Llama's, as in vLLM's back-end, where no sliding window is in the way."""

NXD_MISTRAL = "0.9"
"""The first series of NxD Inference with a class for Mistral, which keeps its sliding window."""

NXD_QUANTIZED_OPTIONS = ("quantized_checkpoints_path", "quantization_dtype")
"""Options of NxD Inference's NeuronConfig that go with ``quantize``."""

NXD_QUANTIZED_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType({"int8": ("int8",), "fp8": ("f8e4m3", "f8e5m2")})
"""``quantize`` -> what ``quantization_dtype`` may be, the default first."""

NXD_E5M2 = "0.7"
"""The first series of NxD Inference that computes with f8e5m2: earlier ones convert every type but f8e4m3 to int8
(`model_wrapper.DecoderModelInstance.load_module`)."""

TNX_FAMILIES = tuple(tnx_families.FAMILIES)
"""Families of transformers-neuronx."""

TNX_CONTINUOUS = tuple(name for name, family in tnx_families.FAMILIES.items() if family.continuous)
"""Those that take a new request beside running ones. The others work on batches that begin and end together."""

TNX_UNPADDED = tuple(name for name, family in tnx_families.FAMILIES.items() if family.serial)
"""Those without padded heads, quantization, lists of lengths and saved artifacts."""

TNX_QUANTIZED_KV = tuple(name for name, family in tnx_families.FAMILIES.items() if family.quantizes_kv)
"""Those with a KV cache of fp8. The package's int8 is a conversion without a scale, which leaves nothing of a key."""

TNX_SAMPLING = tuple(name for name, family in tnx_families.FAMILIES.items() if family.samples)
"""Those that sample on the device."""

TNX_DRAFTING = tuple(name for name, family in tnx_families.FAMILIES.items() if family.speculates)
"""Those that the package speculates with, as the model and as its draft."""

OPTIMUM_FAMILIES = ("llama", "mixtral", "qwen2", "qwen3")
"""optimum-neuron 0.4.5, of the families that `checkpoints` knows."""

_NXD_LAST: Mapping[str, str] = MappingProxyType({"inf2": "0.8", "trn1": "0.8"})
"""The last series of NxD Inference for a family of machines: the models of 0.9 need Trn2 (its release notes)."""


class NoEngine(NamedTuple):
    """Why no engine can be chosen: a problem id, the fact and the remedy."""

    id: str
    what: str
    hint: str


def series(version: str) -> str:
    """ "0.8.16251+f3ca5575" -> "0.8": what the tables here speak of."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _order(name: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in name.split("."))


Release = tuple[int, int]
NXD_RELEASES: tuple[Release, ...] = tuple((major, minor) for major, minor in map(_order, NXD_VERSIONS))


def nxd_release(version: str) -> Release:
    """The series of ``NXD_VERSIONS`` that a version has the options of: "0.8.16251+f3ca" is (0, 8).

    A version that is newer than all, or not a number, has those of the newest; an older one those of the oldest.
    """
    found = series(version).split(".")
    if len(found) != 2 or not all(part.isdecimal() for part in found):
        return NXD_RELEASES[-1]
    return max((one for one in NXD_RELEASES if one <= _order(series(version))), default=NXD_RELEASES[0])


def reaches(version: str, first: str) -> bool:
    """Whether a version is of the series ``first`` or a later one."""
    return _order(series(version)) >= _order(first)


def newest_nxd(machines: str) -> str:
    """The last series of NxD Inference that was read and runs on these machines."""
    return _NXD_LAST.get(machines, NXD_VERSIONS[-1])


def runs_on(engine: Engine, machines: str, version: str | None = None) -> bool:
    """Whether the engine, in that version (None: in some), runs on this family of machines.

    The last SDK of transformers-neuronx compiles for no trn2; see ``_NXD_LAST`` for NxD Inference.
    """
    if engine == "transformers-neuronx":
        return machines != "trn2"
    if engine == "nxd-inference" and version is not None:
        return machines not in _NXD_LAST or reaches(_NXD_LAST[machines], series(version))
    return True


AUTO_ENGINES: tuple[Engine, ...] = ("nxd-inference", "transformers-neuronx")
"""What ``auto`` may stand for on Neuron devices, the preferred one first: NxD Inference is the later of the two."""


def serves(engine: Engine, model_type: str, machines: str | None = None, version: str | None = None) -> bool:
    """Whether the engine has a class for the family, as far as tables say it; on these machines, in that version.

    ``machines`` None: on some. ``version`` None: in some version that runs on them. ``auto``: one of the engines that
    it may stand for. cpu, echo and torch-neuronx are not judged.
    """
    if engine == "auto":
        return any(serves(one, model_type, machines, version) for one in AUTO_ENGINES)
    if machines is not None and not runs_on(engine, machines, version):
        return False
    if engine == "transformers-neuronx":
        return model_type in TNX_FAMILIES
    if engine == "optimum-neuron":
        return model_type in OPTIMUM_FAMILIES
    if engine != "nxd-inference":
        return True
    if model_type not in NXD_FAMILIES:
        return False
    newest = version or (NXD_VERSIONS[-1] if machines is None else newest_nxd(machines))
    return reaches(newest, NXD_FAMILIES[model_type])


def may_run(engine: Engine, host: Host, model_type: str | None) -> bool:
    """Whether a model of the family (None: unknown) can run on such a host, as far as engine and machine decide it."""
    engine, topology = resolve(engine, host), host.topology
    if topology is None or engine in HOST_ENGINES:
        return True
    return runs_on(engine, topology.family) and (model_type is None or serves(engine, model_type, topology.family))


def choose_engine(model_type: str | None, instance: str | None, found: Mapping[Engine, str]) -> Engine | NoEngine:
    """What ``auto`` is on a real host that has these engines, in these versions.

    1. NxD Inference, where its version runs on the machine and serves the family.
    2. transformers-neuronx, likewise.
    3. Else no engine, and why.

    ``model_type`` None: config.json was not read, and no family is refused. ``instance`` is the type of the machine;
    one that is not in the table is taken for any.
    """
    topology = TOPOLOGIES.get(instance or "")
    machines = None if topology is None else topology.family
    here = [one for one in AUTO_ENGINES if one in found]
    if not here:
        return NoEngine(
            "engine-not-installed",
            f"engine auto: this host has neither {' nor '.join(AUTO_ENGINES)}",
            "use an image of the Neuron SDK that holds one, or name its interpreter under engines",
        )
    running = [one for one in here if machines is None or runs_on(one, machines, found[one])]
    told = " and ".join(f"{one} {found[one]}" for one in running or here)
    if not running:
        verb = "does" if len(here) == 1 else "do"
        what = f"engine auto: {told} {verb} not run on {machines}"
        return NoEngine("engine-unsupported-here", what, _runs_here(str(machines)))
    for engine in running:
        if model_type is None or serves(engine, model_type, machines, found[engine]):
            return engine
    others = [one for one in AUTO_ENGINES if one not in running and serves(one, str(model_type), machines)]
    verb = "serves" if len(running) == 1 else "serve"
    hint = f"install {others[0]}" if others else f"no engine serves {model_type} here; take another machine or model"
    return NoEngine("family-unsupported", f"engine auto: {told} {verb} no {model_type}", hint)


def _runs_here(machines: str) -> str:
    if machines == "trn2":
        return "take nxd-inference"
    return f"take nxd-inference up to {_NXD_LAST[machines]}, or transformers-neuronx"
