"""Derives a model's shape and parameter counts from a decoded config.json. Callers read the file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from placements.facts import encoders
from placements.facts.encoders import ENCODERS, Kind


class CheckpointError(Exception):
    """Raised for an unusable config.json, with the problem's id, text and hint."""

    def __init__(self, id: str, fact: str, hint: str = "") -> None:
        super().__init__(f"{id}: {fact}" + (f" ({hint})" if hint else ""))
        self.id = id
        self.what = fact
        self.hint = hint


@dataclass(frozen=True)
class ParameterCounts:
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


@dataclass(frozen=True)
class Checkpoint:
    """The shape of a causal language model, or of an encoder without its head."""

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
    config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # the decoded config.json

    @property
    def feed_forward_matrices(self) -> int:
        """The matrices of one expert: up, down, and a gate in gated families."""
        return 3 if self.model_type in _GATED else 2

    @property
    def learned_positions(self) -> int:
        """The parameters of learned positions; 0 in families that compute positions."""
        if self.model_type not in _EXTRA_POSITIONS or not self.max_positions:
            return 0
        return (self.max_positions + _EXTRA_POSITIONS[self.model_type]) * self.hidden

    @property
    def groups(self) -> ParameterCounts:
        """``parameters`` by group. The groups add up to it exactly."""
        table, positions = self.vocab * (self.embedding_dim or self.hidden), self.learned_positions
        projection = 2 * self.layers * self.hidden * self.head_dim
        feed_forward = self.layers * (self.experts or 1) * self.feed_forward_matrices * self.hidden * self.ffn
        attention, kv = projection * self.heads, projection * self.kv_heads
        head = 0 if self.tied_embeddings else table
        small = self.parameters - (table + head + positions + attention + kv + feed_forward)
        return ParameterCounts(table, head, positions, attention, kv, feed_forward, small)

    @property
    def quantized_by(self) -> str | None:
        """The method by which the stored weights are quantized, as config.json names it; None: they are not quantized.

        ModelOpt has several formats of weights, so its name is followed by the algorithm: "modelopt fp8".
        """
        given = self.config.get("quantization_config") or self.config.get("compression_config")
        if not given:
            return None
        written = given if isinstance(given, Mapping) else {}
        method = str(written.get("quant_method") or "an unnamed method").lower()
        if method == "compressed-tensors" and written.get("kv_cache_scheme") and not written.get("config_groups"):
            return f"{method} kv"  # scales of the KV cache only
        return f"{method} {written.get('quant_algo')}".lower() if method == "modelopt" else method

    @property
    def rope_type(self) -> str:
        """How rotary positions are scaled, as transformers names it; "default" without scaling."""
        return _Config(self.config).rope()[0] if self.model_type in ROTARY else "default"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], kind: Kind = "generate") -> Checkpoint:
        """Reads a decoded config.json.

        Raises CheckpointError: ``unknown-family`` for a model type that the kind does not serve (``FAMILIES`` for
        generate), ``checkpoint-malformed`` for a missing or invalid key.
        """
        if not isinstance(config, Mapping):
            raise _malformed("config.json is not a JSON object")
        family = config.get("model_type")
        if family is None:
            raise _malformed("config.json has no model_type")
        served = families(kind)
        if not isinstance(family, str) or family not in served:
            fact = f'model_type "{family}" is not supported{_for(kind)} ({", ".join(served)})'
            raise CheckpointError("unknown-family", fact, _family_hint(family, kind))
        shape = _READERS[family](family, _Config(config))
        if kind != "generate":
            shape = replace(shape, tied_embeddings=True)  # it has no head over the vocabulary
        longest = shape.max_positions
        return replace(
            shape,
            parameters=_parameters(shape, _Config(config)),
            max_positions=longest if kind == "generate" else encoders.longest_input(family, longest, config),
            stored_bytes=_stored_bytes(config),
            window=sliding_window(family, config),
            config=config,
        )


