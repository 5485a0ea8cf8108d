"""Sources elsewhere that nobody reaches, for fleets whose hosts only play that they fetch."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.artifacts.heads import Asked, Heads
from workers.artifacts.listing import Remote, SourceError


def _away(asked: Asked) -> Remote:
    raise SourceError("s3-unreachable", f"{asked.source} is played")


def nobody_is_asked(patch: pytest.MonkeyPatch, home: Path) -> None:
    """The planner knows nothing of a source elsewhere, and asks nobody."""
    for module in ("orchestrator.sources", "orchestrator.generation"):
        patch.setattr(f"{module}.heads_here", lambda: Heads(home / "heads", _away))
