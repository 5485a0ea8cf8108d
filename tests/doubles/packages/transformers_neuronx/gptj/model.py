"""The stand-in of ``GPTJForSampling``."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.bound import bound

from transformers_neuronx.unserialized import UnserializedModel

NAME = "transformers_neuronx.gptj.model.GPTJForSampling."


class GPTJForSampling(UnserializedModel):
    """Its mask lets a step attend to position 0 alone, and ``start_ids`` are not read."""

    model_types = ("gptj",)
    sees_first_only = True

    @bound(NAME + "__init__")
    def __init__(
        self,
        config: Any,
        batch_size: Any = 1,
        amp: str = "f32",
        tp_degree: int = 2,
        unroll: Any = None,
        init_n_active_tokens: Any = None,
        neuron_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if "context_length_estimate" in kwargs:
            raise KeyError("context_length_estimate")
        self._setup(
            config,
            kwargs.get("n_positions", config.n_positions),
            batch_size=batch_size,
            amp=amp,
            tp_degree=tp_degree,
            unroll=unroll,
            neuron_config=neuron_config,
        )

    @bound(NAME + "to_neuron")
    def to_neuron(self) -> None:
        self._to_device()

    @bound(NAME + "reset")
    def reset(self) -> None:
        """Positions are always given here, so there is nothing to go back to; it is counted, for tests."""
        self.resets = getattr(self, "resets", 0) + 1

    @bound(NAME + "forward")
    def forward(self, input_ids: torch.Tensor, cache_offset: Any, start_ids: Any = None) -> torch.Tensor:
        """``cache_offset``: the position of each token, ``[width]``."""
        return self._step(input_ids, cache_offset, start_ids)

    @bound(NAME + "sample")
    def sample(
        self,
        input_ids: torch.Tensor,
        sequence_length: int,
        start_ids: Any = None,
        top_k: int = 50,
        streamer: Any = None,
    ) -> Any:
        """Always up to ``sequence_length`` tokens in all."""
        return self._sample(input_ids, sequence_length, start_ids, top_k, streamer)
