"""The controller's route table for gateways: the models, and the addresses of their ready replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from orchestrator.messages.replica_states import ModelState
from placements.engines.registry import SERVER_ENGINES, capabilities
from placements.facts.encoders import Kind
from workers.messages.actor_message import actor_message
from workers.messages.credentials import Credentials
from workers.messages.status import ReplicaStatus


class Route(msgspec.Struct, frozen=True):
    """One ready replica."""

    id: str
    epoch: int
    socket: str  # the path of a unix socket, for gateways of its machine; empty: they use ``remote``, too
    remote: str = ""  # `tls://host:port`, for gateways of other machines
    version: str = ""  # of the model; equal versions give equal answers

    def is_on(self, machine: str) -> bool:
        """Returns whether the replica is on ``machine``, the address of its Ray node."""
        return not self.remote or urlsplit(self.remote).hostname == machine

    def address(self, machine: str) -> str:
        """Returns the address for a gateway on ``machine``."""
        return self.socket if self.socket and self.is_on(machine) else self.remote


def remote_address(status: ReplicaStatus) -> str:
    """Returns the replica's address for other machines; empty without one."""
    return status.address if status.address.startswith("tls://") else ""


class ModelRoutes(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the spec."""

    name: str
    state: ModelState
    reason: str | None  # why it is not ready
    engine: str
    kind: Kind = "generate"
    source: str | None  # the folder of its tokenizer; None for the echo engine
    tokenizer: str = ""  # changes if the same text may give other tokens
    max_len: int
    max_queue: int
    max_queue_bytes: int = 256 * 2**20
    max_wait_s: float | None = None  # a request's longest wait for its first token
    queue_order: Literal["fair", "deadline"] = "fair"
    hold_s: float = 300.0  # how long requests wait for a model that they start
    start_s: float | None = None  # the expected duration of a replica's next start; None: unknown
    ready_at: float | None = None  # when the first replica is expected, in seconds since the epoch, if one starts
    loads_on_request: bool  # `min: 0`: a request starts the model and waits for it
    required: bool = False  # it should always have a replica: its min is at least 1, and nobody has unloaded it
    holds: bool = False  # its only replica is being swapped or is expected back, and requests wait for it
    aliases: list[str] = []  # other names of the model
    request_defaults: dict[str, dict[str, Any]] = {}  # by name: fields -> their values in a request without them
    adapters: list[str] = []  # LoRA adapters that all replicas have
    response_template: str = "auto"  # the spec's format of answers
    canary: float | None = None  # share of the requests that goes to the canary version
    canaries: list[str] = []  # ids of the replicas of that version
    replicas: list[Route]

    def defaults(self, name: str) -> Mapping[str, Any]:
        """Returns the defaults of requests that are sent to ``name``. Those of a name also hold for its adapters."""
        if not self.request_defaults:
            return {}
        own = name == self.name or name in self.aliases
        return self.request_defaults.get(name if own else name.rpartition(":")[0], {})

    def ready_in_s(self, now: float) -> float | None:
        """Returns the expected seconds from ``now``, in seconds since the epoch, until a request can begin; None:
        unknown. A start that is late is expected to take as long again as it is late."""
        if self.replicas:
            return None
        if self.ready_at is not None:
            return abs(self.ready_at - now)
        if self.state is not ModelState.UNLOADED or self.reason is not None or not self.loads_on_request:
            return None  # it does not start now, was unloaded by hand, or is held back for lack of cores
        return self.start_s

    @property
    def reading(self) -> str:
        """Changes if the same request may give other tokens, or another kind of answer."""
        return self.tokenizer if self.kind == "generate" else f"{self.kind} {self.tokenizer}"

    @property
    def forwards(self) -> bool:
        """Its replicas get the clients' own bodies."""
        return capabilities(self.engine).forwards

    @property
    def scores_prompts(self) -> bool:
        """Returns whether the engine computes the logprobs of prompts."""
        return capabilities(self.engine).scores_prompts

    @property
    def reads_parts(self) -> bool:
        """Its replicas also get bodies with parts that are not text, such as images."""
        return self.engine in SERVER_ENGINES


@actor_message
class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """The routes of all models. ``ready`` stays true once every model has reached its ``min`` replicas."""

    ready: bool
    stopping: bool  # the fleet shuts down: no new requests are accepted
    token: str
    models: list[ModelRoutes]
    credentials: Credentials | None = None  # of gateways, for replicas on other hosts
    draining: list[str] = []  # machines of a joined cluster whose gateways send their clients away
