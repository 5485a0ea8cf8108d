"""Answers to prompts that begin with what a slot holds equal those to prompts that are read from the beginning."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, VOCAB_SIZE
from tests.tiers import everyday
from tests.workers.batching.test_speculation import config
from tests.workers.engines.test_cpu_engine import MAX_LEN, ROUNDINGS, Reference, Served
from workers.engines.cpu.engine import PREFIX_BLOCK, CpuEngine
from workers.engines.engine_setup import TORCH_DTYPES
from workers.engines.open_engine import open_engine
from workers.messages.requests import FinishReason

Checkpoints = Callable[[str], Path]
SYSTEM = list(range(100, 100 + PREFIX_BLOCK + 3))  # what all conversations begin with


def words(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, VOCAB_SIZE) for _ in range(count)]


Turn = list[tuple[list[int], list[int]]]  # of each conversation, a prompt and its answer


def turns(generate: Callable[[Sequence[int], int], list[int]], talks: int, n: int = 6, count: int = 4) -> list[Turn]:
    """Each turn continues the one before, with its answer and more words."""
    prompts = [SYSTEM + words(3 + 7 * talk, talk) for talk in range(talks)]
    conversation: list[Turn] = []
    for turn in range(count):
        if conversation:
            prompts = [
                p + a + words(1 + (turn + 5 * t) % 11, 10 * turn + t) for t, (p, a) in enumerate(conversation[-1])
            ]
        conversation.append([(prompt, generate(prompt, n)) for prompt in prompts])
    return conversation


@pytest.mark.parametrize("family", everyday(FAMILIES, ("llama", "gpt2", "bloom", "mistral-window")))
def test_conversations_get_the_answers_of_generate(checkpoint: Checkpoints, family: str) -> None:
    """Four conversations of four turns through three slots, two at once, token for token, and much was not read."""
    path = checkpoint(family)
    served = Served(path, slots=3, prefix_cache=True)
    for number, turn in enumerate(turns(Reference(path), 4)):
        for pair in (0, 1), (2, 3):
            for talk in pair:
                served.submit(f"{number}.{talk}", turn[talk][0], 6)
            served.run_out()
            assert [served.ids(f"{number}.{talk}") for talk in pair] == [turn[talk][1] for talk in pair]
    stats = served.batcher.stats
    assert stats.prefix_hits > 0.4 * stats.prefix_queries


@pytest.mark.parametrize("family", ["llama", "bloom", "mistral-window"])
def test_interleaved_conversations_equal_generate(checkpoint: Checkpoints, family: str) -> None:
    """24 requests through 4 slots, one before each step, most begin as earlier ones did, and every fifth leaves."""
    path = checkpoint(family)
    generate, rng = Reference(path), random.Random(7)
    served = Served(path, slots=4, prefix_cache=True)
    requests: list[tuple[list[int], int]] = []
    cancelled: set[int] = set()
    while len(requests) < 24 or served.batcher.stats.live or served.batcher.stats.waiting:
        if len(requests) < 24:
            begun = rng.choice([SYSTEM, *([*prompt, *served.ids(str(n))] for n, (prompt, _) in enumerate(requests))])
            prompt = [*begun[: rng.randrange(60, 90)], *words(rng.randrange(1, 25), len(requests))]
            requests.append((prompt, rng.randrange(1, 14)))
            served.submit(str(len(requests) - 1), *requests[-1])
        served.batcher.step()
        for number in range(0, len(requests), 5):
            if number not in cancelled and 1 <= len(served.ids(str(number))) < requests[number][1]:
                served.batcher.cancel(str(number))
                cancelled.add(number)
    for number, (prompt, n) in enumerate(requests):
        answer = served.ids(str(number))
        assert answer == generate(prompt, n)[: len(answer)]
        assert len(answer) == n or number in cancelled
    assert cancelled
    assert served.batcher.stats.prefix_hits > 0.4 * served.batcher.stats.prefix_queries


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_the_rest_of_a_prompt_is_prefilled_in_chunks(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """``prefill_chunk`` holds for the rest of a prompt too: token for token, and never more of them together."""
    from transformers import LlamaModel

    path = checkpoint("llama")
    served = Served(path, slots=4, prefix_cache=True, prefill_chunk=chunk)
    conversations = turns(Reference(path), 4, count=2)
    forward, widths = LlamaModel.forward, set()

    def record_width(self: Any, *, input_ids: Any, **arguments: Any) -> Any:
        widths.add(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **arguments)

    monkeypatch.setattr(LlamaModel, "forward", record_width)
    for number, turn in enumerate(conversations):
        for talk, (prompt, _) in enumerate(turn):
            served.submit(f"{number}.{talk}", prompt, 6)
        served.run_out()
        assert [served.ids(f"{number}.{talk}") for talk in range(4)] == [answer for _, answer in turn]
    assert served.batcher.stats.prefix_hits > 0
    assert max(widths) == chunk


@pytest.mark.parametrize(("dtype", "step"), [("bf16", 2.0**-8), ("fp16", 2.0**-11)])
def test_half_precision_is_right_up_to_rounding(checkpoint: Checkpoints, dtype: str, step: float) -> None:
    """Each token after what a slot held is the best of transformers' own forward pass, or as good within rounding."""
    import torch
    from transformers import AutoModelForCausalLM

    path = checkpoint("llama")
    model = AutoModelForCausalLM.from_pretrained(str(path), dtype=getattr(torch, TORCH_DTYPES[dtype])).eval()
    served = Served(path, slots=4, dtype=dtype, prefix_cache=True)
    lost = []
    for number, turn in enumerate(turns(lambda prompt, n: words(n, len(prompt)), 4)):
        for talk, (prompt, _) in enumerate(turn):
            served.submit(f"{number}.{talk}", prompt, 6)
        served.run_out()
        for talk, (prompt, _) in enumerate(turn):
            answer = served.ids(f"{number}.{talk}")
            with torch.inference_mode():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].float()
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            lost.append(((logits.max(dim=1).values - chosen) / logits.abs().max()).max().item())
    assert served.batcher.stats.prefix_hits > 0
    assert max(lost) <= ROUNDINGS * step


