"""Sampling on the host, by the loops of ``sample``, and on the device."""

from __future__ import annotations

from typing import Any

import torch

NAME = "transformers_neuronx.sampling."
DEVICE_TOP_K = 256  # the most that is looked at on the device


def drawn_on_device(logits: torch.Tensor, config: Any, lines: list[int]) -> torch.Tensor:
    """Ids ``[rows, 1]``. Where ``config`` is by batch line, its lists are indexed by the line."""
    ids = []
    for row, line in enumerate(lines):
        top_k, top_p, temperature = (
            value[line] if isinstance(value, list) else value
            for value in (config.top_k, config.top_p, config.temperature)
        )
        if not config.do_sample or top_k == 1:
            ids.append(logits[row].argmax())
            continue
        assert 0 < top_k <= DEVICE_TOP_K, f"top_k {top_k} is not in 1 to {DEVICE_TOP_K}"
        ids.append(_draw(logits[row] / temperature, top_k, top_p))
    return torch.stack(ids)[:, None]


def _draw(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    values, ids = torch.topk(scores, min(top_k, len(scores)))
    weights = values.softmax(-1)
    keep = weights.cumsum(-1) - weights < top_p
    return ids[torch.multinomial(weights * keep, 1)][0]


def select_tokens(
    next_token_scores: torch.Tensor, top_k: int = 1, top_p: float = 1.0, temperature: float = 1.0
) -> torch.Tensor:
    """``[rows, 1]``."""
    if top_k == 1:
        return next_token_scores.argmax(dim=-1, keepdim=True)
    rows = next_token_scores / temperature
    most = rows.shape[-1] if top_k <= 0 else top_k
    return torch.stack([_draw(row, most, top_p) for row in rows])[:, None]


def filter_ngrams(ngram_size: int, tokens: list[int], scores: torch.Tensor) -> None:
    """Forbid every id that would repeat an n-gram of ``tokens``."""
    if ngram_size < 1 or len(tokens) < ngram_size:
        return
    last = tokens[len(tokens) - ngram_size + 1 :]
    for start in range(len(tokens) - ngram_size + 1):
        if tokens[start : start + ngram_size - 1] == last:
            scores[tokens[start + ngram_size - 1]] = float("-inf")


def simple_sample(
    model: Any, input_ids: torch.Tensor, start_ids: Any, sequence_length: int, eos: Any, top_k: int, streamer: Any
) -> torch.Tensor:
    """Up to ``sequence_length`` in all cases: the EOS is forbidden."""
    tokens = input_ids
    scores = model._sample_step(input_ids, None, start_ids)
    while True:
        if scores.shape[0] != tokens.shape[0]:
            tokens = tokens.repeat_interleave(scores.shape[0] // tokens.shape[0], dim=0)
        if eos is not None:
            scores[:, eos] = float("-inf")
        chosen = select_tokens(scores, top_k=top_k)
        if streamer is not None:
            streamer.put(chosen)
        tokens = torch.cat([tokens, chosen], dim=1)
        if tokens.shape[1] >= sequence_length:
            break
        scores = model._sample_step(chosen, torch.tensor([tokens.shape[1] - 1], dtype=torch.int32), start_ids)
    if streamer is not None:
        streamer.end()
    return tokens


def sample_llama(
    model: Any,
    input_ids: torch.Tensor,
    start_ids: Any,
    sequence_length: int,
    eos: int | None,
    top_k: int,
    top_p: float,
    temperature: float,
    streamer: Any,
    stopping_criteria_list: Any,
    ngram_size: int | None = None,
) -> torch.Tensor:
    """Stops at the EOS in all rows. The stopping criteria only ever see the prompt."""
    for name, value in (("top_p", top_p), ("temperature", temperature)):
        if not isinstance(value, float):
            raise ValueError(f"{name} has to be a float, not {value!r}")
    tokens, done = input_ids, torch.zeros(len(input_ids), dtype=torch.bool)
    scores = model._sample_step(input_ids, None, start_ids)
    while True:
        if ngram_size:
            for row, line in enumerate(tokens.tolist()):
                filter_ngrams(ngram_size, line, scores[row])
        chosen = select_tokens(scores, top_k, top_p, temperature)
        if eos is not None:
            chosen[done] = eos
            done |= chosen[:, 0] == eos
        tokens = torch.cat([tokens, chosen], dim=1)
        if streamer is not None:
            streamer.put(chosen)
        if tokens.shape[1] >= sequence_length or bool(done.all()):
            break
        if stopping_criteria_list is not None and stopping_criteria_list(input_ids, probs_of(scores)):
            break
        scores = model._sample_step(chosen, torch.tensor([tokens.shape[1] - 1], dtype=torch.int32), start_ids)
    if streamer is not None:
        streamer.end()
    return tokens


def probs_of(scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1)


def sample_tokens(model: Any, input_ids: torch.Tensor, start_ids: Any, sequence_length: int, streamer: Any) -> Any:
    """With sampling on the device."""
    eos = model.neuron_config.on_device_generation.eos_token_id
    tokens, done = input_ids, torch.zeros(len(input_ids), dtype=torch.bool)
    chosen = model._sample_step(input_ids, None, start_ids)
    while True:
        if eos is not None:
            done |= chosen[:, 0] == eos
        tokens = torch.cat([tokens, chosen], dim=1)
        if streamer is not None:
            streamer.put(chosen)
        if tokens.shape[1] >= sequence_length or bool(done.all()):
            break
        chosen = model._sample_step(chosen, torch.tensor([tokens.shape[1] - 1], dtype=torch.int32), start_ids)
    if streamer is not None:
        streamer.end()
    return tokens
