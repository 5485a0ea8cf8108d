"""Advice on a model that has a host for itself and comes without settings, as in a container of one checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from orchestrator.advise.advice import advise
from orchestrator.advise.candidates import SizingQuestion
from orchestrator.process.failure import Failed

CHOSEN = ("tp_degree", "allow_head_padding", "max_batch", "replicas")
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 128  # as in `corewright advise`


def advised(source: str, instance: str, max_len: int) -> dict[str, Any] | None:
    """Returns the fields ``CHOSEN`` of a spec with which a host serves the most requests, with slots of ``max_len``
    tokens and weights in the checkpoint's own type; None if nothing serves it. Heads are padded only if the model fits
    in no other way. Takes up to 3 s of one core."""
    output = min(OUTPUT_TOKENS, max(1, max_len // 4))
    prompt = min(PROMPT_TOKENS, max(1, max_len - output))
    padded = SizingQuestion(source, "auto", (instance,), prompt, output, max_len)
    for question in (replace(padded, as_is=True), padded):
        try:
            lines = advise(question).lines
        except Failed:
            continue
        for line in lines:
            if not line.candidate.quantized:
                fields = yaml.safe_load(line.spec)["models"][question.name]
                return {name: fields[name] for name in CHOSEN if name in fields}
    return None
