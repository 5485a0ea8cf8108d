"""Draft and target in one graph; greedy, and of all lines at once under continuous batching."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.runtime import runtime

from transformers_neuronx import graphs

NAME = "transformers_neuronx.fused_speculation."


class FusedSpeculativeBase(torch.nn.Module):
    pad_token_id: int

    @bound(NAME + "FusedSpeculativeBase.speculative_iteration_post_process")
    def speculative_iteration_post_process(
        self, output_tokens: torch.Tensor, output_counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Padding behind each row's own count."""
        is_token = torch.arange(output_tokens.shape[1]) < output_counts
        return torch.where(is_token, output_tokens, self.pad_token_id), output_counts


class FusedSpeculativeDecoder(FusedSpeculativeBase):
    @bound(NAME + "FusedSpeculativeDecoder.__init__")
    def __init__(
        self,
        draft: Any,
        target: Any,
        k: int = 2,
        pad_token_id: int = 0,
        eos_token_id: Any = None,
        buckets: Any = None,
        output_scores: bool = False,
        deterministic_threshold: Any = None,
        debug: bool = False,
        simulation_acceptance_length: Any = None,
    ) -> None:
        super().__init__()
        for name, model in (("draft", draft), ("target", target)):
            assert model.neuron_config.on_device_embedding, f"The {name} model must enable on-device embedding."
            assert model.neuron_config.on_device_generation is not None, (
                f"The {name} model must enable on-device sampling."
            )
        assert target.config.vocab_size == draft.config.vocab_size, "both models must have the same vocab size"
        assert target.tp_degree == draft.tp_degree, "both models must have the same tp degree"
        assert isinstance(k, int), "The k value must be an integer."
        self.draft, self.target, self.k = draft, target, k
        self.pad_token_id, self.eos_token_id = pad_token_id, eos_token_id
        self._compiled = False

    @bound(NAME + "FusedSpeculativeDecoder.to_neuron")
    def to_neuron(self, workers: Any = None) -> None:
        """After both models are on the device."""
        self.draft._ready()
        self.target._ready()
        kinds = [(f"fused-{self.k}", size, batch) for size in self.target.token_buckets for batch in self._batches()]
        kernels = graphs.kernels(self.target, kinds)
        graphs.compile_all(kernels, self.target.tp_degree)
        graphs.load_neffs(kernels)
        self._compiled = True

    def _batches(self) -> list[int]:
        return list(self.target.batch_sizes)

    @bound(NAME + "FusedSpeculativeDecoder.update_generation_config")
    def update_generation_config(self, generation_config: Any) -> None:
        self.target.update_generation_config(generation_config)

    @bound(NAME + "FusedSpeculativeDecoder.speculative_iteration")
    def speculative_iteration(
        self, input_ids: torch.Tensor, cache_ids: torch.Tensor, start_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts give their next token; a step gives 1 to k + 1 tokens for each row: ids and counts ``[rows, 1]``."""
        rows = len(input_ids)
        if bool((cache_ids.min(dim=-1).values == 0).any()):
            first = self.target(input_ids, cache_ids, start_ids).reshape(rows, -1)
            self.draft(input_ids, cache_ids, start_ids)
            return first, torch.ones(rows, 1, dtype=torch.long)
        assert self._compiled, "speculative_iteration before to_neuron"
        runtime().execute()
        lines = [int(line) for line in start_ids.flatten()]
        for line in range(self.target.batch):
            if line not in lines:  # padded with token 0 at position 0, and run
                self._run(line, 0, 0)
        runs = [self._run(line, int(input_ids[row, 0]), int(cache_ids[row, 0])) for row, line in enumerate(lines)]
        counts = torch.tensor([[len(run)] for run in runs])
        tokens = torch.tensor([run + [self.pad_token_id] * (self.k + 1 - len(run)) for run in runs])
        return self.speculative_iteration_post_process(tokens, counts)

    def _run(self, line: int, token: int, position: int) -> list[int]:
        guesses, last = [], token
        for ahead in range(self.k + 1):  # one more, so that the draft has seen all of its guesses
            last = int(self.draft._run(line, [last], position + ahead)[0].argmax())
            guesses.append(last)
        own = self.target._run(line, [token, *guesses[: self.k]], position).argmax(dim=-1).tolist()
        count = next((index for index in range(self.k) if guesses[index] != own[index]), self.k)
        return list(own[: count + 1])

    @bound(NAME + "FusedSpeculativeDecoder.sample")
    def sample(
        self,
        input_ids: torch.Tensor,
        start_ids: Any = None,
        attention_mask: Any = None,
        sequence_length: Any = None,
        streamer: Any = None,
    ) -> torch.Tensor:
        assert len(input_ids) == 1, "only a batch of 1 is played here"
        assert self._compiled, "sample before to_neuron"
        longest = self.target.longest - self.k
        sequence_length = longest if sequence_length is None else sequence_length
        assert sequence_length <= longest
        chosen = self.target(input_ids, None, start_ids).reshape(1, -1)
        self.draft(input_ids, None, start_ids)
        if streamer is not None:
            streamer.put(input_ids)
            streamer.put(chosen)
        tokens = [*input_ids[0].tolist(), int(chosen[0, -1])]
        while len(tokens) < sequence_length and tokens[-1] != self.eos_token_id:
            runtime().execute()
            run = self._run(0, tokens[-1], len(tokens) - 1)
            if self.eos_token_id in run:
                run = run[: run.index(self.eos_token_id) + 1]
            if streamer is not None:
                streamer.put(torch.tensor([run]))
            tokens += run
        if streamer is not None:
            streamer.end()
        return torch.tensor([tokens[:sequence_length]])
