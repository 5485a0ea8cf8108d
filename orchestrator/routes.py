"""What the controller tells the gateway: which models there are, and where their ready replicas listen."""

from __future__ import annotations

import msgspec

from orchestrator.lifecycle import ModelState


class Route(msgspec.Struct, frozen=True):
    """One ready replica."""

    id: str
    epoch: int
    socket: str


class ModelRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the spec."""

    name: str
    state: ModelState
    reason: str | None  # why it is not ready
    engine: str
    source: str | None  # the folder of its tokenizer; None for the echo engine
    max_len: int
    max_queue: int
    holds: bool  # requests wait while it loads (`min: 0`: they are what loads it)
    replicas: list[Route]


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """All models. ``ready`` stays true once every model has had its ``min`` replicas."""

    ready: bool
    stopping: bool  # the fleet is going down: nothing new is begun
    token: str
    models: list[ModelRoutes]