def families(kind: Kind) -> tuple[str, ...]:
    """Returns the values of model_type that are supported for a kind."""
    return FAMILIES if kind == "generate" else encoders.families(kind)


def _for(kind: Kind) -> str:
    return "" if kind == "generate" else f" for kind {kind}"


def _family_hint(family: object, kind: Kind) -> str:
    if kind == "generate" and family in ENCODERS:
        return "set its kind: embedding, rerank or classification"
    return "use a model of one of these families, or engine: server"


_GATED = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"})
ROTARY = _GATED | {"gpt_neox"}
"""The families whose rotary positions config.json may scale. Those of gptj are always the same."""
_EXTRA_POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}  # families with learned positions -> rows beyond them

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


def _malformed(fact: str) -> CheckpointError:
    return CheckpointError("checkpoint-malformed", fact, "use the config.json that belongs to the checkpoint")


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
            raise _malformed(f"{name} in config.json is {value!r}, not a positive whole number")
        return value

    def given(self, name: str, absent: int) -> int | None:
        """Returns a positive integer, None if it is null, or ``absent`` (the default of transformers)."""
        return self.optional(name) if name in self._values else absent

    def number(self, *names: str) -> int:
        """Returns a positive integer. Raises CheckpointError if it is missing."""
        value = self.optional(*names)
        if value is None:
            raise _malformed(f"config.json has no {' or '.join(names)}")
        return value

    def number_or(self, name: str, default: int) -> int:
        """Returns a whole number that may be 0, or ``default``."""
        value = self._values.get(name)
        return default if value is None else 0 if value == 0 else self.number(name)

    def signed(self, name: str, default: int) -> int:
        """Returns a whole number of either sign, or ``default``."""
        value = self._values.get(name, default)
        if not isinstance(value, int):
            raise _malformed(f"{name} in config.json is {value!r}, not a whole number")
        return value

    def words(self, name: str) -> list[str]:
        """Returns a list of words, which may be written as one text with "|" between them."""
        value = self._values.get(name) or []
        return value.lower().split("|") if isinstance(value, str) else [str(word) for word in value]

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _malformed(f"{name} in config.json is {value!r}, not true or false")
        return value

    def rope(self) -> tuple[str, Any]:
        """Returns how rotary positions are scaled, and the longest input before it, if it is named. `rope_parameters`
        is transformers 5's name of `rope_scaling`."""
        _, written = self._first(("rope_parameters", "rope_scaling"))
        scaling = written if isinstance(written, Mapping) else {}
        original = scaling.get("original_max_position_embeddings") or self.optional("original_max_position_embeddings")
        return str(scaling.get("rope_type") or scaling.get("type") or "default"), original


# The readers return a Checkpoint without its parameters.


def _gpt(family: str, config: _Config) -> Checkpoint:
    """gpt2, gpt_bigcode and gptj."""
    hidden, heads = config.number("n_embd", "hidden_size"), config.number("n_head", "num_attention_heads")
    positions = config.number("n_positions", "max_position_embeddings", *(("n_ctx",) if family == "gpt2" else ()))
    kv_heads = 1 if family == "gpt_bigcode" and config.flag("multi_query", True) else heads
    layers, ffn = config.number("n_layer", "num_hidden_layers"), config.optional("n_inner") or 4 * hidden
    return _shape(family, config, hidden, heads, kv_heads, layers, ffn, positions, tied=family != "gptj")


