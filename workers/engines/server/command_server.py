"""The engine server: any command that serves OpenAI's API, on the cores of a replica."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from placements.engines.server.capabilities import filled
from workers.engines.server.completion_stream import error_message
from workers.engines.server.server_process import Address, CompletionServer, ServerProcess, free_port, server_folder
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)

GRACE_S = 5.0  # from SIGTERM to SIGKILL
PORTS = 3  # that are tried, if another process takes one before the server does
PROBE_S = 60.0
SOCKET = "s.sock"  # llama-server takes a host for a path by this suffix
CORES = "NEURON_RT_VISIBLE_CORES"
_PROBES: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
)
_LACKS = (404, 405, 501)  # statuses of a route that the server does not have


class _Card(msgspec.Struct):
    id: str


class _Cards(msgspec.Struct):
    data: list[_Card] = []


def start_server(config: ReplicaConfig, held: Iterable[int] = ()) -> CompletionServer:
    """Starts the command and returns when it has answered a request. ``held``: see `ServerProcess`. Raises
    EngineLoadError."""
    assert config.model.server is not None
    for attempt in range(1, PORTS + 1):
        parent = Path(config.run.socket).parent if config.run.socket else Path(tempfile.gettempdir())
        folder = server_folder(parent, GRACE_S)
        address = (
            Address(path=str(folder / SOCKET)) if config.model.server.listen == "unix" else Address(port=free_port())
        )
        command, env = command_and_env(config, address)
        log.info("starting %s", " ".join(command))
        process = ServerProcess(command, env, folder, grace_s=GRACE_S, held=held)
        try:
            process.wait_ready(address, config.model.server.ready)
            break
        except EngineLoadError:
            if not address.port or not _is_taken(address.port) or attempt == PORTS:
                raise
            log.warning("another process has taken port %d: starting the server again", address.port)
    if address.port and not process.listens(address.port):
        process.stop()
        raise EngineLoadError(
            "server-failed",
            f"port {address.port} belongs to another process than {command[0]}",
            "the command must listen on {port} of 127.0.0.1",
        )
    model = _name_of_model(config, address)
    try:
        _probe(address, model)
    except EngineLoadError:
        process.stop()
        raise
    spec = EngineSpec(
        slots=config.model.max_batch,
        max_len=config.max_len,
        prefill_buckets=(config.max_len,),
        decode_buckets=(config.max_len,),
        vocab_size=0,
        eos_token_ids=frozenset(),
    )
    return CompletionServer(address, model, spec, (0, 0), process.wait, process.stop)


def command_and_env(config: ReplicaConfig, address: Address) -> tuple[list[str], dict[str, str]]:
    """Returns the command with its placeholders filled, and its variables: those of the plan, those of the spec, and
    the cores under the name that the spec gives."""
    server, env = config.model.server, dict(config.place.env)
    assert server is not None
    cores = env.pop(CORES, "")
    values = {
        "socket": address.path,
        "port": str(address.port),
        "model": config.source or "",
        "cores": cores,
        "first": str(config.place.cores[0]) if config.place.cores else "",
        "tp": str(config.model.tp_degree),
    }
    if cores:
        env[server.cores_env] = cores
    env |= {name: filled(text, values) for name, text in server.env.items()}
    return [filled(part, values) for part in server.command], env


def _is_taken(port: int) -> bool:
    """Returns whether a process listens on the port, after the server that should has ended."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _name_of_model(config: ReplicaConfig, address: Address) -> str:
    """Returns the name of the model in the server: the only one that it lists, else its source, else ours."""
    with contextlib.suppress(OSError, http.client.HTTPException, msgspec.DecodeError):
        status, body = address.get("/v1/models")
        cards = msgspec.json.decode(body, type=_Cards).data if status == http.client.OK else []
        if len(cards) == 1:
            return cards[0].id
    return config.source or config.model.name


def _probe(address: Address, model: str) -> None:
    """Sends a request of one token to the first route that the server has. Raises EngineLoadError."""
    cause = "it has none of the routes " + ", ".join(route for route, _ in _PROBES)
    for route, body in _PROBES:
        try:
            status, answer = address.post(route, msgspec.json.encode({"model": model, **body}), PROBE_S)
        except (OSError, http.client.HTTPException) as error:
            raise EngineLoadError("probe-failed", f"the first request to {route} failed: {error}") from error
        if status == http.client.OK:
            return
        if status not in _LACKS:
            cause = f"{route} answered {status}: {error_message(answer)}"
            break
    raise EngineLoadError("probe-failed", f"the first request failed: {cause}", "the replica's log has its output")
