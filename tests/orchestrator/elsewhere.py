"""Unreachable remote sources, for fleets whose hosts only simulate fetches."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import Remote, SourceError
from workers.artifacts.sources.open_source import SourceQuery
from workers.artifacts.sources.source_metadata import SourceMetadata


def _unreachable(query: SourceQuery, _: RetryPolicy) -> Remote:
    raise SourceError("s3-unreachable", f"the test has no {query.source}")


def forbid_remote_sources(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Makes every remote source unreachable for the planner."""
    for module in ("orchestrator.control.resolve.checkpoint_reader", "orchestrator.control.resolve.resolved_revision"):
        patch.setattr(f"{module}.source_metadata_store", lambda: SourceMetadata(home / "heads", _unreachable))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test of a module that imports this reads a remote source."""
    forbid_remote_sources(monkeypatch, tmp_path)
