from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements.facts.checkpoints import FAMILIES, Checkpoint, CheckpointError, ParameterCounts
from tests.searches import search

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
BLOOM: dict[str, Any] = {
    "model_type": "bloom",
    "hidden_size": 1024,
    "n_head": 16,
    "n_layer": 24,
    "vocab_size": 250880,
    "seq_length": 2048,
}
MISTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mistral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
MIXTRAL: dict[str, Any] = {**MISTRAL, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
GPTJ: dict[str, Any] = {
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "rotary_dim": 64,
    "vocab_size": 50400,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "max_position_embeddings": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 50272,
    "word_embed_proj_dim": 512,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 8_030_261_248),
        (GPT2, 124_439_808),
        (BLOOM, 559_214_592),
        (MISTRAL, 7_241_732_096),
        (MIXTRAL, 46_702_792_704),
        (QWEN3, 596_049_920),
        (GPTJ, 6_050_882_784),
        (OPT, 331_196_416),
    ],
    ids=["llama-3.1-8b", "gpt2", "bloom-560m", "mistral-7b", "mixtral-8x7b", "qwen3-0.6b", "gpt-j-6b", "opt-350m"],
)
def test_parameters_of_known_models(config: dict[str, Any], parameters: int) -> None:
    """The counts that the model cards give."""
    assert Checkpoint.from_config(config).parameters == parameters


SMALL_LLAMA = {
    **LLAMA,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
SMALL_GPT2 = {**GPT2, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 97}
SMALL_BLOOM = {**BLOOM, "hidden_size": 48, "n_head": 4, "n_layer": 3, "vocab_size": 97}
ROTARY = {key: value for key, value in SMALL_LLAMA.items() if key != "model_type"}
SMALL_MISTRAL = {**ROTARY, "model_type": "mistral"}
SMALL_MIXTRAL = {**ROTARY, "model_type": "mixtral", "num_local_experts": 4}
SMALL_QWEN2 = {**ROTARY, "model_type": "qwen2"}
SMALL_QWEN3 = {**ROTARY, "model_type": "qwen3"}
SMALL_BIGCODE = {**SMALL_GPT2, "model_type": "gpt_bigcode"}
SMALL_GPTJ = {**SMALL_GPT2, "model_type": "gptj", "rotary_dim": 6}
SMALL_NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}
SMALL_OPT = {
    **{key: value for key, value in SMALL_NEOX.items() if key != "intermediate_size"},
    "model_type": "opt",
    "ffn_dim": 100,
}


VARIANTS: list[dict[str, Any]] = [
    SMALL_MISTRAL,
    {**SMALL_MISTRAL, "head_dim": 16, "tie_word_embeddings": True},
    {**SMALL_MISTRAL, "head_dim": None, "sliding_window": 24},
    SMALL_MIXTRAL,
    {**SMALL_MIXTRAL, "num_local_experts": 3, "head_dim": None},
    SMALL_QWEN2,
    {**SMALL_QWEN2, "tie_word_embeddings": True, "num_key_value_heads": None},
    SMALL_QWEN3,
    {**SMALL_QWEN3, "head_dim": 10, "attention_bias": True, "tie_word_embeddings": True},
    SMALL_BIGCODE,
    {**SMALL_BIGCODE, "multi_query": False, "n_inner": 100},
    {**SMALL_BIGCODE, "tie_word_embeddings": False},
    SMALL_GPTJ,
    {**SMALL_GPTJ, "n_inner": 100},
    {**SMALL_GPTJ, "tie_word_embeddings": True},
    SMALL_NEOX,
    {**SMALL_NEOX, "attention_bias": False},
    {**SMALL_NEOX, "tie_word_embeddings": True},
    SMALL_OPT,
    {**SMALL_OPT, "tie_word_embeddings": False},
    {**SMALL_OPT, "word_embed_proj_dim": 20, "do_layer_norm_before": False},
    {**SMALL_OPT, "word_embed_proj_dim": 20, "tie_word_embeddings": False, "_remove_final_layer_norm": True},
    {**SMALL_OPT, "enable_bias": False},
    {**SMALL_OPT, "layer_norm_elementwise_affine": False},
    SMALL_LLAMA,
    {**SMALL_LLAMA, "tie_word_embeddings": True},
    {**SMALL_LLAMA, "attention_bias": True, "mlp_bias": True},
    {**SMALL_LLAMA, "head_dim": 16, "num_key_value_heads": None},
    SMALL_GPT2,
    {**SMALL_GPT2, "n_inner": 100},
    {**SMALL_GPT2, "tie_word_embeddings": False},
    SMALL_BLOOM,
    {**SMALL_BLOOM, "tie_word_embeddings": False},
]


