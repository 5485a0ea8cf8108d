"""How fast a replica should be, from config.json and the instance type alone. Ranges, not promises."""

from __future__ import annotations

from dataclasses import dataclass

from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import BYTES, HOST_ENGINES, Engine
from placements.facts.topology import Topology
from placements.resources.memory import GIB, estimate
from placements.spec.schema import ModelSpec

# Of inf2 and trn1: two cores on a device of 820 GB/s and 190 TFLOPS in bf16.
CORE_BYTES_S = 410e9
CORE_FLOPS = 95e12

WEIGHTS_SHARE = 0.51
"""Of the bandwidth, while weights are read. This and the next three were fitted on 42 rows of AWS's tables of decode
latencies on inf2 (tp 24, SDK 2.18). With the bytes that `memory` counts, the median error on these rows is 7 %, and the
greatest 28 %; 36 rows of trn1 that were not fitted: 4 % and 33 %."""
KV_SHARE = 0.63
LAYER_ROW_S = 13.2e-6  # of a layer and a slot
STEP_S = 4.2e-3  # of every step
DECODE_ERROR = 0.07  # the median

PREFILL_MFU = 0.13
"""Of the FLOPS, while a prompt is read. With PREFILL_S the median error is 28 %; on the same rows the greatest is
79 %."""
PREFILL_S = 0.016  # of every prefill
PREFILL_ERROR = 0.28  # the median

TRN2_BYTES_S = 2.9e12 / 4
"""Of one logical core of trn2 at LNC 2: 2.9 TB/s and 667 TFLOPS in dense bf16 on a device of four (AWS's page of the
instance type). No row of trn2 was fitted."""
TRN2_FLOPS = 667e12 / 4

LOAD_BYTES_S = 1.0e9
"""At which weights come from the file to the cores: no figure is published for these instances. Loading presharded
weights of Llama-3.1-8B, 16 GB, is of the order of ten to twenty seconds."""
LOAD_S = 30.0
"""Of a start beside the weights: the process, torch and the runtime, and cached graphs."""

HOST_LOAD_S = 6.0  # of the engines cpu and echo: a process with its imports, as measured with small models
HOST_STEP_S = 0.0005  # of the batcher and the socket, for an echo engine without a time of its own
HOST_FLOPS = 5e10  # of a core of an emulated host's real CPU; a guess
HOST_BYTES_S = 5e9  # likewise


@dataclass(frozen=True)
class Speed:
    """Of one replica, in seconds. ``decode_error`` and ``prefill_error`` are parts of one: with 0.2 half of all cases
    are within 20 % either way; 1.0 where nobody knows."""

    step_s: float  # of a decode of all slots
    prefill_base_s: float
    prefill_token_s: float
    load_s: float
    decode_error: float
    prefill_error: float
    source: str  # where the numbers come from, in a few words

    def as_dict(self) -> dict[str, float | str]:
        """As `simulate -o json` prints it, and as `--speeds FILE` holds it."""
        return {
            "step_ms": round(self.step_s * 1000, 4),
            "prefill_base_ms": round(self.prefill_base_s * 1000, 4),
            "prefill_token_ms": round(self.prefill_token_s * 1000, 6),
            "load_s": round(self.load_s, 3),
            "decode_error": self.decode_error,
            "prefill_error": self.prefill_error,
            "source": self.source,
        }


def speed(model: ModelSpec, checkpoint: Checkpoint | None, engine: Engine, topology: Topology | None) -> Speed:
    """What is expected of a replica; ``engine`` is the resolved one.

    TPOT = W / (tp x 410e9 x 0.51) + KV / (410e9 x 0.63) + 13.2e-6 x layers x B + 4.2e-3, with W the bytes of the
    weights, KV the bytes of the KV cache on a core and B the slots. The prefill takes 2 FLOPs for each parameter and
    token at an MFU of 0.13, and 16 ms. Without a checkpoint that could be read: as a model of 8 billion parameters.
    """
    if engine == "echo":
        step_ms = model.engine_options.get("step_ms", 0.0)
        step_s = max(HOST_STEP_S, float(step_ms) / 1000 if isinstance(step_ms, int | float) else 0.0)
        return Speed(step_s, step_s, 0.0, HOST_LOAD_S, 0.0, 0.0, "the echo engine's step_ms")
    if checkpoint is None:
        return _unknown(model)
    width = BYTES[model.dtype_on(engine)]
    if engine in HOST_ENGINES or topology is None:
        return _on_cpu(checkpoint, width)
    return _on_neuron(model, checkpoint, engine, topology, width)


def _on_neuron(model: ModelSpec, checkpoint: Checkpoint, engine: Engine, topology: Topology, width: float) -> Speed:
    tp, slots = model.tp_degree, model.max_batch
    need = estimate(model, checkpoint, engine)
    weights = need.weights * GIB  # on a core
    is_trn2 = topology.family == "trn2"
    bandwidth, flops = (TRN2_BYTES_S, TRN2_FLOPS) if is_trn2 else (CORE_BYTES_S, CORE_FLOPS)
    if is_trn2 and topology.lnc == 1:
        bandwidth, flops = bandwidth / 2, flops / 2
    step_s = (
        weights / (bandwidth * WEIGHTS_SHARE)
        + need.kv * GIB / (bandwidth * KV_SHARE)
        + LAYER_ROW_S * checkpoint.layers * slots
        + STEP_S
    )
    token_s = 2 * checkpoint.parameters / (tp * flops * PREFILL_MFU)
    load_s = LOAD_S + checkpoint.parameters * width / LOAD_BYTES_S
    source = "fitted on AWS's tables of inf2"
    source = "AWS's figures of trn2, with what was fitted on inf2" if is_trn2 else source
    return Speed(step_s, PREFILL_S, token_s, load_s, DECODE_ERROR * (2 if is_trn2 else 1), PREFILL_ERROR, source)


def _on_cpu(checkpoint: Checkpoint, width: float) -> Speed:
    """The order of magnitude only: `--speeds` with what a fleet has measured is for more."""
    step_s = checkpoint.parameters * width / HOST_BYTES_S + HOST_STEP_S
    token_s = 2 * checkpoint.parameters / HOST_FLOPS
    load_s = HOST_LOAD_S + checkpoint.parameters * width / LOAD_BYTES_S
    return Speed(step_s, HOST_STEP_S, token_s, load_s, 1.0, 1.0, "a guess for a CPU")


def _unknown(model: ModelSpec) -> Speed:
    parameters, layers = 8e9, 32
    step_s = parameters * 2 / (model.tp_degree * CORE_BYTES_S * WEIGHTS_SHARE) + LAYER_ROW_S * layers * model.max_batch
    token_s = 2 * parameters / (model.tp_degree * CORE_FLOPS * PREFILL_MFU)
    load_s = LOAD_S + parameters * 2 / LOAD_BYTES_S
    return Speed(step_s + STEP_S, PREFILL_S, token_s, load_s, 1.0, 1.0, "a guess: no config.json was read")
