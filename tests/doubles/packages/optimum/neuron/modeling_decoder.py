"""``NeuronModelForCausalLM`` of 0.0.28, over the stand-in of transformers-neuronx."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers_neuronx
from neuron_double.compiler import compiler_version
from optimum.neuron.configuration_utils import get_available_cores
from transformers import AutoConfig, GenerationConfig
from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig

CONTINUOUS = ("llama", "mistral")


def _export_kwargs(family: str, neuron: dict[str, Any]) -> dict[str, Any]:
    """``get_export_kwargs`` of the family. A batch of one is static."""
    length, batch = neuron["sequence_length"], neuron["batch_size"]
    kwargs = {"batch_size": batch, "tp_degree": neuron["num_cores"], "amp": neuron["auto_cast_type"].replace("p", "")}
    if batch > 1 and family in CONTINUOUS:
        shared = ContinuousBatchingConfig(batch_size_for_shared_caches=batch)
        kwargs |= {"n_positions": [length], "context_length_estimate": [length]}
        return kwargs | {"neuron_config": NeuronConfig(continuous_batching=shared, fuse_qkv=True)}
    return kwargs | {"n_positions": length, "neuron_config": NeuronConfig(fuse_qkv=True)}


class NeuronModelForCausalLM:
    def __init__(self, config: Any, checkpoint_dir: str, compiled_dir: str | None = None) -> None:
        """Claims the cores. Raises ValueError for more cores than there are."""
        self.config, self.checkpoint_dir, self.compiled_dir = config, checkpoint_dir, compiled_dir
        self.generation_config = GenerationConfig.from_model_config(config)
        neuron = config.neuron
        if neuron["compiler_version"] != compiler_version():
            raise ValueError(f"The model was compiled with neuronx-cc {neuron['compiler_version']}")
        if neuron["num_cores"] > get_available_cores():
            raise ValueError(f"The specified number of cores ({neuron['num_cores']}) exceeds the number available")
        kwargs = _export_kwargs(config.model_type, neuron)
        kind = transformers_neuronx.KINDS[config.model_type]
        self.model = kind.from_pretrained(checkpoint_dir, **kwargs)
        if compiled_dir is not None:
            self.model.load(compiled_dir)
        self.model.to_neuron()
        self.continuous_batching = self.model.neuron_config and self.model.neuron_config.continuous_batching

    @classmethod
    def from_pretrained(cls, model_id: str, export: bool = False, **shapes: Any) -> NeuronModelForCausalLM:
        """Raises ValueError for a model that is not exported, without ``export``."""
        config = AutoConfig.from_pretrained(model_id)
        if not export:
            if getattr(config, "neuron", None) is None:
                raise ValueError("The specified directory does not contain a neuron model.")
            checkpoint, compiled = Path(model_id, "checkpoint"), Path(model_id, "compiled")
            if not checkpoint.is_dir():
                raise ValueError("Unable to fetch the neuron model weights files.")
            assert compiled.is_dir()
            return cls(config, str(checkpoint), str(compiled))
        if unknown := shapes.keys() - {"batch_size", "sequence_length", "num_cores", "auto_cast_type"}:
            raise TypeError(f"unexpected keyword arguments {sorted(unknown)}")
        config = copy.deepcopy(config)
        config.neuron = {
            "task": "text-generation",
            **shapes,
            "compiler_type": "neuronx-cc",
            "compiler_version": compiler_version(),
            "checkpoint_id": None if Path(model_id).is_dir() else model_id,
            "checkpoint_revision": None,
        }
        return cls(config, model_id)

    def save_pretrained(self, save_directory: str) -> None:
        """Copies the checkpoint of a local folder, and the graphs. Raises FileExistsError for graphs saved before."""
        out = Path(save_directory)
        out.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(save_directory)
        if self.config.neuron["checkpoint_id"] is None:
            shutil.copytree(self.checkpoint_dir, out / "checkpoint", dirs_exist_ok=True)
        if self.compiled_dir is None:
            self.model.save(str(out / "compiled"))
        else:
            shutil.copytree(self.compiled_dir, out / "compiled")
        self.generation_config.save_pretrained(save_directory)

    def forward(
        self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any = None, return_dict: bool = True
    ) -> tuple[torch.Tensor]:
        assert not return_dict, "the adapter takes a tuple"
        return (self.model.forward(input_ids, cache_ids, start_ids)[:, None, :],)
