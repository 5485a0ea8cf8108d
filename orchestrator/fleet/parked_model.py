"""A model without replicas whose files a host keeps in memory."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.fleet.fleet_status import ParkedStatus
from workers.host.page_cache import CachedBytes

GIB = 2**30


@dataclass(frozen=True)
class ParkedModel:
    """Where the last replica of a model was ready, and what it had read there."""

    host: str
    folders: tuple[str, ...]  # its weights, those of its draft and its adapters
    version: str  # of the replica
    cached: CachedBytes | None = None  # as the host last reported it

    def status(self, start_s: float) -> ParkedStatus | None:
        """Returns the model's status, with the expected seconds of a start; None until the host has reported."""
        if self.cached is None:
            return None
        gib, cached_gib = (round(size / GIB, 3) for size in (self.cached.total, self.cached.cached))
        return ParkedStatus(host=self.host, gib=gib, cached_gib=cached_gib, start_s=round(start_s, 1))

    def text(self, start_s: float) -> str | None:
        """Returns the same for display."""
        if (report := self.status(start_s)) is None:
            return None
        size = f"{report.cached_gib:.1f} of {report.gib:.1f} GiB in memory"
        return f"parked on {self.host}, {size}: a start takes about {start_s:.1f} s"
