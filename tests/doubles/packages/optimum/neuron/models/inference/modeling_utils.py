"""``NeuronModelForCausalLM``: exported, saved and loaded."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.compiler import cached_compile
from optimum.neuron.models.inference.backend.config import (
    CHUNKS,
    TARGETS,
    NxDNeuronConfig,
    align_compilation_target,
    current_instance_type,
    get_available_cores,
)
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

_HERE = "optimum.neuron.models.inference.modeling_utils.NeuronPreTrainedModel"
STATIC = ("granite", "mixtral")  # their classes set no continuous batching, and no sampling on the device
FAMILIES = (*STATIC, "llama", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3")


def _get_neuron_config(family: str, batch_size: int, tensor_parallel_size: int, **more: Any) -> NxDNeuronConfig:
    """``_get_neuron_config`` of the family's class."""
    shared = {"batch_size": batch_size, "tp_degree": tensor_parallel_size, **more}
    if family in STATIC:
        return NxDNeuronConfig(**shared, fused_qkv=family == "granite")
    samples = not (family in ("qwen2", "qwen3") and batch_size > 1 and tensor_parallel_size == 2)
    flags = {"on_device_sampling": samples, "fused_qkv": family != "qwen2", "continuous_batching": batch_size > 1}
    return NxDNeuronConfig(**shared, **flags)


class NeuronPreTrainedModel:
    """Its class methods choose the class of the model."""

    config: Any
    neuron_config: NxDNeuronConfig
    graphs: list[list[str]]  # text and NEFF of each

    @classmethod
    @bound(f"{_HERE}.get_neuron_config")
    def get_neuron_config(
        cls,
        model_name_or_path: str,
        config: Any = None,
        token: Any = None,
        revision: str | None = None,
        instance_type: str | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        tensor_parallel_size: int | None = None,
        prefill_chunk_size: int | None = None,
    ) -> NxDNeuronConfig:
        if CHUNKS and prefill_chunk_size is None:
            prefill_chunk_size = 1024 if (sequence_length or 0) > 1024 else 0
        more = {"prefill_chunk_size": prefill_chunk_size} if CHUNKS else {}
        sizes = batch_size, sequence_length, tensor_parallel_size
        return cls._chosen(model_name_or_path, config, instance_type, sizes, **more)

    @classmethod
    def _chosen(cls, path: str, config: Any, kind: str | None, sizes: Any, **more: Any) -> NxDNeuronConfig:
        if not Path(path).is_dir():
            raise OSError(f"{path} is not a folder, and there is no hub here")
        config = config or AutoConfig.from_pretrained(path)
        if kind is not None and kind not in TARGETS:
            raise ValueError(f"{kind} is not a valid instance type, supported instance types are: {list(TARGETS)}.")
        if config.model_type not in FAMILIES:
            raise ValueError(f"Model type {config.model_type} is not supported for task text-generation in neuron")
        batch, length, cores = sizes
        length = length or min(config.max_position_embeddings, 4096)
        named = {"torch_dtype": config.dtype, "target": TARGETS[kind] if kind else current_instance_type(), **more}
        cores = cores or get_available_cores()
        return _get_neuron_config(config.model_type, batch or 1, cores, sequence_length=length, **named)

    @classmethod
    @bound(f"{_HERE}.export")
    def export(
        cls,
        model_id: str,
        neuron_config: NxDNeuronConfig,
        config: Any = None,
        token: Any = None,
        revision: str | None = None,
        load_weights: bool = False,
    ) -> NeuronPreTrainedModel:
        """Compiles. Takes no core unless ``load_weights``."""
        align_compilation_target(str(neuron_config.target))
        config = config or AutoConfig.from_pretrained(model_id)
        flags = "--auto-cast=none --model-type=transformer -O2 --lnc=1 --target " + str(neuron_config.target)
        work = os.environ.get("BASE_COMPILE_WORK_DIR", "/tmp/nxd_model/")  # so the key has the folder
        texts = [
            json.dumps([tag, neuron_config.to_dict(), config.to_dict()], sort_keys=True, default=str)
            for tag in ("prompts", "steps")
        ]
        neffs = [cached_compile(text, f"{flags} --logfile={work}log.txt", neuron_config.tp_degree) for text in texts]
        graphs = [[text, neff.decode()] for text, neff in zip(texts, neffs, strict=True)]
        model = _model(config, neuron_config, graphs)
        if load_weights:
            model.load_weights(model_id)
        return model

    @bound(f"{_HERE}.save_pretrained")
    def save_pretrained(self, save_directory: str) -> None:
        """Writes the configurations, the graphs and, if the model is of a local folder, the weights of each core."""
        out = Path(save_directory)
        out.mkdir(parents=True, exist_ok=True)
        self.neuron_config.save_pretrained(save_directory)
        self.config.save_pretrained(save_directory)
        (out / "model.pt").write_text(json.dumps(self.graphs))
        if not Path(self.config._name_or_path).is_dir():
            return
        weights = AutoModelForCausalLM.from_pretrained(self.config._name_or_path, dtype=torch.float32).state_dict()
        shards, ranks = out / "checkpoint" / "weights", self.neuron_config.tp_degree
        shards.mkdir(parents=True)
        for rank in range(ranks):
            parts = {name: tensor.flatten().tensor_split(ranks)[rank].clone() for name, tensor in weights.items()}
            save_file(parts, shards / f"tp{rank}_sharded_checkpoint.safetensors")

    @classmethod
    @bound(f"{_HERE}.from_pretrained")
    def from_pretrained(cls, model_id: str) -> NeuronPreTrainedModel:
        """Claims the cores. Raises OSError, ValueError or RuntimeError for what does not fit this machine."""
        config = AutoConfig.from_pretrained(model_id)
        neuron = NxDNeuronConfig.from_pretrained(model_id)
        if neuron.target != current_instance_type():
            raise ValueError(f"The model was compiled for {neuron.target} but this is {current_instance_type()}")
        if get_available_cores() < neuron.tp_degree:
            raise ValueError(f"The model requires at least {neuron.tp_degree} Neuron cores")
        if not Path(model_id, "model.pt").exists():
            raise ValueError(f"The provided filename {model_id}/model.pt does not exist")
        model = _model(config, neuron, json.loads(Path(model_id, "model.pt").read_text()))
        model.load_weights(model_id)
        return model


class NeuronModelForCausalLM(NeuronPreTrainedModel):
    """What callers import."""


def _model(config: Any, neuron_config: NxDNeuronConfig, graphs: list[list[str]]) -> Any:
    from optimum.neuron.models.inference.backend.modules.decoder.modeling_decoder import NxDModelForCausalLM

    return NxDModelForCausalLM(config, neuron_config, graphs)
