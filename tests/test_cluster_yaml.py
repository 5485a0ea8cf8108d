"""The cluster launcher file, judged by Ray's own schema and by the planner's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.on_ray.ray_nodes import core_resources
from placements.facts.topology import TOPOLOGIES

FILE = Path(__file__).parent.parent / "cluster.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return loaded


def test_ray_accepts_the_file(config: dict[str, Any]) -> None:
    """Ray's schema finds nothing wrong with it, and finds a key that it does not know."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="no_such_key"):
        validate_config(prepare_config(config | {"no_such_key": 1}))


def test_each_worker_declares_the_cores_of_its_instance_type(config: dict[str, Any]) -> None:
    """Every NeuronCore is a resource of its own, exactly as many as the machine has."""
    worker = config["available_node_types"]["inf2-48xlarge"]
    topology = TOPOLOGIES[worker["node_config"]["InstanceType"]]

    assert worker["resources"] == {"CPU": topology.vcpus, **core_resources(topology.cores)}


def test_the_head_takes_no_work(config: dict[str, Any]) -> None:
    """Nothing is scheduled onto the head by its CPUs."""
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}
