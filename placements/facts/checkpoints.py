"""Derives a model's shape and parameter counts from a decoded config.json. Callers read the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from placements.facts.tnx_families import Reading


class CheckpointError(Exception):
    """Raised for an unusable config.json, with the problem's id, text and hint."""

    def __init__(self, id: str, what: str, hint: str = "") -> None:
        super().__init__(f"{id}: {what}" + (f" ({hint})" if hint else ""))
        self.id = id
        self.what = what
        self.hint = hint


@dataclass(frozen=True)
class Parameters:
    """A model's parameter counts by purpose. A fused query-key-value projection is counted as its parts."""

    embedding: int  # token embedding, with the head if the two are tied
    head: int  # 0 if tied
    positions: int  # learned positions
    attention: int  # matrices of the query and output projections
    kv: int  # matrices of the key and value projections
    feed_forward: int  # matrices, of all experts
    small: int  # norms, biases, routers, and the projections of an embedding's width (some opt models)

    @property
    def matrices(self) -> int:
        """The parameters that ``quantize`` applies to: the projections of all layers."""
        return self.attention + self.kv + self.feed_forward

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.positions + self.matrices + self.small


_AS_IT_IS = Reading()


@dataclass(frozen=True)
class Checkpoint:
    """The shape of a causal language model."""

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
    experts: int | None = None  # experts of a layer, all in memory; None: no router
    embedding_dim: int | None = None  # width of an embedded token if it is not ``hidden`` (some opt models)
    stored_bytes: int | None = None  # bytes a parameter in the checkpoint's files; None: unknown
    window: int | None = None  # tokens that a token attends to, itself included; None: all before it
    on_tnx: Reading = _AS_IT_IS  # how transformers-neuronx reads config.json

    @property
    def feed_forward_matrices(self) -> int:
        """The matrices of one expert: up, down, and a gate in gated families."""
        return 3 if self.model_type in _GATED else 2

    @property
    def groups(self) -> Parameters:
        """``parameters`` by group. The groups add up to it exactly."""
        table = self.vocab * (self.embedding_dim or self.hidden)
        positions = 0
        if self.model_type in _LEARNED_POSITIONS and self.max_positions:
            positions = (self.max_positions + _LEARNED_POSITIONS[self.model_type]) * self.hidden
        projection = 2 * self.layers * self.hidden * self.head_dim
        feed_forward = self.layers * (self.experts or 1) * self.feed_forward_matrices * self.hidden * self.ffn
        attention, kv = projection * self.heads, projection * self.kv_heads
        head = 0 if self.tied_embeddings else table
        small = self.parameters - (table + head + positions + attention + kv + feed_forward)
        return Parameters(table, head, positions, attention, kv, feed_forward, small)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Checkpoint:
        """Reads a decoded config.json.

        Raises CheckpointError: ``unknown-family`` for a model type outside ``FAMILIES``, ``checkpoint-malformed`` for a
        missing or invalid key.
        """
        if not isinstance(config, Mapping):
            raise CheckpointError("checkpoint-malformed", "config.json is not a JSON object", _REPAIR)
        family = config.get("model_type")
        if family is None:
            raise CheckpointError("checkpoint-malformed", "config.json has no model_type", _REPAIR)
        reader = _FAMILIES.get(family) if isinstance(family, str) else None
        if reader is None:
            supported = ", ".join(sorted(_FAMILIES))
            raise CheckpointError(
                "unknown-family",
                f'model_type "{family}" is not supported ({supported})',
                "serve a checkpoint of one of these families",
            )
        read = _Config(config)
        window, reading = sliding_window(family, config), Reading.of(config)
        return replace(reader(read), stored_bytes=_stored_bytes(config), window=window, on_tnx=reading)


_GATED = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"})
_LEARNED_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}  # rows beyond the positions

_STORED_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _stored_bytes(config: Mapping[str, Any]) -> int | None:
    """Returns the bytes a parameter from ``dtype`` (transformers 5) or ``torch_dtype``; None if unknown."""
    name = config.get("dtype", config.get("torch_dtype"))
    return _STORED_BYTES.get(name.removeprefix("torch.")) if isinstance(name, str) else None