@pytest.mark.parametrize("config", VARIANTS)
def test_parameters_are_those_that_transformers_builds(config: dict[str, Any]) -> None:
    """The formula equals the sum over the parameters of the real model class, built without memory."""
    assert Checkpoint.from_config(config).parameters == sum(weight.numel() for weight in built(config).parameters())


@pytest.mark.parametrize("config", VARIANTS)
def test_groups_are_those_that_transformers_builds(config: dict[str, Any]) -> None:
    """Each group equals the sum over the parameters of that name, and all of them are the whole."""
    shape = Checkpoint.from_config(config)
    assert (shape.groups, shape.groups.total) == (groups(built(config), shape), shape.parameters)


@pytest.mark.slow
@search(50)
@given(data=st.data())
@pytest.mark.parametrize("family", FAMILIES)
def test_any_small_config_is_counted_as_transformers_builds_it(family: str, data: st.DataObject) -> None:
    """Parameters and groups, over random shapes, vocabularies, ties, biases and null keys of each family."""
    config = data.draw(CONFIGS[family])
    shape, model = Checkpoint.from_config(config), built(config)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.groups == groups(model, shape)


def built(config: dict[str, Any]) -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = transformers.AutoConfig.for_model(config["model_type"], **options)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config)
    model.tie_weights()
    return model


def groups(model: Any, shape: Checkpoint) -> ParameterCounts:
    """The model's parameters by name. A matrix that fuses query, key and value is divided by the shape's heads."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    sizes = dict.fromkeys(("embedding", "head", "positions", "attention", "kv", "feed_forward", "small"), 0)
    for name, weight in model.named_parameters():
        size, matrix = weight.numel(), weight.dim() > 1
        if weight is embedding:
            sizes["embedding"] += size
        elif weight is head:
            sizes["head"] += size
        elif "wpe" in name or "embed_positions" in name:
            sizes["positions"] += size
        elif not matrix or "project_" in name or "mlp.gate.weight" in name or "block_sparse_moe.gate.weight" in name:
            sizes["small"] += size
        elif "k_proj" in name or "v_proj" in name:
            sizes["kv"] += size
        elif "query_key_value" in name or "c_attn" in name:
            kv = 2 * shape.kv_heads * size // (shape.heads + 2 * shape.kv_heads)
            sizes["kv"] += kv
            sizes["attention"] += size - kv
        elif "attn" in name or "attention" in name:
            sizes["attention"] += size
        else:
            sizes["feed_forward"] += size
    return ParameterCounts(**sizes)


_FLAG = st.booleans()


@st.composite
def _rotary_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Null only where the family's class in transformers 5 accepts it."""
    absent = draw(st.integers(0, 9)) == 0
    heads = 32 if absent else draw(st.integers(1, 6))  # the defaults of absent KV heads, 8 and 32, divide 32
    head_dim = 2 * draw(st.integers(1, 5))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "intermediate_size": draw(st.integers(1, 60)),
        "vocab_size": draw(st.integers(4, 300)),
        "max_position_embeddings": draw(st.integers(1, 64)),
        "tie_word_embeddings": draw(_FLAG),
        "attention_bias": draw(_FLAG),
        "mlp_bias": draw(_FLAG),
    }
    if not absent:
        divisors = [kv for kv in range(1, heads + 1) if heads % kv == 0]
        null = [None] if family in ("llama", "qwen2", "qwen3") else []
        config["num_key_value_heads"] = draw(st.sampled_from([*null, *divisors]))
    match draw(st.integers(0, 2)):
        case 0 if family in ("llama", "mistral", "mixtral"):
            config["head_dim"] = None
        case 1:
            config["head_dim"] = 2 * draw(st.integers(1, 8))
            config["hidden_size"] = heads * draw(st.integers(1, 30))  # llama's class wants a multiple
    if family == "mixtral":
        config["num_local_experts"] = draw(st.integers(2, 5))
    return config


