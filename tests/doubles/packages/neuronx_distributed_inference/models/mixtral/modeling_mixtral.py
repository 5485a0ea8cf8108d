"""The stand-in of Mixtral."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_HERE = "models.mixtral.modeling_mixtral"
need(f"{_HERE}.NeuronMixtralForCausalLM", __name__)


@trimmed
class MixtralInferenceConfig(InferenceConfig):
    @played(f"{_HERE}.MixtralInferenceConfig.get_required_attributes")
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
            "num_local_experts",
            "num_experts_per_tok",
            "rms_norm_eps",
        ]

    @classmethod
    @played(f"{_HERE}.MixtralInferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return MoENeuronConfig


class NeuronMixtralModel(NeuronBaseModel):
    """The ``worker_cls`` of a fused speculation."""


class NeuronMixtralForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronMixtralModel

    @classmethod
    @played(f"{_HERE}.NeuronMixtralForCausalLM.get_config_cls")
    def get_config_cls(cls) -> Any:
        return MixtralInferenceConfig
