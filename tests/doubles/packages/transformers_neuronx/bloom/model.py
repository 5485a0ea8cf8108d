"""The stand-in of ``BloomForSampling``."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound

from transformers_neuronx import sampling
from transformers_neuronx.base import NeuronModelBase

NAME = "transformers_neuronx.bloom.model.BloomForSampling."


class BloomForSampling(NeuronModelBase):
    model_types = ("bloom",)

    @bound(NAME + "__init__")
    def __init__(
        self,
        config: Any,
        *,
        n_positions: Any = 2048,
        batch_size: Any = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        context_length_estimate: Any = None,
        context_unroll: Any = None,
        unroll: Any = None,
        neuron_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._setup(
            config,
            n_positions=n_positions,
            batch_size=batch_size,
            amp=amp,
            tp_degree=tp_degree,
            context_length_estimate=context_length_estimate,
            unroll=unroll,
            neuron_config=neuron_config,
        )

    @bound(NAME + "forward")
    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        return self._static(input_ids, cache_ids, start_ids)

    @bound(NAME + "sample")
    def sample(
        self,
        input_ids: torch.Tensor,
        sequence_length: int,
        start_ids: Any = None,
        top_k: int = 50,
        streamer: Any = None,
    ) -> Any:
        """Always up to ``sequence_length`` tokens in all."""
        if self._generation is not None:
            return sampling.sample_tokens(self, input_ids, start_ids, sequence_length, streamer)
        eos = self.config.eos_token_id
        return sampling.simple_sample(self, input_ids, start_ids, sequence_length, eos, top_k, streamer)

    def _sample_step(self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any) -> torch.Tensor:
        return self._static(input_ids, cache_ids, start_ids)
