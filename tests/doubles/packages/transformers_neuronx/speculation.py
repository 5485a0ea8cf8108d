"""A draft that guesses and a target that accepts, both on this process's cores."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound

from transformers_neuronx.base import NeuronModelBase

NAME = "transformers_neuronx.speculation."


class DefaultTokenAcceptor:
    """Accepts a guess with the target's probability over the draft's; the first refused one is drawn anew."""

    @bound(NAME + "DefaultTokenAcceptor.__call__")
    def __call__(
        self, draft_ids: torch.Tensor, draft_scores: torch.Tensor, target_scores: torch.Tensor
    ) -> torch.Tensor:
        """``[1, accepted]`` from ``[1, k - 1]``, ``[1, k - 1, vocab]`` and ``[1, k, vocab]``."""
        guesses, drafted, own = draft_ids[0], draft_scores[0].softmax(-1), target_scores[0].softmax(-1)
        accepted: list[int] = []
        for index, guess in enumerate(guesses.tolist()):
            if torch.rand(()) * drafted[index, guess] < own[index, guess]:
                accepted.append(guess)
                continue
            remainder = (own[index] - drafted[index]).clamp(min=0)
            return torch.tensor([[*accepted, int(torch.multinomial(remainder, 1))]])
        return torch.tensor([[*accepted, int(torch.multinomial(own[-1], 1))]])


class DraftModelForSpeculation:
    @bound(NAME + "DraftModelForSpeculation.__init__")
    def __init__(self, model: Any, **kwargs: Any) -> None:
        self.model, self.kwargs = model, kwargs

    @bound(NAME + "DraftModelForSpeculation.__call__")
    def __call__(
        self, input_ids: torch.Tensor, k: int, cache_ids: Any = None, start_ids: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy guesses ``[1, k]`` and their scores ``[k, 1, vocab]``; of a whole prompt one."""
        first = 0 if cache_ids is None else int(cache_ids.flatten()[0])
        scores = [self.model(input_ids, cache_ids, start_ids)]
        tokens = [scores[0].argmax(dim=1, keepdim=True)]
        if first:
            for ahead in range(1, k):
                position = torch.tensor([first + ahead], dtype=torch.int32)
                scores.append(self.model(tokens[-1], position, start_ids))
                tokens.append(scores[-1].argmax(dim=1, keepdim=True))
        return torch.cat(tokens, dim=1), torch.stack(scores)


class SpeculativeGenerator:
    """Of a single prompt. The streamer gets the prompt first."""

    @bound(NAME + "SpeculativeGenerator.__init__")
    def __init__(self, draft: Any, target: Any, k: int = 4, acceptor: Any = None) -> None:
        self.draft = DraftModelForSpeculation(draft) if isinstance(draft, NeuronModelBase) else draft
        self.target, self.k, self.acceptor = target, k, acceptor or DefaultTokenAcceptor()

    @bound(NAME + "SpeculativeGenerator.sample")
    def sample(
        self,
        input_ids: torch.Tensor,
        sequence_length: int,
        start_ids: Any = None,
        eos_token_id: Any = None,
        pad_token_id: Any = 0,
        attention_mask: Any = None,
        streamer: Any = None,
        output_logits: bool = False,
    ) -> torch.Tensor:
        assert len(input_ids) == 1, "only a batch of 1 is played here"
        self.draft(input_ids, self.k, None, start_ids)
        chosen = self.target(input_ids, None, start_ids).argmax(dim=1, keepdim=True)
        if streamer is not None:
            streamer.put(input_ids)
            streamer.put(chosen)
        tokens, position = torch.cat([input_ids, chosen], dim=1), input_ids.shape[1]
        while tokens.shape[1] < sequence_length and int(tokens[0, -1]) != eos_token_id:
            here = torch.tensor([position], dtype=torch.int32)
            guesses, drafted = self.draft(tokens[:, -1:], self.k - 1, here, start_ids)
            scores = self.target.speculative_forward(
                input_ids=torch.cat([tokens[:, -1:], guesses], dim=1),
                cache_ids=torch.arange(position, position + self.k),
                start_ids=start_ids,
                speculation_length=self.k,
            )
            run = self.acceptor(guesses, drafted.transpose(0, 1), scores.permute(2, 0, 1))
            if run.shape[1] == self.k:  # the draft has not seen its last guess
                self.draft(guesses[:, -1:], 1, torch.tensor([position + self.k - 1], dtype=torch.int32), start_ids)
            ends = (run[0] == eos_token_id).nonzero() if eos_token_id is not None else torch.empty(0)
            if len(ends):
                run = run[:, : int(ends[0]) + 1]
            if streamer is not None:
                streamer.put(run)
            tokens, position = torch.cat([tokens, run], dim=1), position + run.shape[1]
        if streamer is not None:
            streamer.end()
        return tokens[:, :sequence_length]
