"""``NxDModelForCausalLM``: its weights are loaded, and it is run step by step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.runtime import runtime
from optimum.neuron.models.inference.backend.config import NxDNeuronConfig
from optimum.neuron.models.inference.modeling_utils import NeuronModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

_HERE = "optimum.neuron.models.inference.backend.modules.decoder.modeling_decoder.NxDModelForCausalLM"


class NxDModelForCausalLM(NeuronModelForCausalLM):
    def __init__(self, config: Any, neuron_config: NxDNeuronConfig, graphs: list[list[str]]) -> None:
        self.config, self.neuron_config = copy.deepcopy(config), copy.deepcopy(neuron_config)
        self.graphs = graphs
        self._plain: Any = None  # transformers' model, once there are weights
        self._lines: list[list[int]] = [[] for _ in range(neuron_config.batch_size)]  # the cache's tokens

    def load_weights(self, path: str) -> None:
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
        for _, neff in self.graphs:
            device.load_neff(neff.encode())
        device.allocate(sum(tensor.nbytes for tensor in weights.values()) // ranks, "tensors")
        self._plain = AutoModelForCausalLM.from_config(self.config).eval()
        for name, own in self._plain.state_dict().items():
            own.copy_(weights[name].reshape(own.shape))
        self._plain.to(self.neuron_config.torch_dtype)

    @bound(f"{_HERE}.forward")
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
        return logits.argmax(-1) if neuron.on_device_sampling else logits[:, None]

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

    @bound(f"{_HERE}.prefill_chunk")
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
