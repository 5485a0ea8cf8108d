"""``NeuronModelForCausalLM`` with the classes of its families: exported, saved, loaded, and run step by step."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import torch
from neuron_double.compiler import cached_compile
from neuron_double.runtime import runtime
from optimum.neuron.configuration_utils import (
    CHUNKS,
    TARGETS,
    NxDNeuronConfig,
    align_compilation_target,
    current_instance_type,
    get_available_cores,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

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


class NeuronModelForCausalLM:
    def __init__(self, config: Any, neuron_config: NxDNeuronConfig, graphs: list[list[str]]) -> None:
        self.config, self.neuron_config = copy.deepcopy(config), copy.deepcopy(neuron_config)
        self._graphs = graphs  # text and NEFF of each
        self._plain: Any = None  # transformers' model, once there are weights
        self._lines: list[list[int]] = [[] for _ in range(neuron_config.batch_size)]  # the cache's tokens

    if CHUNKS:

        @classmethod
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
            if prefill_chunk_size is None:
                prefill_chunk_size = 1024 if (sequence_length or 0) > 1024 else 0
            sizes = batch_size, sequence_length, tensor_parallel_size
            return cls._chosen(model_name_or_path, config, instance_type, sizes, prefill_chunk_size=prefill_chunk_size)

    else:

        @classmethod
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
        ) -> NxDNeuronConfig:
            return cls._chosen(
                model_name_or_path, config, instance_type, (batch_size, sequence_length, tensor_parallel_size)
            )

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
    def export(
        cls,
        model_id: str,
        neuron_config: NxDNeuronConfig,
        config: Any = None,
        token: Any = None,
        revision: str | None = None,
        load_weights: bool = False,
    ) -> NeuronModelForCausalLM:
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
        model = cls(config, neuron_config, [[text, neff.decode()] for text, neff in zip(texts, neffs, strict=True)])
        if load_weights:
            model._load(model_id)
        return model

    def save_pretrained(self, save_directory: str) -> None:
        """Writes the configurations, the graphs and, if the model is of a local folder, the weights of each core."""
        out = Path(save_directory)
        out.mkdir(parents=True, exist_ok=True)
        self.neuron_config.save_pretrained(save_directory)
        self.config.save_pretrained(save_directory)
        (out / "model.pt").write_text(json.dumps(self._graphs))
        if not Path(self.config._name_or_path).is_dir():
            return
        weights = AutoModelForCausalLM.from_pretrained(self.config._name_or_path, dtype=torch.float32).state_dict()
        shards, ranks = out / "checkpoint" / "weights", self.neuron_config.tp_degree
        shards.mkdir(parents=True)
        for rank in range(ranks):
            parts = {name: tensor.flatten().tensor_split(ranks)[rank].clone() for name, tensor in weights.items()}
            save_file(parts, shards / f"tp{rank}_sharded_checkpoint.safetensors")

    @classmethod
    def from_pretrained(cls, model_id: str) -> NeuronModelForCausalLM:
        """Claims the cores. Raises OSError, ValueError or RuntimeError for what does not fit this machine."""
        config = AutoConfig.from_pretrained(model_id)
        neuron = NxDNeuronConfig.from_pretrained(model_id)
        if neuron.target != current_instance_type():
            raise ValueError(f"The model was compiled for {neuron.target} but this is {current_instance_type()}")
        if get_available_cores() < neuron.tp_degree:
            raise ValueError(f"The model requires at least {neuron.tp_degree} Neuron cores")
        if not Path(model_id, "model.pt").exists():
            raise ValueError(f"The provided filename {model_id}/model.pt does not exist")
        model = cls(config, neuron, json.loads(Path(model_id, "model.pt").read_text()))
        model._load(model_id)
        return model

    def _load(self, path: str) -> None:
        """Loads the graphs, and the weights of each core, else those of the checkpoint."""
        device, shards, ranks = runtime(), Path(path, "checkpoint", "weights"), self.neuron_config.tp_degree
        if shards.is_dir():
            parts = [load_file(shards / f"tp{rank}_sharded_checkpoint.safetensors") for rank in range(ranks)]
            weights = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        elif any(Path(path).glob("*.safetensors")):
            weights = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        else:
            raise ValueError(f"Checkpoint file not found under {path}.")
        device.claim()
        device.load_collectives(ranks)
        for _, neff in self._graphs:
            device.load_neff(neff.encode())
        device.allocate(sum(tensor.nbytes for tensor in weights.values()) // ranks, "tensors")
        self._plain = AutoModelForCausalLM.from_config(self.config).eval()
        for name, own in self._plain.state_dict().items():
            own.copy_(weights[name].reshape(own.shape))
        self._plain.to(self.neuron_config.torch_dtype)

    def forward(
        self, input_ids: Any, position_ids: Any, seq_ids: Any = None, sampling_params: Any = None
    ) -> torch.Tensor:
        """``input_ids``, ``position_ids`` [rows, tokens]; ``seq_ids`` [rows]; ``sampling_params`` [rows, 3] float32."""
        neuron, rows = self.neuron_config, input_ids.shape[0]
        if neuron.on_device_sampling:
            _validate_sampling_params(sampling_params, neuron.max_topk)
        assert sampling_params.dtype == torch.float32, "the graphs are compiled for float32"
        assert sampling_params.shape == (rows, 3), "the graphs take three parameters for each row"
        is_prompt = input_ids.shape[-1] > 1 and not position_ids.min().item()
        if is_prompt and getattr(neuron, "prefill_chunk_size", 0):
            raise ValueError("When prefill_chunk_size > 0, call generate() or prefill_chunk() instead of forward()")
        if rows > neuron.batch_size:
            raise ValueError(f"Input batch size {rows} exceeds the maximum batch size {neuron.batch_size}.")
        lines = seq_ids.tolist() if neuron.continuous_batching else [*range(rows)]  # which ignores seq_ids
        if is_prompt:
            logits = self._prompts(lines, input_ids, position_ids)
        else:
            logits = self._step(lines, input_ids, position_ids)
        return logits.argmax(-1).to(torch.int32) if neuron.on_device_sampling else logits[:, None]

    def _prompts(self, lines: list[int], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """A prompt ends at its first highest position, where the padding that is added here has 1."""
        width = self.neuron_config.max_context_length
        assert ids.shape[1] <= width, "a prompt that is longer than its graph is cut off"
        padded = torch.nn.functional.pad(positions, (0, width - ids.shape[1]), value=1)
        answers = []
        if not self.neuron_config.continuous_batching:  # a whole batch: missing rows are the first one
            runtime().execute()
            self._lines = [ids[0].tolist() for _ in self._lines]
        for line, row, places in zip(lines, ids.tolist(), padded.tolist(), strict=True):
            if self.neuron_config.continuous_batching:
                runtime().execute()
            self._lines[line] = row + [0] * (width - len(row))
            answers.append(self._next(line, places.index(max(places)) + 1))
        return torch.stack(answers)

    def _step(self, lines: list[int], ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows that are missing are the first one, in all other lines."""
        if ids.shape[1] != 1:
            raise ValueError(f"no graph has the input shapes {tuple(ids.shape)}")
        assert len({*lines}) == len(lines), "a slot is given twice"
        runtime().execute()
        for line in {*range(self.neuron_config.batch_size)} - {*lines}:
            self._write(line, int(positions[0, 0]), [int(ids[0, 0])])
        answers = []
        for line, token, position in zip(lines, ids[:, 0].tolist(), positions[:, 0].tolist(), strict=True):
            self._write(line, position, [token])
            answers.append(self._next(line, position + 1))
        return torch.stack(answers)

    if CHUNKS:

        def prefill_chunk(self, input_ids: Any, position_ids: Any, seq_ids: Any, sampling_params: Any) -> torch.Tensor:
            """Processes one chunk of one prompt; the last token and its position fill it up. Returns logits."""
            assert input_ids.shape[0] == 1, "a chunk is of one slot"
            assert input_ids.shape[1] <= self.neuron_config.prefill_chunk_size, "no graph takes a longer chunk"
            first = int(position_ids[0, 0])
            assert position_ids[0].tolist() == [*range(first, first + input_ids.shape[1])], "positions ascend"
            assert sampling_params.shape == (1, 3)
            runtime().execute()
            line = int(seq_ids[0]) if self.neuron_config.continuous_batching else 0
            self._write(line, first, input_ids[0].tolist())
            return self._next(line, first + input_ids.shape[1])[None, None]

    def _write(self, line: int, position: int, tokens: list[int]) -> None:
        held = self._lines[line]
        held += [0] * (position + len(tokens) - len(held))
        held[position : position + len(tokens)] = tokens

    def _next(self, line: int, length: int) -> torch.Tensor:
        """Logits [vocab] after the first tokens of a line. Raises RuntimeError without weights."""
        if self._plain is None:
            raise RuntimeError("the model is not initialized")
        with torch.no_grad():
            logits: torch.Tensor = self._plain(torch.tensor([self._lines[line][:length]])).logits[0, -1].float()
        return logits


def _validate_sampling_params(params: torch.Tensor, max_topk: int) -> None:
    top_k, top_p, temperature = params[:, 0], params[:, 1], params[:, 2]
    if not torch.all((top_k == -1) | ((top_k > 0) & (top_k <= max_topk))) or not torch.equal(top_k, top_k.floor()):
        raise ValueError(f"Invalid top-k values found: {top_k}, the most is {max_topk}.")
    if not torch.all((top_p > 0.0) & (top_p <= 1.0)):
        raise ValueError(f"Invalid top-p values found: {top_p}.")
    if not torch.all(temperature > 0.0):
        raise ValueError(f"Invalid temperature values found: {temperature}.")
