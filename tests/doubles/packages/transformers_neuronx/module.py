"""Checkpoints: what ``from_pretrained`` checks and reads, and the split format."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.slots import SlotModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

NAME = "transformers_neuronx.module."
_KEY_TO_FILENAME_JSON = "key_to_filename.json"
_PYTORCH_MODEL_BIN_FILENAME = "pytorch_model.bin"


@bound(NAME + "save_pretrained_split")
def save_pretrained_split(model: Any, save_directory: str) -> None:
    """config.json, and ``pytorch_model.bin/`` with one file for each tensor."""
    model.config.save_pretrained(save_directory)
    save_split(model.state_dict(), str(Path(save_directory) / _PYTORCH_MODEL_BIN_FILENAME))


@bound(NAME + "save_split")
def save_split(state_dict: Any, save_dir: str) -> None:
    folder = Path(save_dir)
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for index, (key, tensor) in enumerate(state_dict.items()):
        names[key] = f"p{index}.safetensors"
        save_file({key: tensor.contiguous()}, folder / names[key])
    (folder / _KEY_TO_FILENAME_JSON).write_text(json.dumps(names))


def open_weights(path: str, slots: int, max_len: int, **how: Any) -> SlotModel:
    """The checkpoint in ``path``, by preference: safetensors, split, pickled."""
    folder = Path(path)
    split = folder / _PYTORCH_MODEL_BIN_FILENAME
    if list(folder.glob("*.safetensors")) or not split.is_dir():
        return SlotModel(path, slots, max_len, **how)
    tensors: dict[str, torch.Tensor] = {}
    for key, name in json.loads((split / _KEY_TO_FILENAME_JSON).read_text()).items():
        file = split / name
        content = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
        tensors[key] = (content[key] if isinstance(content, dict) else content).clone()
    with tempfile.TemporaryDirectory() as joined:
        (Path(joined) / "config.json").write_text((folder / "config.json").read_text())
        save_file(tensors, Path(joined) / "model.safetensors", metadata={"format": "pt"})
        return SlotModel(joined, slots, max_len, **how)


class PretrainedModel(torch.nn.Module):
    """What all classes have, GPT-J and GPT-NeoX nothing more."""

    model_types: tuple[str, ...] = ()

    @classmethod
    @bound(NAME + "PretrainedModel.from_pretrained")
    def from_pretrained(cls, pretrained_model_path: str, *model_args: Any, **kwargs: Any) -> Any:
        """Reads the configuration; the weights come with ``to_neuron``."""
        _check(**kwargs)
        config = AutoConfig.from_pretrained(pretrained_model_path)
        model = cls(config, *model_args, **kwargs)
        model._checkpoint_path = str(pretrained_model_path)
        return model


def _check(**kwargs: Any) -> None:
    positions, context = kwargs.get("n_positions", 2048), kwargs.get("context_length_estimate")
    longest = max(positions) if isinstance(positions, list) else positions
    if context is not None:
        most = max(context) if isinstance(context, list) else context
        assert longest >= most, f"n_positions ({longest}) must be at least context_length_estimate ({most})"
    neuron_config = kwargs.get("neuron_config")
    if neuron_config is None:
        return
    if neuron_config.continuous_batching is not None:
        shared = neuron_config.continuous_batching.batch_size_for_shared_caches
        batch = kwargs.get("batch_size")
        assert batch == shared, f"batch_size ({batch}) must be batch_size_for_shared_caches ({shared})"
    if neuron_config.bsh_cache_layout:
        assert neuron_config.continuous_batching is not None, "the BSH cache layout is for continuous batching only"
        for value in (positions, context):
            assert not isinstance(value, list) or len(value) == 1, "the BSH cache layout takes a single bucket"
