"""What a replica of torch-neuronx costs."""

from __future__ import annotations

from placements.engines.memory import EngineCosts, LoadedReplica
from placements.engines.torch_neuronx.capabilities import traced_batch, traced_lengths
from placements.spec.schema import ModelSpec


class TorchNeuronxCosts(EngineCosts):
    """The costs of traces, each with weights of its own, which are compiled one by one."""

    def copies(self, model: ModelSpec, length: int) -> int:
        """Once for each trace."""
        return len(traced_lengths(model.buckets.prefill, length))

    def prefill_rows(self, model: ModelSpec) -> int:
        """The rows of a trace."""
        return traced_batch(model.max_batch, model.engine_options)

    def host_gib(self, replica: LoadedReplica) -> tuple[float, float]:
        """A load holds the checkpoint, and the trace that is being loaded."""
        serving, loading = super().host_gib(replica)
        return serving, 2 * loading


COSTS = TorchNeuronxCosts()
