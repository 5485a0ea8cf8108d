"""The stand-in of ``LlamaForSampling``."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import plays

from transformers_neuronx.lines import LinesModel


@plays("transformers_neuronx.llama.model.LlamaForSampling", "__init__", "forward", "speculative_forward")
class LlamaForSampling(LinesModel):
    model_types = ("llama", "code_llama")
    nan_with_padding = True

    def forward(
        self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None, **unused: Any
    ) -> torch.Tensor:
        return self._step(input_ids, cache_ids, start_ids)

    def speculative_forward(
        self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None, speculation_length: Any = None
    ) -> torch.Tensor:
        """``[speculation_length, vocab, rows]``. A KeyError for a length that was not enabled."""
        return self._speculative(input_ids, cache_ids, start_ids, speculation_length)
