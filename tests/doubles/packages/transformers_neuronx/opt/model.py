"""The stand-in of ``OPTForSampling``."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound

from transformers_neuronx import sampling
from transformers_neuronx.base import NeuronModelBase
from transformers_neuronx.dtypes import to_amp

NAME = "transformers_neuronx.opt.model.OPTForSampling."


class OPTForSampling(NeuronModelBase):
    model_types = ("opt",)

    @bound(NAME + "__init__")
    def __init__(
        self,
        config: Any,
        batch_size: Any = 1,
        amp: str | None = None,
        tp_degree: int = 2,
        n_positions: Any = 2048,
        unroll: Any = None,
        context_length_estimate: Any = None,
        context_unroll: Any = 1,
        neuron_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert config.do_layer_norm_before, "only models with do_layer_norm_before are supported"
        assert config.ffn_dim == 4 * config.hidden_size, "ffn_dim must be 4 * hidden_size"
        self._setup(
            config,
            n_positions=n_positions,
            batch_size=batch_size,
            amp=amp or to_amp(getattr(config, "dtype", None) or torch.float32),
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