@st.composite
def _fused_configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    heads, head_dim = draw(st.integers(1, 6)), 4 * draw(st.integers(1, 4))
    hidden, layers, inner = heads * head_dim, draw(st.integers(1, 3)), draw(st.integers(1, 60))
    tied, vocab = (
        draw(st.sampled_from([{}, {"tie_word_embeddings": False}, {"tie_word_embeddings": True}])),
        {"vocab_size": draw(st.integers(4, 300))},
    )
    short = {"n_embd": hidden, "n_head": heads, "n_layer": layers, "n_positions": draw(st.integers(1, 64))}
    long = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    width = draw(st.sampled_from([{}, {"n_inner": None}, {"n_inner": inner}]))
    positions = {"max_position_embeddings": draw(st.integers(1, 64))}
    own: dict[str, Any] = {
        "gpt2": {**short, **width},  # type: ignore[dict-item]
        "gpt_bigcode": {**short, **width, "multi_query": draw(_FLAG)},  # type: ignore[dict-item]
        "gptj": {**short, **width, "rotary_dim": draw(st.sampled_from([2, 4]))},  # type: ignore[dict-item]
        "bloom": {"hidden_size": hidden, "n_head": heads, "n_layer": layers},
        "gpt_neox": {**long, **positions, "intermediate_size": inner, "attention_bias": draw(_FLAG)},
        "opt": {
            **long,
            **positions,
            "ffn_dim": inner,
            "word_embed_proj_dim": draw(st.sampled_from([hidden, draw(st.integers(1, 60))])),
            "do_layer_norm_before": draw(_FLAG),
            "_remove_final_layer_norm": draw(_FLAG),
            "enable_bias": draw(_FLAG),
            "layer_norm_elementwise_affine": draw(_FLAG),
        },
    }
    return {"model_type": family, **tied, **vocab, **own[family]}


CONFIGS = {
    family: _rotary_configs(family)
    if family in ("llama", "mistral", "mixtral", "qwen2", "qwen3")
    else _fused_configs(family)
    for family in FAMILIES
}


@pytest.mark.parametrize(
    ("named", "stored"),
    [
        ({}, None),
        ({"torch_dtype": "bfloat16"}, 2),
        ({"torch_dtype": "float32"}, 4),
        ({"dtype": "float16"}, 2),
        ({"dtype": "torch.float32"}, 4),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "float8_e4m3fn"}, None),
        ({"torch_dtype": 16}, None),
    ],
)
def test_the_files_dtype_is_read_if_it_is_known(named: dict[str, Any], stored: int | None) -> None:
    """Under its name in transformers 4 or 5; another value is not an error, since only an estimate needs it."""
    assert Checkpoint.from_config({**LLAMA, **named}).stored_bytes == stored


EACH_FAMILY = [
    SMALL_BLOOM,
    SMALL_GPT2,
    SMALL_BIGCODE,
    {**SMALL_BIGCODE, "multi_query": False},
    SMALL_NEOX,
    SMALL_GPTJ,
    SMALL_LLAMA,
    SMALL_MISTRAL,
    {key: value for key, value in SMALL_MISTRAL.items() if key != "num_key_value_heads"}
    | {"hidden_size": 64, "num_attention_heads": 16},
    SMALL_MIXTRAL,
    SMALL_OPT,
    {**SMALL_OPT, "word_embed_proj_dim": 20},
    SMALL_QWEN2,
    SMALL_QWEN3,
    {**SMALL_QWEN3, "head_dim": 10},
]


