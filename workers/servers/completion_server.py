"""A server that is ready for requests, of the engine vllm or server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from workers.messages.engine_protocol import EngineSpec
from workers.servers.server_process import Address


@dataclass(frozen=True)
class CompletionServer:
    """A server that is ready, and what requests to it depend on."""

    address: Address
    model: str  # its name there
    spec: EngineSpec
    version: tuple[int, int]  # of vLLM, for requests as tokens
    wait: Callable[[], int]  # blocks until its processes are gone; returns the exit code
    stop: Callable[[], None]
    adapters: Mapping[str, str] = field(default_factory=dict)  # folders, by name
    key: str = ""  # that requests need
    most_adapters: int = 0  # loaded at a time; 0: all of them are loaded at the start
    max_rank: int = 0  # of adapters that are loaded later
