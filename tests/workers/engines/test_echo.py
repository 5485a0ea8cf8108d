from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.echo.engine import EOS_ID, EchoEngine, echo_tokens

prompts = st.lists(st.integers(0, 256), min_size=1, max_size=40)


def loaded(slots: int = 4, max_len: int = 128) -> EchoEngine:
    engine = EchoEngine(slots, max_len)
    engine.load()
    return engine


@given(prompts, st.integers(1, 20))
def test_the_engine_answers_what_the_rule_says(prompt: list[int], n: int) -> None:
    """A client can compute the whole answer from the prompt alone."""
    engine = loaded()
    tokens = engine.prefill([2], [prompt])
    while len(tokens) < n:
        tokens += engine.decode([2], [tokens[-1]], [len(prompt) + len(tokens) - 1])
    assert tokens == echo_tokens(prompt, n)


@given(prompts, st.integers(0, 30))
def test_an_answer_is_printable_and_without_eos(prompt: list[int], n: int) -> None:
    """It can be read in a terminal, and ends by its length only."""
    tokens = echo_tokens(prompt, n)
    assert len(tokens) == n
    assert EOS_ID not in tokens
    assert bytes(tokens).decode("ascii").isprintable()


@given(prompts, st.data())
def test_a_changed_token_changes_the_answer(prompt: list[int], data: st.DataObject) -> None:
    """Corruption of one token of the prompt shows within eight tokens of the answer."""
    place = data.draw(st.integers(0, len(prompt) - 1))
    other = data.draw(st.integers(0, 256).filter(lambda token: token != prompt[place]))
    changed = [*prompt[:place], other, *prompt[place + 1 :]]
    assert echo_tokens(prompt, 8) != echo_tokens(changed, 8)


def two_live() -> tuple[EchoEngine, list[int]]:
    engine = loaded()
    return engine, engine.prefill([0, 1], [[1, 2], [3, 4, 5]])


BROKEN_RULES: dict[str, tuple[str, Callable[[EchoEngine, list[int]], object]]] = {
    "unsorted slots": ("not sorted", lambda e, t: e.decode([1, 0], [t[1], t[0]], [3, 2])),
    "a slot twice": ("not sorted", lambda e, t: e.decode([0, 0], [t[0], t[0]], [2, 2])),
    "a wrong position": ("position 3 is wrong", lambda e, t: e.decode([0, 1], t, [3, 3])),
    "another slot's token": ("expected", lambda e, t: e.decode([0, 1], [t[1], t[0] + 1], [2, 3])),
    "a free slot": ("is empty", lambda e, t: e.decode([0, 1, 2], [*t, 0], [2, 3, 0])),
    "no such slot": ("does not exist", lambda e, t: e.decode([4], [0], [0])),
    "no rows": ("decode of 0 slots", lambda e, t: e.decode([], [], [])),
    "two prompts for one slot": ("distinct", lambda e, t: e.prefill([2, 2], [[1], [2]])),
    "an empty prompt": ("empty", lambda e, t: e.prefill([2], [[]])),
    "a foreign id": ("vocabulary", lambda e, t: e.prefill([2], [[257]])),
    "too long a prompt": ("129 tokens", lambda e, t: e.prefill([2], [[1] * 129])),
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_a_broken_rule_raises(rule: str) -> None:
    """What would make a Neuron engine answer nonsense is an error here, which says what was wrong."""
    message, call = BROKEN_RULES[rule]
    with pytest.raises(ValueError, match=message):
        call(*two_live())


def test_a_live_slot_left_out_of_a_decode_is_found() -> None:
    """As on Neuron, the decode overwrites it, and listing it again is an error."""
    engine, tokens = two_live()
    (second,) = engine.decode([1], tokens[1:], [3])
    with pytest.raises(ValueError, match="omitted from a decode"):
        engine.decode([0, 1], [tokens[0], second], [2, 4])


def test_a_full_slot_takes_no_more_tokens() -> None:
    """A position beyond max_len is an error, not a wrap-around."""
    engine = loaded(max_len=3)
    tokens = engine.prefill([0], [[7, 7, 7]])
    with pytest.raises(ValueError, match="full"):
        engine.decode([0], tokens, [3])


def test_the_spec_is_there_once_loaded() -> None:
    """Before ``load`` there is nothing to know."""
    with pytest.raises(RuntimeError, match="not loaded"):
        _ = EchoEngine(1, 8).spec


def test_the_echo_path_imports_no_model_library() -> None:
    """An echo replica starts without torch, transformers, tokenizers or numpy."""
    code = """
import sys
from workers.batching.batcher import Batcher
from workers.engines.echo.engine import EchoEngine
from workers.messages.requests import GenerateRequest
from workers.text.tokenizer import TemplateInput, load_tokenizer
engine = EchoEngine(2, 64)
engine.load()
tokenizer = load_tokenizer("echo", None)
batcher = Batcher(engine, tokenizer, lambda events: None)
prompt = tokenizer.apply_chat_template(TemplateInput([{"role": "user", "content": "hi"}]))
batcher.submit(GenerateRequest(id="a", prompt_ids=prompt, max_tokens=4, temperature=0.7, stop=["x"]))
while batcher.step():
    pass
print(sorted({"torch", "transformers", "tokenizers", "numpy", "ray"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
