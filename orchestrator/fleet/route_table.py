"""What the controller tells the gateway: which models there are, and where their ready replicas listen."""

from __future__ import annotations

from typing import Literal

import msgspec

from orchestrator.fleet.lifecycle import ModelState
from workers.messages.credentials import Credentials


class Route(msgspec.Struct, frozen=True):
    """One ready replica."""

    id: str
    epoch: int
    socket: str  # the path of a unix socket, or `tls://host:port`


class ModelRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the spec."""

    name: str
    state: ModelState
    reason: str | None  # why it is not ready
    engine: str
    source: str | None  # the folder of its tokenizer; None for the echo engine
    tokenizer: str = ""  # changes when the same text gives other tokens
    max_len: int
    max_queue: int
    max_queue_bytes: int = 256 * 2**20
    max_wait_s: float | None = None  # that each request may wait for its first token
    queue_order: Literal["fair", "deadline"] = "fair"
    hold_s: float = 300.0  # that requests wait for a model which they have started
    loads_on_request: bool  # `min: 0`: a request is what loads it, and waits for it
    holds: bool = False  # its one replica is being swapped, and requests wait for the new one
    aliases: list[str] = []  # other names of the model
    tool_parser: str = "auto"  # of the spec: how the model writes the calls of tools
    canary: float | None = None  # share of the requests that goes to the version that is being tried
    canaries: list[str] = []  # ids of the replicas of that version
    replicas: list[Route]


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """All models. ``ready`` stays true once every model has had its ``min`` replicas."""

    ready: bool
    stopping: bool  # the fleet is going down: nothing new is begun
    token: str
    models: list[ModelRoutes]
    credentials: Credentials | None = None  # of the gateways, for replicas on other hosts
