"""Through the whole running system, token for token what transformers' ``generate`` gives each request alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from tests.checkpoints import EOS_ID, FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.fleet import LiveFleet

SPEC = """\
version: 1
name: exact
hosts: {emulate: inf2.48xlarge}
defaults: {engine: cpu, dtype: fp32, max_len: 128, max_batch: 4}
models:
"""
pytestmark = pytest.mark.soak

FEW = {"llama": 2, "gpt2": 2, "bloom": 1}  # configuration -> tp_degree
ALL = dict.fromkeys(FAMILIES, 2)  # all 24 cores
ALL_READY_S = 180.0  # twelve processes import torch at once
REQUESTS = 16


def requests(seed: int) -> list[tuple[list[int], int]]:
    """Ragged prompts of token ids, each with its number of tokens to generate."""
    rng = random.Random(seed)
    return [
        ([rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(1, 60))], rng.randrange(8, 48))
        for _ in range(REQUESTS)
    ]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    with serving(tmp_path_factory.mktemp("exact"), FEW) as live:
        yield live.wait_ready()


@contextmanager
def serving(folder: Path, degrees: dict[str, int]) -> Iterator[LiveFleet]:
    """A fleet of a model for each configuration, named like it; each with an EOS that does occur."""
    for family in degrees:
        make_checkpoint(folder / family, family, eos=eos_of(folder, family))
    spec = folder / "spec.yaml"
    models = [f"  {family}: {{source: ./{family}, tp_degree: {tp}}}\n" for family, tp in degrees.items()]
    spec.write_text(SPEC + "".join(models))
    with LiveFleet(spec) as live:
        yield live


def eos_of(folder: Path, family: str) -> int:
    """An id that the model does produce for one of the requests, so that some answers end early."""
    probe = folder / f"{family}-probe"
    make_checkpoint(probe, family)
    prompt, count = requests(1)[0]
    return generate(load(probe), prompt, count, None)[4]


def load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(path)).eval()


def generate(model: Any, prompt: list[int], count: int, eos: int | None, **how: Any) -> list[int]:
    import torch
    from transformers import GenerationConfig

    model.generation_config.eos_token_id = eos  # generate inherits what is None in the call
    config = GenerationConfig(**({"do_sample": False} | how), max_new_tokens=count, eos_token_id=eos, pad_token_id=0)
    ids = torch.tensor([prompt])
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


def ask_all(fleet: LiveFleet, model: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """Send all at once; the answers' first choices."""
    answers: list[Any] = [None] * len(bodies)

    def ask(i: int) -> None:
        body = {"model": model, "return_token_ids": True, **bodies[i]}
        response = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=120)
        answers[i] = response.json()["choices"][0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return answers


@pytest.mark.parametrize("family", FEW)
def test_greedy_output_equals_generate_for_each_request_alone(fleet: LiveFleet, family: str) -> None:
    """16 ragged requests at once through 4 slots; some end with an EOS token."""
    prompts = requests(1)
    model = load(fleet.spec.parent / family)

    answers = ask_all(fleet, family, greedy(prompts))

    check_greedy(answers, prompts, model)


@pytest.mark.timeout(600)
def test_one_fleet_of_every_configuration_equals_generate(tmp_path: Path) -> None:
    """Twelve models on one emulated host, 16 concurrent requests each: the output equals that of each request alone."""
    prompts = requests(1)
    with serving(tmp_path, ALL) as live:
        live.wait_ready(ALL_READY_S)
        with ThreadPoolExecutor(len(ALL)) as clients:
            answers = list(clients.map(lambda family: ask_all(live, family, greedy(prompts)), ALL))

    for family, answer in zip(ALL, answers, strict=True):
        check_greedy(answer, prompts, load(tmp_path / family))


def greedy(prompts: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    return [{"prompt": ids, "max_tokens": count, "temperature": 0} for ids, count in prompts]


def check_greedy(answers: list[Any], prompts: list[tuple[list[int], int]], model: Any) -> None:
    """The answers are generate's, and so are the reasons for their ends."""
    eos = model.generation_config.eos_token_id
    assert eos != EOS_ID
    expected = [generate(model, ids, count, eos) for ids, count in prompts]
    assert [answer["token_ids"] for answer in answers] == expected
    reasons = ["stop" if ids[-1] == eos else "length" for ids in expected]
    assert [answer["finish_reason"] for answer in answers] == reasons
    assert "stop" in reasons


def test_ignore_eos_continues_to_max_tokens(fleet: LiveFleet) -> None:
    """With `ignore_eos` every answer has exactly `max_tokens` tokens, and still equals generate."""
    prompts = requests(1)[:4]
    model = load(fleet.spec.parent / "llama")

    bodies = [{"prompt": ids, "max_tokens": count, "temperature": 0, "ignore_eos": True} for ids, count in prompts]
    answers = ask_all(fleet, "llama", bodies)

    assert [answer["token_ids"] for answer in answers] == [generate(model, ids, count, None) for ids, count in prompts]


def test_a_seed_gives_the_sample_of_generate(fleet: LiveFleet) -> None:
    """The same seed gives the same tokens in any batch; they are those of transformers."""
    import torch

    prompts = requests(2)[:8]
    model = load(fleet.spec.parent / "llama")
    expected = []
    for seed, (ids, count) in enumerate(prompts):
        torch.manual_seed(seed)
        expected.append(generate(model, ids, count, None, do_sample=True, temperature=0.8, top_p=0.9, top_k=0))

    how = {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True}
    bodies = [{"prompt": ids, "max_tokens": count, "seed": seed, **how} for seed, (ids, count) in enumerate(prompts)]
    answers = ask_all(fleet, "llama", bodies)

    assert [answer["token_ids"] for answer in answers] == expected


def test_text_in_is_text_out(fleet: LiveFleet) -> None:
    """A text prompt is tokenized with its special tokens, and the text is the decoded continuation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(fleet.spec.parent / "gpt2"))
    prompt = "A slot is one row of the batch, Zwölf Boxkämpfer 🙂"
    ids = tokenizer(prompt)["input_ids"]
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0)

    answer = client.completions.create(
        model="gpt2", prompt=prompt, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
    )
    stream = client.completions.create(
        model="gpt2", prompt=prompt, max_tokens=20, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )

    new = generate(load(fleet.spec.parent / "gpt2"), ids, 20, None)
    whole = tokenizer.decode(ids + new, skip_special_tokens=True)
    expected = whole.removeprefix(tokenizer.decode(ids, skip_special_tokens=True))  # type: ignore[arg-type, union-attr]
    assert answer.choices[0].text == expected
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


def test_a_prompt_over_the_models_length_is_rejected_with_the_numbers(fleet: LiveFleet) -> None:
    """The running system rejects it before the queue, and continues."""
    long = httpx.post(f"{fleet.url}/v1/completions", json={"model": "bloom", "prompt": [9] * 129})

    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "128" in long.json()["error"]["message"]
    assert "129" in long.json()["error"]["message"]
