"""Facts about encoders: the kinds of models that do not generate, their families, and the shapes of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from placements.facts.engines import Engine

Kind = Literal["generate", "embedding", "rerank", "classification"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ENCODERS = ("bert", "deberta-v2", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta")
"""Values of model_type whose scores and vectors tests compare with transformers and sentence-transformers."""

EMBEDDING_DECODERS = ("mistral", "qwen2", "qwen3")
"""Families that generate, and also serve as embedding models: their last token is pooled."""

ENGINES_OF_ENCODERS: tuple[Engine, ...] = ("cpu", "echo", "torch-neuronx")
"""The engines that serve models that do not generate."""

TRACED_BATCH = 8
"""Rows of a trace of torch-neuronx, by default. It splits a longer batch, and fills a shorter one."""

TRACED_LENGTH = 64
"""Tokens of its shortest trace, by default. Each length is compiled, and has weights of its own on the core."""

DEFAULT_BATCH = 32
"""The default rows of a batch, as sentence-transformers' batch_size."""

SHIFTED = frozenset({"mpnet", "roberta", "xlm-roberta"})
"""Families whose positions begin after the id of the padding."""

NO_TYPES = frozenset({"distilbert", "modernbert", "mpnet"})
"""Families without an embedding of token types."""


def families(kind: Kind) -> tuple[str, ...]:
    """Returns the values of model_type that models of a kind other than generate may have."""
    return (*ENCODERS, *EMBEDDING_DECODERS) if kind == "embedding" else ENCODERS


def longest_input(family: str, positions: int | None, config: Mapping[str, object]) -> int | None:
    """Returns the most tokens of an input, from the positions of config.json; None: no limit."""
    if positions is None or family not in SHIFTED:
        return positions
    padding = config.get("pad_token_id", 1)
    return positions - (padding if isinstance(padding, int) else 1) - 1


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