def sliding_window(family: str, config: Mapping[str, Any]) -> int | None:
    """Returns the length of the sliding window, with the default of transformers if the key is absent.

    None: a token attends to all tokens before it. Raises CheckpointError.
    """
    read = _Config(config)
    if family.startswith("qwen"):
        return read.given("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    if family == "mistral":
        return read.given("sliding_window", 4096)
    return read.optional("sliding_window") if family == "mixtral" else None


_REPAIR = "use the config.json that belongs to the checkpoint"


class _Config:
    """Typed access to a config. Each key may have older spellings."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def _first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        return next(
            ((name, self._values[name]) for name in names if self._values.get(name) is not None), (names[0], None)
        )

    def optional(self, *names: str) -> int | None:
        """Returns a positive integer, or None if the key is absent or null."""
        name, value = self._first(names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 40:
            raise CheckpointError(
                "checkpoint-malformed", f"{name} in config.json is {value!r}, not a positive whole number", _REPAIR
            )
        return value

    def given(self, name: str, absent: int) -> int | None:
        """Returns a positive integer, None if it is null, or ``absent`` (the default of transformers)."""
        return self.optional(name) if name in self._values else absent

    def number(self, *names: str) -> int:
        """Returns a positive integer. Raises CheckpointError if it is missing."""
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


@dataclass(frozen=True)
class _Rotary:
    """The shape of a model with rotary positions, grouped queries and gated feed-forward layers."""

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def attention(self) -> int:
        """The parameters of the four projections, without biases."""
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def qkv_biases(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def feed_forward(self) -> int:
        return 3 * self.hidden * self.ffn


def _rotary(config: _Config, kv_heads: int | None = None, head_dim: int | None = None) -> _Rotary:
    """Reads the shape. ``kv_heads`` and ``head_dim`` are the family's defaults; None: heads, and hidden / heads."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.given("num_key_value_heads", kv_heads or heads) or heads
    if heads % kv_heads:
        raise CheckpointError(
            "checkpoint-malformed", f"{heads} heads in config.json do not divide by {kv_heads} key-value heads", _REPAIR
        )
    head_dim = config.optional("head_dim") or head_dim or _even_head_dim(hidden, heads)
    ffn, layers = config.number("intermediate_size"), config.number("num_hidden_layers")
    return _Rotary(hidden, ffn, heads, kv_heads, head_dim, layers)


def _rotary_checkpoint(
    family: str, config: _Config, shape: _Rotary, attention: int, feed_forward: int, experts: int | None = None
) -> Checkpoint:
    """``attention`` and ``feed_forward`` are the parameters of one layer, without its two norms."""
    hidden, vocab = shape.hidden, config.number("vocab_size")
    tied = config.flag("tie_word_embeddings", False)
    block = attention + feed_forward + 2 * hidden
    return Checkpoint(
        family,
        shape.heads,
        shape.kv_heads,
        shape.layers,
        hidden,
        shape.ffn,
        shape.head_dim,
        vocab,
        config.optional("max_position_embeddings"),
        tied,
        vocab * hidden * (1 if tied else 2) + shape.layers * block + hidden,
        experts,
    )


def _llama(config: _Config) -> Checkpoint:
    shape = _rotary(config)
    attention, feed_forward = shape.attention, shape.feed_forward
    if config.flag("attention_bias", False):
        attention += shape.qkv_biases + shape.hidden
    if config.flag("mlp_bias", False):
        feed_forward += 2 * shape.ffn + shape.hidden
    return _rotary_checkpoint("llama", config, shape, attention, feed_forward)


def _mistral(config: _Config) -> Checkpoint:
    shape = _rotary(config, kv_heads=8)
    return _rotary_checkpoint("mistral", config, shape, shape.attention, shape.feed_forward)


def _mixtral(config: _Config) -> Checkpoint:
    shape, experts = _rotary(config, kv_heads=8), config.number("num_local_experts")
    feed_forward = experts * (shape.feed_forward + shape.hidden)  # each expert has a row of the router
    return _rotary_checkpoint("mixtral", config, shape, shape.attention, feed_forward, experts)


def _qwen2(config: _Config) -> Checkpoint:
    shape = _rotary(config, kv_heads=32)
    return _rotary_checkpoint("qwen2", config, shape, shape.attention + shape.qkv_biases, shape.feed_forward)


def _qwen3(config: _Config) -> Checkpoint:
    shape = _rotary(config, kv_heads=32, head_dim=128)
    attention = shape.attention + 2 * shape.head_dim  # a norm each for queries and keys
    if config.flag("attention_bias", False):
        attention += shape.qkv_biases + shape.hidden
    return _rotary_checkpoint("qwen3", config, shape, attention, shape.feed_forward)


def _fused_block(hidden: int, ffn: int) -> int:
    """Returns the parameters of a block with biases, two layer norms and a fused QKV projection (gpt2, bloom)."""
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


def _gpt_bigcode(config: _Config) -> Checkpoint:
    hidden, heads = config.number("n_embd", "hidden_size"), config.number("n_head", "num_attention_heads")
    layers, vocab = config.number("n_layer", "num_hidden_layers"), config.number("vocab_size")
    positions = config.number("n_positions", "max_position_embeddings")
    ffn = config.optional("n_inner") or 4 * hidden
    tied, head_dim = config.flag("tie_word_embeddings", True), _even_head_dim(hidden, heads)
    kv_heads = 1 if config.flag("multi_query", True) else heads
    block = _fused_block(hidden, ffn) - 2 * (heads - kv_heads) * head_dim * (hidden + 1)
    parameters = vocab * hidden * (1 if tied else 2) + positions * hidden + layers * block + 2 * hidden
    return Checkpoint("gpt_bigcode", heads, kv_heads, layers, hidden, ffn, head_dim, vocab, positions, tied, parameters)


def _gptj(config: _Config) -> Checkpoint:
    hidden, heads = config.number("n_embd", "hidden_size"), config.number("n_head", "num_attention_heads")
    layers, vocab = config.number("n_layer", "num_hidden_layers"), config.number("vocab_size")
    positions = config.number("n_positions", "max_position_embeddings")
    ffn = config.optional("n_inner") or 4 * hidden
    tied, head_dim = config.flag("tie_word_embeddings", False), _even_head_dim(hidden, heads)
    # One norm a layer, and no biases in the attention. The head has a bias, tied or not.
    block = 4 * hidden * hidden + hidden * (ffn + 1) + ffn * (hidden + 1) + 2 * hidden
    parameters = vocab * hidden * (1 if tied else 2) + vocab + layers * block + 2 * hidden
    return Checkpoint("gptj", heads, heads, layers, hidden, ffn, head_dim, vocab, positions, tied, parameters)


def _gpt_neox(config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    layers, vocab = config.number("num_hidden_layers"), config.number("vocab_size")
    ffn, positions = config.number("intermediate_size"), config.optional("max_position_embeddings")
    tied, head_dim = config.flag("tie_word_embeddings", False), _even_head_dim(hidden, heads)
    block = _fused_block(hidden, ffn) - (0 if config.flag("attention_bias", True) else 4 * hidden)
    parameters = vocab * hidden * (1 if tied else 2) + layers * block + 2 * hidden
    return Checkpoint("gpt_neox", heads, heads, layers, hidden, ffn, head_dim, vocab, positions, tied, parameters)


def _opt(config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    layers, vocab = config.number("num_hidden_layers"), config.number("vocab_size")
    ffn, positions = config.number("ffn_dim"), config.number("max_position_embeddings")
    width = config.optional("word_embed_proj_dim") or hidden
    tied, head_dim = config.flag("tie_word_embeddings", True), _even_head_dim(hidden, heads)
    norm = 2 * hidden if config.flag("layer_norm_elementwise_affine", True) else 0
    block = 4 * hidden * hidden + 2 * hidden * ffn + 2 * norm
    if config.flag("enable_bias", True):
        block += 5 * hidden + ffn
    parameters = vocab * width * (1 if tied else 2) + (positions + 2) * hidden + layers * block
    if width != hidden:
        parameters += 2 * width * hidden
    if config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False):
        parameters += norm
    return Checkpoint(
        "opt",
        heads,
        heads,
        layers,
        hidden,
        ffn,
        head_dim,
        vocab,
        positions,
        tied,
        parameters,
        embedding_dim=None if width == hidden else width,
    )


_FAMILIES: dict[str, Callable[[_Config], Checkpoint]] = {
    "bloom": _bloom,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "opt": _opt,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
FAMILIES: tuple[str, ...] = tuple(sorted(_FAMILIES))
