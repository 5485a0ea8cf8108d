"""The stand-in of ``MistralForSampling``."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound

from transformers_neuronx import sampling
from transformers_neuronx.config import NeuronConfig
from transformers_neuronx.lines import LinesModel

NAME = "transformers_neuronx.mistral.model.MistralForSampling."


class MistralForSampling(LinesModel):
    model_types = ("mistral",)

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
        neuron_config: NeuronConfig | None = NeuronConfig(),  # noqa: B008 - one object for all models, as the package has it
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
        return self._step(input_ids, cache_ids, start_ids)

    @bound(NAME + "sample")
    def sample(
        self,
        input_ids: torch.Tensor,
        sequence_length: int,
        start_ids: Any = None,
        top_k: int = 50,
        top_p: float = 1.0,
        eos_token_override: Any = None,
        temperature: float = 1.0,
        streamer: Any = None,
        stopping_criteria_list: Any = None,
    ) -> Any:
        """Input and output, up to the EOS or ``sequence_length`` tokens in all."""
        if self._generation is not None:
            return sampling.sample_tokens(self, input_ids, start_ids, sequence_length, streamer)
        if len(input_ids) not in self.batch_sizes:
            raise ValueError(f"Model not compiled for batch_size : {len(input_ids)}. It is one of {self.batch_sizes}")
        eos = self.config.eos_token_id if eos_token_override is None else eos_token_override
        return sampling.sample_llama(
            self,
            input_ids,
            start_ids,
            sequence_length,
            eos,
            top_k,
            top_p,
            temperature,
            streamer,
            stopping_criteria_list,
            None,
        )

    def _sample_step(self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any) -> torch.Tensor:
        return self._step(input_ids, cache_ids, start_ids)
