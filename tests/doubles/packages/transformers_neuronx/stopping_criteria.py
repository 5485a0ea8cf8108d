"""Conditions that end ``sample``."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from neuron_double.bound import bound

NAME = "transformers_neuronx.stopping_criteria."


class StoppingCriteria(ABC):
    @abstractmethod
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool: ...


class MaxTimeCriteria(StoppingCriteria):
    @bound(NAME + "MaxTimeCriteria.__init__")
    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        self.max_time = max_time
        self.initial_timestamp = time.time() if initial_timestamp is None else initial_timestamp

    @bound(NAME + "MaxTimeCriteria.__call__")
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        return time.time() - self.initial_timestamp > self.max_time


class StoppingCriteriaList(list[StoppingCriteria]):
    @bound(NAME + "StoppingCriteriaList.__call__")
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        return any(criteria(input_ids, scores, **kwargs) for criteria in self)
