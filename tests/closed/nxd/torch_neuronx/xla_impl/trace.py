"""Tracing a module: it runs once with example inputs, and its text stands for the HLO."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from closed_layer import blank

from torch_neuronx.device_semantics import DeviceSemantics

__getattr__ = blank(__name__)


@dataclass
class HloModule:
    """The text of a graph, with the fields that the package reads of a module in protobuf."""

    text: str
    entry_computation_id: int = 0
    computations: list[Any] = field(default_factory=lambda: [SimpleNamespace(id=0, instructions=[])])
    frontend_attributes: Any = field(default_factory=lambda: SimpleNamespace(map={}))

    def __str__(self) -> str:
        return self.text

    def SerializeToString(self) -> bytes:
        return self.text.encode()


@dataclass
class HloArtifacts:
    """A traced graph."""

    hlo_module: Any
    metaneff: Any = None
    weight_name_to_idx: Mapping[str, int] = field(default_factory=dict)
    flattener: Any = None
    packer: Any = None
    weights: Any = None
    constant_parameter_tensors: Any = None


@dataclass
class NeffArtifacts:
    """The file of a compiled graph."""

    neff_filename: str


def generate_hlo(
    func: Any, example_inputs: Sequence[torch.Tensor], input_output_aliases: Mapping[torch.Tensor, int], **_: Any
) -> HloArtifacts:
    """Run the module once. Raises RuntimeError for a state whose new value has another shape or type."""
    from neuronx_distributed.parallel_layers import parallel_state

    with torch.no_grad(), DeviceSemantics():
        outputs = func(*example_inputs)
    for state, index in input_output_aliases.items():
        if (outputs[index].shape, outputs[index].dtype) != (state.shape, state.dtype):
            raise RuntimeError(f"output {index} cannot replace its state: {_type(outputs[index])}, {_type(state)}")
    description = {
        "cores": parallel_state.get_tensor_model_parallel_size(),
        "inputs": [_type(tensor) for tensor in example_inputs],
        "weights": {name: _type(tensor) for name, tensor in func.state_dict().items()},
        "states": sorted(input_output_aliases.values()),
        "module": str(func),
    }
    return HloArtifacts(HloModule(json.dumps(description)), SimpleNamespace(SerializeToString=lambda: b""))


def _type(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{list(tensor.shape)}"
