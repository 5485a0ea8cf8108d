"""The shapes of encoders, read from config.json, compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements.facts.checkpoints import Checkpoint, CheckpointError
from placements.facts.encoders import EMBEDDING_DECODERS, ENCODERS, KINDS, families
from placements.resources.host_memory import host_memory
from placements.resources.memory import estimate
from placements.spec.schema import ModelSpec
from tests.searches import search

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 6,
    "vocab_size": 30522,
}


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """A small config.json of the family, with or without the keys that change the parameters."""
    heads, layers, ffn = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 50))
    hidden = heads * 2 * draw(st.integers(1, 5))
    config: dict[str, Any] = {
        "model_type": family,
        "vocab_size": draw(st.integers(4, 300)),
        "max_position_embeddings": draw(st.integers(4, 70)),
        "pad_token_id": draw(st.integers(0, 2)),
    }
    if family == "distilbert":
        return config | {"dim": hidden, "n_heads": heads, "n_layers": layers, "hidden_dim": ffn}
    config |= {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    config["intermediate_size"] = ffn
    if family in EMBEDDING_DECODERS:
        return config | {"num_key_value_heads": heads, "tie_word_embeddings": draw(st.booleans())}
    optional: dict[str, st.SearchStrategy[Any]] = {"type_vocab_size": st.integers(1, 3)}
    if family == "mpnet":
        optional = {"relative_attention_num_buckets": st.integers(1, 40)}
    if family == "deberta-v2":
        optional = {
            "type_vocab_size": st.integers(0, 3),
            "position_biased_input": st.booleans(),
            "relative_attention": st.booleans(),
            "position_buckets": st.sampled_from([-1, 16]),
            "max_relative_positions": st.sampled_from([-1, 24]),
            "norm_rel_ebd": st.sampled_from(["none", "layer_norm"]),
            "share_att_key": st.booleans(),
            "pos_att_type": st.sampled_from(["p2c|c2p", ["c2p"], ["p2c", "c2p"], []]),
            "conv_kernel_size": st.sampled_from([0, 3]),
        }
    return config | draw(st.fixed_dictionaries({}, optional=optional))


def built(config: dict[str, Any]) -> Any:
    """The model without a head, without memory."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    options = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(config["model_type"], **options))


@search(10, cost=4)
@given(data=st.data())
@pytest.mark.parametrize("family", families("embedding"))
def test_parameters_are_those_that_transformers_builds(family: str, data: st.DataObject) -> None:
    """Over random shapes and optional keys of each family; the groups add up, and none is negative."""
    config = data.draw(configs(family))
    shape, model = Checkpoint.from_config(config, "embedding"), built(config)

    assert shape.parameters == sum(weight.numel() for weight in model.parameters())
    assert shape.groups.total == shape.parameters
    assert min(vars(shape.groups).values()) >= 0
    assert (shape.layers, shape.heads, shape.vocab) == (
        model.config.num_hidden_layers,
        model.config.num_attention_heads,
        model.config.vocab_size,
    )


@pytest.mark.parametrize(
    ("family", "positions", "padding", "longest"),
    [("bert", 512, 0, 512), ("roberta", 514, 1, 512), ("mpnet", 514, 1, 512), ("modernbert", 8192, 5, 8192)],
)
def test_the_longest_input_leaves_out_positions_before_the_first(
    family: str, positions: int, padding: int, longest: int
) -> None:
    """The positions of roberta and its like begin after the id of the padding."""
    config = {**BERT, "model_type": family, "max_position_embeddings": positions, "pad_token_id": padding}
    assert Checkpoint.from_config(config, "embedding").max_positions == longest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*ENCODERS, *EMBEDDING_DECODERS, "gpt2"])
def test_a_family_is_read_for_its_kinds_only(kind: Any, family: str) -> None:
    """The error names the families of the kind, and the kinds of an encoder that has none."""
    config = {**BERT, "model_type": family, "dim": 8, "n_heads": 2, "n_layers": 1, "hidden_dim": 8, "n_embd": 8}
    legal = {"generate": (*EMBEDDING_DECODERS, "gpt2"), "embedding": (*ENCODERS, *EMBEDDING_DECODERS)}
    config |= {"n_head": 2, "n_layer": 1, "n_positions": 8, "num_key_value_heads": 12}
    if family in legal.get(kind, ENCODERS):
        assert Checkpoint.from_config(config, kind).model_type == family
        return
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.from_config(config, kind)
    assert caught.value.id == "unknown-family"
    assert (f"for kind {kind} (" in caught.value.what) is (kind != "generate")
    assert ("set its kind" in caught.value.hint) is (kind == "generate")


def test_an_encoder_needs_memory_for_its_weights_only() -> None:
    """No KV cache, on a core or on the host."""
    model = ModelSpec(name="e", source="./m", kind="embedding", max_batch=1000)
    shape = Checkpoint.from_config(BERT, "embedding")

    assert estimate(model, shape, "cpu").kv == 0
    assert host_memory(model, shape, "cpu").load == 1.0 + shape.parameters * 4 / 2**30
