"""What a host tells of the models that it holds."""

from __future__ import annotations

import pytest

from orchestrator.cluster.host_actor import sources_among
from workers.artifacts.store.store import Artifact


def artifact(source: str) -> Artifact:
    return Artifact(key="k", source=source, folder="/k", files={}, fetched_at=0.0, used_at=0.0, fetch_s=1.0, boot="b")


@pytest.mark.parametrize("kept", ["s3://models/one", "s3://models/one/"])
@pytest.mark.parametrize("source", ["s3://models/one", "s3://models/one/"])
def test_a_trailing_slash_does_not_hide_a_model(kept: str, source: str) -> None:
    """It is reported as it was requested, which is the controller's key."""
    assert sources_among([source, "s3://models/other"], [artifact(kept)]) == {source}


def test_a_missing_model_is_not_reported() -> None:
    """Nor one with the same prefix."""
    assert sources_among(["s3://models/one"], [artifact("s3://models/one-more")]) == frozenset()
