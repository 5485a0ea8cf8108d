"""Decides when a replica's process may be started although its fetch has not ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from workers.artifacts.fetch.progress import FetchStatus
from workers.compiling.prefetch import compiles
from workers.messages.engine_protocol import LOADS_ARRIVING
from workers.messages.replica_config import ReplicaConfig

PROCESS_S = 5.0
"""From the request for a process until it reads weights, until it was measured: 1 s for Ray to start it, 4 s to import
torch and transformers."""
PACE_S = 1.0  # observation time of a fetch before its remaining time is estimated
SPAN_S = 10.0  # window of that estimate


def lead_of(config: ReplicaConfig, before_weights_s: float | None) -> float | None:
    """Returns how long before the end of its fetch a replica's process may be started, in seconds; None: not before.

    Its engine must be able to wait for missing files, and nothing else may read them: neither code of the checkpoint
    nor compilation ahead. ``before_weights_s`` is the part of the model's last starts before they read weights; None:
    it was not measured.
    """
    if config.engine not in LOADS_ARRIVING or config.trust_remote_code or compiles(config):
        return None
    return PROCESS_S if before_weights_s is None else before_weights_s


@dataclass
class RemainingTime:
    """Estimates the remaining time of a fetch from the recent network rate: bytes left by an earlier attempt arrive at
    the speed of the disk and do not predict the rest."""

    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def estimate(self, status: FetchStatus, now: float) -> float | None:
        """Returns the seconds until the end of the fetch; None: unknown. ``now`` is when the status was reported."""
        self._samples.append((now, status.moved))
        while len(self._samples) > 2 and self._samples[1][0] <= now - SPAN_S:
            self._samples.popleft()
        at, moved = self._samples[0]
        if now - at < PACE_S or status.moved <= moved:
            return None
        return max(0, status.total - status.done) * (now - at) / (status.moved - moved)
