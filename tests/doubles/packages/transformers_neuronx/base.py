"""The classes of models: what the package checks, compiles and returns. Transformers computes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from neuron_double.bound import bound, plays
from neuron_double.runtime import runtime
from neuron_double.token_slots import TokenSlots
from transformers import AutoConfig

from transformers_neuronx import graphs
from transformers_neuronx.config import GenerationConfig, NeuronConfig
from transformers_neuronx.constants import Layout

NAME = "transformers_neuronx.base.NeuronModelBase."
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Model:
    """Static batches, padded on the left."""

    family = ""
    context_unroll: int | None = None  # layers in a program; None: all
    quantizes_kv = False

    def __init__(
        self,
        config: Any,
        *,
        n_positions: Any = 2048,
        batch_size: int = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        context_length_estimate: Any = None,
        neuron_config: Any = None,
        **unused: Any,
    ) -> None:
        self.config, self.amp, self.tp_degree, self.batch = config, amp, tp_degree, batch_size
        self.neuron_config = neuron_config or NeuronConfig()
        self.token_buckets: list[int] = sorted(_listed(n_positions))
        self.context_buckets: list[int] = sorted(_listed(context_length_estimate or []))
        self.speculation_lengths: list[int] = []
        self.generation: GenerationConfig | None = self.neuron_config.on_device_generation
        self._directory: str | None = None
        self._kernels: list[graphs.Kernel] | None = None
        self._slots: TokenSlots | None = None

    @classmethod
    @bound("transformers_neuronx.module.PretrainedModel.from_pretrained")
    def from_pretrained(cls, pretrained_model_path: str, *model_args: Any, **kwargs: Any) -> Any:
        """Reads the configuration; the weights come with ``to_neuron``."""
        lengths = [max(_listed(kwargs.get(name) or 0)) for name in ("n_positions", "context_length_estimate")]
        assert lengths[0] >= lengths[1] or not lengths[0], f"n_positions and context_length_estimate: {lengths}"
        neuron_config = kwargs.get("neuron_config")
        if neuron_config is not None and neuron_config.continuous_batching is not None:
            shared, batch = neuron_config.continuous_batching.batch_size_for_shared_caches, kwargs.get("batch_size")
            assert batch == shared, f"batch_size ({batch}) must be batch_size_for_shared_caches ({shared})"
        assert neuron_config is None or neuron_config.cache_layout != Layout.BSH, "BSH is not played"
        model = cls(AutoConfig.from_pretrained(pretrained_model_path), *model_args, **kwargs)
        model._path = str(pretrained_model_path)
        return model

    def to_neuron(self) -> None:
        """Claim the cores, read the weights, then take or compile the NEFFs, and load all of it."""
        runtime().claim()
        runtime().load_collectives(self.tp_degree)
        slots = TokenSlots(self._path, self.batch, DTYPES[self.amp])
        programs = self._programs()
        if self._directory is not None:
            graphs.read_neffs(programs, Path(self._directory))
        else:
            graphs.compile_all(programs, self.tp_degree)
        graphs.take_memory(self, slots.model)
        graphs.load_neffs(programs)
        self._slots = slots

    def _programs(self) -> list[graphs.Kernel]:
        """Raises what building the graphs raises: with the weights, once ``to_neuron`` has claimed the cores."""
        if self._kernels is None:
            self._check_graphs()
            parts = 1 if self.context_unroll in (None, self.config.num_hidden_layers) else 2  # the head is one, too
            kinds = [("decode", bucket, 1) for bucket in self.token_buckets]
            kinds += [("context", bucket, part) for bucket in self.context_buckets for part in range(parts)]
            kinds += [
                ("speculation", bucket, length) for bucket in self.token_buckets for length in self.speculation_lengths
            ]
            self._kernels = graphs.kernels(self, kinds)
        return self._kernels

    def _check_graphs(self) -> None:
        assert self.quantizes_kv or self.neuron_config.kv_cache_quant is None, "inconsistent dtype between operands"
        top_k = self.generation.global_top_k if self.generation is not None else None
        assert top_k is None or top_k <= self.config.vocab_size, f"topk of {top_k} of {self.config.vocab_size} logits"

    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        """One position for all rows; ``start_ids`` is how many of a row's first tokens are padding."""
        rows, width = input_ids.shape
        positions = torch.arange(width) if cache_ids is None else cache_ids
        if positions.shape != (width,):
            raise RuntimeError(f"cache_ids {list(positions.shape)} do not fit input_ids {list(input_ids.shape)}")
        if rows != self.batch:
            raise KeyError((width, rows)) if width > 1 else RuntimeError(f"{rows} rows for a batch of {self.batch}")
        logits = self._lock_step(input_ids, int(positions[0]), start_ids)
        return self._sampled(torch.stack([row[-1] for row in logits]), range(rows))

    def _lock_step(self, input_ids: torch.Tensor, first: int, start_ids: Any) -> list[torch.Tensor]:
        starts = [0] * self.batch if start_ids is None else start_ids.tolist()
        calls = []
        for row, start in enumerate(starts):
            padding = max(0, start - first)
            calls.append((row, input_ids[row, padding:].tolist(), max(0, first - start)))
        return self._run(calls, first + input_ids.shape[1])

    def _run(self, calls: Sequence[tuple[int, list[int], int]], end: int) -> list[torch.Tensor]:
        """Raises StopIteration where no token bucket holds the last position."""
        if self._slots is None:
            raise RuntimeError("forward before to_neuron: the model is not on the device")
        next(bucket for bucket in self.token_buckets if bucket >= end)
        runtime().execute()
        return self._slots.run(calls)

    def _sampled(self, logits: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """``[rows, vocab]``, or the ids ``[rows, 1]`` that were drawn: only greedy ones are played."""
        if self.generation is None:
            return logits
        top_k: Any = self.generation.top_k
        if [top_k[slot] for slot in slots] != [1] * len(slots):
            raise NotImplementedError(f"the stand-in samples greedily, not with a top_k of {top_k}")
        return logits.argmax(-1, keepdim=True).int()


class NeuronModelBase(Model):
    """What the older class lacks."""

    @bound(NAME + "enable_speculative_decoder")
    def enable_speculative_decoder(self, speculation_length: int, batch_sizes: Any = None, token_tree: Any = None):
        """Compile programs of so many tokens too. Before ``to_neuron``."""
        self.speculation_lengths.append(speculation_length)

    @bound(NAME + "load")
    def load(self, directory: str) -> None:
        """Only remembers it."""
        self._directory = directory

    @bound(NAME + "save")
    def save(self, directory: str, sharded_weights: bool = False) -> None:
        assert not sharded_weights, "sharded weights are not played"
        graphs.write_neffs(self._programs(), Path(directory))

    @bound(NAME + "cpu_compile")
    def cpu_compile(self) -> None:
        """Compile without any device."""
        graphs.compile_all(self._programs(), self.tp_degree)

    @bound(NAME + "reset")
    def reset(self) -> None:
        """Writes zeros from the host into the whole KV cache."""

    @bound(NAME + "update_generation_config")
    def update_generation_config(self, generation_config: GenerationConfig) -> None:
        """New values for sampling on the device. Raises AttributeError where the device does not sample."""
        if self.generation is None:
            raise AttributeError(f"{type(self).__name__} has no top_k on the device")
        self.generation = generation_config


class ContinuousModel(NeuronModelBase):
    """Continuous batching: each row names its slot in ``start_ids``. A static batch has no padding."""

    quantizes_kv = True

    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        """A prompt ends at its highest position. In a step of one token each, slots without a row lose theirs."""
        if self.neuron_config.continuous_batching is None:
            assert start_ids is None or not start_ids.any(), "padding is not played"
            return super().forward(input_ids, cache_ids, start_ids)
        rows, width = input_ids.shape
        slots = start_ids.tolist()
        if len(slots) != rows or max(slots) >= self.batch or cache_ids.shape != (rows, width):
            raise RuntimeError(f"index {slots} and cache_ids {list(cache_ids.shape)} for {rows} rows")
        if width > 1:
            if int(cache_ids[0, 0]):
                raise NotImplementedError("several tokens behind a prompt are for speculative_forward")
            assert width <= self.context_buckets[-1], f"invalid input prompt length ({width})"
            lengths = (cache_ids.max(dim=1).values + 1).tolist()
            prompts = zip(slots, input_ids.tolist(), lengths, strict=True)
            logits = self._run([(slot, row[:length], 0) for slot, row, length in prompts], width)
            return self._sampled(torch.stack([row[-1] for row in logits]), slots)
        if cache_ids.dtype != input_ids.dtype:
            raise RuntimeError("scatter(): Expected self.dtype to be equal to src.dtype")
        steps = zip(slots, input_ids.tolist(), cache_ids[:, 0].tolist(), strict=True)
        idle = [(slot, [0], 0) for slot in range(self.batch) if slot not in slots]
        logits = self._run([*steps, *idle], int(cache_ids.max()) + 1)
        return self._sampled(torch.cat(logits[:rows]), slots)


@plays("transformers_neuronx.llama.model.LlamaForSampling", "__init__", "forward", "speculative_forward")
class LlamaForSampling(ContinuousModel):
    family = "llama"

    def __init__(self, config: Any, **keywords: Any) -> None:
        super().__init__(config, **keywords)
        options = self.neuron_config
        uneven = [
            bucket
            for bucket in self.context_buckets
            if options.sequence_parallel_norm
            and bucket > options.sequence_parallel_norm_threshold
            and bucket % self.tp_degree
        ]
        if uneven:
            raise ValueError(f"sequence_parallel_norm: buckets {uneven} cannot be divided by {self.tp_degree}")

    def speculative_forward(
        self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None, speculation_length: Any = None
    ) -> torch.Tensor:
        """``[speculation_length, vocab, slots]``, of all slots and with the length that was enabled."""
        rows, width = input_ids.shape
        if width != speculation_length or width not in self.speculation_lengths:
            raise KeyError((speculation_length, rows))
        assert rows == self.batch, f"invalid batch size for speculative forward ({rows})"
        if cache_ids.dim() == 1:
            logits = self._lock_step(input_ids, int(cache_ids[0]), start_ids)
        else:
            if not int(cache_ids[0, 0]) or int(cache_ids.min()) < 0:
                raise NotImplementedError("a run that begins at position 0 is a prompt to the package")
            assert width >= rows, f"buffer ([{rows}]) and tensor ([{width}]) have different shapes"
            calls = zip(start_ids.tolist(), input_ids.tolist(), cache_ids[:, 0].tolist(), strict=True)
            logits = self._run(list(calls), int(cache_ids.max()) + 1)
        return torch.stack(logits, dim=-1)


@plays("transformers_neuronx.mistral.model.MistralForSampling", "__init__", "forward")
class MistralForSampling(ContinuousModel):
    family = "mistral"


@plays("transformers_neuronx.mixtral.model.MixtralForSampling", "__init__", "forward")
class MixtralForSampling(ContinuousModel):
    family = "mixtral"


@plays("transformers_neuronx.bloom.model.BloomForSampling", "__init__", "forward")
class BloomForSampling(NeuronModelBase):
    family = "bloom"


@plays("transformers_neuronx.opt.model.OPTForSampling", "__init__", "forward")
class OPTForSampling(NeuronModelBase):
    family = "opt"
    context_unroll = 1


@plays(
    "transformers_neuronx.gpt2.model.GPT2ForSamplingWithContextBroadcasting",
    *("__init__", "forward", "reset", "speculative_forward"),
)
class GPT2ForSamplingWithContextBroadcasting(NeuronModelBase):
    family = "gpt2"
    context_unroll = 1

    def __init__(
        self, config: Any, *, prompt_batch_size: int = 1, reorder_cache: bool = False, **keywords: Any
    ) -> None:
        known = ("n_positions", "batch_size", "amp", "tp_degree", "context_length_estimate", "neuron_config")
        unknown = set(keywords) - {*known, "unroll", "context_unroll"}
        if unknown:
            raise KeyError(min(unknown))
        assert keywords.get("context_length_estimate") != 0, "context_length_estimate must not be 0"
        super().__init__(config, **keywords)
        assert prompt_batch_size == self.batch, "one prompt for several rows is not played"

    def reset(self, context_length_estimate: int) -> None:
        """See ``NeuronModelBase.reset``."""

    speculative_forward = LlamaForSampling.speculative_forward


@plays("transformers_neuronx.gptneox.model.GPTNeoXForSampling", "__init__", "forward", "reset")
class GPTNeoXForSampling(Model):
    """An older class: no context programs, no padded heads."""

    family = "gptneox"

    def reset(self) -> None:
        """See ``NeuronModelBase.reset``."""

    def forward(self, input_ids: torch.Tensor, cache_offset: Any, start_ids: Any = None) -> torch.Tensor:
        """``cache_offset``: the position of each token, ``[width]``."""
        return super().forward(input_ids, cache_offset, start_ids)

    def _check_graphs(self) -> None:
        if self.config.num_attention_heads % self.tp_degree:
            raise ValueError(f"cannot shard {self.config.num_attention_heads} heads along {self.tp_degree} cores")


def _listed(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]
