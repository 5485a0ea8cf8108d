"""``generate`` of transformers over a model of this package."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

NAME = "transformers_neuronx.generation_utils.HuggingFaceGenerationModelAdapter."


class HuggingFaceGenerationModelAdapter(PreTrainedModel, GenerationMixin):
    """The package's own is for a transformers whose PreTrainedModel brings ``generate`` itself."""

    main_input_name = "input_ids"
    _supports_sdpa = True  # attention is the wrapped model's affair

    @bound(NAME + "__init__")
    def __init__(self, config: Any, model: Any) -> None:
        super().__init__(config)
        self.model = model
        self.cur_len = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @bound(NAME + "reset_generation")
    def reset_generation(self) -> None:
        self.cur_len = 0

    @bound(NAME + "generate")
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.reset_generation()
        kwargs.setdefault("use_cache", False)  # the model has its own
        return super().generate(*args, **kwargs)

    @bound(NAME + "prepare_inputs_for_generation")
    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: Any = None, inputs_embeds: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Left padding, as the attention mask has it, becomes start_ids."""
        start_ids = None
        if kwargs.get("attention_mask") is not None:
            mask = kwargs["attention_mask"]
            start_ids = mask.shape[1] - mask.sum(dim=1)
            if not bool(start_ids.any()):
                start_ids = None
        cache_ids = None
        if self.cur_len > 0:
            cache_ids = torch.tensor([input_ids.shape[1] - 1], dtype=torch.int32)
            input_ids = input_ids[:, -1:]
        self.cur_len += input_ids.shape[1]
        return {"input_ids": input_ids, "cache_ids": cache_ids, "start_ids": start_ids}

    @bound(NAME + "forward")
    def forward(
        self,
        input_ids: torch.Tensor,
        cache_ids: Any,
        start_ids: Any = None,
        output_hidden_states: Any = False,
        output_attentions: Any = False,
        attention_mask: Any = None,
        return_dict: Any = False,
    ) -> CausalLMOutput:
        """Only batches that were compiled; beams and returned sequences multiply them."""
        if cache_ids is None:
            logits = self.model(input_ids, torch.arange(input_ids.shape[1]), start_ids)
        else:
            logits = self.model(input_ids, cache_ids, start_ids)
        return CausalLMOutput(logits=logits[:, None, :])
