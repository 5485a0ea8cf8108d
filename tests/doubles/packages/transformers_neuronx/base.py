"""What the classes have in common: their life from construction to the device, and one row's step on it."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.runtime import runtime
from safetensors.torch import save_file

from transformers_neuronx import bucket, graphs, utils
from transformers_neuronx.as_computed import as_computed
from transformers_neuronx.config import GenerationConfig, NeuronConfig
from transformers_neuronx.constants import GQA
from transformers_neuronx.module import PretrainedModel, open_weights
from transformers_neuronx.sampling import drawn_on_device

NAME = "transformers_neuronx.base.NeuronModelBase."
QUANT = {"s8": "int8", "f8e4m3fn": "fp8"}


class NeuronModelBase(PretrainedModel):
    """Static batches, padded on the left; ``slots.Slotted`` adds continuous batching."""

    quantizes = True  # weights
    quantizes_kv = False  # the graphs of the others scatter whole numbers into a KV cache of one byte
    pads_heads = True
    sees_first_only = False
    on_host = False
    nan_with_padding = False

    def _setup(
        self,
        config: Any,
        *,
        n_positions: Any,
        batch_size: Any,
        amp: str,
        tp_degree: int,
        context_length_estimate: Any = None,
        unroll: Any = None,
        neuron_config: NeuronConfig | None = None,
    ) -> None:
        """What all constructors do with their keywords."""
        self.config = config
        self.amp, _ = utils.parse_amp(amp)
        self.tp_degree, self.unroll = tp_degree, unroll
        self.neuron_config = neuron_config if neuron_config is not None else NeuronConfig()
        self.batch_sizes = bucket.batch_sizes(batch_size)
        self.token_buckets = bucket.token_sizes(n_positions)
        self.context_buckets = self._context_sizes(context_length_estimate)
        self.n_head = config.num_attention_heads
        if not self._batches_continuously and self.neuron_config.continuous_batching is not None:
            # Found out by an assertion in the first prompt (``_context_dynamic_batching``).
            self.refuses_prompts = True
        self._speculation: dict[tuple[int, int], bool] = {}
        self._kernels: list[graphs.Kernel] | None = None
        self._directory: str | None = None
        self._device: Any = None
        self._generation: GenerationConfig | None = self.neuron_config.on_device_generation
        self._check_gqa_fallback()

    def _context_sizes(self, estimate: Any) -> list[int]:
        return bucket.context_sizes(estimate, self.token_buckets)

    @property
    def _batches_continuously(self) -> bool:
        return False

    @property
    def longest(self) -> int:
        return self.token_buckets[-1]

    @property
    def batch(self) -> int:
        return self.batch_sizes[-1]

    def _check_gqa_fallback(self) -> None:
        """A strategy whose rule is not met is replaced with a warning."""
        strategy, tp, heads = self.neuron_config.group_query_attention, self.tp_degree, self.n_head
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        if kv_heads == heads:
            return
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        padding = utils.round_up_to_divisor(heads, tp) - heads
        met = {
            GQA.SHARD_OVER_HEADS: kv_heads % tp == 0,
            GQA.SHARD_OVER_BATCH: all(size % tp == 0 for size in self.batch_sizes),
            GQA.REPLICATED_HEADS: True,
            GQA.ALL_GATHER_HEADS: kv_heads * head_dim % tp == 0 and (heads % tp == 0 or padding % kv_heads == 0),
        }
        if strategy is not None and not met[strategy]:
            instead = GQA.SHARD_OVER_HEADS if met[GQA.SHARD_OVER_HEADS] else GQA.REPLICATED_HEADS
            warnings.warn(
                f"group_query_attention {strategy.value} does not fit {kv_heads} KV heads and a tp degree of {tp}; "
                f"falling back to {instead.value}",
                stacklevel=3,
            )
            self.neuron_config.group_query_attention = instead
        elif strategy is None:
            fits = met[GQA.SHARD_OVER_HEADS]
            self.neuron_config.group_query_attention = GQA.SHARD_OVER_HEADS if fits else GQA.REPLICATED_HEADS

    # from the constructor to the device

    @bound(NAME + "enable_speculative_decoder")
    def enable_speculative_decoder(
        self, speculation_length: Any, batch_sizes: Any = None, token_tree: Any = None
    ) -> None:
        """Compile graphs of so many tokens too. Before ``to_neuron``."""
        lengths = speculation_length if isinstance(speculation_length, list) else [speculation_length]
        for length in lengths:
            for batch in batch_sizes or self.batch_sizes:
                self._speculation[length, batch] = True

    @bound(NAME + "load")
    def load(self, directory: str) -> None:
        """Only remembers it."""
        self._directory = directory

    @bound(NAME + "save")
    def save(self, directory: str, sharded_weights: bool = False) -> None:
        if sharded_weights:
            assert self.neuron_config.on_device_embedding, "sharded weights need on_device_embedding"
            _write_sharded(self._ready().model, Path(directory), self.tp_degree)
        graphs.write_neffs(self._graphs(), Path(directory))

    @bound(NAME + "compile")
    def compile(self, parallel_degree: Any = None) -> None:
        graphs.compile_all(self._graphs(), self.tp_degree)

    @bound(NAME + "cpu_compile")
    def cpu_compile(self) -> None:
        """Compile without any device."""
        self.on_host = True
        graphs.compile_all(self._graphs(), self.tp_degree)

    @bound(NAME + "is_compiled")
    def is_compiled(self) -> bool:
        return self._kernels is not None and all(graph.neff is not None for graph in self._kernels)

    @bound(NAME + "to_neuron")
    def to_neuron(self) -> None:
        """Claim the cores, read the weights, then take or compile the NEFFs, and load all of it."""
        self._to_device()

    def _to_device(self) -> None:
        self.on_host = False
        runtime().claim()
        self._check_sharding()
        runtime().load_collectives(self.tp_degree)
        computed = as_computed(self.config, self._checkpoint_path)
        how = {"config": computed, "sees_first_only": self.sees_first_only, **self._quantization()}
        weights = open_weights(self._checkpoint_path, self.batch, self.longest, dtype=self.amp, **how)
        kernels = self._graphs()
        if self._directory is not None:
            graphs.read_neffs(kernels, Path(self._directory))
        else:
            graphs.compile_all(kernels, self.tp_degree)
        graphs.take_memory(self, weights.model, self.batch, self.longest)
        graphs.load_neffs(kernels)
        self._device = weights

    def _check_sharding(self) -> None:
        if not self.pads_heads and self.n_head % self.tp_degree:
            raise ValueError(f"cannot shard {self.n_head} heads along {self.tp_degree} cores")
        experts = getattr(self.config, "num_local_experts", None)
        if experts is not None and experts % self.tp_degree and self.tp_degree % experts:
            raise ValueError(f"cannot shard {experts} experts along {self.tp_degree} cores")

    def _quantization(self) -> dict[str, str | None]:
        if not self.quantizes:
            return {}
        weights, cache = self.neuron_config.quant, self.neuron_config.kv_cache_quant
        return {
            "quantize": None if weights is None else QUANT[weights.quant_dtype],
            "quantize_kv": None if cache is None else QUANT.get(cache.quant_dtype),
        }

    def _graphs(self) -> list[graphs.Kernel]:
        if self._kernels is None:
            self._check_graphs()
            kinds = [("decode", size, batch) for size in self.token_buckets for batch in self.batch_sizes]
            kinds += [("context", size, batch) for size in self.context_buckets for batch in self._context_batches()]
            kinds += [("speculation", length, batch) for length, batch in self._speculation]
            self._kernels = graphs.kernels(self, kinds)
        return self._kernels

    def _check_graphs(self) -> None:
        """What fails while graphs are built: with the weights, once ``to_neuron`` has claimed the cores."""
        config = self.neuron_config
        assert self.quantizes_kv or config.kv_cache_quant is None, "inconsistent dtype between operands and updates"
        if config.log_softmax_scores and not hasattr(self, "post_layer"):
            raise AttributeError("'DecoderLmHead' object has no attribute 'post_layer_builder'")
        chosen = config.on_device_generation
        if chosen is not None and chosen.global_top_k is not None:
            size = utils.round_up_to_divisor(self.config.vocab_size, self.tp_degree)
            assert chosen.global_top_k <= size, f"topk of {chosen.global_top_k} of {size} logits"

    def _context_batches(self) -> list[int]:
        return self.batch_sizes

    # steps

    @bound(NAME + "reset")
    def reset(self) -> None:
        """Writes zeros from the host into the whole KV cache."""

    @bound(NAME + "update_generation_config")
    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        """New values for sampling on the device. Only a dynamic configuration can be changed."""
        compiled = self.neuron_config.on_device_generation
        assert compiled is not None, "on_device_generation is not enabled"
        assert compiled.dynamic, "only a dynamic on_device_generation can be updated"
        self._generation = generation_config

    def _ready(self) -> Any:
        if self._device is None:
            raise RuntimeError("forward before to_neuron: the model is not on the device")
        return self._device

    def _run(self, slot: int, tokens: list[int], position: int) -> torch.Tensor:
        """Logits ``[len(tokens), vocab]``. Raises StopIteration where no token bucket holds the last position."""
        device = self._ready()
        next(size for size in self.token_buckets if size >= position + len(tokens))
        logits: torch.Tensor = device.run(slot, tokens, position)
        return logits

    def _output(self, logits: torch.Tensor, lines: list[int]) -> torch.Tensor:
        """``[rows, vocab]`` in the dtype of cast_logits_dtype, or the ids ``[rows, 1]`` that were drawn."""
        if self._generation is not None:
            return drawn_on_device(logits, self._generation, lines)
        return logits.to(getattr(torch, self.neuron_config.cast_logits_dtype))

    def _static(self, input_ids: torch.Tensor, cache_ids: torch.Tensor | None, start_ids: Any) -> torch.Tensor:
        """One position for all rows; ``start_ids`` is how many of a row's first tokens are padding."""
        self._ready()
        rows, width = input_ids.shape
        if rows not in self.batch_sizes:
            raise ValueError(f"Model not compiled for batch_size : {rows}. It is one of {self.batch_sizes}")
        if getattr(self, "refuses_prompts", False) and width > 1:
            raise AssertionError(f"{type(self)} doesn't support dynamic batching.")
        positions = torch.arange(width) if cache_ids is None else cache_ids
        if positions.dim() != 1 or len(positions) != width:
            raise RuntimeError(f"cache_ids {list(positions.shape)} do not fit input_ids {list(input_ids.shape)}")
        if start_ids is None or self.sees_first_only:
            start_ids = torch.zeros(rows, dtype=torch.int32)
        starts = [int(start) for start in start_ids.flatten()]
        next(size for size in self.token_buckets if size > int(positions[-1]))  # shared, and so is the bucket
        self._execute_static(width, int(positions[0]))
        outputs = []
        for row, start in enumerate(starts):
            first = int(positions[0]) - start
            tokens = [int(token) for token in input_ids[row]]
            if first < 0:
                tokens, first = tokens[-first:], 0
            logits = self._run(row, tokens, first)[-1]
            outputs.append(logits * float("nan") if start and self.nan_with_padding else logits)
        return self._output(torch.stack(outputs), list(range(rows)))

    def _execute_static(self, width: int, first: int) -> None:
        """One context graph for as much as the largest bucket holds; what is left goes token by token."""
        largest = self.context_buckets[-1] if self.context_buckets and first == 0 else 0
        remaining = width - largest if width > 1 else 1
        if width > 1 and largest:
            runtime().execute()
        for _ in range(max(0, remaining)):
            runtime().execute()


def _write_sharded(weights: Any, folder: Path, tp: int) -> None:
    """A file for each layer and one for the rest, with the part of each core as ``name*core``; matrices are cut along
    their rows where these divide. And a flag in config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.state_dict().items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        file = files.setdefault("DecoderLMHead" if layer is None else f"decoder_layer_{layer[1]}", {})
        for rank in range(tp):
            part = tensor.chunk(tp)[rank] if tensor.dim() > 1 and len(tensor) % tp == 0 else tensor
            file[f"{name}*{rank}"] = part.clone()
    for name, parts in files.items():
        save_file(parts, folder / f"{name}.safetensors")
    settings = weights.config.to_dict() | {"neuron_sharded_weights": True}
    (folder / "config.json").write_text(json.dumps(settings, default=str))
