"""What `vllm serve` needs for LoRA adapters: their number, their rank, and an empty one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placements.engines.vllm.capabilities import Plugin
from workers.engines.server.adapters import largest_rank
from workers.engines.weight_files import tensors_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

MOST_LOADED = 8
EMPTY = "empty-adapter"  # a folder in the server's working directory
PROJECTIONS = ("o_proj", "c_proj")  # of the attention, in families with adapters in vLLM


def most_loaded(options: Mapping[str, Any]) -> int:
    """Returns the most adapters that are loaded at a time: ``max_loras`` of the engine options, or 8."""
    given = options.get("max_loras")
    return given if type(given) is int and given > 0 else MOST_LOADED


def loads_adapters(config: ReplicaConfig, plugin: Plugin) -> bool:
    """Returns whether the server is started for adapters: it has some, or ``max_loras`` reserves room for later ones,
    which only vLLM's CPU back end gets."""
    return bool(config.adapters) or (plugin == "cpu" and "max_loras" in config.model.engine_options)


def max_rank_of(config: ReplicaConfig) -> int:
    """Returns ``max_lora_rank`` of the engine options, or what the adapters need. Raises EngineLoadError."""
    given = config.model.engine_options.get("max_lora_rank")
    return given if type(given) is int else largest_rank(config.adapters)


def write_empty_adapter(folder: Path, checkpoint: Path) -> None:
    """Writes an adapter that changes nothing: zeros for one projection of the checkpoint, since vLLM accepts none
    without modules. Raises EngineLoadError for a checkpoint without a known projection."""
    names = (
        (suffix, name, tensor.shape)
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in tensors_of(file).items()
        for suffix in PROJECTIONS
        if name.endswith(f".{suffix}.weight") and len(tensor.shape) == 2
    )
    suffix, name, (rows, columns) = min(names, default=("", "", (0, 0)))
    if not name:
        message = f"{checkpoint} has no safetensors file with a projection of {' or '.join(PROJECTIONS)}"
        raise EngineLoadError("adapters-unsupported", message, "remove the adapters, or save the model as safetensors")
    header, end = {}, 0
    for part, shape in (("lora_A", (1, columns)), ("lora_B", (rows, 1))):
        size = 4 * math.prod(shape)
        key = f"base_model.model.{name.removesuffix('.weight')}.{part}.weight"
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + size)}
        end += size
    described = json.dumps(header).encode()
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": [suffix]}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(len(described).to_bytes(8, "little") + described + bytes(end))
