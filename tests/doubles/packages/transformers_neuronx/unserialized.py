"""What GPT-J and GPT-NeoX share: older classes, which do not derive from NeuronModelBase."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx import base, sampling
from transformers_neuronx.module import PretrainedModel


class _Life(base.NeuronModelBase):
    """Their insides: no context graph, no quantization, no padding of heads."""

    quantizes = False
    quantizes_kv = True  # it is not even read
    pads_heads = False


class UnserializedModel(PretrainedModel):
    """No ``save`` and ``load``; prompts go token by token."""

    sees_first_only = False

    def _setup(self, config: Any, n_positions: Any, **how: Any) -> None:
        assert isinstance(n_positions, int), "n_positions must be an int"
        assert "context_length_estimate" not in how, "there is no context graph"
        self._life = _Life()
        self._life.sees_first_only = self.sees_first_only
        self._life._setup(config, n_positions=n_positions, context_length_estimate=0, **how)
        self.config, self.neuron_config = config, self._life.neuron_config
        self.tp_degree, self.batch_sizes = self._life.tp_degree, self._life.batch_sizes

    def _to_device(self) -> None:
        self._life._checkpoint_path = self._checkpoint_path
        self._life._to_device()

    def _step(self, input_ids: torch.Tensor, cache_offset: Any, start_ids: Any) -> torch.Tensor:
        return self._life._static(input_ids, cache_offset, start_ids)

    def _sample(
        self, input_ids: torch.Tensor, sequence_length: int, start_ids: Any, top_k: int, streamer: Any
    ) -> torch.Tensor:
        eos = self.config.eos_token_id
        return sampling.simple_sample(self, input_ids, start_ids, sequence_length, eos, top_k, streamer)

    def _sample_step(self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any) -> torch.Tensor:
        return self._step(input_ids, cache_ids, start_ids)
