"""What the engine ``optimum-neuron`` can do, by the two eras of Optimum Neuron."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from placements.engines.capabilities import LLAMA_ROPES, NEURON_INDEX, Capabilities, OptionRange, Unused
from placements.facts.versions import order, reaches, series

OptimumEra = Literal["tnx", "nxd"]
"""Optimum Neuron over transformers-neuronx, or with its own backend on NeuronX Distributed."""

OPTIMUM_FAMILIES: Mapping[OptimumEra, tuple[str, ...]] = {
    "tnx": ("bloom", "gpt2", "llama", "mistral", "mixtral", "opt", "qwen2"),
    "nxd": ("llama", "mixtral", "qwen2", "qwen3"),
}
"""Families of optimum-neuron 0.0.28 and 0.4.5, of those in `checkpoints`."""

OPTIMUM_FIRST = (0, 4, 2)
"""The first version of Optimum Neuron whose NxD backend has the interface that is used here."""
OPTIMUM_LAST = "0.4"


def optimum_era(version: str) -> OptimumEra | None:
    """Returns the era of a version of Optimum Neuron; None for one that is not supported."""
    release = order(version)[:3]
    if release == (0, 0, 28):
        return "tnx"
    return "nxd" if release >= OPTIMUM_FIRST else None


class OptimumCapabilities(Capabilities):
    """What Optimum Neuron can do."""

    def planned_as(self, version: str) -> str:
        """By the last series whose code was run."""
        return "" if reaches(OPTIMUM_LAST, series(version)) else OPTIMUM_LAST

    def serves(self, model_type: str, machines: str | None = None, version: str | None = None) -> bool:
        """By the era of the version."""
        eras = OPTIMUM_FAMILIES if version is None else [era] if (era := optimum_era(version)) else []
        return any(model_type in OPTIMUM_FAMILIES[each] for each in eras)


CAPABILITIES = OptimumCapabilities(
    engine="optimum-neuron",
    runs_on="neuron",
    package="optimum.neuron",
    requires=("optimum-neuron",),
    loads=("hf", "optimum-first", "optimum", "precompiled"),
    install=f"pip install 'optimum-neuron[neuronx]==0.4.5' {NEURON_INDEX}",
    options=MappingProxyType({"prefill_chunk_size": OptionRange(0, 1 << 24, whole=True)}),
    families=tuple(sorted({name for names in OPTIMUM_FAMILIES.values() for name in names})),
    ropes=MappingProxyType(dict.fromkeys(("llama", "qwen2", "qwen3"), LLAMA_ROPES)),
    stores_shards=True,
    exports_graphs=True,
    unused=(Unused(("buckets", "fuse_qkv", "compiler"), "remove {field}", ", which chooses it itself"),),
    not_on=frozenset({"trn3"}),
    absent="not in AWS's images; see docs/engines.md",
)
"""``prefill_chunk_size``: tokens of a prompt in one run, from Optimum Neuron 0.4.6 on; 0: all. In 0.4.5, Qwen's
classes compute rotary positions with Llama's, and Mixtral's ignores ``rope_scaling``."""
