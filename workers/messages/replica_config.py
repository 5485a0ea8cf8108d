"""A replica's configuration, as a value that crosses processes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from placements.facts.encoders import Kind
from workers.messages.actor_message import actor_message
from workers.messages.credentials import Credentials

# Environment variables that are removed for every replica. The first would narrow the cores of some engines; the others
# are for models over several hosts, and transformers-neuronx reads them for its NeuronConfig (`config`, `decoder`).
NEVER_SET = (
    "NEURON_RT_NUM_CORES",
    "NEURON_RANK_ID",
    "NEURON_LOCAL_TP",
    "NEURON_PP_STAGES",
    "CPU_COMM_ID",
    "NEURON_VOCAB_PAD_DIVISOR",
)


Keys = tuple[str, ...]
"""The keys of a source within its model in the spec."""

SOURCE: Keys = ("source",)
DRAFT: Keys = ("draft", "source")
ADAPTERS = "adapters"  # the first of ("adapters", NAME)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The source that a folder was fetched from."""

    source: str  # s3://... or a hub id; without credentials
    revision: str | None = None  # of the hub
    artifact: str = ""  # the key of its content; empty: the source's current content


class ServerCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The command of a server, with placeholders (`placements.engines.server.capabilities`)."""

    command: list[str]
    listen: Literal["unix", "port"]
    ready: str  # the route that answers 200 when it is ready
    env: dict[str, str]
    cores_env: str  # the variable for its cores


@actor_message
class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that a replica gets at its start."""

    model: str
    replica: int = 0
    epoch: int = 0
    host: str = ""  # as the planner names it
    engine: str
    kind: Kind = "generate"
    max_wait_s: float = 0.0  # of an input, for a batch to fill; only of encoders
    source: str | None  # a folder on this host, or a source to fetch; None for the echo engine
    revision: str | None = None  # of a source on the hub: the commit
    dtype: str
    slots: int
    max_len: int
    cores: list[int] = []  # empty where the engine uses none
    claims: str | None = None  # the folder of the core locks of an emulated host
    env: dict[str, str] = {}  # variables that the process must have
    log: str = ""
    socket: str = ""  # the path of a unix socket, for gateways of the same host
    uses_socket: bool = True  # False: all gateways use ``listen``
    token: str = ""
    listen: str = ""  # for gateways of other hosts: `tls://ADDRESS:0`, or `tls` where the address is not known yet
    credentials: Credentials | None = None  # of the replicas of this fleet
    draft_source: str | None = None  # as ``source``, of the draft model; None: no drafting
    draft_revision: str | None = None
    draft_k: int = 0  # tokens drafted ahead
    draft_method: str = "draft_model"  # or eagle, eagle3
    origin: Origin | None = None  # of ``source``, once it is fetched
    draft_origin: Origin | None = None
    contents: str = ""  # what `contents_of` its local folders must give; empty: anything
    adapters: dict[str, str] = {}  # as ``source``, of LoRA adapters by name
    adapter_origins: dict[str, Origin] = {}  # of those that are not local
    allow_pickle: bool = False  # read pickled weights too, also the draft's
    trust_remote_code: bool = False  # run Python code of the checkpoint and of the draft's
    engine_options: dict[str, Any] = {}
    tp_degree: int = 1
    sampling: Literal["host", "device"] = "host"
    prefill_buckets: list[int] = []  # compiled prompt lengths; empty: the engine's own
    decode_buckets: list[int] = []  # compiled KV lengths; empty: the engine's own
    quantize: str | None = None  # of the weights: int8, fp8
    quantize_kv: str | None = None  # of the KV cache: int8, fp8
    group_query_attention: str | None = None
    fuse_qkv: bool | None = None
    compile_workers: int | None = None  # graphs compiled at once; None: the engine's own number
    compiled: str | None = None  # the folder of compiled artifacts of all models on this host
    neff_cache: str | None = None  # where all hosts share compiled artifacts: a folder, or s3://...
    python: str | None = None  # the interpreter of its process; None: that of the Ray node
    warm: bool = False  # its process may be a fork of the host's warm process
    proven: bool = False  # this version has served on this host: its first request is a client's, without a trial
    server_python: str | None = None  # the interpreter of its server, such as vLLM's; None: that of its process
    server_launch: list[str] = []  # the command of vLLM's server; empty: `vllm serve` of its interpreter
    start_s: float = 0.0  # the deadline of a start, with its compiles; 0: the server's own time limits
    server: ServerCommand | None = None  # of the engine server
    version: str = ""  # of everything that its process depends on; equal versions are interchangeable
    tokenizer: str = ""  # a key; equal keys mean that the same text gives the same tokens

    def sources(self) -> list[tuple[Keys, str, str | None, Origin | None]]:
        """Returns each source or folder that is read: its keys, itself, its revision and its origin."""
        places = [
            (SOURCE, self.source, self.revision, self.origin),
            (DRAFT, self.draft_source, self.draft_revision, self.draft_origin),
        ]
        return [(keys, at, revision, origin) for keys, at, revision, origin in places if at is not None] + [
            ((ADAPTERS, name), at, None, self.adapter_origins.get(name)) for name, at in self.adapters.items()
        ]

    @property
    def adapter_sources(self) -> dict[str, str]:
        """The source of each adapter: where it was fetched from, or its folder."""
        origins = self.adapter_origins
        return {name: origins[name].source if name in origins else at for name, at in self.adapters.items()}

    def local_folders(self) -> list[str]:
        """Returns the folders of the model and its draft that the host has had, and that their owner may change."""
        places = ((self.source, self.origin), (self.draft_source, self.draft_origin))
        return [folder for folder, origin in places if folder is not None and origin is None]

    def fetched_folders(self) -> dict[Keys, str]:
        """Returns the folders that were fetched."""
        return {keys: at for keys, at, _, origin in self.sources() if origin is not None}
