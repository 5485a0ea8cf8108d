"""Sources elsewhere that nobody reaches, for fleets whose hosts only play that they fetch."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.artifacts.sources.listing import Remote, SourceError
from workers.artifacts.sources.source_metadata import SourceMetadata, SourceQuery


def _away(asked: SourceQuery) -> Remote:
    raise SourceError("s3-unreachable", f"{asked.source} is played")


def nobody_is_asked(patch: pytest.MonkeyPatch, home: Path) -> None:
    """The planner knows nothing of a source elsewhere, and asks nobody."""
    for module in ("orchestrator.revisions.checkpoint_reader", "orchestrator.revisions.resolved_revision"):
        patch.setattr(f"{module}.source_metadata_store", lambda: SourceMetadata(home / "heads", _away))
