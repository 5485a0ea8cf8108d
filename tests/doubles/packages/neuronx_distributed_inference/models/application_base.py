"""Compile to a folder, load that folder: the life of every NxD Inference model."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from neuron_double.compiler import cached_compile, compile_graph
from neuron_double.runtime import runtime
from neuron_double.slots import SlotModel

from neuronx_distributed_inference._played import played, trimmed, version
from neuronx_distributed_inference.models import checkpoints
from neuronx_distributed_inference.models.config import InferenceConfig, NeuronConfig, has_fp8_cache
from neuronx_distributed_inference.models.model_wrapper import ModelWrapper
from neuronx_distributed_inference.modules.attention.gqa import determine_sharding_strategy
from neuronx_distributed_inference.modules.autobucketing import generate_buckets

_HERE = "models.application_base"
COMPILED_MODEL_FILE_NAME = "model.pt"
_FP8_NEEDS = ("XLA_HANDLE_SPECIAL_SCALAR", "UNSAFE_FP8FNCAST")


def normalize_path(path: str) -> str:
    """With a slash at its end."""
    return f"{os.path.normpath(path)}/"


@played(f"{_HERE}.is_compiled")
def is_compiled(model_path: str) -> bool:
    """Joined as strings, so a path without a slash at its end is never one of a compiled model."""
    return Path(str(model_path) + COMPILED_MODEL_FILE_NAME).is_file()


@trimmed
class NeuronApplicationBase(torch.nn.Module):
    config: Any

    @played(f"{_HERE}.NeuronApplicationBase.__init__")
    def __init__(self, model_path: str, config: Any = None, neuron_config: Any = None) -> None:
        super().__init__()
        self.config = self.get_config_cls().load(model_path) if config is None else config
        if neuron_config is not None:
            self.config.neuron_config = neuron_config
        self.neuron_config = self.config.neuron_config
        self.model_path = str(model_path)
        self.is_compiled = is_compiled(normalize_path(self.model_path))
        self.is_loaded_to_neuron = False
        self.draft: SlotModel | None = None
        self.target: SlotModel | None = None
        self.validate_config(self.config)
        self.models = [ModelWrapper(self.neuron_config, tag) for tag in self.tags()]

    @classmethod
    @played(f"{_HERE}.NeuronApplicationBase.validate_config")
    def validate_config(cls, config: Any) -> None:
        """For subclasses."""

    @classmethod
    @played(f"{_HERE}.NeuronApplicationBase.get_config_cls")
    def get_config_cls(cls) -> Any:
        return InferenceConfig

    @classmethod
    @played(f"{_HERE}.NeuronApplicationBase.get_neuron_config_cls")
    def get_neuron_config_cls(cls) -> Any:
        return cls.get_config_cls().get_neuron_config_cls() or NeuronConfig

    def graphs(self) -> list[dict[str, Any]]:
        """Tag, batch and bucket of each graph that is compiled."""
        neuron, graphs = self.neuron_config, []
        for tag in self.tags():
            batch = neuron.ctx_batch_size if tag == "context_encoding_model" else neuron.tkg_batch_size
            graphs += [{"tag": tag, "batch": batch, "bucket": bucket} for bucket in self.buckets(tag)]
        return graphs

    def tags(self) -> list[str]:
        neuron = self.neuron_config
        if getattr(neuron, "enable_fused_speculation", False):
            return ["context_encoding_model", "fused_speculation_model"]
        speculates = ["speculation_model"] if neuron.speculation_length else []
        return ["context_encoding_model", "token_generation_model", *speculates]

    def buckets(self, tag: str) -> list[int]:
        """Ascending. A list of one's own holds only where bucketing is on."""
        neuron = self.neuron_config
        is_context = tag == "context_encoding_model"
        longest = neuron.max_context_length if is_context else neuron.max_length
        if not neuron.enable_bucketing:
            return [longest]
        name = "context_encoding_buckets" if is_context else "token_generation_buckets"
        return sorted(getattr(neuron, name, None) or generate_buckets(128, longest))

    @played(f"{_HERE}.NeuronApplicationBase.compile")
    def compile(
        self,
        compiled_model_path: str,
        debug: bool = False,
        pre_shard_weights_hook: Any = None,
        dry_run: bool = False,
        disable_fail_fast: bool = False,
    ) -> None:
        """Writes neuron_config.json, model.pt and, if asked, the weights of each rank. Takes no core.

        The graphs lie in BASE_COMPILE_WORK_DIR meanwhile, which begins empty; so another compile in the same place
        takes them away or puts its own there.
        """
        self._check_fp8()
        out = Path(normalize_path(str(compiled_model_path)))
        out.mkdir(parents=True, exist_ok=True)
        self.config.save(str(out))
        work = Path(os.environ.get("BASE_COMPILE_WORK_DIR", "/tmp/nxd_model/"))
        shutil.rmtree(work, ignore_errors=True)
        for index, graph in enumerate(self.graphs()):
            folder = work / graph["tag"] / f"_tp0_bk{index}"
            folder.mkdir(parents=True)
            (folder / "graph.hlo").write_text(self._hlo(graph))
        if dry_run:
            return
        flags = {wrapper.tag: wrapper.compiler_args for wrapper in self.models}
        compiled = []
        for index, graph in enumerate(self.graphs()):
            folder = work / graph["tag"] / f"_tp0_bk{index}"
            hlo = (folder / "graph.hlo").read_text()
            graph_flags = (
                f"{flags[graph['tag']]} --logfile={folder}/log-neuron-cc.txt"  # so the key depends on the folder
            )
            cached = compile_graph if version() == "0.2" else cached_compile  # ModelBuilder's, since SDK 2.23
            neff = cached(hlo, graph_flags, cores=self.neuron_config.tp_degree).decode()
            compiled.append({**graph, "hlo": hlo, "neff": neff})
        (out / COMPILED_MODEL_FILE_NAME).write_text(json.dumps(compiled))
        if pre_shard_weights_hook is not None:
            pre_shard_weights_hook(self)
        self._shard(out)
        self.is_compiled = True

    @played(f"{_HERE}.NeuronApplicationBase.shard_weights")
    def shard_weights(self, compiled_model_path: str, debug: bool = False, pre_shard_weights_hook: Any = None) -> None:
        self._shard(Path(compiled_model_path))

    def _shard(self, out: Path) -> None:
        """Nothing with ``skip_sharding``, though a load reads the files all the same."""
        if getattr(self.neuron_config, "skip_sharding", False) or not self.neuron_config.save_sharded_checkpoint:
            return
        for name, (path, config) in self._both().items():
            folder, dtype = out / "weights" / name, config.neuron_config.torch_dtype
            checkpoints.shard(_stored_weights(path, config), folder, self.neuron_config.tp_degree, dtype)

    @played(f"{_HERE}.NeuronApplicationBase.load")
    def load(
        self,
        compiled_model_path: str,
        start_rank_id: int | None = None,
        local_ranks_size: int | None = None,
        skip_warmup: bool = False,
    ) -> None:
        """Claims the cores. Raises FileNotFoundError for what was not compiled, RuntimeError by the runtime."""
        out = Path(normalize_path(str(compiled_model_path)))
        compiled = json.loads((out / COMPILED_MODEL_FILE_NAME).read_text())
        device, neuron = runtime(), self.neuron_config
        device.claim()
        device.load_collectives(neuron.tp_degree)
        for graph, wished in zip(compiled, self.graphs(), strict=False):
            device.load_neff(graph["neff"].encode())
            if graph["hlo"] != self._hlo(wished):
                raise RuntimeError(f"{wished['tag']}: the graph has other shapes than the weights")
        self._load_weights(out)
        self.is_loaded_to_neuron = True
        if not (skip_warmup or getattr(neuron, "skip_warmup", False)):
            self._warm_up()

    @played(f"{_HERE}.NeuronApplicationBase.warmup")
    def warmup(self) -> None:
        self._warm_up()

    def _warm_up(self) -> None:
        for _ in self.graphs():
            runtime().execute()

    @played(f"{_HERE}.NeuronApplicationBase.load_weights")
    def load_weights(
        self, compiled_model_path: str, start_rank_id: int | None = None, local_ranks_size: int | None = None
    ) -> None:
        """From the files of the ranks, where the configuration says that they were saved; else from the checkpoint in
        ``model_path``, which is divided again."""
        self._load_weights(Path(compiled_model_path))

    def _load_weights(self, out: Path) -> None:
        for name, (path, config) in self._both().items():
            folder = out / "weights" / name
            neuron, ranks = config.neuron_config, self.neuron_config.tp_degree
            saved = self.neuron_config.save_sharded_checkpoint
            weights = checkpoints.unshard(folder, ranks) if saved else _stored_weights(path, config)
            size = sum(
                tensor.numel() * min(tensor.element_size(), neuron.torch_dtype.itemsize) for tensor in weights.values()
            )
            runtime().allocate(size // ranks, "tensors")
            runtime().allocate(self._kv_bytes(config) // ranks, "tensors")
            with checkpoints.as_checkpoint(config, checkpoints.dequantized(weights)) as path:
                model = SlotModel(
                    path,
                    slots=getattr(self.neuron_config, "kv_cache_batch_size", self.neuron_config.max_batch_size),
                    max_len=self.neuron_config.max_length,
                    dtype=neuron.torch_dtype,
                    quantize_kv="fp8" if has_fp8_cache(neuron) else None,
                )
            setattr(self, name or "target", model)

    @classmethod
    @played(f"{_HERE}.NeuronApplicationBase.get_state_dict")
    def get_state_dict(cls, model_name_or_path: str, config: Any) -> dict[str, torch.Tensor]:
        return checkpoints.state_dict(model_name_or_path)

    @classmethod
    @played(f"{_HERE}.NeuronApplicationBase.save_quantized_state_dict")
    def save_quantized_state_dict(cls, model_path: str, config: Any) -> None:
        """Quantizes the checkpoint in ``model_path`` into ``quantized_checkpoints_path``."""
        file = checkpoints.quantized_file(config.neuron_config)
        file.parent.mkdir(parents=True, exist_ok=True)
        checkpoints.save_file(_quantized(model_path, config), file, {"format": "pt"})

    @classmethod
    @played(f"{_HERE}.NeuronApplicationBase.generate_quantized_state_dict")
    def generate_quantized_state_dict(cls, model_path: str, config: Any) -> dict[str, torch.Tensor]:
        return _quantized(model_path, config)

    @played(f"{_HERE}.NeuronApplicationBase.reset")
    def reset(self) -> None:
        """For subclasses."""

    def _both(self) -> dict[str, tuple[str, Any]]:
        """Of each model the folder below ``weights``, its checkpoint and its configuration."""
        fused, own = self.config.fused_spec_config, (self.model_path, self.config)
        return {"": own} if fused is None else {"": own, "draft": (fused.draft_model_path, fused.draft_config)}

    def _hlo(self, graph: dict[str, Any]) -> str:
        shapes = {name: getattr(self.neuron_config, name, None) for name in ("tp_degree", "max_length", "quantized")}
        models = [{"path": config._name_or_path, **config.hf_config} for _, config in self._both().values()]
        return json.dumps({**graph, **shapes, "models": models}, sort_keys=True, default=str)

    def _kv_bytes(self, config: Any) -> int:
        heads = int(config.num_attention_heads)
        kv = int(getattr(config, "num_key_value_heads", None) or heads)
        degree = self.neuron_config.tp_degree
        if kv < degree or kv % degree:
            replicated = determine_sharding_strategy(degree, kv).name == "REPLICATE_TO_TP_DEGREE"
            kv = degree if replicated else math.ceil(heads / degree) * degree
        dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        size = 1 if has_fp8_cache(config.neuron_config) else config.neuron_config.torch_dtype.itemsize
        tokens = self.neuron_config.max_length * self.neuron_config.max_batch_size
        return 2 * int(config.num_hidden_layers) * kv * dim * tokens * size

    def _check_fp8(self) -> None:
        neuron = self.neuron_config
        is_fp8 = (
            neuron.kv_cache_quant or has_fp8_cache(neuron) or (neuron.quantized and neuron.quantization_dtype != "int8")
        )
        missing = [name for name in _FP8_NEEDS if os.environ.get(name) != "1"]
        if is_fp8 and missing:
            raise RuntimeError(f"fp8 needs {', '.join(missing)} set to 1")


def _quantized(model_path: str, config: Any) -> dict[str, torch.Tensor]:
    return checkpoints.quantized(checkpoints.state_dict(model_path), config.neuron_config)


def _stored_weights(path: str, config: Any) -> dict[str, torch.Tensor]:
    """Raises OSError where the checkpoint, or the quantized one, is gone."""
    if config.neuron_config.quantized:
        return checkpoints.in_modules(checkpoints.load_file(checkpoints.quantized_file(config.neuron_config)), config)
    return checkpoints.state_dict(path)
