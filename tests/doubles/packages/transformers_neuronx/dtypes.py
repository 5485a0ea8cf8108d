"""amp names and torch's."""

from __future__ import annotations

import torch
from neuron_double.bound import bound

_TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@bound("transformers_neuronx.dtypes.to_torch_dtype")
def to_torch_dtype(dtype: str) -> torch.dtype:
    return _TORCH[dtype]


@bound("transformers_neuronx.dtypes.to_amp")
def to_amp(dtype: torch.dtype) -> str:
    return {kind: name for name, kind in _TORCH.items()}[dtype]
