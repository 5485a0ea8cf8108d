"""The families of models by table: what each demands of a config, and the classes of its module."""

from __future__ import annotations

from functools import cache
from typing import Any

from neuronx_distributed_inference._played import PACKAGE, contract, played, version
from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig, NeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel

_SHARED = (
    *("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "vocab_size"),
    *("max_position_embeddings", "rope_theta", "rms_norm_eps"),
)
_REQUIRED = {  # besides these
    "Llama": ("pad_token_id", "hidden_act"),
    "Mistral": ("hidden_act", "tie_word_embeddings"),
    "Mixtral": ("pad_token_id", "num_local_experts", "num_experts_per_tok"),
    "Qwen2": ("pad_token_id", "hidden_act"),
    "Qwen3": ("head_dim", "pad_token_id", "hidden_act"),
}


@cache
def classes(name: str) -> dict[str, Any]:
    """The classes of the module of that family; one that this stand-in does not play demands nothing."""
    path = f"models.{name.lower()}.modeling_{name.lower()}"

    class FamilyConfig(InferenceConfig):
        @played(f"{path}.{name}InferenceConfig.get_required_attributes")
        def get_required_attributes(self) -> list[str]:
            return [*_SHARED, *_REQUIRED[name]]

        @classmethod
        @played(f"{path}.{name}InferenceConfig.get_neuron_config_cls")
        def get_neuron_config_cls(cls) -> Any:
            return MoENeuronConfig if name == "Mixtral" else NeuronConfig

    class FamilyForCausalLM(NeuronBaseForCausalLM):
        _model_cls = type(f"Neuron{name}Model", (NeuronBaseModel,), {})

        @classmethod
        @played(f"{path}.Neuron{name}ForCausalLM.get_config_cls")
        def get_config_cls(cls) -> Any:
            return FamilyConfig

    made = {f"{name}InferenceConfig": FamilyConfig, f"Neuron{name}ForCausalLM": FamilyForCausalLM}
    for public, cls in made.items():
        cls.__name__ = cls.__qualname__ = public
        cls.__module__ = f"{PACKAGE}.{path}"
    return made


def registry() -> dict[str, dict[str, Any]]:
    """MODEL_TYPES of the version that is played."""
    data = contract().data
    snapshot = data["snapshots"].get(version()) or data["other_revisions"][version()]
    names = snapshot["registries"][f"{PACKAGE}.utils.constants.MODEL_TYPES"]
    return {arch: {task: _class(name) for task, name in tasks.items()} for arch, tasks in names.items()}


def _class(name: str) -> Any:
    family = name.removeprefix("Neuron").removesuffix("ForCausalLM")
    if family in _REQUIRED:
        return classes(family)[name]
    return type(name, (NeuronBaseForCausalLM,), {"__doc__": "Not played."})