def test_seeded_samples_are_the_same(checkpoint: Checkpoints) -> None:
    """Sampled, penalized and greedy ones beside each other: the tokens of an engine without the cache."""
    path = checkpoint("llama")
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "seed": 4, "top_p": 0.8},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 5, "top_k": 9},
    ]
    rounds = turns(lambda prompt, n: words(n, len(prompt)), 4)
    answers = []
    for cache in (False, True):
        served = Served(path, slots=4, prefix_cache=cache)
        for number, turn in enumerate(rounds):
            for talk, (prompt, _) in enumerate(turn):
                served.submit(f"{number}.{talk}", prompt, 12, **kinds[talk])
            served.run_out()
        answers.append({id: served.ids(id) for id in served.events})
    assert answers[0] == answers[1]
    assert served.batcher.stats.prefix_hits > 0


def test_a_cancelled_request_leaves_its_prefix(checkpoint: Checkpoints) -> None:
    """Its prompt and all tokens but the last are reused, and the next answer is right."""
    path = checkpoint("llama")
    generate = Reference(path)
    served = Served(path, slots=2, prefix_cache=True)
    prompt = words(30, 1)
    served.submit("leaves", prompt, 40)
    for _ in range(8):
        served.batcher.step()
    served.batcher.cancel("leaves")
    served.run_out()
    got = served.ids("leaves")
    assert (len(got), served.finish("leaves")) == (8, FinishReason.CANCELLED)
    served.submit("goes on", [*prompt, *got, 7, 8], 12)
    served.run_out()
    assert served.ids("goes on") == generate([*prompt, *got, 7, 8], 12)
    assert served.batcher.stats.prefix_hits == 37


