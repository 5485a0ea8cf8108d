"""The stand-in of Mistral."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_HERE = "models.mistral.modeling_mistral"
need(f"{_HERE}.NeuronMistralForCausalLM", __name__)


class MistralNeuronConfig(NeuronConfig):
    @played(f"{_HERE}.MistralNeuronConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@trimmed
class MistralInferenceConfig(InferenceConfig):
    @played(f"{_HERE}.MistralInferenceConfig.get_required_attributes")
    def get_required_attributes(self) -> list[str]:
        return [
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "hidden_act",
            "tie_word_embeddings",
        ]

    @classmethod
    @played(f"{_HERE}.MistralInferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return NeuronConfig


class NeuronMistralModel(NeuronBaseModel):
    """The ``worker_cls`` of a fused speculation."""


class NeuronMistralForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronMistralModel

    @classmethod
    @played(f"{_HERE}.NeuronMistralForCausalLM.get_config_cls")
    def get_config_cls(cls) -> Any:
        return MistralInferenceConfig