@pytest.mark.parametrize("config", EACH_FAMILY)
def test_the_shape_is_that_of_transformers(config: dict[str, Any]) -> None:
    """Layers, widths, vocabulary and tying, and the keys that one token leaves in the cache of one layer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model, shape = built(config).to(torch.bfloat16), Checkpoint.from_config(config)
    cache = transformers.DynamicCache(config=model.config)
    with torch.device("meta"):
        model(input_ids=torch.zeros((1, 1), dtype=torch.long), past_key_values=cache, use_cache=True)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    keys = cache.layers[0].keys
    stacked = [weight.shape[0] for name, weight in model.named_parameters() if name.endswith("0.mlp.gate.weight")]

    assert (shape.model_type, shape.heads, shape.hidden) == (
        model.config.model_type,
        model.config.num_attention_heads,
        model.config.hidden_size,
    )
    assert (shape.layers, shape.kv_heads, shape.head_dim) == (len(cache.layers), keys.shape[1], keys.shape[3])
    assert (shape.vocab, shape.embedding_dim or shape.hidden) == tuple(embedding.shape)
    assert shape.tied_embeddings is (embedding is head)
    assert [shape.experts] == (stacked or [None])
    assert shape.max_positions == getattr(model.config, "max_position_embeddings", None)
    assert any(shape.ffn in weight.shape for weight in model.parameters())


def test_every_family_is_among_the_shapes_above() -> None:
    """A new family is compared with transformers."""
    assert {config["model_type"] for config in EACH_FAMILY} == set(FAMILIES)


def test_multi_query_attention_has_one_kv_head() -> None:
    """gpt_bigcode, whose default is multi_query."""
    assert (Checkpoint.from_config(SMALL_BIGCODE).kv_heads, Checkpoint.from_config(SMALL_BIGCODE).heads) == (1, 4)


def test_the_facts_of_a_llama_are_read_from_its_config() -> None:
    """Every field of a grouped-query llama."""
    assert Checkpoint.from_config(LLAMA) == Checkpoint(
        "llama", 32, 8, 32, 4096, 14336, 128, 128256, 131072, False, 8_030_261_248
    )


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 4096}}, 4096),
        ({"rope_parameters": {"rope_type": "longrope"}, "original_max_position_embeddings": 8192}, 8192),
        ({"rope_scaling": {"type": "longrope"}}, 131072),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}, 131072),
    ],
)
def test_positions_of_longrope_end_before_scaling(config: dict[str, Any], positions: int) -> None:
    """transformers scales all rows of a batch by the longest one, and the cpu engine refuses to load longer ones."""
    assert Checkpoint.from_config(LLAMA | config).max_positions == positions


def test_bloom_has_no_limit_of_positions() -> None:
    """Alibi: seq_length is the training length, not a limit."""
    assert Checkpoint.from_config(BLOOM).max_positions is None


def test_older_names_are_read() -> None:
    """bloom's n_embed and num_attention_heads, llama without num_key_value_heads."""
    old = {key: value for key, value in BLOOM.items() if key not in ("hidden_size", "n_head")}
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert (
        Checkpoint.from_config({**old, "n_embed": 1024, "num_attention_heads": 16}),
        Checkpoint.from_config(without).kv_heads,
    ) == (Checkpoint.from_config(BLOOM), 32)


def test_tied_embeddings_count_once() -> None:
    """Embedding and head of gpt2 are one matrix, llama's are two."""
    gpt2, llama = Checkpoint.from_config(GPT2), Checkpoint.from_config(LLAMA)
    tables = [checkpoint.groups.embedding + checkpoint.groups.head for checkpoint in (gpt2, llama)]
    assert tables == [50257 * 768, 2 * 128256 * 4096]


@pytest.mark.parametrize("family", ["phi3", "t5", "", "LLAMA", 7, ["llama"]])
def test_another_family_is_rejected_with_the_supported_ones(family: object) -> None:
    """unknown-family has the given family and the supported ones."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_config({**LLAMA, "model_type": family})
    assert (caught.value.id, f'"{family}"' in caught.value.what, ", ".join(FAMILIES) in caught.value.what) == (
        "unknown-family",
        True,
        True,
    )


@pytest.mark.parametrize(
    "config",
    [
        {},
        {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"},
        {**LLAMA, "num_hidden_layers": "32"},
        {**LLAMA, "num_hidden_layers": 0},
        {**LLAMA, "num_hidden_layers": True},
        {**LLAMA, "hidden_size": 4097},
        {**LLAMA, "num_key_value_heads": 5},
        {**LLAMA, "tie_word_embeddings": "yes"},
        {**LLAMA, "vocab_size": 1 << 60},
        {**GPT2, "n_head": 7},
        {**BLOOM, "n_head": 7},
    ],
)
def test_an_invalid_config_is_malformed(config: dict[str, Any]) -> None:
    """Missing, mistyped and contradictory keys give checkpoint-malformed, never another exception."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_config(config)
    assert caught.value.id == "checkpoint-malformed"


def test_a_config_that_is_not_an_object_is_malformed() -> None:
    """JSON may have a list in place of an object."""
    with pytest.raises(CheckpointError, match="not a JSON object"):
        Checkpoint.from_config(["llama"])  # type: ignore[arg-type]
