"""What the engine ``torch-neuronx`` can do: the encoders that it traces, and the shapes of traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from placements.engines.capabilities import NEURON_INDEX, Capabilities, OptionRange, Traces, Unused
from placements.engines.cpu.capabilities import FIRST_TRANSFORMERS
from placements.facts.encoders import KINDS

TRACED_FAMILIES = ("bert", "distilbert", "mpnet", "roberta", "xlm-roberta")
"""Encoders that torch-neuronx traces. Their graphs have fixed shapes, and optimum-neuron exports them in this way."""

TRACED_REFUSED: Mapping[str, str] = {
    "deberta-v2": "AWS documents no trace of it",
    "modernbert": "AWS documents no trace of it",
    **dict.fromkeys(("mistral", "qwen2", "qwen3"), "AWS documents no trace of a decoder that gives embeddings"),
}
"""Families that the cpu engine encodes with, and torch-neuronx does not -> why."""

TRACED_BATCH = 8
"""Rows of a trace of torch-neuronx, by default. It splits a longer batch, and fills a shorter one."""

TRACED_LENGTH = 64
"""Tokens of its shortest trace, by default. Each length is compiled, and has weights of its own on the core."""


def traced_lengths(buckets: Sequence[int], longest: int) -> tuple[int, ...]:
    """Returns the lengths of the traces of torch-neuronx: those of ``buckets``, else lengths that double up to exactly
    ``longest``."""
    if buckets:
        return tuple(buckets)
    lengths = [TRACED_LENGTH]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return (*lengths[:-1], longest)


def traced_batch(rows: int, options: Mapping[str, object]) -> int:
    """Returns the rows of a trace, for the ``engine_options`` of a model with ``rows`` in a batch."""
    given = options.get("compiled_batch")
    return given if isinstance(given, int) else min(rows, TRACED_BATCH)


class TorchNeuronxCapabilities(Capabilities):
    """What torch-neuronx can do."""

    def traces(self, buckets: Sequence[int], longest: int, rows: int, options: Mapping[str, object]) -> Traces | None:
        """One trace for each length."""
        return Traces(traced_lengths(buckets, longest), traced_batch(rows, options))


CAPABILITIES = TorchNeuronxCapabilities(
    engine="torch-neuronx",
    runs_on="neuron",
    kinds=tuple(kind for kind in KINDS if kind != "generate"),
    requires=("torch-neuronx", "neuronx-cc", "torch", "safetensors", "numpy", "transformers"),
    transformers=FIRST_TRANSFORMERS,
    install=f"AWS's Neuron images have it; else pip install torch-neuronx neuronx-cc {NEURON_INDEX}",
    options=MappingProxyType({"compiled_batch": OptionRange(1, 1024, whole=True)}),
    families=TRACED_FAMILIES,
    refused=MappingProxyType(TRACED_REFUSED),
    unused=(Unused(("buckets.decode",), "remove it, and set buckets.prefill", encoding=True),),
    sets_workers=False,
    outside="it is not an encoder",
    beside="nxd-inference",
    absent=f"needs torch-neuronx beside transformers {FIRST_TRANSFORMERS} or later",
)
"""``compiled_batch``: inputs of a compiled batch."""
