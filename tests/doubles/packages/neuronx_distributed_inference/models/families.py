"""The families of models by table: what each demands of a config, and the classes of its module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neuronx_distributed_inference._played import PACKAGE, need, played, trimmed
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_SHARED = [
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
]


@dataclass(frozen=True)
class _Family:
    name: str
    required: tuple[str, ...]  # attributes of a config, besides the shared ones
    neuron_config: type[NeuronConfig] | None = NeuronConfig  # None: the one that its module defines
    defines: bool = False  # a NeuronConfig of its own


_FAMILIES = {
    "llama": _Family("Llama", ("pad_token_id", "hidden_act")),
    "mistral": _Family("Mistral", ("hidden_act", "tie_word_embeddings"), defines=True),
    "mixtral": _Family("Mixtral", ("pad_token_id", "num_local_experts", "num_experts_per_tok"), MoENeuronConfig),
    "qwen2": _Family("Qwen2", ("pad_token_id", "hidden_act"), None, defines=True),
    "qwen3": _Family("Qwen3", ("head_dim", "pad_token_id", "hidden_act"), None, defines=True),
    "qwen3_moe": _Family(
        "Qwen3Moe",
        (
            *("head_dim", "hidden_act", "moe_intermediate_size", "norm_topk_prob", "num_experts"),
            *("num_experts_per_tok", "rope_scaling", "tie_word_embeddings"),
        ),
        MoENeuronConfig,
    ),
}


def classes(module: str) -> dict[str, Any]:
    """The classes of that module. Raises ModuleNotFoundError where the version that is played lacks it."""
    path = module.removeprefix(f"{PACKAGE}.")
    family = _FAMILIES[module.rpartition(".modeling_")[2]]
    name = family.name
    need(f"{path}.Neuron{name}ForCausalLM", module)

    class OwnNeuronConfig(NeuronConfig):
        @played(f"{path}.{name}NeuronConfig.__init__")
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    @trimmed
    class FamilyConfig(InferenceConfig):
        @played(f"{path}.{name}InferenceConfig.get_required_attributes")
        def get_required_attributes(self) -> list[str]:
            return [*_SHARED, *family.required]

        @classmethod
        @played(f"{path}.{name}InferenceConfig.get_neuron_config_cls")
        def get_neuron_config_cls(cls) -> Any:
            return family.neuron_config or OwnNeuronConfig

    class FamilyModel(NeuronBaseModel):
        """The ``worker_cls`` of a fused speculation."""

    class FamilyForCausalLM(NeuronBaseForCausalLM):
        _model_cls = FamilyModel

        @classmethod
        @played(f"{path}.Neuron{name}ForCausalLM.get_config_cls")
        def get_config_cls(cls) -> Any:
            return FamilyConfig

    made: dict[str, Any] = {
        f"{name}InferenceConfig": FamilyConfig,
        f"Neuron{name}Model": FamilyModel,
        f"Neuron{name}ForCausalLM": FamilyForCausalLM,
        **({f"{name}NeuronConfig": OwnNeuronConfig} if family.defines else {}),
    }
    for public, cls in made.items():
        cls.__name__ = cls.__qualname__ = public
        cls.__module__ = module
    return made
