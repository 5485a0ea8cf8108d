"""The stand-in of Qwen2."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_HERE = "models.qwen2.modeling_qwen2"
need(f"{_HERE}.NeuronQwen2ForCausalLM", __name__)


class Qwen2NeuronConfig(NeuronConfig):
    @played(f"{_HERE}.Qwen2NeuronConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@trimmed
class Qwen2InferenceConfig(InferenceConfig):
    @played(f"{_HERE}.Qwen2InferenceConfig.get_required_attributes")
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
    @played(f"{_HERE}.Qwen2InferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return Qwen2NeuronConfig


class NeuronQwen2Model(NeuronBaseModel):
    """The ``worker_cls`` of a fused speculation."""


class NeuronQwen2ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronQwen2Model

    @classmethod
    @played(f"{_HERE}.NeuronQwen2ForCausalLM.get_config_cls")
    def get_config_cls(cls) -> Any:
        return Qwen2InferenceConfig
