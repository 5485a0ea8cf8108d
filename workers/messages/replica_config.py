"""A replica's configuration, as a value that crosses processes."""

from __future__ import annotations

from typing import Any

import msgspec

from placements.engines.capabilities import Dtype
from placements.spec.schema import ModelSpec
from workers.messages.actor_message import actor_message
from workers.messages.credentials import Credentials

Keys = tuple[str, ...]
"""The keys of a source within its model in the spec."""

SOURCE: Keys = ("source",)
DRAFT: Keys = ("draft", "source")
ADAPTERS = "adapters"  # the first of ("adapters", NAME)


def key_of(keys: Keys) -> str:
    """Returns the keys of a source as one text."""
    return ".".join(keys)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """A source that is not on this host, and the folder that its content was fetched to."""

    source: str  # s3://... or a hub id; without credentials
    revision: str | None = None  # of the hub: the commit
    artifact: str = ""  # the key of its content; empty: the source's current content
    folder: str = ""  # on this host; empty: it is still to be fetched


class ReplicaPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica runs: its part of a plan."""

    replica: int = 0  # index within the model, from 0
    host: str = ""  # as the planner names it
    cores: list[int] = []  # empty where the engine uses none
    env: dict[str, str] = {}  # variables that the process must have: its cores, threads, CPUs and compiler options
    claims: str | None = None  # the folder of the core locks of an emulated host


class ReplicaRun(msgspec.Struct, frozen=True, kw_only=True):
    """What one start of a replica gets besides its model and its place."""

    epoch: int = 0
    version: str = ""  # of everything that its process depends on; equal versions are interchangeable
    tokenizer: str = ""  # a key; equal keys mean that the same text gives the same tokens
    log: str = ""
    socket: str = ""  # the path of a unix socket, for gateways of the same host
    uses_socket: bool = True  # False: all gateways use ``listen``
    listen: str = ""  # for gateways of other hosts: `tls://ADDRESS:0`, or `tls` where the address is not known yet
    token: str = ""
    credentials: Credentials | None = None  # of the replicas of this fleet
    compiled: str | None = None  # the folder of compiled artifacts of all models on this host
    contents: str = ""  # what `contents_of` its local folders must give; empty: anything
    python: str | None = None  # the interpreter of its process; None: that of the Ray node
    server_python: str | None = None  # the interpreter of its server, such as vLLM's; None: that of its process
    server_launch: list[str] = []  # the command of vLLM's server; empty: `vllm serve` of its interpreter
    warm: bool = False  # its process may be a fork of the host's warm process
    proven: bool = False  # this version has served on this host: its first request is a client's, without a trial


@actor_message
class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that a replica gets at its start."""

    model: ModelSpec  # resolved (`ModelSpec.resolved`)
    place: ReplicaPlace = ReplicaPlace()
    run: ReplicaRun = ReplicaRun()
    origins: dict[str, Origin] = {}  # of sources that are not local, by `key_of`

    @property
    def id(self) -> str:
        """The replica's id, MODEL/INDEX."""
        return f"{self.model.name}/{self.place.replica}"

    @property
    def dtype(self) -> Dtype:
        """The type of the weights and of the KV cache."""
        return self.model.dtype_on(self.model.engine)

    @property
    def max_len(self) -> int:
        """Tokens of a slot."""
        return self.model.length(None)

    @property
    def source(self) -> str | None:
        """The checkpoint: a folder on this host, or a source to fetch; None for engines that read none."""
        return self._at(SOURCE, self.model.source) or None if self.model.has_source else None

    @property
    def draft_source(self) -> str | None:
        """As ``source``, of the draft model; None: no drafting."""
        return None if self.model.draft is None else self._at(DRAFT, self.model.draft.source)

    @property
    def draft_k(self) -> int:
        """Tokens drafted ahead; 0: no drafting."""
        return 0 if self.model.draft is None else self.model.draft.k

    @property
    def adapters(self) -> dict[str, str]:
        """As ``source``, of LoRA adapters by name."""
        return {name: self._at((ADAPTERS, name), source) for name, source in self.model.adapters.items()}

    def sources(self) -> list[tuple[Keys, str]]:
        """Returns each source that is read, as the spec names it, with its keys."""
        model = self.model
        named = [(SOURCE, model.source if model.has_source else None), (DRAFT, model.draft and model.draft.source)]
        return [(keys, source) for keys, source in named if source] + [
            ((ADAPTERS, name), source) for name, source in model.adapters.items()
        ]

    def local_folders(self) -> list[str]:
        """Returns the folders of the model and its draft that the host has had, and that their owner may change."""
        return [source for keys, source in self.sources() if keys[0] != ADAPTERS and key_of(keys) not in self.origins]

    def fetched_folders(self) -> dict[Keys, str]:
        """Returns the folders that were fetched."""
        origins = ((keys, self.origins.get(key_of(keys))) for keys, _ in self.sources())
        return {keys: origin.folder for keys, origin in origins if origin is not None and origin.folder}

    def with_run(self, **changes: Any) -> ReplicaConfig:
        """Returns the configuration with changed fields of ``run``."""
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, **changes))

    def _at(self, keys: Keys, source: str) -> str:
        origin = self.origins.get(key_of(keys))
        return source if origin is None or not origin.folder else origin.folder
