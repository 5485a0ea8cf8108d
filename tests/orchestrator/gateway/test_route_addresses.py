"""The address at which a gateway reaches a replica depends on the machines of the two."""

import pytest

from orchestrator.messages.route_table import Route

HERE, ELSEWHERE = "192.0.2.1", "192.0.2.2"


@pytest.mark.parametrize(
    ("socket", "remote", "machine", "address"),
    [
        ("/run/s", "", HERE, "/run/s"),
        ("/run/s", f"tls://{HERE}:7000", HERE, "/run/s"),
        ("/run/s", f"tls://{ELSEWHERE}:7000", HERE, f"tls://{ELSEWHERE}:7000"),
        ("/run/s", "tls://[2001:db8::1]:7000", "2001:db8::1", "/run/s"),
        ("", f"tls://{HERE}:7000", HERE, f"tls://{HERE}:7000"),
    ],
)
def test_a_gateway_uses_the_socket_of_its_own_machine_only(
    socket: str, remote: str, machine: str, address: str
) -> None:
    """A route without a socket, as with `data_plane: tcp`, is reached by TLS on every machine."""
    assert Route("m/0", 1, socket, remote).address(machine) == address


@pytest.mark.parametrize(("remote", "here"), [("", True), (f"tls://{HERE}:1", True), (f"tls://{ELSEWHERE}:1", False)])
def test_a_replica_without_a_socket_still_has_a_machine(remote: str, here: bool) -> None:
    """So that /readyz reports a machine whose replicas cannot be reached, with `data_plane: tcp` too."""
    assert Route("m/0", 1, "", remote).is_on(HERE) is here
