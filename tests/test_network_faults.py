"""A fault explains the failure of a request only if nothing else served its model."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.network_faults import Faults
from tests.network_invariants import CoreWatch
from tests.orchestrator.clients import Failure

URL = "http://10.77.0.2:8080"


def faults(seen: dict[str, str], ready: list[str]) -> Faults:
    """``seen`` are the machines of the replicas whose processes run, ``ready`` those that the controller had ready."""
    fleet: Any = SimpleNamespace(gateway_machine=lambda url: SimpleNamespace(name="h2"))
    watch, now = CoreWatch([]), time.monotonic()
    for id, machine in seen.items():
        watch._seen[id].append((now, machine))
    known = Faults(fleet, watch)
    known._ready.append((now - 60.0, ready))
    return known


def unavailable() -> Failure:
    now = time.monotonic()
    return Failure("model_unavailable", "pair", URL, None, began=now - 20.0, ended=now, problem=None)


@pytest.mark.parametrize(("machine", "explained"), [("h3", False), ("h4", True)])
def test_a_model_is_unavailable_only_if_the_machines_of_its_replicas_have_faults(machine: str, explained: bool) -> None:
    known = faults({"pair/0": machine}, ["pair/0"])
    known.begin("h4")
    assert known.permits(unavailable()) is explained


def test_a_replica_that_had_ended_before_the_request_serves_nothing() -> None:
    """The controller, which was away, still had it ready."""
    assert faults({"wide/0": "h3"}, ["pair/0", "wide/0"]).permits(unavailable())
