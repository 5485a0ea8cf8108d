"""Estimates the speed of a replica from config.json and the instance type, with the error of the estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from placements.engines.capabilities import BYTES
from placements.engines.memory import GIB, costs_of
from placements.engines.registry import HOST_ENGINES, Engine
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Topology
from placements.resources.memory import estimate, gathers_heads, padded_heads, padded_kv_heads
from placements.spec.schema import ModelSpec

# inf2 and trn1: two cores on a device with 820 GB/s and 190 TFLOPS in bf16.
CORE_BYTES_S = 410e9
CORE_FLOPS = 95e12

WEIGHTS_SHARE = 0.69
"""The share of the bandwidth that reading weights achieves. This and the next two constants were fitted on the 42 rows
of AWS's tables of decode latencies on inf2 (tp 24, SDK 2.18), with the bytes that `memory` counts. With a model's rows
held out of the fit, the median error on them is 3 %, with those of a batch size 6 %; the maximum is 18 %, but for one
row (Mistral-7B, batch 8, length 16384: 48 %)."""
CACHE_SHARE = 0.54
"""The same of reading the KV cache. Each query head reads the keys and values of its KV head, shared or not."""
LAYER_S = 133e-6  # for each layer: two collectives, and what does not depend on size
DECODE_ERROR = 0.06  # median of a batch size that was held out
FITTED = ("inf2", 24)
"""The family and degree of the rows of every fit."""
VERIFIED = ("trn1", 32)
"""The family and degree of AWS's table of trn1, whose 36 rows are in no fit and whose cores have the figures of inf2's.
The median error of steps is 5 %, the maximum 27 %; of prefills 21 % and 97 %."""
UNVERIFIED_ERROR = 0.5
"""The error of other degrees, for which AWS publishes no rows. On Optimum Neuron's page a step of Llama-2-7B takes 60
ms at tp 2, twice the estimate, and 7.2 ms at tp 24, 6 % more than it, both with an older SDK."""

PREFILL_MFU = 0.21
"""The share of the FLOPS that the matrices of a prefill achieve. This and the next two constants were fitted on the
times to the first token of the same 42 rows, of all prompts of a batch together. The median error on them is 17 %, the
maximum 59 %: long prompts in a batch of 8 take up to 2.4 times the estimate, and alone mostly less than it. On rows of
a model, a batch size or a prompt length that was held out of the fit, the medians are 16 %, 36 % and 38 %, and the
maxima 60 %, 76 % and 62 %."""
ATTENTION_MFU = 0.058
"""The same of the attention scores and their product with the values, which grow with the square of the prompt."""
PREFILL_S = 0.0236  # for each prefill
PREFILL_ERROR = 0.38  # median of a prompt length that was held out

LOGICAL_CORES: Mapping[str, tuple[float, float]] = {
    "trn2": (2.9e12 / 4, 667e12 / 4),
    "trn3": (4.9e12 / 4, 671e12 / 4),
}
"""Family -> bytes/s and FLOPS of one of the four logical cores of a device at LNC 2, in dense bf16 (AWS's pages of trn2
and of the chip Trainium3). Not fitted on these families."""

LOAD_BYTES_S = 1.0e9
"""The rate of loading weights from files to cores. No figure is published for these instances; loading presharded
weights of Llama-3.1-8B (16 GB) takes about ten to twenty seconds."""
LOAD_S = 30.0
"""The time of a start without the weights: process, torch, runtime and cached graphs."""

HOST_LOAD_S = 6.0  # engines cpu and echo: process start and imports, measured with small models
HOST_STEP_S = 0.0005  # batcher and socket
HOST_FLOPS = 5e10  # for each core of an emulated host, on its real CPU; a guess
HOST_BYTES_S = 5e9  # the same; a guess


@dataclass(frozen=True)
class Speed:
    """The speed of one replica, in seconds.

    ``decode_error`` and ``prefill_error`` are median relative errors: 0.2 means that half of all cases are within 20 %.
    1.0 means unknown.
    """

    step_s: float  # a decoding step of all slots
    prefill_base_s: float
    prefill_token_s: float
    prefill_square_s: float  # for the square of a prompt's tokens
    load_s: float
    decode_error: float
    prefill_error: float
    source: str  # origin of the numbers
    requests: int | None = 0  # that have measured some of them; None: unknown

    def as_dict(self) -> dict[str, float | str | None]:
        """Returns the JSON of `simulate -o json` and of `--speeds FILE`."""
        return {
            "step_ms": round(self.step_s * 1000, 4),
            "prefill_base_ms": round(self.prefill_base_s * 1000, 4),
            "prefill_token_ms": round(self.prefill_token_s * 1000, 6),
            "prefill_square_ns": round(self.prefill_square_s * 1e9, 4),
            "load_s": round(self.load_s, 3),
            "decode_error": self.decode_error,
            "prefill_error": self.prefill_error,
            "measured_requests": self.requests,
            "source": self.source,
        }


def speed(model: ModelSpec, checkpoint: Checkpoint | None, engine: Engine, topology: Topology | None) -> Speed:
    """Returns the estimated speed of a replica; ``engine`` is the resolved engine.

    TPOT = W / (410e9 x 0.69) + C / (410e9 x 0.54) + 133e-6 x layers, where W is the bytes of the weights on a core, and
    C those of the KV cache that its query heads read for all slots (``step_bytes``). The prefill of n tokens takes
    23.6 ms, n times the FLOPs of a token in the matrices at an MFU of 0.21, and n^2 times those of a cached position at
    an MFU of 0.058 (``token_flops``). Without a readable checkpoint, 8 billion parameters are assumed.
    """
    if (step_s := costs_of(engine).step_s(model)) is not None:
        return Speed(step_s, step_s, 0.0, 0.0, HOST_LOAD_S, 0.0, 0.0, f"the {engine} engine's step_ms")
    if checkpoint is None:
        return _unknown(model)
    width = BYTES[model.dtype_on(engine)]
    if engine in HOST_ENGINES or topology is None:
        estimated = _on_cpu(checkpoint, width)
    elif model.kind != "generate":
        guess = _on_neuron(model, checkpoint, engine, topology, width)
        estimated = replace(guess, prefill_error=1.0, source="a guess: prefills of models that generate")
    else:
        estimated = _on_neuron(model, checkpoint, engine, topology, width)
    rate = None if topology is None else topology.measured.read_bytes_s
    if rate is None or rate >= LOAD_BYTES_S:
        return estimated
    load_s = estimated.load_s + checkpoint.parameters * width * (1 / rate - 1 / LOAD_BYTES_S)
    return replace(estimated, load_s=load_s, source=f"{estimated.source}; load at {rate / 1e9:.2f} GB/s, measured")


def step_bytes(model: ModelSpec, checkpoint: Checkpoint, engine: Engine) -> tuple[float, float]:
    """Returns the bytes that a core reads in a decoding step of all slots: of its weights, and of the KV cache, of
    which each query head reads the keys and values of its KV head in all positions."""
    heads = padded_heads(checkpoint, model.tp_degree) / model.tp_degree
    row = 2 * heads * checkpoint.head_dim * BYTES[model.dtype_on(engine)]
    weights = estimate(model, checkpoint, engine).weights * GIB
    return weights, checkpoint.layers * model.max_batch * model.length(checkpoint) * row


def token_flops(model: ModelSpec, checkpoint: Checkpoint) -> tuple[float, float]:
    """Returns the FLOPs of a token in all layers, on all cores together: 2 for each parameter of a matrix, all experts
    and the copies of KV heads included, and 4 for each element of the queries, for each cached position."""
    groups, tp, strategy = checkpoint.groups, model.tp_degree, model.group_query_attention
    heads = padded_heads(checkpoint, tp)
    gathered = gathers_heads(checkpoint, tp, strategy)
    kv_heads = checkpoint.kv_heads if gathered else padded_kv_heads(checkpoint, tp, strategy)
    projections = groups.attention / checkpoint.heads * heads + groups.kv / checkpoint.kv_heads * kv_heads
    return 2 * (projections + groups.feed_forward), 4 * checkpoint.layers * heads * checkpoint.head_dim


def _on_neuron(model: ModelSpec, checkpoint: Checkpoint, engine: Engine, topology: Topology, width: float) -> Speed:
    tp = model.tp_degree
    weights, cache = step_bytes(model, checkpoint, engine)
    bandwidth, flops = LOGICAL_CORES.get(topology.family, (CORE_BYTES_S, CORE_FLOPS))
    if topology.lnc == 1:
        bandwidth, flops = bandwidth / 2, flops / 2
    step_s = weights / (bandwidth * WEIGHTS_SHARE) + cache / (bandwidth * CACHE_SHARE) + LAYER_S * checkpoint.layers
    matrices, position = token_flops(model, checkpoint)
    token_s, square_s = matrices / (tp * flops * PREFILL_MFU), position / (tp * flops * ATTENTION_MFU)
    load_s = LOAD_S + checkpoint.parameters * width / LOAD_BYTES_S
    source, errors = _confidence(topology.family, tp)
    return Speed(step_s, PREFILL_S, token_s, square_s, load_s, *errors, source)


def _confidence(family: str, tp: int) -> tuple[str, tuple[float, float]]:
    """Returns the source of an estimate, and the errors of its step and of its prefill."""
    if family in LOGICAL_CORES:
        return f"AWS's figures of {family}, with efficiencies fitted on inf2", (UNVERIFIED_ERROR, UNVERIFIED_ERROR)
    if (family, tp) == FITTED:
        return "fitted on AWS's tables of inf2", (DECODE_ERROR, PREFILL_ERROR)
    if (family, tp) == VERIFIED:
        return "fitted on AWS's tables of inf2, verified with those of trn1", (DECODE_ERROR, PREFILL_ERROR)
    where = f"tp {tp}" if family == FITTED[0] else f"tp {tp} of {family}"
    source = f"fitted on AWS's tables of inf2 at tp {FITTED[1]}, unverified at {where}"
    return source, (UNVERIFIED_ERROR, UNVERIFIED_ERROR)


def _on_cpu(checkpoint: Checkpoint, width: float) -> Speed:
    """Estimates the order of magnitude only; `--speeds` accepts measured values."""
    step_s = checkpoint.parameters * width / HOST_BYTES_S + HOST_STEP_S
    token_s = 2 * checkpoint.parameters / HOST_FLOPS
    load_s = HOST_LOAD_S + checkpoint.parameters * width / LOAD_BYTES_S
    return Speed(step_s, HOST_STEP_S, token_s, 0.0, load_s, 1.0, 1.0, "a guess for a CPU")


def _unknown(model: ModelSpec) -> Speed:
    parameters, layers, width = 8e9, 32, 4096
    step_s = parameters * 2 / (model.tp_degree * CORE_BYTES_S * WEIGHTS_SHARE) + LAYER_S * layers
    flops = model.tp_degree * CORE_FLOPS
    token_s, square_s = 2 * parameters / (flops * PREFILL_MFU), 4 * layers * width / (flops * ATTENTION_MFU)
    load_s = LOAD_S + parameters * 2 / LOAD_BYTES_S
    return Speed(step_s, PREFILL_S, token_s, square_s, load_s, 1.0, 1.0, "a guess: no readable config.json")
