"""A gateway on a machine of its own: what it has received from the controller, and how it serves without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec.structs
import pytest

from orchestrator.access.keys import Allowance, KeyFeed, KeyFile
from orchestrator.gateway import app
from orchestrator.gateway.authenticator import Authenticator
from orchestrator.gateway.key_limits import KeyLimits
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.received import ReceivedFiles
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.key_usage import KeyUsage
from orchestrator.messages.route_table import RouteTable
from tests.fleet import until
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served

PLACE = {"place": "m1", "machine": "10.0.0.1", "fleet": "f1"}


@pytest.fixture
def served() -> Iterator[Served]:
    replica = Served()
    yield replica
    replica.close()


def complete(gateway: LiveGateway, key: str = "") -> int:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"model": "m", "prompt": "hello", "max_tokens": 2}
    return gateway.http.post("/v1/completions", json=body, headers=headers).status_code


def with_key(gateway: LiveGateway, path: Path) -> str:
    """The controller has a key file with one key. Returns the key."""
    file = KeyFile(path)
    _, key = file.create("ann")
    gateway.controller.key_feed = KeyFeed(file)
    return key


def test_a_gateway_has_the_keys_of_the_controller(served: Served, tmp_path: Path) -> None:
    """Also after the controller has lost its home with all keys, as on a new head."""
    gateway = LiveGateway(**PLACE)
    try:
        gateway.serve(routes("m", served))
        until(lambda: complete(gateway) == 200, 5, "the controller has no keys, and the gateway listens on loopback")
        key = with_key(gateway, tmp_path / "keys.json")
        until(lambda: complete(gateway) == 401, 5, "a key is required")
        assert complete(gateway, key) == 200
        gateway.controller.key_feed = KeyFeed(KeyFile(tmp_path / "none"))
        asked = len(gateway.controller.reports)
        until(lambda: len(gateway.controller.reports) > asked + 1, 10, "the gateway has polled again")
        assert [complete(gateway), complete(gateway, key)] == [401, 200]
    finally:
        gateway.close()


def test_a_quiet_gateway_reports_at_once_that_it_is_ready(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the console's playground would find no gateway of a fleet that is ready."""
    monkeypatch.setattr(app, "QUIET_REPORTS", 10**6)  # no other reports of a gateway without requests
    gateway = LiveGateway(**PLACE)
    reports = gateway.controller.reports
    try:
        gateway.serve(routes("m", served), ready=False)
        until(lambda: reports and reports[-1].unready == "not ready", 10, "it reports that it is not ready")
        gateway.controller.change(ready=True)
        until(lambda: not reports[-1].unready, 10, "it reports that it is ready")
        assert reports[-1].address == gateway.url
    finally:
        gateway.close()


def test_a_new_gateway_without_the_controller_has_the_keys_and_routes_of_its_machine(
    served: Served, tmp_path: Path
) -> None:
    """It is ready, and tells how old its routes are. Only this user can read the files."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    first = LiveGateway(home=home, **PLACE)
    key = with_key(first, tmp_path / "keys.json")
    first.serve(routes("m", served))
    until(lambda: complete(first) == 401, 5, "it has the key")
    until(lambda: (home / "received/f1/routes").exists(), 5, "the routes are kept")
    first.close()
    assert {(home / "received/f1" / name).stat().st_mode & 0o777 for name in ("routes", "keys.json")} == {0o600}

    second = LiveGateway(home=home, answers=False, **PLACE)
    try:
        assert [complete(second, key), complete(second, "wrong")] == [200, 401]
        ready = second.http.get("/readyz")
        assert ready.status_code == 200
        assert "routes:" in ready.text
    finally:
        second.close()


def test_without_keys_from_the_controller_every_request_is_rejected(tmp_path: Path) -> None:
    """Also if an earlier fleet of this machine has left its keys and routes."""
    former = ReceivedFiles(tmp_path, "f1")
    former.write_keys(b"")
    former.keep_routes(RouteTable(ready=True, stopping=False, token="t", models=[]), changed=True)
    files = ReceivedFiles(tmp_path, "f2")
    settings = GatewaySettings(host="127.0.0.1", port=1, home=str(tmp_path))
    assert not Authenticator(settings, KeyFile(former.keys, required=True)).requires_keys
    assert Authenticator(settings, KeyFile(files.keys, required=True)).requires_keys
    assert files.routes() is None


def test_only_its_user_can_read_what_a_gateway_has_received(tmp_path: Path) -> None:
    """Digests of keys, and routes with the fleet's token."""
    files = ReceivedFiles(tmp_path, "f1")
    files.write_keys(b"")
    files.keep_routes(RouteTable(ready=True, stopping=False, token="t", models=[]), changed=True)
    folder = files.keys.parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        ("keys.json", "routes", "lock"), 0o600
    )


def test_a_machine_that_drains_sends_its_clients_away(served: Served) -> None:
    """It answers them, and closes their connections."""
    gateway = LiveGateway(**PLACE)
    try:
        gateway.serve(routes("m", served))
        until(lambda: gateway.http.get("/readyz").status_code == 200, 5, "it is ready")
        gateway.controller.change(draining=["m1"])
        until(lambda: gateway.http.get("/readyz").status_code == 503, 5, "it is not ready")
        answer = gateway.http.post("/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200
        assert answer.headers["connection"] == "close"
        assert gateway.http.get("/livez").status_code == 200
    finally:
        gateway.close()


def test_without_the_controller_a_gateway_applies_a_keys_limits_alone(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests at another gateway, which it can no longer follow, do not keep the key out."""
    monkeypatch.setattr(app, "ALONE_S", 0.0)
    gateway = LiveGateway(**PLACE)
    try:
        file = KeyFile(tmp_path / "keys.json")
        key, text = file.create("ann", allowance=Allowance(max_concurrent=1))
        gateway.controller.key_feed = KeyFeed(file)
        gateway.controller.usage.receive("other", [KeyUsage(key.id, live=1)])
        gateway.serve(routes("m", served))
        until(lambda: complete(gateway, text) == 429, 10, "its request at the other gateway counts")
        gateway.controller.answers = False
        until(lambda: complete(gateway, text) == 200, 10, "only its own requests count")
    finally:
        gateway.close()


def test_a_keys_limits_hold_across_gateways(tmp_path: Path) -> None:
    """What is used at one gateway counts at the other after one report, also requests in progress and unused tokens."""
    keys = KeyFile(tmp_path / "keys.json")
    key, _ = keys.create("ann", allowance=Allowance(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2))
    here, there = KeyLimits(), KeyLimits()
    now = 1000.0

    def taken() -> bool:
        try:
            there.take(key, 90, now)
        except ApiError:
            return False
        return True

    def pass_on() -> None:
        there.charge(here.report(now), keys.read(), now)

    grant = here.take(key, 50, now)
    pass_on()
    assert not taken(), "50 of 100 tokens are reserved at the other gateway"
    grant.settle(5, now)
    pass_on()
    assert taken(), "45 were returned"
    here.take(key, 1, now)
    unreported = here.report(now)
    assert [usage.live for usage in unreported] == [1]
    here.restore(unreported)
    assert here.report(now) == unreported, "a report that was lost is repeated"
    there.charge([msgspec.structs.replace(usage, live=2) for usage in unreported], keys.read(), now)
    assert not taken()
