"""What a replica with a server's command costs."""

from __future__ import annotations

from placements.engines.memory import EngineCosts
from placements.facts.checkpoints import Checkpoint
from placements.spec.schema import ModelSpec


class ServerCosts(EngineCosts):
    """The costs of a server, of which only the checkpoint is known."""

    def compilers(self, model: ModelSpec, checkpoint: Checkpoint, prefill: int, decode: int) -> int:
        """None of corewright's."""
        return 0


COSTS = ServerCosts()
