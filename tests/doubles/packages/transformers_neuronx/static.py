"""Families that are made from their keywords, and those of them that only batch statically."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from transformers_neuronx.base import NeuronModelBase


class FamilyModel(NeuronModelBase):
    """A class that differs from others of its kind in its recorded signatures and in what it checks."""

    neuron_config_default: Any = None

    def __init__(self, config: Any, **given: Any) -> None:
        super().__init__()
        self._check(config)
        parameters = inspect.signature(self._setup).parameters
        used = {name: value for name, value in given.items() if name in parameters}
        self._setup(config, **{**self._defaults(config), **used})

    def _check(self, config: Any) -> None:
        """Raises AssertionError for a model that the class cannot compute."""

    def _defaults(self, config: Any) -> dict[str, Any]:
        return {
            "n_positions": 2048,
            "batch_size": 1,
            "amp": "f32",
            "tp_degree": 2,
            "neuron_config": self.neuron_config_default,
        }


class StaticModel(FamilyModel):
    def forward(self, input_ids: torch.Tensor, cache_ids: Any = None, start_ids: Any = None) -> torch.Tensor:
        return self._static(input_ids, cache_ids, start_ids)
