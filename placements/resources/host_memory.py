"""Estimates the host memory of a replica, and of compiling it, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from placements.engines.capabilities import BYTES, SHORTEST_BUCKET
from placements.engines.memory import PROCESS_GIB, LoadedReplica, costs_of
from placements.engines.registry import Engine
from placements.engines.vllm.capabilities import VllmNeuron
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec


@dataclass(frozen=True)
class HostMemory:
    """The host memory that one replica needs, in GiB."""

    serving: float  # while it serves
    load: float  # the peak from its start until it serves; at least ``serving``
    compile: float  # in addition, while a graph is compiled; 0 for engines that compile nothing

    def __str__(self) -> str:
        return f"load {self.load:.1f}, serving {self.serving:.1f}, compile {self.compile:.1f} GiB"


def host_memory(
    model: ModelSpec,
    checkpoint: Checkpoint,
    engine: Engine | None = None,
    draft: Checkpoint | None = None,
    release: VllmNeuron | None = None,
    surplus_gib: float = 0.0,
) -> HostMemory:
    """Returns the host memory of a replica; ``engine`` as in `estimate`, ``release`` is that of vllm-neuron, and
    ``surplus_gib`` was measured beyond the estimate.

    - Loading: the process and the whole checkpoint, in the dtype of its files or of serving, whichever is wider.
      transformers-neuronx reads safetensors layer by layer but other files at once, and config.json does not show the
      format, so that the whole checkpoint counts too. The model's ``host_memory_gib`` replaces this.
      Replicas on NeuronX Distributed map the shards that were saved when the model was compiled: 1.4 GB were measured
      for 12 GB of them, and the rest is page cache, which may be as large as the checkpoint.
    - Serving on Neuron: the process, and the embeddings if the engine may embed on the host. On the host's CPUs: the
      process, weights, KV cache, and a prompt.
    - Compiling: COMPILER_GIB for each of the ``compilers_at_once``, and COMPILE_WORKER_GIB at least. On NeuronX
      Distributed, which holds the shards of all cores beside the checkpoint before it saves them, at least as much as
      the checkpoint. On the host's CPUs torch.compile, if the model enables it.
    """
    engine = engine or model.engine
    width, costs = BYTES[model.dtype_on(engine)], costs_of(engine, checkpoint)
    held = tuple(each for each in (checkpoint, draft) if each is not None)
    replica = LoadedReplica(model, held, model.length(checkpoint), width, release)
    serving, loading = costs.host_gib(replica)
    process = PROCESS_GIB + (surplus_gib if model.host_memory_gib is None else 0.0)
    serving, loading = process + serving, process + loading
    if model.host_memory_gib is not None:
        loading = model.host_memory_gib
    compiling = costs.compile_gib(replica, compilers_at_once(model, checkpoint, engine))
    return HostMemory(min(serving, loading), loading, compiling)


def compilers_at_once(model: ModelSpec, checkpoint: Checkpoint, engine: Engine) -> int:
    """Returns the compiler processes that a compile of the model runs at once; ``engine`` as in `memory.estimate`."""
    ladder = _doubling(model.length(checkpoint))
    prefill, decode = len(model.buckets.prefill) or ladder, len(model.buckets.decode) or ladder
    return costs_of(engine, checkpoint).compilers(model, checkpoint, prefill, decode)


def _doubling(longest: int) -> int:
    """Returns the number of lengths that double from SHORTEST_BUCKET up to ``longest``."""
    return max(0, (longest - 1) // SHORTEST_BUCKET).bit_length() + 1
