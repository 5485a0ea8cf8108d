"""Weights of the stand-in: the checkpoint's own, quantized, or cut into one file for each rank."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from neuronx_distributed_inference._played import version

FP8 = {"f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}


def state_dict(path: str) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face checkpoint, none sharing memory with another. Raises FileNotFoundError."""
    if not any(Path(path).glob("*.safetensors")) and not any(Path(path).glob("pytorch_model*")):
        raise FileNotFoundError(f"Can not find model.safetensors or pytorch_model.bin in {path}")
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def quantized(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """Linear weights, but the head and what is not to be converted, as int8 or fp8 with their scales."""
    unconverted = [*(config.modules_to_not_convert or []), "lm_head", "embed"]
    most = 127.0 if config.quantization_dtype == "int8" else torch.finfo(_kind(config)).max
    converted = {}
    for name, tensor in weights.items():
        if not name.endswith(".weight") or tensor.dim() != 2 or any(part in name for part in unconverted):
            converted[name] = tensor
            continue
        per_channel = config.quantization_type == "per_channel_symmetric"
        largest = tensor.abs().amax(dim=1, keepdim=True) if per_channel else tensor.abs().amax().reshape(1, 1)
        scale = largest.clamp(min=1e-12) / most
        scaled = tensor / scale
        converted[name] = (scaled.round() if config.quantization_dtype == "int8" else scaled).to(_kind(config))
        converted[name.removesuffix("weight") + "scale"] = scale
    return converted


def in_modules(weights: dict[str, torch.Tensor], config: Any) -> dict[str, torch.Tensor]:
    """As the modules hold them: before 0.7 those are int8 for everything but f8e4m3, and what is stored is cast."""
    named = config.neuron_config.quantization_dtype
    held = FP8["f8e4m3"] if named == "f8e4m3" else _kind(config.neuron_config) if version() >= "0.7" else torch.int8
    renamed = {name.replace(".weight_scale", ".scale"): tensor for name, tensor in weights.items()}
    return {name: weight.to(held) if weight.element_size() == 1 else weight for name, weight in renamed.items()}


def dequantized(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    converted = {}
    for name, tensor in weights.items():
        scale = weights.get(name.removesuffix("weight") + "scale") if name.endswith("weight") else None
        if scale is not None:
            converted[name] = (tensor.float() * scale).contiguous()
        elif not name.endswith(".scale"):
            converted[name] = tensor
    return converted


def _kind(config: Any) -> torch.dtype:
    return torch.int8 if config.quantization_dtype == "int8" else FP8[config.quantization_dtype]


def quantized_file(config: Any) -> Path:
    """Where ``quantized_checkpoints_path`` has the weights: a folder, or a file by its suffix."""
    path = Path(config.quantized_checkpoints_path)
    return path if path.suffix in (".safetensors", ".pt") else path / "model.safetensors"


def shard(weights: dict[str, torch.Tensor], folder: Path, ranks: int, dtype: torch.dtype) -> None:
    """``tp{rank}_sharded_checkpoint.safetensors``: of every tensor its part in ``dtype``, and how it looked before."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: _cast(name, tensor, dtype) for name, tensor in weights.items()}
    for rank in range(ranks):
        parts = {name: tensor.flatten().tensor_split(ranks)[rank].clone() for name, tensor in weights.items()}
        shapes = {name: list(tensor.shape) for name, tensor in weights.items()}
        save_file(parts, folder / f"tp{rank}_sharded_checkpoint.safetensors", {"shapes": json.dumps(shapes)})


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales stay as they are, and so does what is of one byte."""
    plain = tensor.is_floating_point() and tensor.element_size() > 1 and not name.endswith(".scale")
    return tensor.to(dtype) if plain else tensor


def unshard(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Raises FileNotFoundError where a rank's file is missing."""
    from safetensors import safe_open

    files = [folder / f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(ranks)]
    parts = [load_file(file) for file in files]
    with safe_open(files[0], "pt") as first:
        shapes = json.loads(first.metadata()["shapes"])
    return {name: torch.cat([part[name] for part in parts]).reshape(shape) for name, shape in shapes.items()}


def as_checkpoint(config: Any, weights: dict[str, torch.Tensor]) -> tempfile.TemporaryDirectory[str]:
    """A folder that transformers can read, with these weights and what ``config`` kept of config.json."""
    folder = tempfile.TemporaryDirectory()
    plain = AutoConfig.for_model(config.model_type, **config.hf_config)
    plain.save_pretrained(folder.name)
    save_file(weights, Path(folder.name) / "model.safetensors", {"format": "pt"})
    return folder
