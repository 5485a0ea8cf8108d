"""What GPT-J and GPT-NeoX share: older classes, which do not derive from NeuronModelBase."""

from __future__ import annotations

from typing import Any

import torch

from transformers_neuronx import base
from transformers_neuronx.module import PretrainedModel

CALLS = ("__init__", "to_neuron", "reset", "forward")


class _Life(base.NeuronModelBase):
    """Their insides: no context graph, no quantization, no padding of heads."""

    quantizes = False
    quantizes_kv = True  # it is not even read
    pads_heads = False


class UnserializedModel(PretrainedModel):
    """No ``save`` and ``load``; prompts go token by token."""

    sees_first_only = False
    positions_key = ""  # of the config, where a call names no ``n_positions``

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
            raise KeyError("context_length_estimate")  # there is no context graph
        self._check(config, unroll)
        n_positions = kwargs.get("n_positions", getattr(config, self.positions_key))
        assert isinstance(n_positions, int), "n_positions must be an int"
        self._life = _Life()
        self._life.sees_first_only = self.sees_first_only
        self._life._setup(
            config,
            n_positions=n_positions,
            context_length_estimate=0,
            batch_size=batch_size,
            amp=amp,
            tp_degree=tp_degree,
            unroll=unroll,
            neuron_config=neuron_config,
        )
        self.config, self.neuron_config = config, self._life.neuron_config
        self.tp_degree, self.batch_sizes = self._life.tp_degree, self._life.batch_sizes

    def _check(self, config: Any, unroll: Any) -> None:
        """Raises AssertionError for a model that the class cannot compute."""

    def to_neuron(self) -> None:
        self._life._checkpoint_path = self._checkpoint_path
        self._life._to_device()

    def reset(self) -> None:
        """Positions are always given here, so there is nothing to go back to."""

    def forward(self, input_ids: torch.Tensor, cache_offset: Any, start_ids: Any = None) -> torch.Tensor:
        """``cache_offset``: the position of each token, ``[width]``."""
        return self._life._static(input_ids, cache_offset, start_ids)
