"""The logprobs of a prompt's tokens are those of transformers' own forward pass, in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import FAMILIES
from tests.tiers import everyday
from tests.workers.engines.test_cpu_engine import MAX_LEN, Reference, Served
from tests.workers.engines.test_cpu_prefix_reuse import SYSTEM, words
from workers.engines.cpu import engine as cpu_engine
from workers.engines.cpu import graphs as cpu_graphs
from workers.engines.cpu.engine import CpuEngine
from workers.messages.engine_protocol import EngineSpec
from workers.messages.requests import FinishReason, TokenLogprobs

Checkpoints = Callable[[str], Path]
PROMPTS = [words(1, 1), words(2, 2), words(37, 3), words(MAX_LEN - 4, 4), [*SYSTEM, *words(20, 5)]]
COUNTS = [0, 2, 5, 3, 20]


def by_transformers(generate: Reference, prompt: Sequence[int]) -> torch.Tensor:
    """Returns ``[len(prompt) - 1, vocab_size]``, for the second and later tokens."""
    with torch.inference_mode():
        logits = generate.model(torch.tensor([list(prompt)])).logits
    return logits[0, :-1].float().log_softmax(-1)


def scored(served: Served, id: str) -> list[TokenLogprobs]:
    return [item for event in served.events[id] for item in event.prompt_logprobs]


def without_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not score prompts."""
    monkeypatch.setattr(cpu_engine, "EngineSpec", lambda **spec: EngineSpec(**{**spec, "scores_prompts": False}))


def check(items: Sequence[TokenLogprobs], prompt: Sequence[int], count: int, right: torch.Tensor) -> None:
    assert [item.id for item in items] == list(prompt)
    assert (items[0].logprob, items[0].top, items[0].rank) == (None, [], None)
    for item, logprobs in zip(items[1:], right, strict=True):
        assert item.logprob == pytest.approx(float(logprobs[item.id]), abs=2e-4)
        assert [value for _, value, *_ in item.top] == pytest.approx(logprobs.topk(count).values.tolist(), abs=2e-4)
        assert item.rank == pytest.approx(int((logprobs >= logprobs[item.id]).sum()), abs=1)


@pytest.mark.parametrize("family", everyday(FAMILIES, ("llama", "bloom", "mistral-window")))
@pytest.mark.parametrize(
    "how",
    [{}, {"prefill_chunk": 7}, {"prefix_cache": True, "prefill_chunk": 16}, {"compile": True}, {"by_steps": True}],
    ids=str,
)
def test_prompts_have_the_logprobs_of_transformers(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, family: str, how: dict[str, Any]
) -> None:
    """Requests without them run in the same batch. Prompts run in chunks and buckets, and after another one has cached
    their prefix; and token by token, as on engines whose graphs return the logits of one position."""
    how = dict(how)
    if how.pop("by_steps", False):
        without_scores(monkeypatch)
    monkeypatch.setattr(cpu_graphs, "BACKEND", "eager")
    monkeypatch.setattr(cpu_engine, "SCORED_TOKENS", 8)
    torch._dynamo.reset()
    path = checkpoint(family)
    generate, served = Reference(path), Served(path, slots=4, **how)
    served.submit("before", [*SYSTEM, *words(9, 6)], 3)
    served.run_out()
    for number, (prompt, count) in enumerate(zip(PROMPTS, COUNTS, strict=True)):
        served.submit(str(number), prompt, 3, prompt_logprobs=count, ignore_eos=True)
        served.submit(f"beside {number}", prompt, 3, ignore_eos=True)
    served.run_out()

    for number, (prompt, count) in enumerate(zip(PROMPTS, COUNTS, strict=True)):
        check(scored(served, str(number)), prompt, count, by_transformers(generate, prompt))
        assert served.ids(str(number)) == served.ids(f"beside {number}") == generate(prompt, 3)
        assert scored(served, f"beside {number}") == []


@pytest.mark.parametrize("by_steps", [False, True])
def test_max_tokens_0_only_scores_the_prompt(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch, by_steps: bool
) -> None:
    """Also one that fills the slot, with a draft."""
    if by_steps:
        without_scores(monkeypatch)
    path = checkpoint("llama")
    served = Served(path, draft=CpuEngine(path, slots=4, max_len=MAX_LEN), prefix_cache=True)
    prompt = words(MAX_LEN, 7)
    served.submit("a", prompt, 0, prompt_logprobs=1)
    served.submit("beside", words(20, 8), 30, ignore_eos=True)
    served.run_out()

    check(scored(served, "a"), prompt, 1, by_transformers(Reference(path), prompt))
    assert served.ids("beside") == Reference(path)(words(20, 8), 30)
    assert (served.ids("a"), served.text("a"), served.finish("a")) == ([], "", FinishReason.LENGTH)
