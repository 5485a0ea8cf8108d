"""What a replica of the echo engine costs."""

from __future__ import annotations

from placements.engines.memory import EngineCosts, LoadedReplica
from placements.spec.schema import ModelSpec

LEAST_STEP_S = 0.0005  # batcher and socket, without step_ms


class EchoCosts(EngineCosts):
    """The costs of the echo engine, which loads nothing."""

    def host_gib(self, replica: LoadedReplica) -> tuple[float, float]:
        """Only the process."""
        return 0.0, 0.0

    def step_s(self, model: ModelSpec) -> float | None:
        """The option ``step_ms``."""
        step_ms = model.engine_options.get("step_ms", 0.0)
        return max(LEAST_STEP_S, float(step_ms) / 1000 if isinstance(step_ms, int | float) else 0.0)


COSTS = EchoCosts(compiles=False)
