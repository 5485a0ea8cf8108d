"""The tiny models that `corewright verify` loads, and the spec that places them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from placements.engines.registry import capabilities, takes_cores
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host, Machine, Topology, alignment, degree

VOCAB_SIZE = 512  # of the tokenizer of placements/examples/models/tiny
POSITIONS = 8192
WINDOW = 24  # tokens; shorter than most prompts
HEAD_DIM = 32
LAYERS = 2
TOKENS = 12  # of an answer that is compared
BUCKETS = (16, 32, 64)
TOO_LARGE = {"max_batch": 1024, "max_len": 8192}  # with 48 heads 96 GiB of KV cache in bf16
NO_OPTION = "--no-such-option"  # of neuronx-cc

FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama": {},
        "mistral": {"sliding_window": None},
        "mistral-window": {"model_type": "mistral", "sliding_window": WINDOW},
        "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen2": {},
        "qwen3": {"head_dim": HEAD_DIM},
    }
)
"""Family -> the entries of its config.json beyond `configuration`. The name is the model_type, unless it is given."""


@dataclass(frozen=True)
class Extent:
    """How much is measured."""

    kills: int  # SIGKILLs of a process that holds cores
    rounds: int  # repetitions of what is timed
    every_start: bool  # of each degree; else the first and the last preferred one
    longest: int  # tokens of the longest prompt


QUICK = Extent(kills=5, rounds=3, every_start=False, longest=512)
FULL = Extent(kills=20, rounds=7, every_start=True, longest=4096)


@dataclass(frozen=True)
class TinyTrial:
    """A model to load: a family, and the fields of its entry in the spec."""

    name: str
    family: str = "llama"
    heads: int = 8
    cores: CoreRange | None = None  # None: the engine does not use cores
    fields: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0

    @property
    def model_type(self) -> str:
        return str(FAMILIES[self.family].get("model_type", self.family))

    @property
    def subject(self) -> str:
        """Its degree and its place, for a verdict."""
        return "no cores" if self.cores is None else f"tp {len(self.cores)} at core {self.cores.first}"

    @property
    def folder(self) -> str:
        """The name of its checkpoint's folder: equal for equal checkpoints."""
        return f"{self.family}-{self.heads}-{self.seed}"

    @property
    def configuration(self) -> dict[str, Any]:
        """Its config.json."""
        hidden = self.heads * HEAD_DIM
        return {
            "model_type": self.model_type,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": POSITIONS,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
            **{name: value for name, value in FAMILIES[self.family].items() if name != "model_type"},
        }


def spec_text(trial: TinyTrial, folder: Path, engine: str, hosts: Any, engines: Any) -> str:
    """Returns the YAML of a spec with one trial; ``hosts`` and ``engines`` are the sections of the user's spec."""
    model = {
        "engine": engine,
        "source": str(folder / trial.folder),
        "tp_degree": 1 if trial.cores is None else len(trial.cores),
        "max_len": 128,
        "max_batch": 4,
        **({} if trial.cores is None else {"cores": [str(trial.cores)]}),
        **trial.fields,
    }
    sections = {"hosts": hosts, "engines": engines}
    given = {name: section for name, section in sections.items() if section}
    return yaml.safe_dump({"version": 1, "name": "verify", **given, "models": {trial.name: model}}, sort_keys=False)


def starts(topology: Topology, tp: int, free: Iterable[int], *, every: bool) -> list[CoreRange]:
    """Returns the ranges of ``tp`` free cores on which `plan` may start a replica: ``every`` legal one, or the first
    and the last that it prefers."""
    row, cores = alignment(topology.family, tp), set(free)
    step = row.legal if every else row.preferred
    ranges = [CoreRange(first, first + tp - 1) for first in range(0, topology.cores - tp + 1, step)]
    usable = [each for each in ranges if cores >= set(each)]
    return usable if every else usable[:1] + usable[1:][-1:]


def degrees(topology: Topology) -> list[int]:
    """Returns the documented degrees of the instance type that have room on it."""
    return [tp for tp in range(1, topology.cores + 1) if (row := degree(topology.family, tp)) and row.documented]


def is_here(host: Host, machine: Machine) -> bool:
    """Returns whether replicas of a host run on this machine."""
    return host.emulated or host.topology is None or host.topology.instance == machine.instance


def settings_of(text: str | None, devices: bool, host: Host | None = None) -> tuple[Any, Any]:
    """Returns the sections ``hosts`` and ``engines`` of the user's spec (None: no spec): without one, those of this
    machine, or of an emulated one where it has no ``devices``. ``host``: only its entry of several."""
    if text is None:
        return None if devices else {"emulate": "inf2.48xlarge"}, None
    read = yaml.safe_load(text)
    hosts = read.get("hosts")
    if isinstance(hosts, list) and host is not None and host.topology is not None:
        key = "emulate" if host.emulated else "instance"
        hosts = next(entry for entry in hosts if entry.get(key) == host.topology.instance)
    return hosts, read.get("engines")


def trials_for(engine: str, host: Host, free: Sequence[int], extent: Extent) -> list[TinyTrial]:
    """Returns the models that the parts load on free cores; each is named after what it is for."""
    topology, ability = host.topology, capabilities(engine)
    if topology is None or not takes_cores(engine, host):
        places: dict[int, list[CoreRange | None]] = {1: [None]}
    else:
        every = {tp: starts(topology, tp, free, every=extent.every_start) for tp in degrees(topology)}
        places = {tp: list(ranges) for tp, ranges in every.items() if ranges}
    if not places:
        return []
    first = places.get(2, next(iter(places.values())))[0]
    fixed = {field for unused in ability.unused for field in unused.fields}
    shaped = {} if ability.runs_on == "cpus" or "buckets" in fixed else {"buckets": {"prefill": list(BUCKETS)}}
    compiled = {**shaped, "engine_options": {"compile": True}} if "compile" in ability.options else shaped
    wrong = compiled if "compiler" in fixed else {**compiled, "compiler": {"flags": NO_OPTION}}
    long = {"max_len": extent.longest + 2 * TOKENS, "max_batch": 1}
    made = [
        TinyTrial("base", cores=first, fields=shaped),
        TinyTrial("long", cores=first, fields=long),
        TinyTrial("too-large", heads=48, cores=first, fields=TOO_LARGE),
        TinyTrial("compiled", cores=first, fields=compiled),
        TinyTrial("miscompiled", cores=first, fields=wrong),
    ]
    served = [name for name in FAMILIES if ability.serves(TinyTrial("", name).model_type)]
    made += [TinyTrial(f"family-{name}", name, cores=first, fields=shaped) for name in served]
    if "sampling" not in fixed:
        made.append(TinyTrial("sampled", cores=first, fields={**shaped, "sampling": "device"}))
    if ability.drafts:
        draft = TinyTrial("draft-model", cores=first, seed=1)
        made += [
            draft,
            TinyTrial("draft", cores=first, fields={**shaped, "draft": {"source": f"./{draft.folder}", "k": 3}}),
        ]
    made += [
        TinyTrial(f"degree-{tp}-{i}", heads=max(8, tp), cores=where, fields={"max_batch": 1})
        for tp, ranges in places.items()
        for i, where in enumerate(ranges)
    ]
    return made
