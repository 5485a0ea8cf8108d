"""Reads `ray start` commands of the deployment files with Ray's own parser."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.cluster.own_ray import HEALTH_CHECKS
from orchestrator.cluster.ray_names import INSTANCE_LABEL, core_resources
from placements.facts.topology import TOPOLOGIES

ROOT = Path(__file__).parent.parent.parent
SINGLE_PORTS = (
    "node_manager_port",
    "object_manager_port",
    "dashboard_agent_grpc_port",
    "runtime_env_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
)
GATEWAY_PORT = 8080


def command(text: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The assignments before the `ray start` of a shell command, and its options as Ray reads them."""
    (part,) = [part for part in text.split(";") if "ray start" in part]
    words = shlex.split(part)
    at = next(index for index, word in enumerate(words) if not re.match(r"\w+=", word))
    assert (Path(words[at]).name, words[at + 1]) == ("ray", "start")
    return dict(word.partition("=")[::2] for word in words[:at]), options(words[at + 2 :])


def options(words: Sequence[str]) -> dict[str, Any]:
    """The options of `ray start`. Fails for one that Ray does not have, or cannot read."""
    from ray.scripts.scripts import start

    return dict(start.make_context("start", list(words)).params)


def check_ports(params: dict[str, Any]) -> None:
    """Every port is fixed, and none is used twice or the gateway's."""
    ports = [params[name] for name in SINGLE_PORTS]
    assert all(ports)
    assert len({*ports, GATEWAY_PORT, 6379, 8265}) == len(ports) + 3
    first, last = params["min_worker_port"], params["max_worker_port"]
    assert 1024 < first < last < 32768  # below the system's range for outgoing connections
    assert not [port for port in ports if first <= port <= last]


def check_health(params: dict[str, Any]) -> None:
    """The settings exist, and find a host that is cut off within 20 s: misses x (period + timeout)."""
    settings = params["system_config"]
    assert settings.keys() <= HEALTH_CHECKS.keys()
    each = settings["health_check_period_ms"] + settings["health_check_timeout_ms"]
    assert settings["health_check_failure_threshold"] * each < 20_000


def check_host(params: dict[str, Any], instance: str) -> None:
    """The node declares the label and every core of the instance type, as Ray reads them."""
    from ray._private.label_utils import parse_node_labels_string

    assert parse_node_labels_string(params["labels"]) == {INSTANCE_LABEL: instance}
    declared = {name: number for name, number in json.loads(params["resources"]).items() if name != "CPU"}
    assert declared == core_resources(TOPOLOGIES[instance].cores)
