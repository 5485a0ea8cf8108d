"""The stand-in of Qwen3Moe."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_HERE = "models.qwen3_moe.modeling_qwen3_moe"
need(f"{_HERE}.NeuronQwen3MoeForCausalLM", __name__)


@trimmed
class Qwen3MoeInferenceConfig(InferenceConfig):
    @played(f"{_HERE}.Qwen3MoeInferenceConfig.get_required_attributes")
    def get_required_attributes(self) -> list[str]:
        return [
            "head_dim",
            "hidden_act",
            "hidden_size",
            "max_position_embeddings",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_attention_heads",
            "num_experts",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_scaling",
            "rope_theta",
            "tie_word_embeddings",
            "vocab_size",
        ]

    @classmethod
    @played(f"{_HERE}.Qwen3MoeInferenceConfig.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return MoENeuronConfig


class NeuronQwen3MoeModel(NeuronBaseModel):
    """The ``worker_cls`` of a fused speculation."""


class NeuronQwen3MoeForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronQwen3MoeModel

    @classmethod
    @played(f"{_HERE}.NeuronQwen3MoeForCausalLM.get_config_cls")
    def get_config_cls(cls) -> Any:
        return Qwen3MoeInferenceConfig
