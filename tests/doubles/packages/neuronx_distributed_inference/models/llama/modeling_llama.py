"""The stand-in of Llama."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_HERE = "models.llama.modeling_llama"
need(f"{_HERE}.NeuronLlamaForCausalLM", __name__)


@trimmed
class LlamaInferenceConfig(InferenceConfig):
    @played(f"{_HERE}.LlamaInferenceConfig.get_required_attributes")
    def get_required_attributes(self) -> list[str]:
        return [
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "pad_token_id",
            "vocab_size",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "hidden_act",
        ]

    @classmethod
    @played(f"{_HERE}.LlamaInferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return NeuronConfig


class NeuronLlamaModel(NeuronBaseModel):
    """The ``worker_cls`` of a fused speculation."""


class NeuronLlamaForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronLlamaModel

    @classmethod
    @played(f"{_HERE}.NeuronLlamaForCausalLM.get_config_cls")
    def get_config_cls(cls) -> Any:
        return LlamaInferenceConfig
