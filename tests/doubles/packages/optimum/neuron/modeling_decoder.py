"""``NeuronDecoderModel`` of 0.0.28, over the stand-in of transformers-neuronx: exported, saved and loaded."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import transformers_neuronx
from neuron_double.bound import bound
from neuron_double.compiler import compiler_version
from optimum.neuron.models.inference.backend.config import get_available_cores
from transformers import AutoConfig, GenerationConfig
from transformers_neuronx.config import ContinuousBatchingConfig, NeuronConfig

_HERE = "optimum.neuron.modeling_decoder.NeuronDecoderModel"
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


class NeuronDecoderModel:
    @bound(f"{_HERE}.__init__")
    def __init__(
        self, config: Any, checkpoint_dir: str, compiled_dir: str | None = None, generation_config: Any = None
    ) -> None:
        """Claims the cores. Raises ValueError for more cores than there are."""
        self.config, self.checkpoint_dir, self.compiled_dir = config, checkpoint_dir, compiled_dir
        self.generation_config = generation_config or GenerationConfig.from_model_config(config)
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
    def from_pretrained(cls, model_id: str, export: bool = False, **shapes: Any) -> NeuronDecoderModel:
        config = AutoConfig.from_pretrained(model_id)
        return cls._export(model_id, config, **shapes) if export else cls._from_pretrained(model_id, config, **shapes)

    @classmethod
    @bound(f"{_HERE}._from_pretrained")
    def _from_pretrained(cls, model_id: str, config: Any) -> NeuronDecoderModel:
        """Raises ValueError for a model that is not exported."""
        if getattr(config, "neuron", None) is None:
            raise ValueError("The specified directory does not contain a neuron model.")
        checkpoint, compiled = Path(model_id, "checkpoint"), Path(model_id, "compiled")
        if not checkpoint.is_dir():
            raise ValueError("Unable to fetch the neuron model weights files.")
        assert compiled.is_dir()
        return cls(config, str(checkpoint), str(compiled))

    @classmethod
    @bound(f"{_HERE}._export")
    def _export(
        cls,
        model_id: str,
        config: Any,
        batch_size: int = 1,
        sequence_length: int | None = None,
        num_cores: int | None = None,
        auto_cast_type: str = "fp32",
    ) -> NeuronDecoderModel:
        config = copy.deepcopy(config)
        config.neuron = {
            "task": "text-generation",
            "batch_size": batch_size,
            "num_cores": num_cores or get_available_cores(),
            "auto_cast_type": auto_cast_type,
            "sequence_length": sequence_length or config.max_position_embeddings,
            "compiler_type": "neuronx-cc",
            "compiler_version": compiler_version(),
            "checkpoint_id": None if Path(model_id).is_dir() else model_id,
            "checkpoint_revision": None,
        }
        return cls(config, model_id)

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(save_directory)
        self._save_pretrained(save_directory)

    @bound(f"{_HERE}._save_pretrained")
    def _save_pretrained(self, save_directory: str) -> None:
        """Copies the checkpoint of a local folder, and the graphs. Raises FileExistsError for graphs saved before."""
        out = Path(save_directory)
        if self.config.neuron["checkpoint_id"] is None:
            shutil.copytree(self.checkpoint_dir, out / "checkpoint", dirs_exist_ok=True)
        if self.compiled_dir is None:
            self.model.save(str(out / "compiled"))
        else:
            shutil.copytree(self.compiled_dir, out / "compiled")
        self.generation_config.save_pretrained(save_directory)