def test_a_failed_request_leaves_no_prefix(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that are no numbers end it; the same prompt is then read from its beginning."""
    path = checkpoint("llama")
    served = Served(path, slots=1, prefix_cache=True)
    decode = served.engine.decode

    def broken(*arguments: Any) -> Any:
        return decode(*arguments) * float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine, "decode", broken)
        served.submit("broken", words(30, 1), 10)
        served.run_out()
    assert served.finish("broken") is FinishReason.ERROR
    served.submit("again", words(30, 1), 10)
    served.run_out()
    assert served.ids("again") == Reference(path)(words(30, 1), 10)
    assert served.batcher.stats.prefix_hits == 0


def test_a_prefix_is_copied_from_a_live_slot(checkpoint: Checkpoints) -> None:
    """What a running answer's prompt begins with is taken over by the next, and neither disturbs the other."""
    path = checkpoint("qwen3")
    generate = Reference(path)
    served = Served(path, slots=2, prefix_cache=True)
    first, second = SYSTEM + words(20, 1), SYSTEM + words(9, 2)
    served.submit("first", first, 30)
    served.batcher.step()
    served.submit("second", second, 30)
    served.run_out()
    assert [served.ids("first"), served.ids("second")] == [generate(first, 30), generate(second, 30)]
    assert served.batcher.stats.prefix_hits == len(SYSTEM)


def test_a_full_slot_is_reused(checkpoint: Checkpoints) -> None:
    """Rests of unequal length are padded, which must not reach beyond the slot into the next one."""
    path = checkpoint("llama")
    generate = Reference(path)
    served = Served(path, slots=3, prefix_cache=True)
    old = [words(MAX_LEN - 20, 1), words(40, 2), words(30, 3)]
    for number, prompt in enumerate(old):
        served.submit(f"old{number}", prompt, 4)
    served.run_out()
    new = [old[0] + words(19, 4), old[1] + words(60, 5), words(30, 6)]
    served.engine.prefill_from([0, 1], [new[0], new[1]], [len(old[0]), len(old[1])])
    logits = served.engine.prefill_from([0, 1, 2], new, [len(old[0]), len(old[1]), 0])
    assert logits.argmax(dim=-1).tolist() == [generate(prompt, 1)[0] for prompt in new]
    after = served.engine.decode([0, 1, 2], [9, 9, 9], [len(prompt) for prompt in new])
    assert after.argmax(dim=-1).tolist() == [generate([*prompt, 9], 1)[0] for prompt in new]


def test_speculation_works_with_the_prefix_cache(checkpoint: Checkpoints) -> None:
    """Token for token, and the draft, which is the model itself here, guesses all of them still."""
    path = checkpoint("llama")
    draft = CpuEngine(path, slots=3, max_len=MAX_LEN, threads=1)
    served = Served(path, slots=3, prefix_cache=True, draft=draft)
    for number, turn in enumerate(turns(Reference(path), 3, n=9)):
        for talk, (prompt, _) in enumerate(turn):
            served.submit(f"{number}.{talk}", prompt, 9)
        served.submit(f"{number}.sampled", SYSTEM, 9, temperature=1.0, seed=1)
        served.run_out()
        assert [served.ids(f"{number}.{talk}") for talk in range(3)] == [answer for _, answer in turn]
    stats = served.batcher.stats
    assert stats.prefix_hits > 0.5 * stats.prefix_queries
    assert stats.accepted == stats.drafted > 0


def test_the_engine_option_enables_the_prefix_cache(checkpoint: Checkpoints) -> None:
    """``engine_options: {prefix_cache: true}``, with and without a draft; by default there is none."""
    path = checkpoint("llama")
    on = {"engine_options": {"prefix_cache": True}}
    configs = [config(path), config(path, **on), config(path, **on, draft_source=str(path), draft_k=2)]
    engines = [open_engine(replica) for replica in configs]
    for engine in engines:
        engine.load()
    assert [engine.spec.prefix_block for engine in engines] == [0, PREFIX_BLOCK, PREFIX_BLOCK]
