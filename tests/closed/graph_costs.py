"""What a compiled graph does on one core, counted in its HLO."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

BYTES = {"PRED": 1, "S8": 1, "U8": 1, "F8E4M3FN": 1, "S16": 2, "F16": 2, "BF16": 2, "S32": 4, "U32": 4, "F32": 4}
BYTES |= {"S64": 8, "U64": 8}


@dataclass(frozen=True)
class GraphCosts:
    """Costs of one run on each core; of several steps the last ones are not counted."""

    weights: int  # bytes of parameters that are neither written by the host nor by the graph
    cache: int  # bytes of parameters that the graph updates in place: the KV cache
    flops: int  # multiplications and additions of matrix products
    reduced: int  # bytes of the operands of all-reduce and reduce-scatter
    gathered: int  # bytes of the results of all-gather


def costs_of(module: Any, inputs: int) -> GraphCosts:
    """Returns the costs of an ``HloModuleProto`` whose first ``inputs`` parameters are written by the host."""
    types = importlib.import_module("torch_neuronx.pyhlo.xla_data_pb2").PrimitiveType

    def size(shape: Any) -> int:
        return math.prod(shape.dimensions) * BYTES[types.Name(shape.element_type)]

    entry = next(part for part in module.computations if part.id == module.entry_computation_id)
    shapes = {instruction.id: instruction.shape for instruction in entry.instructions}
    updated = {alias.parameter_number for alias in module.input_output_alias.entries}
    held = [
        (number in updated, size(shape))
        for number, shape in enumerate(module.host_program_shape.parameters)
        if number >= inputs
    ]
    flops = reduced = gathered = 0
    for instruction in entry.instructions:
        if instruction.opcode == "dot":
            left = shapes[instruction.operand_ids[0]].dimensions
            inner = instruction.dot_dimension_numbers.lhs_contracting_dimensions
            flops += 2 * math.prod(instruction.shape.dimensions) * math.prod(left[dim] for dim in inner)
        elif instruction.opcode in ("all-reduce", "reduce-scatter"):
            reduced += size(shapes[instruction.operand_ids[0]])
        elif instruction.opcode == "all-gather":
            gathered += size(instruction.shape)
    return GraphCosts(
        weights=sum(bytes for is_updated, bytes in held if not is_updated),
        cache=sum(bytes for is_updated, bytes in held if is_updated),
        flops=flops,
        reduced=reduced,
        gathered=gathered,
    )
