"""Compares an engine with transformers along given tokens, so that rounding in one step cannot change the next."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.closed.lane_record import count_compared

PROMPTS = ([9, 90, 200, 31, 8], [77], [300, 20, 41, 6, 118, 54, 23, 99, 16], [7] * 15)
STEPS = 8


def deviation(
    engine: Any, source: Path, prompts_by_slot: Sequence[Sequence[int]] = PROMPTS, steps: int = STEPS
) -> float:
    """Returns the largest deviation of the engine's logits from those of transformers in float32, after each prompt
    and each of ``steps`` further tokens in all slots, in standard deviations of the logits.

    An engine that returns ids deviates by the distance of their logits from the highest. One slot is left out after
    half of the steps, as one that has ended.
    """
    slots = list(range(engine.spec.slots))
    prompts = [list(prompts_by_slot[slot % len(prompts_by_slot)]) for slot in slots]
    tokens = torch.randint(6, engine.spec.vocab_size, (len(slots), steps), generator=torch.Generator().manual_seed(3))
    expected = [_logits(source, [*prompt, *row]) for prompt, row in zip(prompts, tokens.tolist(), strict=True)]
    if engine.spec.continuous:
        outputs = [engine.prefill([slot], [prompt])[0] for slot, prompt in zip(slots, prompts, strict=True)]
    else:
        outputs = list(engine.prefill(slots, prompts))
    count_compared(len(slots))
    worst = max(_distance(outputs[slot], expected[slot][len(prompts[slot]) - 1]) for slot in slots)
    for step in range(steps):
        live = slots[:-1] if step >= steps // 2 and len(slots) > 1 and engine.spec.continuous else slots
        positions = [len(prompts[slot]) + step for slot in live]
        count_compared(len(live))
        outputs = list(engine.decode(live, [int(tokens[slot, step]) for slot in live], positions))
        for slot, output, position in zip(live, outputs, positions, strict=True):
            worst = max(worst, _distance(output, expected[slot][position]))
    return worst


def _distance(output: Any, expected: torch.Tensor) -> float:
    if isinstance(output, int):
        return float((expected.max() - expected[output]) / expected.std())
    return float((output.reshape(-1) - expected).abs().max() / expected.std())


@torch.inference_mode()
def _logits(source: Path, ids: Sequence[int]) -> torch.Tensor:
    """Returns ``[len(ids), vocab]``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source).float().eval()
    return model(torch.tensor([list(ids)])).logits[0]
