"""Checkpoint: what a model's config.json says that placement depends on. Pure: callers read the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class CheckpointError(Exception):
    """A config.json that cannot be used: a problem id, the fact and the remedy."""

    def __init__(self, id: str, what: str, hint: str = "") -> None:
        super().__init__(f"{id}: {what}" + (f" ({hint})" if hint else ""))
        self.id = id
        self.what = what
        self.hint = hint


@dataclass(frozen=True)
class Checkpoint:
    """A causal language model's shape."""

    model_type: str
    heads: int  # query heads
    kv_heads: int  # equal to ``heads`` without grouped-query attention
    layers: int
    hidden: int
    ffn: int  # width of the feed-forward layers
    head_dim: int
    vocab: int
    max_positions: int | None  # None: no limit in the architecture (alibi)
    tied_embeddings: bool
    parameters: int  # of the whole model, tied weights counted once

    @property
    def embedding_parameters(self) -> int:
        """Token embedding and output head, tied weights counted once."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Checkpoint:
        """Read a decoded config.json.

        Raises CheckpointError: ``unknown-family`` for a model type other than llama, gpt2 and bloom,
        ``checkpoint-malformed`` for a key that is missing or makes no sense.
        """
        if not isinstance(config, Mapping):
            raise CheckpointError("checkpoint-malformed", "config.json is not a JSON object", _REPAIR)
        family = config.get("model_type")
        if family is None:
            raise CheckpointError("checkpoint-malformed", "config.json has no model_type", _REPAIR)
        reader = _FAMILIES.get(family) if isinstance(family, str) else None
        if reader is None:
            known = ", ".join(sorted(_FAMILIES))
            raise CheckpointError(
                "unknown-family",
                f'model_type "{family}" is not supported; supported are {known}',
                "serve a checkpoint of one of these families",
            )
        return reader(_Config(config))


_REPAIR = "use the config.json that belongs to the checkpoint"


class _Config:
    """Typed access to a config, where each name may have older spellings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        return next(
            ((name, self._values[name]) for name in names if self._values.get(name) is not None), (names[0], None)
        )

    def optional(self, *names: str) -> int | None:
        """A positive whole number, or None when it is absent or null."""
        name, value = self._first(names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
            raise CheckpointError(
                "checkpoint-malformed", f"{name} in config.json is {value!r}, not a positive whole number", _REPAIR
            )
        return value

    def number(self, *names: str) -> int:
        """A positive whole number that must be there."""
        value = self.optional(*names)
        if value is None:
            raise CheckpointError("checkpoint-malformed", f"config.json has no {' or '.join(names)}", _REPAIR)
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CheckpointError(
                "checkpoint-malformed", f"{name} in config.json is {value!r}, not true or false", _REPAIR
            )
        return value


def _even_head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise CheckpointError(
            "checkpoint-malformed", f"hidden size {hidden} in config.json does not divide by {heads} heads", _REPAIR
        )
    return hidden // heads


def _llama(config: _Config) -> Checkpoint:
    hidden, ffn = config.number("hidden_size"), config.number("intermediate_size")
    heads, layers = config.number("num_attention_heads"), config.number("num_hidden_layers")
    kv_heads = config.optional("num_key_value_heads") or heads
    head_dim = config.optional("head_dim") or _even_head_dim(hidden, heads)
    vocab = config.number("vocab_size")
    if heads % kv_heads:
        raise CheckpointError(
            "checkpoint-malformed", f"{heads} heads in config.json do not divide by {kv_heads} key-value heads", _REPAIR
        )
    tied = config.flag("tie_word_embeddings", False)
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    if config.flag("attention_bias", False):
        attention += queries + 2 * keys + hidden
    feed_forward = 3 * hidden * ffn
    if config.flag("mlp_bias", False):
        feed_forward += 2 * ffn + hidden
    block = attention + feed_forward + 2 * hidden
    parameters = vocab * hidden * (1 if tied else 2) + layers * block + hidden
    positions = config.optional("max_position_embeddings")
    return Checkpoint("llama", heads, kv_heads, layers, hidden, ffn, head_dim, vocab, positions, tied, parameters)


def _fused_block(hidden: int, ffn: int) -> int:
    """A block with biases everywhere, two layer norms and one fused query-key-value projection (gpt2, bloom)."""
    return 4 * hidden * (hidden + 1) + hidden * (ffn + 1) + ffn * (hidden + 1) + 4 * hidden


def _gpt2(config: _Config) -> Checkpoint:
    hidden, heads = config.number("n_embd", "hidden_size"), config.number("n_head", "num_attention_heads")
    layers, vocab = config.number("n_layer", "num_hidden_layers"), config.number("vocab_size")
    positions = config.number("n_positions", "max_position_embeddings", "n_ctx")
    ffn = config.optional("n_inner") or 4 * hidden
    tied = config.flag("tie_word_embeddings", True)
    embeddings = vocab * hidden * (1 if tied else 2) + positions * hidden
    parameters = embeddings + layers * _fused_block(hidden, ffn) + 2 * hidden
    head_dim = _even_head_dim(hidden, heads)
    return Checkpoint("gpt2", heads, heads, layers, hidden, ffn, head_dim, vocab, positions, tied, parameters)


def _bloom(config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size", "n_embed"), config.number("n_head", "num_attention_heads")
    layers, vocab = config.number("n_layer", "num_hidden_layers"), config.number("vocab_size")
    tied = config.flag("tie_word_embeddings", True)
    embeddings = vocab * hidden * (1 if tied else 2) + 2 * hidden  # with a layer norm of its own
    parameters = embeddings + layers * _fused_block(hidden, 4 * hidden) + 2 * hidden
    head_dim = _even_head_dim(hidden, heads)
    return Checkpoint("bloom", heads, heads, layers, hidden, 4 * hidden, head_dim, vocab, None, tied, parameters)


_FAMILIES: dict[str, Callable[[_Config], Checkpoint]] = {"llama": _llama, "gpt2": _gpt2, "bloom": _bloom}
FAMILIES: tuple[str, ...] = tuple(sorted(_FAMILIES))
