"""Compile to a folder, load that folder: the life of every NxD Inference model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from neuron_double.compiler import cached_compile
from neuron_double.runtime import runtime
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from neuronx_distributed_inference._played import played, version
from neuronx_distributed_inference.models.config import InferenceConfig

_HERE = "models.application_base.NeuronApplicationBase"
COMPILED_MODEL_FILE_NAME = "model.pt"
_FP8_NEEDS = ("XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")
_TYPES = {"int8": torch.int8, "f8e4m3": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2}
DRAFT = "draft_model."  # before the names of a draft's weights
_FUSES_QKV = {"Llama": "0.4", "Qwen2": "0.7", "Qwen3": "0.9"}  # in earlier versions, and others in all: a KeyError


class ModelWrapper:
    """One kind of graph. ``compiler_args`` are the flags that it is compiled with; NEURON_CC_FLAGS is not read."""

    def __init__(self, neuron_config: Any, tag: str) -> None:
        self.tag = tag
        level = "-O1" if tag == "context_encoding_model" else "-O2"
        lnc = neuron_config.logical_nc_config
        self.compiler_args = f"--auto-cast=none --model-type=transformer --lnc={lnc} {level} "


class NeuronApplicationBase(torch.nn.Module):
    config: Any

    @played(f"{_HERE}.__init__")
    def __init__(self, model_path: str, config: Any = None, neuron_config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.neuron_config = config.neuron_config
        self.model_path = str(model_path)
        self.is_loaded_to_neuron = False
        self.plain: dict[str, Any] = {}  # models of transformers by the prefix of their weights
        self.models = [ModelWrapper(self.neuron_config, tag) for tag in self.tags()]

    @classmethod
    @played(f"{_HERE}.get_config_cls")
    def get_config_cls(cls) -> Any:
        return InferenceConfig

    @classmethod
    @played(f"{_HERE}.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return cls.get_config_cls().get_neuron_config_cls()

    def tags(self) -> list[str]:
        """Of prompts, and of steps."""
        fused = self.neuron_config.enable_fused_speculation
        return ["context_encoding_model", "fused_speculation_model" if fused else "token_generation_model"]

    def buckets(self, tag: str) -> list[int]:
        """Ascending. A list of one's own holds only where bucketing is on."""
        neuron, is_context = self.neuron_config, tag == "context_encoding_model"
        if not neuron.enable_bucketing:
            return [neuron.max_context_length if is_context else neuron.max_length]
        return sorted(neuron.context_encoding_buckets if is_context else neuron.token_generation_buckets)

    def _graphs(self) -> list[tuple[str, str]]:
        """Tag and text of each graph that is compiled."""
        neuron = self.neuron_config
        shapes = {name: getattr(neuron, name) for name in ("tp_degree", "max_length", "max_batch_size", "quantized")}
        models = [{"path": config._name_or_path, **config.hf_config} for _, config in self._both().values()]
        graphs = [(tag, bucket) for tag in self.tags() for bucket in self.buckets(tag)]
        return [(tag, json.dumps([tag, bucket, shapes, models], sort_keys=True, default=str)) for tag, bucket in graphs]

    @played(f"{_HERE}.compile")
    def compile(self, compiled_model_path: str) -> None:
        """Writes neuron_config.json, model.pt and, if asked, the weights of each rank. Takes no core."""
        self._check_fp8()
        out = Path(compiled_model_path)
        out.mkdir(parents=True, exist_ok=True)
        self.config.save(str(out))
        flags = {wrapper.tag: wrapper.compiler_args for wrapper in self.models}
        log = f"--logfile={os.environ.get('BASE_COMPILE_WORK_DIR', '/tmp/nxd_model/')}"  # so the key has the folder
        compiled = [
            [
                hlo,
                cached_compile(
                    hlo, f"{flags[tag]} {log}{tag}/log-neuron-cc.txt", cores=self.neuron_config.tp_degree
                ).decode(),
            ]
            for tag, hlo in self._graphs()
        ]
        (out / COMPILED_MODEL_FILE_NAME).write_text(json.dumps(compiled))
        if self.neuron_config.skip_sharding or not self.neuron_config.save_sharded_checkpoint:
            return
        self._check_weights()
        ranks, weights = self.neuron_config.tp_degree, self._weights()
        (out / "weights").mkdir(exist_ok=True)
        for rank in range(ranks):
            parts = {name: tensor.flatten().tensor_split(ranks)[rank].clone() for name, tensor in weights.items()}
            save_file(parts, out / f"weights/tp{rank}_sharded_checkpoint.safetensors")

    @played(f"{_HERE}.load")
    def load(self, compiled_model_path: str) -> None:
        """Claims the cores. Raises ValueError for what was not compiled, RuntimeError by the runtime."""
        out, device = Path(compiled_model_path), runtime()
        if not (out / COMPILED_MODEL_FILE_NAME).exists():
            raise ValueError(f"The provided filename {out / COMPILED_MODEL_FILE_NAME} does not exist")
        compiled = json.loads((out / COMPILED_MODEL_FILE_NAME).read_text())
        device.claim()
        device.load_collectives(self.neuron_config.tp_degree)
        for (hlo, neff), (tag, wished) in zip(compiled, self._graphs(), strict=True):
            device.load_neff(neff.encode())
            if hlo != wished:
                raise RuntimeError(f"{tag}: the graph has other shapes than the weights")
        weights = self._sharded(out / "weights") if self.neuron_config.save_sharded_checkpoint else self._weights()
        device.allocate(sum(tensor.nbytes for tensor in weights.values()) // self.neuron_config.tp_degree, "tensors")
        self.plain = {prefix: _model(config, weights, prefix) for prefix, (_, config) in self._both().items()}
        self.is_loaded_to_neuron = True
        for _ in compiled:  # the warm-up
            device.execute()

    def _sharded(self, folder: Path) -> dict[str, torch.Tensor]:
        """Flat tensors. Raises FileNotFoundError where a rank's file is missing."""
        files = [folder / f"tp{rank}_sharded_checkpoint.safetensors" for rank in range(self.neuron_config.tp_degree)]
        parts = [load_file(file) for file in files]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _weights(self) -> dict[str, torch.Tensor]:
        """Of all models, by the configured type; scales and what is of one byte stay as they are."""
        weights = {}
        for prefix, (path, config) in self._both().items():
            for name, tensor in _stored_weights(path, config).items():
                is_plain = tensor.element_size() > 1 and not name.endswith(".scale")
                weights[prefix + name] = tensor.to(config.neuron_config.torch_dtype) if is_plain else tensor
        return weights

    @classmethod
    @played(f"{_HERE}.save_quantized_state_dict")
    def save_quantized_state_dict(cls, model_path: str, config: Any) -> None:
        """Quantizes the checkpoint in ``model_path`` into ``quantized_checkpoints_path``."""
        folder, neuron = Path(config.neuron_config.quantized_checkpoints_path), config.neuron_config
        folder.mkdir(parents=True, exist_ok=True)
        kind = _TYPES[neuron.quantization_dtype]
        most = 127.0 if kind is torch.int8 else torch.finfo(kind).max
        weights = _state_dict(model_path)
        for name in [name for name in weights if name.endswith("proj.weight")]:
            per_channel = neuron.quantization_type == "per_channel_symmetric"
            scale = weights[name].abs().amax(dim=1 if per_channel else (0, 1), keepdim=True) / most
            weights[name.replace(".weight", ".scale")] = scale
            scaled = weights[name] / scale
            weights[name] = (scaled.round() if kind is torch.int8 else scaled).to(kind)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def _both(self) -> dict[str, tuple[str, Any]]:
        """Of each model the prefix of its weights, its checkpoint and its configuration."""
        fused, own = self.config.fused_spec_config, (self.model_path, self.config)
        return {"": own} if fused is None else {"": own, DRAFT: (fused.draft_model_path, fused.draft_config)}

    def _check_fp8(self) -> None:
        """The compiler needs two variables for numbers of fp8."""
        neuron = self.neuron_config
        is_fp8 = neuron.kv_cache_quant or (neuron.quantized and neuron.quantization_dtype != "int8")
        missing = [name for name in _FP8_NEEDS if os.environ.get(name) != "1"]
        if is_fp8 and missing:
            raise RuntimeError(f"fp8 needs {', '.join(missing)} set to 1")

    def _check_weights(self) -> None:
        """What fails while weights are divided, although the options were accepted."""
        name = type(self).__name__.removeprefix("Neuron").removesuffix("ForCausalLM")
        if self.neuron_config.fused_qkv and version() < _FUSES_QKV.get(name, "1"):
            raise KeyError("layers.0.self_attn.Wqkv.weight")
        if self.neuron_config.quantized and name == "Mixtral":
            raise RuntimeError("Cannot find layers.0.mlp.expert_mlps.mlp_op.gate_up_proj.scale")
        if self.neuron_config.quantized and name == "Qwen2":
            raise NotImplementedError("set_bias_to_state_dict")


def _state_dict(path: str) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint, none sharing memory with another. Raises OSError without one."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}


def _stored_weights(path: str, config: Any) -> dict[str, torch.Tensor]:
    if config.neuron_config.quantized:
        return load_file(Path(config.neuron_config.quantized_checkpoints_path) / "model.safetensors")
    return _state_dict(path)


def _model(config: Any, weights: dict[str, torch.Tensor], prefix: str) -> Any:
    """transformers' model with these weights, which may be flat."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.model_type, **config.hf_config)).eval()
    for name, own in model.state_dict().items():
        scale = weights.get(f"{prefix}{name.removesuffix('.weight')}.scale", torch.ones(1))
        own.copy_((weights[prefix + name].float().reshape(own.shape[0], -1) * scale.reshape(-1, 1)).reshape(own.shape))
    return model.to(config.neuron_config.torch_dtype)
