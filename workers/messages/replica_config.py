"""What a replica is told at its start, as a value that crosses processes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from workers.messages.credentials import Credentials

# Of the environment, what no replica has. The first would narrow the cores of some engines; the others are for models
# over several hosts, and transformers-neuronx reads them when its NeuronConfig is made (`config`, `decoder`).
NEVER_SET = (
    "NEURON_RT_NUM_CORES",
    "NEURON_RANK_ID",
    "NEURON_LOCAL_TP",
    "NEURON_PP_STAGES",
    "CPU_COMM_ID",
    "NEURON_VOCAB_PAD_DIVISOR",
)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a folder was fetched from."""

    source: str  # s3://... or a hub id; it holds no credentials
    revision: str | None = None  # of the hub
    artifact: str = ""  # the key of its content; empty: what the source has


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a replica is told at its start."""

    model: str
    replica: int
    epoch: int
    host: str  # the planner's name of it
    engine: str
    source: str | None  # a folder on this host, or what is to be fetched to it; None for the echo engine
    revision: str | None = None  # of a source on the hub: the commit
    dtype: str
    slots: int
    max_len: int
    cores: list[int]  # empty where the engine takes none
    claims: str | None  # the folder of the core locks of an emulated host
    env: dict[str, str]  # what the environment must hold
    log: str
    socket: str  # the path of a unix socket, for gateways of the same host
    token: str
    listen: str = ""  # for gateways of another host: `tls://ADDRESS:0`, or `tls` where the address is still to be found
    credentials: Credentials | None = None  # of the replicas of this fleet
    draft_source: str | None = None  # as ``source``, of the model that drafts; None: nothing is drafted
    draft_revision: str | None = None
    draft_k: int = 0  # tokens that it drafts ahead
    origin: Origin | None = None  # of ``source``, once that was fetched
    draft_origin: Origin | None = None
    allow_pickle: bool = False  # read pickled weights too, the draft's as well
    trust_remote_code: bool = False  # run Python code of the checkpoint, and of the draft's
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
    compiled: str | None = None  # the folder on this host where compiled artifacts are kept, of all models
    neff_cache: str | None = None  # where all hosts find what was compiled: a folder, or s3://...
    python: str | None = None  # the interpreter that it runs in; None: that of the Ray node
    version: str = ""  # of all that matters to its process: equal ones are interchangeable
    tokenizer: str = ""  # equal where the same text gives the same tokens
