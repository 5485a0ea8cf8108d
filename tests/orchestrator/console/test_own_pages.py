"""What keeps pages of other origins away from the controller, on loopback and behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from orchestrator.messages.controller_settings import ADMIN_PATH
from tests.orchestrator.fakefleet import TOKEN, LiveAdmin
from tests.orchestrator.hostile import ask

KEY = {"authorization": f"Bearer {TOKEN}"}
PUBLIC = "https://ops.example:8443"


@pytest.fixture
def http(admin: LiveAdmin) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=admin.url, timeout=20) as client:
        yield client


@pytest.fixture
def proxied() -> Iterator[LiveAdmin]:
    """The API of a fleet whose console has a public address."""
    live = LiveAdmin(console_url=f"{PUBLIC}/fleets/a/console/")
    yield live
    live.close()


@pytest.mark.parametrize("head", ["GET /admin/v1/status HTTP/1.1\r\nHost:", "GET /admin/v1/status HTTP/1.0"])
def test_a_request_without_a_host_is_refused(head: str, admin: LiveAdmin) -> None:
    answer = ask(admin.port, f"{head}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())

    assert (answer.status, answer.json["error"]["code"]) == (421, "wrong_host")


REBOUND = ["evil.example", "evil.example:1234", "127.0.0.1.evil.example", "169.254.169.254", "[::2]:80", "[::1"]


@pytest.mark.parametrize("host", REBOUND)
@pytest.mark.parametrize("path", ["/console/", "/console/stream", f"{ADMIN_PATH}/status"])
def test_a_name_that_was_rebound_to_loopback_is_refused(host: str, path: str, http: httpx.Client) -> None:
    """Its page could otherwise read what the controller answers, as from its own origin."""
    answer = http.get(path, headers={**KEY, "host": host, "origin": f"http://{host}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "wrong_host")


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:9000", "LOCALHOST"])
def test_names_of_loopback_are_served_on_any_port(host: str, http: httpx.Client) -> None:
    """`ssh -L` gives the controller another port."""
    assert http.get("/console/", headers={"host": host}).status_code == 200


FOREIGN = ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1", "http://127.0.0.1.evil.example"]


@pytest.mark.parametrize("origin", FOREIGN)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_request_of_another_origin_is_refused(origin: str, method: str, admin: LiveAdmin, http: httpx.Client) -> None:
    """Even with a valid key: nothing of the fleet is read or changed, and no browser gets leave to read the answer."""
    path = f"{ADMIN_PATH}/{'unload' if method == 'POST' else 'status'}"
    answer = http.request(method, path, headers={**KEY, "origin": origin}, content=b'{"model": "chat"}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_origin")
    assert "access-control-allow-origin" not in answer.headers
    assert admin.fleet.calls == []


def test_the_pages_own_origin_is_served(admin: LiveAdmin, http: httpx.Client) -> None:
    answer = http.post(f"{ADMIN_PATH}/unload", headers={**KEY, "origin": admin.url}, json={"model": "chat"})
    assert answer.status_code == 200


# Behind a proxy


def unload(admin: LiveAdmin, **headers: str) -> tuple[int, str]:
    """Sends a change with the key and these headers. Returns the status and the error's code."""
    answer = httpx.post(f"{admin.url}{ADMIN_PATH}/unload", headers={**KEY, **headers}, json={"model": "chat"})
    return answer.status_code, answer.json().get("error", {}).get("code", "")


@pytest.mark.parametrize("host", ["ops.example:8443", "ops.example", "OPS.example", "127.0.0.1:80", "localhost"])
def test_the_public_page_is_served_with_each_host_that_proxies_send(host: str, proxied: LiveAdmin) -> None:
    """That of the browser, with or without its port, or that of the controller."""
    assert unload(proxied, host=host, origin=PUBLIC) == (200, "")


def test_loopback_is_served_beside_the_public_page(proxied: LiveAdmin) -> None:
    """Through a tunnel, and to commands."""
    assert unload(proxied, host="localhost:9000", origin="http://localhost:9000") == (200, "")
    assert unload(proxied) == (200, "")


@pytest.mark.parametrize("host", [*REBOUND, "ops.example.evil.example", "xops.example", "example"])
def test_behind_a_proxy_a_rebound_name_is_refused(host: str, proxied: LiveAdmin) -> None:
    """Also for what claims to be the public page."""
    assert unload(proxied, host=host, origin=PUBLIC) == (421, "wrong_host")
    assert proxied.fleet.calls == []


FOREIGN_TO_PUBLIC = [
    *FOREIGN,
    "http://ops.example:8443",
    "https://ops.example",
    "https://ops.example:8443.evil.example",
    "",
]


@pytest.mark.parametrize("origin", FOREIGN_TO_PUBLIC)
@pytest.mark.parametrize("host", ["ops.example:8443", "127.0.0.1"])
def test_behind_a_proxy_a_request_of_another_origin_is_refused(host: str, origin: str, proxied: LiveAdmin) -> None:
    """Even with a valid key, and of the same name by plain HTTP, whose pages anybody in between can write."""
    assert unload(proxied, host=host, origin=origin) == (403, "foreign_origin")
    assert proxied.fleet.calls == []


def test_without_a_public_address_no_origin_is_the_empty_one(admin: LiveAdmin) -> None:
    assert unload(admin, origin="") == (403, "foreign_origin")
