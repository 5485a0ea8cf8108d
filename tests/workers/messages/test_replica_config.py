"""A replica's configuration between processes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from placements.spec.parse import parse
from tests.replica_configs import changed, replica_config
from workers.messages.json_form import decoded, encoded
from workers.messages.replica_config import Origin, ReplicaConfig

EXAMPLES = sorted((Path(__file__).parents[3] / "placements" / "examples").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_models_of_each_example_arrive_unchanged(example: Path) -> None:
    """By Ray, which pickles them, and as JSON to child processes."""
    spec = parse(example.read_text(), str(example), "/specs").spec
    assert spec is not None
    for model in spec.models:
        config = ReplicaConfig(model=model.resolved(model.engine, None))
        for received in (pickle.loads(pickle.dumps(config)), decoded(encoded(config), ReplicaConfig)):
            assert received.model.model_dump() == config.model.model_dump()
            assert received.model.started_with == config.model.started_with


def test_fields_of_another_version_are_ignored() -> None:
    """As in every message between machines of one protocol."""
    config = replica_config(source="s3://models/a", prefill_buckets=[64], log="/log")
    sent = json.loads(encoded(config))
    sent["model"] |= {"later": 1, "buckets": {**sent["model"]["buckets"], "later": 1}}
    sent["run"]["later"] = sent["place"]["later"] = sent["later"] = 1
    assert decoded(json.dumps(sent), ReplicaConfig) == config


def test_sources_are_folders_once_they_are_fetched() -> None:
    """A path is a folder from the start, and stays the owner's."""
    config = replica_config(source="s3://models/a", draft_source="/models/draft")
    assert (config.source, config.local_folders()) == ("s3://models/a", ["/models/draft"])
    fetched = changed(config, origins={"source": Origin(source="s3://models/a", artifact="k", folder="/store/k")})
    assert (fetched.source, fetched.fetched_folders()) == ("/store/k", {("source",): "/store/k"})
