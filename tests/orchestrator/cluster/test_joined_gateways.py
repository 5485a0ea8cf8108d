"""What `up` reports of the gateways of a joined cluster."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from orchestrator.cli.views import status_text
from orchestrator.cluster import gateways
from orchestrator.cluster.gateway_start import are_starting, client_url, loopback_warning, not_started
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.fleet_status import GatewayInFleet
from orchestrator.messages.gateway_places import ClusterMachine, GatewayPlace
from orchestrator.process.failure import Failed
from tests.orchestrator.fakefleet import STATUS, status_of

MACHINES = [
    ClusterMachine(GatewayPlace("head", "n0"), "10.0.0.1", is_head=True),
    ClusterMachine(GatewayPlace("a", "n1"), "10.0.0.2", "a"),
    ClusterMachine(GatewayPlace("b", "n2"), "10.0.0.3", "b"),
]


def gateway(machine: str, state: str, address: str | None = None, reason: str | None = None) -> GatewayInFleet:
    known = {"machine": machine, "host": None, "address": address, "state": state, "reason": reason}
    return msgspec.convert({**known, "version": None, "routes_age_s": 1.5 if address else None}, GatewayInFleet)


@pytest.mark.parametrize(
    ("host", "places_on", "url"),
    [
        ("0.0.0.0", "hosts", "http://10.0.0.2:8080"),
        ("0.0.0.0", "head", "http://10.0.0.1:8080"),
        ("127.0.0.1", "hosts", "http://127.0.0.1:8080"),
    ],
)
def test_the_printed_address_is_that_of_a_gateway(host: str, places_on: str, url: str) -> None:
    assert client_url(GatewaySettings(host=host, port=8080, home=""), places_on, MACHINES) == url


@pytest.mark.parametrize(("spare", "label", "count"), [(True, "", 2), (True, "a", 3), (False, "a", 2)])
def test_a_machine_has_its_gateways_and_on_a_cluster_their_spare(spare: bool, label: str, count: int) -> None:
    settings = GatewaySettings(host="", port=1, home="", gateways=2, gateway_spare=spare)
    assert gateways._count(settings, GatewayPlace(label, "n1")) == count


def test_the_spare_gateway_may_take_the_seat_of_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads from its settings how many there are. Serve would take 5 s to replace the second one."""
    deployed: dict[str, Any] = {}
    monkeypatch.setattr(gateways, "_deploy", deployed.update)
    settings = GatewaySettings(host="", port=1, home="", gateways=2)
    gateways.start_spare_gateway(settings, "chat")
    (application,) = deployed.values()
    deployment = application._bound_deployment
    assert (deployment.num_replicas, deployment.init_args) == (1, (settings, "chat"))


def test_several_gateways_on_loopback_are_a_warning() -> None:
    """`gateways-on-loopback`; not for one gateway, on the head, or on the network."""
    warning = loopback_warning("127.0.0.1", "hosts", 2)
    assert warning is not None
    assert (warning.id, warning.severity) == ("gateways-on-loopback", "warning")
    others = [("127.0.0.1", "hosts", 1), ("127.0.0.1", "head", 2), ("0.0.0.0", "hosts", 2)]
    assert [loopback_warning(*other) for other in others] == [None] * 3


def test_up_fails_if_no_gateway_runs_and_names_those_that_do_not() -> None:
    runs, failed = gateway("a", "ready", "http://a:8080"), gateway("b", "failed", reason="no port")
    assert [are_starting(gateways) for gateways in ([], [runs, gateway("b", "starting")], [runs, failed])] == [
        True,
        True,
        False,
    ]
    assert not_started([runs, failed], "hosts", "g.log") == ["b: no port"]
    for reports, cause in (([failed], "b: no port"), ([], "gateways_on: zone=x")):
        with pytest.raises(Failed, match=cause) as raised:
            not_started(reports, "zone=x", "g.log")
        assert raised.value.problem.id == "gateway-not-started"


def test_the_status_shows_each_gateway() -> None:
    gateways = [gateway("a", "ready", "http://a:8080"), gateway("b", "failed")]
    text = status_text(status_of({**STATUS, "gateways": msgspec.to_builtins(gateways)}))
    assert "gateway of a: http://a:8080, ready, routes 2 s old\ngateway of b: b, failed" in text
