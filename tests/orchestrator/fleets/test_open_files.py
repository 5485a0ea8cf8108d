"""A gateway whose process may open few files refuses clients too many, and goes on with what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.gateway.server import SPARE_FILES

pytestmark = pytest.mark.live

PROJECT = Path(__file__).parents[3]
FILES, CLIENTS = 256, 300
GATEWAY = """
import json, resource, sys
from tests.orchestrator.gateways import LiveGateway

resource.setrlimit(resource.RLIMIT_NOFILE, (128, int(sys.argv[1])))
gateway = LiveGateway()
print(gateway.port, flush=True)
for line in sys.stdin:
    print(json.dumps([resource.getrlimit(resource.RLIMIT_NOFILE)[0], gateway.connections]), flush=True)
gateway.close()
"""
CROWD = r"""
import json, resource, socket, sys
port, count = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
sockets, served = [], 0
for _ in range(count):
    sockets.append(socket.create_connection(("127.0.0.1", port), timeout=20))
    try:
        sockets[-1].sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        served += sockets[-1].recv(4096).startswith(b"HTTP/1.1 200")
    except ConnectionError:  # a refusal closes the connection, also before the request has come
        pass
print(json.dumps(served), flush=True)
sys.stdin.read()
"""


def _child(script: str, *arguments: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT)


def _line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_a_gateway_with_few_files_rejects_excess_clients_and_recovers() -> None:
    """It raises its limit first, and keeps descriptors for its own work."""
    with _child(GATEWAY, FILES) as gateway:
        port = _line(gateway)
        with _child(CROWD, port, CLIENTS) as crowd:
            served = _line(crowd)
            assert gateway.stdin is not None
            print(file=gateway.stdin, flush=True)
            limit, connections = _line(gateway)
            crowd.communicate()
        with _child(CROWD, port, 1) as single:
            served_after = _line(single)
            single.communicate()
        gateway.communicate(timeout=20)
    assert (limit, served_after) == (FILES, 1)
    assert 0 < served < connections < FILES - SPARE_FILES // 2
