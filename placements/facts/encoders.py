"""Facts about encoders: the kinds of models that do not generate, their families, and the shapes of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Kind = Literal["generate", "embedding", "rerank", "classification"]
KINDS: tuple[Kind, ...] = get_args(Kind)

ENCODERS = ("bert", "deberta-v2", "distilbert", "modernbert", "mpnet", "roberta", "xlm-roberta")
"""Values of model_type whose scores and vectors tests compare with transformers and sentence-transformers."""

EMBEDDING_DECODERS = ("mistral", "qwen2", "qwen3")
"""Families that generate, and also serve as embedding models: their last token is pooled."""

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
