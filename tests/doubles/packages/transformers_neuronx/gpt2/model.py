"""The stand-ins of GPT-2's classes."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.runtime import runtime

from transformers_neuronx import graphs
from transformers_neuronx.base import NeuronModelBase
from transformers_neuronx.config import NeuronConfig

NAME = "transformers_neuronx.gpt2.model."
CONFIG_KEYS = {"n_positions", "low_cpu_mem_usage", "revision"}  # what GPT2Config takes of the rest


def _check_keys(kwargs: dict[str, Any]) -> None:
    unknown = set(kwargs) - CONFIG_KEYS
    if unknown:
        raise KeyError(sorted(unknown)[0])


class GPT2ForSamplingWithContextBroadcasting(NeuronModelBase):
    """A prompt of ``prompt_batch_size`` rows becomes ``batch_size`` rows of equal beginning."""

    model_types = ("gpt2",)

    @bound(NAME + "GPT2ForSamplingWithContextBroadcasting.__init__")
    def __init__(
        self,
        config: Any,
        batch_size: Any = 1,
        prompt_batch_size: int = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        unroll: Any = None,
        context_length_estimate: Any = None,
        context_unroll: Any = 1,
        neuron_config: NeuronConfig = NeuronConfig(),  # noqa: B008 - one object for all models, as the package has it
        reorder_cache: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        _check_keys(kwargs)
        assert context_length_estimate != 0, "context_length_estimate must not be 0"
        self.prompt_batch_size = prompt_batch_size
        self._setup(
            config,
            n_positions=kwargs.get("n_positions", config.n_positions),
            batch_size=batch_size,
            amp=amp,
            tp_degree=tp_degree,
            context_length_estimate=context_length_estimate,
            unroll=unroll,
            neuron_config=neuron_config,
        )
        assert self.batch % prompt_batch_size == 0, "batch_size must be a multiple of prompt_batch_size"

    def _context_sizes(self, estimate: Any) -> list[int]:
        return [self.longest] if estimate is None else super()._context_sizes(estimate)

    def _context_batches(self) -> list[int]:
        return [self.prompt_batch_size]

    @bound(NAME + "GPT2ForSamplingWithContextBroadcasting.reset")
    def reset(self, context_length_estimate: Any) -> None:
        """See ``NeuronModelBase.reset``; this class wants to know the bucket, and is reset with its weights for each.

        While it compiles on the host the cache of a layer is a list with a part for each core: a reset joins them and
        lists the whole for each core again, once for the token graphs and once for the context graphs.
        """
        if self.on_host:
            self.host_caches = getattr(self, "host_caches", 1) * self.tp_degree

    def _graphs(self) -> list[graphs.Kernel]:
        if self._kernels is None:
            for length in self.context_buckets:
                self.reset(context_length_estimate=length)
        return super()._graphs()

    @bound(NAME + "GPT2ForSamplingWithContextBroadcasting.forward")
    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        return self._step(input_ids, cache_ids, start_ids)

    def post_layer(self, logits: torch.Tensor) -> torch.Tensor:
        """The scores beside the logits, with log_softmax_scores."""
        return logits.log_softmax(dim=-1)

    def _output(self, logits: torch.Tensor, lines: list[int]) -> Any:
        output = super()._output(logits, lines)
        return (output, self.post_layer(output)) if self.neuron_config.log_softmax_scores else output

    def _step(self, input_ids: torch.Tensor, cache_ids: Any, start_ids: Any) -> torch.Tensor:
        rows, width = input_ids.shape
        if width == 1:
            return self._static(input_ids, cache_ids, start_ids)
        if rows != self.prompt_batch_size:
            raise RuntimeError(f"the context graph takes {self.prompt_batch_size} rows, not {rows}")
        copies = self.batch // rows
        if start_ids is not None and len(start_ids) == rows:
            start_ids = start_ids.repeat_interleave(copies)
        return self._static(input_ids.repeat_interleave(copies, dim=0), cache_ids, start_ids)

    @bound(NAME + "GPT2ForSamplingWithContextBroadcasting.speculative_forward")
    def speculative_forward(
        self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None, speculation_length: Any = None
    ) -> torch.Tensor:
        """``[speculation_length, vocab, rows]``, at positions ``cache_ids`` that all rows share."""
        self._ready()
        rows, width = input_ids.shape
        length = width if speculation_length is None else speculation_length
        if (length, rows) not in self._speculation:
            raise KeyError((length, rows))
        runtime().execute()
        first = 0 if cache_ids is None else int(cache_ids.flatten()[0])
        starts = [0] * rows if start_ids is None else [int(start) for start in start_ids.flatten()]
        outputs = [
            self._run(row, [int(token) for token in input_ids[row, :length]], first - start)
            for row, start in enumerate(starts)
        ]
        return torch.stack(outputs, dim=-1).to(torch.float32)
