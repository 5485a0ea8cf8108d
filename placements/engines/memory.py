"""What a replica of an engine costs: memory of cores and host, compilers, and the steps that are known without a model.

The methods have the answers of most Neuron engines; an engine's module ``memory`` overrides what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from placements.engines.registry import AUTO_ENGINES, ENGINES, Engine, part
from placements.engines.vllm.capabilities import VllmNeuron
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec

GIB = 1 << 30

SCRATCH_GIB = 1.0
"""The scratchpad that all NEFFs of a core share, see `resources.memory`: 1024 MiB on each core with Llama-3.1-8B, tp 8,
batch 32, length 4096, inf2.48xlarge (optimum-neuron, benchmark/vllm/memory_capacity_analysis.md)."""

PROCESS_GIB = 1.0
"""A replica's process without a model. Importing torch and transformers takes 0.32 GiB (measured on CPU); the share of
the Neuron runtime is not documented, so this is a conservative guess."""

COMPILE_WORKER_GIB = 64.0
"""The least for compiling: neuron_parallel_compile starts one worker for each 64 GiB of the host. A compile of
Llama-3.1-8B with NxD Inference, tp 1, was killed on 32 GiB while it generated graphs (trn1.2xlarge)."""

COMPILER_GIB = 12.0
"""Each compiler process, if there are many: NxD Inference 0.8 compiled Trinity-Nano (6 billion parameters, tp 1, length
2048, ten graphs of which nine at once) in the 123 GB of inf2.8xlarge (its contrib/models/Trinity/README.md)."""

COMPILER_THREADS = 32
"""The most compilers that NxD Inference runs at once: its ThreadPoolExecutor has min(32, CPUs + 4) threads
(neuronx-distributed, trace/model_builder.py)."""


class LoadedReplica(NamedTuple):
    """What a replica holds in the host's memory."""

    model: ModelSpec
    checkpoints: Sequence[Checkpoint]  # the model's, and that of its draft
    length: int  # tokens of a slot
    width: int  # bytes of the dtype
    release: VllmNeuron | None  # of vllm-neuron

    @property
    def weights_gib(self) -> float:
        """All weights in the dtype."""
        return sum(each.parameters for each in self.checkpoints) * self.width / GIB


@dataclass(frozen=True)
class EngineCosts:
    """What a replica of an engine costs."""

    scratch_gib: float = SCRATCH_GIB
    on_nxd: bool = False  # it runs on a backend built on NeuronX Distributed
    rank0_embeds: bool = False  # rank 0 has a surplus as large as the whole embedding and head
    compiles: bool = True  # graphs for NeuronCores

    def copies(self, model: ModelSpec, length: int) -> int:
        """Returns how often the weights are on a core."""
        return 1

    def prefill_rows(self, model: ModelSpec) -> int:
        """Returns the prompts of one prefill."""
        return 1

    def embeddings(self, model: ModelSpec, checkpoint: Checkpoint) -> tuple[int, int]:
        """Returns the parameters of embeddings and heads that are divided among the cores, and of small ones that every
        core holds."""
        groups = checkpoint.groups
        return groups.embedding + groups.head, groups.small + groups.positions

    def kv_tokens(self, model: ModelSpec, length: int) -> int:
        """Returns the tokens of the KV cache."""
        return model.max_batch * length

    def embeds_on_host(self, model: ModelSpec, checkpoint: Checkpoint) -> bool:
        """Returns whether the embeddings stay in the host's memory."""
        return False

    def host_gib(self, replica: LoadedReplica) -> tuple[float, float]:
        """Returns the GiB of the host's memory beside the process: while it serves, and while it loads."""
        held, width = replica.checkpoints, replica.width
        embedded = [each.groups for each in held] if self.embeds_on_host(replica.model, held[0]) else []
        embeddings = sum(groups.embedding + groups.positions for groups in embedded)
        files = sum(each.parameters * max(width, each.stored_bytes or 0) for each in held)
        return embeddings * width / GIB, files / GIB

    def compilers(self, model: ModelSpec, checkpoint: Checkpoint, prefill: int, decode: int) -> int:
        """Returns the compiler processes that run at once, for so many graphs; by default one after the other."""
        return int(self.compiles)

    def compile_gib(self, replica: LoadedReplica, compilers: int) -> float:
        """Returns the GiB of the host's memory for compiling, beside the checkpoint."""
        shards = replica.weights_gib if self.on_nxd else 0.0
        return max(COMPILE_WORKER_GIB, COMPILER_GIB * compilers, shards) if self.compiles else 0.0

    def step_s(self, model: ModelSpec) -> float | None:
        """Returns the seconds of a step that does not depend on the model; None: it does."""
        return None


@dataclass(frozen=True)
class NxdCosts(EngineCosts):
    """What a replica costs on NxD Inference, also below vLLM."""

    on_nxd: bool = True

    def host_gib(self, replica: LoadedReplica) -> tuple[float, float]:
        """Returns the estimate for a load that maps the shards of the compile. In the shards of a quantized model, each
        parameter has one byte, except those of embeddings and norms."""
        serving, loading = super().host_gib(replica)
        if replica.model.quantize is None:
            return serving, loading
        model = replica.checkpoints[0]
        quantized = model.parameters - sum(self.embeddings(replica.model, model))
        return serving, loading - quantized * (max(replica.width, model.stored_bytes or 0) - 1) / GIB

    def compilers(self, model: ModelSpec, checkpoint: Checkpoint, prefill: int, decode: int) -> int:
        """One for each graph but the first decode graph, which is compiled alone before the others, since it decides
        the layout of the weights."""
        return min(COMPILER_THREADS, max(1, prefill + decode - 1))


@dataclass(frozen=True)
class AutoCosts(EngineCosts):
    """What a replica of ``auto`` costs that is not resolved: it counts as the candidate that needs most."""

    chosen: EngineCosts = field(default_factory=EngineCosts)  # the preferred candidate that serves the family

    def embeds_on_host(self, model: ModelSpec, checkpoint: Checkpoint) -> bool:
        """One candidate embeds there by default."""
        return True

    def compilers(self, model: ModelSpec, checkpoint: Checkpoint, prefill: int, decode: int) -> int:
        """Those of the chosen candidate."""
        return self.chosen.compilers(model, checkpoint, prefill, decode)


_USUAL = EngineCosts()


def costs_of(engine: Engine, checkpoint: Checkpoint | None = None) -> EngineCosts:
    """Returns what the replicas of a resolved engine cost."""
    if engine == "auto":
        family = "" if checkpoint is None else checkpoint.model_type
        serving = next((name for name in AUTO_ENGINES if ENGINES[name].serves(family)), AUTO_ENGINES[-1])
        chosen = costs_of(serving)
        return AutoCosts(on_nxd=chosen.on_nxd, chosen=chosen)
    module = part(engine, "memory")
    costs: EngineCosts = _USUAL if module is None else module.COSTS
    return costs
