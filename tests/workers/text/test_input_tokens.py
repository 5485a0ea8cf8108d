"""Inputs of encoders are tokenized as transformers and sentence-transformers tokenize them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.encoders import TYPED, save_encoder, texts
from workers.engines.encoder_layout import read_layout
from workers.messages.encoder_protocol import EncodeInput
from workers.text.input_tokens import InputTexts
from workers.text.tokenizer import ByteTokenizer, HubTokenizer, TooManyTokens
from workers.text.tokenizer_pool import TokenizerPool, load_apart

MOST = 256
PAIRS = list(zip(texts(7, seed=1), texts(7, seed=2), strict=True))


@pytest.mark.parametrize("family", ["bert", "roberta", "deberta-v2", "qwen3"])
@pytest.mark.parametrize("cut", [None, 5, 12])
def test_texts_and_pairs_have_the_tokens_of_transformers(family: str, cut: int | None, tmp_path: Path) -> None:
    """With its way to cut pairs, and token types only where the tokenizer gives them to the model."""
    hub = save_encoder(tmp_path, family)
    own = HubTokenizer(tmp_path)
    options: dict[str, Any] = {} if cut is None else {"truncation": "longest_first", "max_length": cut}

    singles = own.encode_inputs(InputTexts(texts(7), MOST, cut=cut))
    pairs = own.encode_inputs(InputTexts(PAIRS, MOST, cut=cut))

    assert [input.ids for input in singles] == [hub(text, **options)["input_ids"] for text in texts(7)]
    expected = [hub(*pair, **options) for pair in PAIRS]
    assert [input.ids for input in pairs] == [one["input_ids"] for one in expected]
    typed = [one["token_type_ids"].index(1) if family in TYPED else 0 for one in expected]
    assert [input.second for input in pairs] == typed
    assert own.encode("w1 " * 50) == hub("w1 " * 50)["input_ids"]  # nothing of the cut remains


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_second_texts_of_pairs_are_cut_after_their_own_tokens(family: str, tmp_path: Path) -> None:
    """The first texts and shorter ones stay whole; what is cut may then be within the limit."""
    hub, own = save_encoder(tmp_path, family), HubTokenizer(tmp_path)
    pairs = [("w1 " * 9, "w2 w3 w4 w5 " * 100), ("w1", "w2")]
    second = hub(pairs[0][1], add_special_tokens=False)["input_ids"]

    inputs = own.encode_inputs(InputTexts(pairs, MOST, cut_second=len(second) // 20))

    kept = hub.decode(second[: len(second) // 20])
    assert [input.ids for input in inputs] == [hub(pairs[0][0], kept)["input_ids"], hub(*pairs[1])["input_ids"]]


def test_an_input_that_is_too_long_is_named_by_its_place_and_cut_only_on_request(tmp_path: Path) -> None:
    """The limit is the lowest of the model's, the folder's and the request's; the folder's replaces the tokenizer's."""
    save_encoder(tmp_path, "bert")
    tokenizer = load_apart(TokenizerPool(), "cpu", str(tmp_path))
    given: list[Any] = ["w1", [1] * 9, "w2 " * 8]

    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode_inputs(InputTexts(given, MOST, max_length=8))
    assert (caught.value.place, caught.value.count, caught.value.limit, caught.value.exact) == (1, 9, 8, True)
    cut = tokenizer.encode_inputs(InputTexts(given, MOST, max_length=8, cut=0))
    assert [len(input.ids) for input in cut] == [3, 8, 8]
    assert [len(input.ids) for input in tokenizer.encode_inputs(InputTexts(given, MOST, cut=4))] == [3, 4, 4]
    with pytest.raises(ValueError, match="2 tokens leave no room for text beside 2 special tokens"):
        tokenizer.encode_inputs(InputTexts(given, MOST, cut=2))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((tmp_path / "tokenizer_config.json").read_text()), "model_max_length": 6})
    )
    own = HubTokenizer(tmp_path)
    assert len(own.encode_inputs(InputTexts(["w2 " * 8], MOST, cut=0))[0].ids) == 6
    assert len(own.encode_inputs(InputTexts(["w2 " * 8], MOST, max_length=8, cut=0))[0].ids) == 8


def test_a_long_text_is_rejected_without_being_tokenized(tmp_path: Path) -> None:
    save_encoder(tmp_path, "qwen3")  # its vocabulary has a longest token
    own = HubTokenizer(tmp_path)
    own._fast = None  # to use it would fail
    with pytest.raises(TooManyTokens) as caught:
        own.encode_inputs(InputTexts(["w", "word " * 50_000], MOST))
    assert (caught.value.place, caught.value.limit, caught.value.exact) == (1, MOST, False)


@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_prompt_is_part_of_each_text_and_counted_where_it_is_not_pooled(
    family: str, pools: bool, tmp_path: Path
) -> None:
    hub = save_encoder(tmp_path, family)
    inputs = HubTokenizer(tmp_path).encode_inputs(InputTexts(["w4", [7, 8]], MOST, prompt="w1 w2 ", pools_prompt=pools))

    prompt = hub("w1 w2 ")["input_ids"]
    expected = len(prompt) - (prompt[-1] in hub.all_special_ids)
    assert [input.ids for input in inputs] == [hub("w1 w2 w4")["input_ids"], [7, 8]]
    assert [input.prompt for input in inputs] == [0 if pools else expected, 0]


def test_a_folder_that_lower_cases_does_so_but_keeps_special_tokens(tmp_path: Path) -> None:
    """As sentence-transformers does with `do_lower_case`."""
    from sentence_transformers.base.modules import Transformer

    save_encoder(tmp_path, "bert")
    settings = {"max_seq_length": 7, "do_lower_case": True}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    layout = read_layout(tmp_path, "embedding")
    assert (layout.max_length, layout.lower_case) == (7, True)
    given = ["W1 w2 [SEP] W3", " W4 w5 w6 w7 w8 w9"]

    tokenizer = load_apart(TokenizerPool(), "cpu", str(tmp_path), lower_case=True)
    inputs = tokenizer.encode_inputs(InputTexts(given, MOST, max_length=layout.max_length, cut=0))

    expected = Transformer.load(str(tmp_path)).preprocess(given)["input_ids"].tolist()
    assert [input.ids for input in inputs] == [[id for id in row if id] for row in expected]
    assert HubTokenizer(tmp_path).encode("W1") != tokenizer.encode("W1") == tokenizer.encode("w1")


def test_bytes_are_tokens_of_the_echo_engine() -> None:
    encode = ByteTokenizer().encode_inputs
    assert encode(InputTexts(["ab", [1], "c"], 9, prompt="p", pools_prompt=False)) == [
        EncodeInput([*b"pab"], prompt=1),
        EncodeInput([1]),
        EncodeInput([*b"pc"], prompt=1),
    ]
    assert encode(InputTexts([("ab", "cd")], 3, cut=0)) == [EncodeInput([*b"abc"], second=2)]
    with pytest.raises(TooManyTokens):
        encode(InputTexts(["ab"], 1))
