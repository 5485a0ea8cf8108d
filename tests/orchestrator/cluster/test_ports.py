"""Ports that are chosen for what listens later, and ports that others have taken by then."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.process import addresses
from orchestrator.process.addresses import free_port
from tests.fleet import LiveFleet, until

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  m: {engine: echo}
"""


@pytest.mark.parametrize("first", [25_000, 32_768])
def test_a_port_is_outside_the_kernels_range_for_connections(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor in use, nor a node port of Kubernetes."""
    (tmp_path / "range").write_text(f"{first}\t60999\n")
    monkeypatch.setattr(addresses, "_EPHEMERAL", tmp_path / "range")
    taken = [socket.create_server(("127.0.0.1", free_port())) for _ in range(50)]
    try:
        ports = {listener.getsockname()[1] for listener in taken}
        assert len(ports) == 50
        assert all(20_000 <= port < min(first, 30_000) for port in ports)
        assert all(free_port() not in ports for _ in range(200))
    finally:
        for listener in taken:
            listener.close()


@pytest.mark.parametrize("message", ["1024\t65535\n", "", None])
def test_without_other_ports_the_kernel_chooses(
    message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine whose range has nearly all ports, or is unknown."""
    file = tmp_path / "range"
    if message is not None:
        file.write_text(message)
    monkeypatch.setattr(addresses, "_EPHEMERAL", file)
    with socket.create_server(("127.0.0.1", free_port())) as listener:
        assert listener.getsockname()[1] > 0


def test_a_preferred_port_is_chosen_while_it_is_free() -> None:
    """Also right after its last server, whose connections may linger."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_connection(("127.0.0.1", port)):
        assert free_port(port) != port
        listener.accept()[0].close()  # the server closes first
    assert free_port(port) == port


@pytest.mark.live
def test_a_port_taken_while_ray_starts_is_reported() -> None:
    """With the gateway's own error; and nothing of the fleet is left."""
    with LiveFleet(SPEC) as fleet:
        until(lambda: "starting Ray" in fleet.output(), 60, "the port was looked at")
        with socket.create_server(("127.0.0.1", fleet.port)):
            assert fleet.process.wait(120) == 1
        assert "gateway-not-started: the gateway does not start: OSError: [Errno 98]" in fleet.output()
        assert fleet.processes() == []


def test_one_port_for_the_gateway_and_the_admin_api_is_refused_before_the_start(tmp_path: Path) -> None:
    """Each would be free by itself."""
    (tmp_path / "spec.yaml").write_text(SPEC)
    port = str(free_port())
    command = [sys.executable, "-m", "orchestrator.cli.main", "up", str(tmp_path / "spec.yaml")]
    result = subprocess.run(
        [*command, "--port", port, "--admin-port", port],
        env={**os.environ, "COREWRIGHT_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert f"error: port-in-use: --port and --admin-port are both {port}" in result.stderr
    assert "starting" not in result.stderr
