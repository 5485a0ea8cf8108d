"""Who may enter the gateway, without the gateway."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from orchestrator.access.keys import KeyFile
from orchestrator.gateway.authenticator import Authenticator, host_name
from orchestrator.gateway.http.connection import HttpConnection
from orchestrator.gateway.http.exchange import Exchange, Request
from orchestrator.gateway.http.http_server import HttpServer
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.settings import GatewaySettings


def gate(
    home: Path, host: str = "127.0.0.1", *, insecure: bool = False, origins: tuple[str, ...] = ()
) -> Authenticator:
    settings = GatewaySettings(host=host, port=1, home=str(home), insecure=insecure, cors_origins=origins)
    return Authenticator(settings, KeyFile(home / "keys.json"))


def exchange(method: str = "POST", **headers: str) -> Exchange:
    """A request with these headers, on a connection of its own."""
    server = HttpServer(GatewaySettings(host="", port=1, home=""), lambda exchange: None)
    fields = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return Exchange(Request(method, "/v1/models", "", fields, b"", "1.1", True, 0.0), HttpConnection(server), "id")


@pytest.mark.parametrize(
    ("host", "insecure", "has_key", "demands"),
    [
        ("127.0.0.1", False, False, False),
        ("127.0.0.1", False, True, True),
        ("0.0.0.0", False, False, True),  # such as when the file of keys was removed under a running fleet
        ("0.0.0.0", False, True, True),
        ("0.0.0.0", True, False, False),
        ("127.0.0.1", True, True, False),
    ],
)
def test_a_key_is_required_on_the_network_always_and_on_loopback_once_one_exists(
    tmp_path: Path, host: str, insecure: bool, has_key: bool, demands: bool
) -> None:
    """Only --insecure accepts clients of the network without a key."""
    if has_key:
        KeyFile(tmp_path / "keys.json").create("alice")

    authenticator = gate(tmp_path, host, insecure=insecure)

    assert authenticator.requires_keys is demands
    if demands:
        with pytest.raises(ApiError) as refused:
            authenticator.admit(exchange())
        assert refused.value.status == 401
        assert authenticator.early({}) is not None
    else:
        authenticator.admit(exchange())
        assert authenticator.early({}) is None


@pytest.mark.parametrize(("host", "demands"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_during_the_grace_period_a_key_counts_but_is_not_required_on_loopback(
    tmp_path: Path, host: str, demands: bool
) -> None:
    """On the network it is required all the same."""
    key, text = KeyFile(tmp_path / "keys.json").create("alice", activate_at=time.time() + 3600)
    authenticator = gate(tmp_path, host)
    with_key = exchange(authorization=f"Bearer {text}")
    authenticator.admit(with_key)
    assert (authenticator.requires_keys, with_key.key) == (demands, key)
    for without in (exchange(), exchange(authorization="Bearer anything")):
        if demands:
            with pytest.raises(ApiError):
                authenticator.admit(without)
        else:
            authenticator.admit(without)
            assert without.key is None


def test_a_connection_shared_by_a_proxy_admits_each_request_by_its_own_key(tmp_path: Path) -> None:
    """The proxy's own Authorization, which is the same for all clients, is not an API key."""
    file = KeyFile(tmp_path / "keys.json")
    alice, bob = file.create("alice"), file.create("bob")
    authenticator = gate(tmp_path)
    request = exchange(authorization="Basic proxy", x_api_key=alice[1])
    authenticator.admit(request)
    request.request.headers[b"x-api-key"] = bob[1].encode()
    authenticator.admit(request)
    assert request.key == bob[0]


def test_an_ended_grace_period_stays_over_when_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until an operator opens the gateway again."""
    now = 1_800_000_000.0
    file = KeyFile(tmp_path / "keys.json")
    file.create("alice", activate_at=now + 60, now=now)
    authenticator = gate(tmp_path)
    seen = []
    for at in (now, now + 61, now - 86400):
        monkeypatch.setattr(time, "time", lambda at=at: at)
        authenticator.refresh()
        seen.append(authenticator.requires_keys)
    assert seen == [False, True, True]
    file.open_keyless(now + 30)
    authenticator.refresh()
    assert not authenticator.requires_keys


def test_keys_in_use_are_counted_for_any_clock_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = time.time()
    _, text = KeyFile(tmp_path / "keys.json").create("alice")
    authenticator = gate(tmp_path)
    authenticator.admit(exchange(authorization=f"Bearer {text}"))
    monkeypatch.setattr(time, "time", lambda: wall + 86400)
    assert authenticator.in_use(60) == 1


def test_a_grace_period_ends_on_open_connections_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock, without a change of the file."""
    now = time.time()
    KeyFile(tmp_path / "keys.json").create("alice", activate_at=now + 60)
    authenticator, request = gate(tmp_path), exchange()
    authenticator.admit(request)
    monkeypatch.setattr("orchestrator.gateway.authenticator.time.time", lambda: now + 61)
    with pytest.raises(ApiError):
        authenticator.admit(request)


def test_a_key_is_accepted_in_either_header(tmp_path: Path) -> None:
    """As OpenAI's clients send it, and as Anthropic's and Azure's do."""
    _, text = KeyFile(tmp_path / "keys.json").create("alice")
    authenticator = gate(tmp_path)

    for shown in (exchange(authorization=f"Bearer {text}"), exchange(x_api_key=text)):
        authenticator.admit(shown)
        assert shown.key is not None
        assert shown.key.name == "alice"
    assert authenticator.in_use(60) == 1


def test_two_keys_in_one_request_are_rejected(tmp_path: Path) -> None:
    """A header that is sent twice is joined, so that a proxy and the server cannot disagree on which counts."""
    file = KeyFile(tmp_path / "keys.json")
    first, second = file.create("a")[1], file.create("b")[1]

    with pytest.raises(ApiError):
        gate(tmp_path).admit(exchange(authorization=f"Bearer {first}, Bearer {second}"))


@pytest.mark.parametrize(
    ("origin", "host", "method", "passes"),
    [
        ("http://localhost:8080", "localhost:8080", "POST", True),
        ("http://evil.example", "localhost:8080", "POST", False),
        ("http://evil.example:8080", "evil.example:8080", "POST", False),  # a name that was bound anew to loopback
        ("http://evil.example", "localhost:8080", "GET", True),  # but its script may not read the answer
        ("https://chat.example", "localhost:8080", "POST", True),
        ("null", "localhost:8080", "POST", False),
    ],
)
def test_a_script_of_another_origin_is_rejected(
    tmp_path: Path, origin: str, host: str, method: str, passes: bool
) -> None:
    """Unless the settings have its origin; only then the response allows it to read."""
    authenticator, request = (
        gate(tmp_path, origins=("https://chat.example",)),
        exchange(method, origin=origin, host=host),
    )

    if passes:
        authenticator.admit_origin(request)
    else:
        with pytest.raises(ApiError) as refused:
            authenticator.admit_origin(request)
        assert (refused.value.status, refused.value.code) == (403, "origin_not_allowed")
    allowed = dict(request._extra).get(b"access-control-allow-origin")
    assert allowed == (origin.encode() if origin == "https://chat.example" else None)


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost", "localhost"), ("localhost:80", "localhost"), ("[::1]:8080", "::1"), ("[::1]", "::1"), ("", "")],
)
def test_a_host_header_is_parsed_without_its_port(host: str, name: str) -> None:
    """Including IPv6 addresses."""
    assert host_name(host) == name
