"""``NeuronModelForCausalLM`` of 0.0.28."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound
from optimum.neuron.modeling_decoder import NeuronDecoderModel


class NeuronModelForCausalLM(NeuronDecoderModel):
    @bound("optimum.neuron.modeling.NeuronModelForCausalLM.forward")
    def forward(
        self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any = None, return_dict: bool = True
    ) -> tuple[torch.Tensor]:
        assert not return_dict, "the adapter takes a tuple"
        return (self.model.forward(input_ids, cache_ids, start_ids)[:, None, :],)