def _bloom(family: str, config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size", "n_embed"), config.number("n_head", "num_attention_heads")
    layers = config.number("n_layer", "num_hidden_layers")
    return _shape(family, config, hidden, heads, heads, layers, 4 * hidden, None, tied=True)


def _opt(family: str, config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    layers, ffn = config.number("num_hidden_layers"), config.number("ffn_dim")
    positions = config.number("max_position_embeddings")
    shape = _shape(family, config, hidden, heads, heads, layers, ffn, positions, tied=True)
    width = config.optional("word_embed_proj_dim") or hidden
    return replace(shape, embedding_dim=None if width == hidden else width)


def _gpt_neox(family: str, config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    return _rotary_shape(family, config, hidden, heads, heads)


def _gated(family: str, config: _Config) -> Checkpoint:
    """The families with rotary positions, grouped queries and gated feed-forward layers."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.given("num_key_value_heads", _KV_HEADS.get(family, heads)) or heads
    if heads % kv_heads:
        raise _malformed(f"{heads} heads in config.json do not divide by {kv_heads} key-value heads")
    head_dim = config.optional("head_dim") or (128 if family == "qwen3" else None)
    experts = config.number("num_local_experts") if family == "mixtral" else None
    return replace(_rotary_shape(family, config, hidden, heads, kv_heads, head_dim), experts=experts)


_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32}  # the defaults of transformers


def _rotary_shape(
    family: str, config: _Config, hidden: int, heads: int, kv_heads: int, head_dim: int | None = None
) -> Checkpoint:
    layers, ffn = config.number("num_hidden_layers"), config.number("intermediate_size")
    positions = config.optional("max_position_embeddings")
    scaling, original = config.rope()
    if scaling == "longrope" and positions is not None and isinstance(original, int):
        positions = min(positions, original)  # longer rows of a batch would change the answers of others
    return _shape(family, config, hidden, heads, kv_heads, layers, ffn, positions, tied=False, head_dim=head_dim)


def _shape(
    family: str,
    config: _Config,
    hidden: int,
    heads: int,
    kv_heads: int,
    layers: int,
    ffn: int,
    positions: int | None,
    *,
    tied: bool,  # the default of transformers
    head_dim: int | None = None,  # None: hidden / heads
) -> Checkpoint:
    if head_dim is None and hidden % heads:
        raise _malformed(f"hidden size {hidden} in config.json does not divide by {heads} heads")
    vocab, tied = config.number("vocab_size"), config.flag("tie_word_embeddings", tied)
    head_dim = head_dim or hidden // heads
    return Checkpoint(family, heads, kv_heads, layers, hidden, ffn, head_dim, vocab, positions, tied, parameters=0)


def _encoder(family: str, config: _Config) -> Checkpoint:
    hidden, heads = config.number("hidden_size", "dim"), config.number("num_attention_heads", "n_heads")
    layers, ffn = config.number("num_hidden_layers", "n_layers"), config.number("intermediate_size", "hidden_dim")
    positions = config.optional("max_position_embeddings")
    return _shape(family, config, hidden, heads, heads, layers, ffn, positions, tied=True)


_READERS: dict[str, Callable[[str, _Config], Checkpoint]] = {
    **dict.fromkeys(ENCODERS, _encoder),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), _gpt),
    **dict.fromkeys(_GATED, _gated),
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
}
FAMILIES: tuple[str, ...] = tuple(sorted(_READERS.keys() - set(ENCODERS)))


def _parameters(shape: Checkpoint, config: _Config) -> int:
    """Returns the parameters of the whole model, tied weights counted once."""
    if shape.model_type in ENCODERS:
        return _encoder_parameters(shape, config)
    if shape.model_type in _GATED:
        layer, rest = _gated_layer(shape, config), shape.hidden
    elif shape.model_type == "opt":
        layer, rest = _opt_layer(shape, config)
    else:
        layer, rest = _fused_layer(shape, config)
    table = shape.vocab * (shape.embedding_dim or shape.hidden)
    return table * (1 if shape.tied_embeddings else 2) + shape.learned_positions + shape.layers * layer + rest


def _gated_layer(shape: Checkpoint, config: _Config) -> int:
    """Returns the parameters of a layer with two norms."""
    family, hidden, head_dim = shape.model_type, shape.hidden, shape.head_dim
    biases = (shape.heads + 2 * shape.kv_heads) * head_dim
    layer = 2 * hidden * (shape.heads + shape.kv_heads) * head_dim + 2 * hidden
    layer += (shape.experts or 1) * 3 * hidden * shape.ffn
    layer += (shape.experts or 0) * hidden  # the router has a row for each expert
    if family == "qwen2":
        layer += biases
    if family == "qwen3":
        layer += 2 * head_dim  # a norm each for queries and keys
    if family in ("llama", "qwen3") and config.flag("attention_bias", False):
        layer += biases + hidden
    if family == "llama" and config.flag("mlp_bias", False):
        layer += 2 * shape.ffn + hidden
    return layer


def _fused_layer(shape: Checkpoint, config: _Config) -> tuple[int, int]:
    """Returns the parameters of a layer with biases, two norms and a fused QKV projection, and those of the rest."""
    family, hidden, ffn = shape.model_type, shape.hidden, shape.ffn
    layer, rest = 4 * hidden * (hidden + 1) + hidden * (ffn + 1) + ffn * (hidden + 1) + 4 * hidden, 2 * hidden
    if family == "bloom":
        rest += 2 * hidden  # a norm of the embeddings
    elif family == "gpt_bigcode":
        layer -= 2 * (shape.heads - shape.kv_heads) * shape.head_dim * (hidden + 1)
    elif family == "gptj":
        layer -= 6 * hidden  # one norm, and no biases in the attention
        rest += shape.vocab  # the head has a bias, tied or not
    elif family == "gpt_neox" and not config.flag("attention_bias", True):
        layer -= 4 * hidden
    return layer, rest


def _encoder_parameters(shape: Checkpoint, config: _Config) -> int:
    """Returns the parameters of transformers' model without a head, with its pooler if it has one."""
    family, hidden, ffn = shape.model_type, shape.hidden, shape.ffn
    if family == "modernbert":
        layer = 4 * hidden * hidden + 3 * hidden * ffn + 2 * hidden  # gated; no biases
        return shape.vocab * hidden + shape.layers * layer + hidden  # the first layer has one norm, the end another
    layer = 4 * hidden * (hidden + 1) + hidden * (ffn + 1) + ffn * (hidden + 1) + 4 * hidden
    count = shape.vocab * hidden + 2 * hidden + shape.layers * layer
    if family == "deberta-v2":
        return count + _deberta_extras(shape, config)
    count += (shape.max_positions or 0) * hidden
    if family != "distilbert":
        count += hidden * (hidden + 1)  # the pooler
    if family == "mpnet":
        return count + (config.optional("relative_attention_num_buckets") or 32) * shape.heads
    return count if family in encoders.NO_TYPES else count + config.number_or("type_vocab_size", 2) * hidden


def _deberta_extras(shape: Checkpoint, config: _Config) -> int:
    """Returns the parameters of positions, types and relative positions."""
    hidden, count = shape.hidden, config.number_or("type_vocab_size", 0) * shape.hidden
    if config.flag("position_biased_input", True):
        count += (shape.max_positions or 0) * hidden
    if "layer_norm" in config.words("norm_rel_ebd"):
        count += 2 * hidden
    if config.flag("relative_attention", False):
        buckets = config.signed("position_buckets", -1)
        most = config.signed("max_relative_positions", -1)
        span = buckets if buckets > 0 else most if most > 0 else shape.max_positions or 0
        count += 2 * span * hidden
        if not config.flag("share_att_key", False):
            kinds = config.words("pos_att_type")
            count += shape.layers * len({"c2p", "p2c"}.intersection(kinds)) * hidden * (hidden + 1)
    if kernel := config.number_or("conv_kernel_size", 0):
        count += kernel * hidden * hidden + hidden + 2 * hidden
    return count


def _opt_layer(shape: Checkpoint, config: _Config) -> tuple[int, int]:
    """Returns the parameters of a layer, and those of the rest."""
    hidden, ffn = shape.hidden, shape.ffn
    norm = 2 * hidden if config.flag("layer_norm_elementwise_affine", True) else 0
    layer = 4 * hidden * hidden + 2 * hidden * ffn + 2 * norm
    if config.flag("enable_bias", True):
        layer += 5 * hidden + ffn
    rest = 2 * (shape.embedding_dim or 0) * hidden
    if config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False):
        rest += norm
    return layer, rest
