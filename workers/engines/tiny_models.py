"""Makes tiny checkpoints with random weights, and scores answers: ``python -m workers.engines.tiny_models``.

A ``TinyJob`` is read as JSON from standard input; the reply on standard output is one JSON line, ``Scores``. It runs in
the interpreter of an engine, which has torch and transformers. The weights are random, not trained: a model that has
memorized its text gives good answers even from a wrong position, which hides the fault.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from workers.host.json_process import ChildRequest, answering, read_request

WEIGHT_STD = 0.1  # with which random models give each token its own probability


class TinyModel(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint to make, in bfloat16, which every engine computes in."""

    folder: str
    config: dict[str, Any]  # of config.json, with ``model_type``
    tokenizer: str  # the folder of the tokenizer, whose files are copied
    seed: int = 0


class ScoredAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to score."""

    folder: str  # of its model
    prompt_ids: list[int]
    token_ids: list[int]


class TinyJob(ChildRequest, frozen=True, kw_only=True):
    """The checkpoints to make, then the answers to score."""

    make: list[TinyModel] = msgspec.field(default_factory=list)
    score: list[ScoredAnswer] = msgspec.field(default_factory=list)


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The score of each answer: for each token its log probability, and that of the most probable token there."""

    own: list[list[float]] = []
    best: list[list[float]] = []


def make(model: TinyModel) -> None:
    """Writes one checkpoint, deterministically."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM  # not typed

    torch.manual_seed(model.seed)
    settings = dict(model.config)
    config = AutoConfig.for_model(settings.pop("model_type"), initializer_range=WEIGHT_STD, **settings)
    classes.from_config(config).to(torch.bfloat16).save_pretrained(model.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(model.tokenizer, name), model.folder)


def score(answers: Sequence[ScoredAnswer]) -> Scores:
    """Scores each answer in one forward pass over prompt and answer in float32: without a KV cache, buckets or padding,
    which an engine may get wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM  # not typed
    models: dict[str, Any] = {}
    own, best = [], []
    for answer in answers:
        model = models.get(answer.folder)
        if model is None:
            models.clear()  # one at a time
            model = models[answer.folder] = classes.from_pretrained(answer.folder).float().eval()
        first = len(answer.prompt_ids) - 1
        with torch.no_grad():
            logits = model(torch.tensor([answer.prompt_ids + answer.token_ids])).logits[0, first:-1]
        probabilities = torch.log_softmax(logits, dim=-1)
        chosen = torch.tensor(answer.token_ids).unsqueeze(-1)
        own.append(probabilities.gather(-1, chosen).squeeze(-1).tolist())
        best.append(probabilities.max(dim=-1).values.tolist())
    return Scores(own=own, best=best)


def main() -> None:
    """Read the job and do it."""
    job, send = read_request(TinyJob), answering()
    for model in job.make:
        make(model)
    send(score(job.score))


if __name__ == "__main__":
    main()
