"""The stand-in of Qwen3."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_HERE = "models.qwen3.modeling_qwen3"
need(f"{_HERE}.NeuronQwen3ForCausalLM", __name__)


class Qwen3NeuronConfig(NeuronConfig):
    @played(f"{_HERE}.Qwen3NeuronConfig.__init__")
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)


@trimmed
class Qwen3InferenceConfig(InferenceConfig):
    @played(f"{_HERE}.Qwen3InferenceConfig.get_required_attributes")
    def get_required_attributes(self) -> list[str]:
        return [
            "hidden_size",
            "num_attention_heads",
            "num_hidden_layers",
            "num_key_value_heads",
            "head_dim",
            "pad_token_id",
            "vocab_size",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "hidden_act",
        ]

    @classmethod
    @played(f"{_HERE}.Qwen3InferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return Qwen3NeuronConfig


class NeuronQwen3Model(NeuronBaseModel):
    """The ``worker_cls`` of a fused speculation."""


class NeuronQwen3ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronQwen3Model

    @classmethod
    @played(f"{_HERE}.NeuronQwen3ForCausalLM.get_config_cls")
    def get_config_cls(cls) -> Any:
        return Qwen3InferenceConfig
