"""Executes an HLO module with torch on the CPU, all ranks in step, so that a collective reads every rank's operand.

Each result is checked against the shape and type that the module declares, as XLA's verifier does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_neuronx.pyhlo import hlo_pb2, xla_data_pb2

_TYPES = xla_data_pb2.PrimitiveType
DTYPES = {  # torch computes little with unsigned integers, so int64 holds the wider ones
    _TYPES.PRED: torch.bool,
    _TYPES.S8: torch.int8,
    _TYPES.S16: torch.int16,
    _TYPES.S32: torch.int32,
    _TYPES.S64: torch.int64,
    _TYPES.U8: torch.uint8,
    _TYPES.U16: torch.int64,
    _TYPES.U32: torch.int64,
    _TYPES.U64: torch.int64,
    _TYPES.F16: torch.float16,
    _TYPES.F32: torch.float32,
    _TYPES.F64: torch.float64,
    _TYPES.BF16: torch.bfloat16,
    _TYPES.F8E4M3FN: torch.float8_e4m3fn,
    _TYPES.F8E5M2: torch.float8_e5m2,
}
_BUFFERS = {_TYPES.U32: (torch.int32, torch.uint32)}  # the package hands signed integers over as unsigned ones

Tensor = torch.Tensor


class Program:
    """A module that is ready to run."""

    def __init__(self, serialized: bytes):
        """Reads a serialized ``HloModuleProto``. Raises NotImplementedError for an operation without a stand-in."""
        module = hlo_pb2.HloModuleProto.FromString(serialized)
        self.module, self.name = module, module.name
        self.runs = 0  # counted by the runtime
        computations = {computation.id: computation for computation in module.computations}
        entry = computations[module.entry_computation_id]
        root = next(instruction for instruction in entry.instructions if instruction.id == entry.root_id)
        is_tuple = root.opcode == "tuple"
        self.outputs = list(root.operand_ids) if is_tuple else [root.id]
        parameters = module.host_program_shape.parameters
        self.parameters = [(*_shape(parameter), _buffer_dtypes(parameter)) for parameter in parameters]
        """For each parameter its sizes, the dtype that the program computes with, and the dtypes of its buffers."""
        self.aliases = {
            (alias.output_shape_index[0] if alias.output_shape_index else 0): alias.parameter_number
            for alias in module.input_output_alias.entries
            if alias.kind == hlo_pb2.Kind.MUST_ALIAS
        }
        """The outputs that share the memory of a parameter, each with the parameter's number."""
        instructions = (
            entry.instructions[:-1] if is_tuple and entry.instructions[-1].id == root.id else entry.instructions
        )
        self._instructions = [_Instruction(proto, computations) for proto in instructions]
        self._last_uses = self._find_last_uses()

    def __call__(self, ranks: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Returns outputs by rank, from inputs by rank. Raises RuntimeError that names the failing instruction."""
        values: dict[int, list[Any]] = {}
        for instruction in self._instructions:
            if instruction.opcode == "parameter":
                values[instruction.id] = [inputs[instruction.proto.parameter_number] for inputs in ranks]
                continue
            operands = [values[number] for number in instruction.operands]
            try:
                values[instruction.id] = instruction.run(operands, len(ranks))
            except Exception as error:
                proto = instruction.proto
                raise RuntimeError(f"{self.name}: {proto.name} of {instruction.declared}: {error}") from error
            for number in self._last_uses.get(instruction.id, ()):
                del values[number]
        return [[values[number][rank] for number in self.outputs] for rank in range(len(ranks))]

    def _find_last_uses(self) -> dict[int, list[int]]:
        last: dict[int, int] = {}
        for instruction in self._instructions:
            for number in instruction.operands:
                last[number] = instruction.id
        uses: dict[int, list[int]] = {}
        for number, user in last.items():
            if number not in self.outputs:
                uses.setdefault(user, []).append(number)
        return uses


class _Instruction:
    def __init__(self, proto: Any, computations: dict[int, Any]):
        self.proto, self.opcode, self.id = proto, proto.opcode, proto.id
        self.operands = list(proto.operand_ids)
        self.declared = [_shape(part) for part in proto.shape.tuple_shapes] or [_shape(proto.shape)]
        self.sizes, self.dtype = self.declared[0]
        called = list(proto.called_computation_ids)
        self.function = _function(computations[called[0]]) if called else ""
        name = proto.custom_call_target if self.opcode == "custom-call" else self.opcode
        self._collective = _COLLECTIVES.get(name)
        self._operation = _OPERATIONS.get(name)
        if self._collective is None and self._operation is None and name not in ("parameter", "constant"):
            raise NotImplementedError(f"no stand-in for the operation {name}")
        self._constant = _constant(self) if name == "constant" else None

    def run(self, operands: list[list[Any]], rank_count: int) -> list[Any]:
        """Returns the result of each rank. Raises ValueError for a result that is not as declared."""
        if self._constant is not None:
            return [self._constant] * rank_count
        if self._collective is not None:
            results = self._by_group(operands[0] if operands else [None] * rank_count)
        else:
            assert self._operation is not None
            results = [self._operation(self, *(values[rank] for values in operands)) for rank in range(rank_count)]
        for result in results:
            self._check(result)
        return results

    def _by_group(self, values: list[Any]) -> list[Any]:
        """Runs the collective in each replica group; ranks outside of all groups keep their operand."""
        results = list(values)
        groups = [list(group.replica_ids) for group in self.proto.replica_groups] or [list(range(len(values)))]
        for group in groups:
            assert self._collective is not None
            for rank, result in zip(group, self._collective(self, [values[rank] for rank in group]), strict=True):
                results[rank] = result
        return results

    def _check(self, result: Any) -> None:
        parts = result if isinstance(result, tuple) else (result,)
        for part, (sizes, dtype) in zip(parts, self.declared, strict=True):
            if tuple(part.shape) != sizes or part.dtype != dtype:
                raise ValueError(f"the result is {tuple(part.shape)} of {part.dtype} and not {sizes} of {dtype}")


def _shape(proto: Any) -> tuple[tuple[int, ...], torch.dtype | None]:
    return tuple(proto.dimensions), DTYPES.get(proto.element_type)


def _buffer_dtypes(proto: Any) -> tuple[torch.dtype, ...]:
    return _BUFFERS.get(proto.element_type) or (DTYPES[proto.element_type],)


def _function(computation: Any) -> str:
    """Returns what a reducer, comparer or updater does. Each is one operation deep, so its root's opcode says it."""
    root = next(instruction for instruction in computation.instructions if instruction.id == computation.root_id)
    if root.opcode == "parameter":
        return f"parameter {root.parameter_number}"
    return root.comparison_direction or root.opcode


def _constant(instruction: _Instruction) -> Tensor:
    literal = instruction.proto.literal
    values = getattr(literal, f"{_TYPES.Name(literal.shape.element_type).lower()}s")
    dtype, sizes = instruction.dtype, instruction.sizes
    if isinstance(values, bytes):
        tensor = torch.frombuffer(bytearray(values), dtype=dtype)
    else:
        tensor = torch.tensor(list(values), dtype=dtype)
    return tensor.reshape([1] * len(sizes)).expand(sizes) if tensor.numel() == 1 else tensor.reshape(sizes)


_REDUCE: dict[str, Callable[..., Tensor]] = {"add": torch.sum, "maximum": torch.amax, "minimum": torch.amin}
_COMBINE = {"add": torch.add, "maximum": torch.maximum, "minimum": torch.minimum, "multiply": torch.mul}


def _broadcast(instruction: _Instruction, value: Tensor) -> Tensor:
    sizes = [1] * len(instruction.sizes)
    for size, dim in zip(value.shape, instruction.proto.dimensions, strict=True):
        sizes[dim] = size
    return value.reshape(sizes).expand(instruction.sizes)


def _iota(instruction: _Instruction) -> Tensor:
    dim = instruction.proto.dimensions[0]
    sizes = [1] * len(instruction.sizes)
    sizes[dim] = instruction.sizes[dim]
    return torch.arange(sizes[dim], dtype=instruction.dtype).reshape(sizes).expand(instruction.sizes)


def _compare(instruction: _Instruction, left: Tensor, right: Tensor) -> Tensor:
    return getattr(torch, instruction.proto.comparison_direction.lower())(left, right)


def _dot(instruction: _Instruction, left: Tensor, right: Tensor) -> Tensor:
    dims = instruction.proto.dot_dimension_numbers
    left_batch, right_batch = list(dims.lhs_batch_dimensions), list(dims.rhs_batch_dimensions)
    left_inner, right_inner = list(dims.lhs_contracting_dimensions), list(dims.rhs_contracting_dimensions)
    left_free = [dim for dim in range(left.dim()) if dim not in left_batch + left_inner]
    right_free = [dim for dim in range(right.dim()) if dim not in right_batch + right_inner]
    count = math.prod(left.shape[dim] for dim in left_batch)
    depth = math.prod(left.shape[dim] for dim in left_inner)
    matrix = left.permute(left_batch + left_free + left_inner).reshape(count, -1, depth)
    other = right.permute(right_batch + right_inner + right_free).reshape(count, depth, -1)
    return torch.bmm(matrix, other.to(matrix.dtype)).reshape(instruction.sizes).to(instruction.dtype)


def _reduce(instruction: _Instruction, value: Tensor, initial: Tensor) -> Tensor:
    dims, function = list(instruction.proto.dimensions), instruction.function
    if function in ("and", "or"):
        return _REDUCE["minimum" if function == "and" else "maximum"](value.to(torch.int8), dims).to(torch.bool)
    if not dims:
        return value
    options = {"dtype": value.dtype} if function == "add" else {}
    return _COMBINE[function](_REDUCE[function](value, dims, **options), initial)


def _reduce_window(instruction: _Instruction, value: Tensor, initial: Tensor) -> Tensor:
    window = list(instruction.proto.window.dimensions)
    pads = [pad for dim in reversed(window) for pad in (dim.padding_low, dim.padding_high)]
    value = torch.nn.functional.pad(value, pads, value=initial.item())
    for number, dim in enumerate(window):
        value = _REDUCE[instruction.function](value.unfold(number, dim.size, max(1, dim.stride)), -1)
    return value.to(instruction.dtype)


def _slice(instruction: _Instruction, value: Tensor) -> Tensor:
    bounds = instruction.proto.slice_dimensions
    return value[tuple(slice(bound.start, bound.limit, bound.stride or 1) for bound in bounds)]


def _window(value: Tensor, starts: Sequence[Tensor], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Returns the window that begins at ``starts``, moved inside as XLA does."""
    limits = [full - size for full, size in zip(value.shape, sizes, strict=True)]
    inside = [min(max(int(start), 0), limit) for start, limit in zip(starts, limits, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(inside, sizes, strict=True))


def _dynamic_slice(instruction: _Instruction, value: Tensor, *starts: Tensor) -> Tensor:
    return value[_window(value, starts, instruction.sizes)]


def _dynamic_update_slice(instruction: _Instruction, value: Tensor, update: Tensor, *starts: Tensor) -> Tensor:
    value = value.clone()
    value[_window(value, starts, update.shape)] = update
    return value


def _pad(instruction: _Instruction, value: Tensor, filler: Tensor) -> Tensor:
    edges = list(instruction.proto.padding_config.dimensions)
    if any(edge.interior_padding for edge in edges):
        raise NotImplementedError("no stand-in for interior padding")
    pads = [pad for edge in reversed(edges) for pad in (edge.edge_padding_low, edge.edge_padding_high)]
    return torch.nn.functional.pad(value, pads, value=filler.item())


def _index_vectors(indices: Tensor, dim: int) -> Tensor:
    """Returns ``indices`` with the components of an index last: ``[*batch, components]``."""
    return indices.unsqueeze(-1) if dim == indices.dim() else indices.movedim(dim, -1)


def _places(
    vectors: Tensor, components: dict[int, int], windows: Sequence[int], kept: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns for each dimension of the operand the indices, ``[*batch, *window]``, and where windows begin.

    ``components`` gives each indexed dimension its place in a vector; ``kept`` are the dimensions of a window.
    """
    places, starts = [], []
    for dim, size in enumerate(windows):
        if dim in components:
            start = vectors[..., components[dim]].long()
        else:
            start = torch.zeros(vectors.shape[:-1], dtype=torch.long)
        starts.append(start)
        place = start.reshape([*start.shape, *[1] * len(kept)])
        if dim in kept:
            place = place + torch.arange(size).reshape([size if other == dim else 1 for other in kept])
        places.append(place)
    return places, starts


def _gather(instruction: _Instruction, value: Tensor, indices: Tensor) -> Tensor:
    dims, windows = instruction.proto.gather_dimension_numbers, list(instruction.proto.gather_slice_sizes)
    mapped = list(dims.start_index_map)
    vectors = _index_vectors(indices, dims.index_vector_dim)
    for at, dim in enumerate(mapped):
        last = value.shape[dim] - windows[dim]
        if vectors.numel() and not 0 <= int(vectors[..., at].min()) <= int(vectors[..., at].max()) <= last:
            raise RuntimeError(f"a gather reads beyond the end of dimension {dim}, whose last start is {last}")
    kept = [dim for dim in range(value.dim()) if dim not in dims.collapsed_slice_dims]
    places, _ = _places(vectors, {dim: at for at, dim in enumerate(mapped)}, windows, kept)
    result = value[tuple(torch.broadcast_tensors(*places))]  # [*batch, *window]
    offsets = list(dims.offset_dims)
    batch = [dim for dim in range(len(instruction.sizes)) if dim not in offsets]
    order = [0] * len(instruction.sizes)
    for source, dim in enumerate(batch + offsets):
        order[dim] = source
    return result.permute(order)


def _scatter(instruction: _Instruction, value: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    dims = instruction.proto.scatter_dimension_numbers
    vectors = _index_vectors(indices, dims.index_vector_dim)
    kept = [dim for dim in range(value.dim()) if dim not in dims.inserted_window_dims]
    window_dims = list(dims.update_window_dims)
    updates = updates.permute([dim for dim in range(updates.dim()) if dim not in window_dims] + window_dims)
    windows = [1] * value.dim()
    for dim, size in zip(kept, updates.shape[vectors.dim() - 1 :], strict=True):
        windows[dim] = size
    components = {dim: at for at, dim in enumerate(dims.scatter_dims_to_operand_dims)}
    places, starts = _places(vectors, components, windows, kept)
    inside = torch.ones(vectors.shape[:-1], dtype=torch.bool)  # XLA drops a whole update that does not fit
    for start, size, full in zip(starts, windows, value.shape, strict=True):
        inside &= (start >= 0) & (start + size <= full)
    everywhere = torch.broadcast_tensors(*places)
    inside = inside.reshape([*inside.shape, *[1] * len(kept)]).expand(everywhere[0].shape)
    value = value.clone()
    if instruction.function not in ("add", "parameter 1"):
        raise NotImplementedError(f"no stand-in for a scatter by {instruction.function}")
    chosen = tuple(place[inside] for place in everywhere)
    value.index_put_(chosen, updates[inside], accumulate=instruction.function == "add")
    return value


def _sort(instruction: _Instruction, value: Tensor, *others: Tensor) -> Any:
    dim = instruction.proto.dimensions[0]
    ordered, order = torch.sort(value, dim=dim, descending=instruction.function == "GT", stable=True)
    return (ordered, *[other.gather(dim, order) for other in others]) if others else ordered


def _batch_norm(instruction: _Instruction, value: Tensor, scale: Tensor, offset: Tensor) -> Any:
    feature = instruction.proto.feature_index
    others = [dim for dim in range(value.dim()) if dim != feature]
    mean, variance = value.mean(others), value.var(others, unbiased=False)
    view = [-1 if dim == feature else 1 for dim in range(value.dim())]
    normal = (value - mean.reshape(view)) * torch.rsqrt(variance.reshape(view) + instruction.proto.epsilon)
    return normal * scale.reshape(view) + offset.reshape(view), mean, variance


def _rms_norm(instruction: _Instruction, value: Tensor, weight: Tensor, epsilon: Tensor) -> Tensor:
    dim = int(instruction.proto.backend_config)
    view = [-1 if other == dim else 1 for other in range(value.dim())]
    scaled = value * torch.rsqrt((value * value).mean(dim, keepdim=True) + epsilon)
    return (scaled * weight.reshape(view).to(value.dtype)).to(instruction.dtype)


def _kernel(instruction: _Instruction, value: Tensor) -> Tensor:
    kernel = json.loads(instruction.proto.backend_config)
    if kernel["kernel"] != "cumsum":
        raise NotImplementedError(f"no stand-in for the NKI kernel {kernel}")
    return value.cumsum(kernel["axis"])


def _divide(instruction: _Instruction, left: Tensor, right: Tensor) -> Tensor:
    return left / right if left.dtype.is_floating_point else torch.div(left, right, rounding_mode="trunc")


def _top_k(instruction: _Instruction, value: Tensor) -> Any:
    return tuple(torch.topk(value, int(instruction.proto.backend_config), dim=-1))


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda instruction, *operands: function(*operands)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": _plain(torch.abs),
    "cosine": _plain(torch.cos),
    "exponential": _plain(torch.exp),
    "floor": _plain(torch.floor),
    "log": _plain(torch.log),
    "logistic": _plain(torch.sigmoid),
    "negate": _plain(torch.neg),
    "not": _plain(torch.bitwise_not),
    "rsqrt": _plain(torch.rsqrt),
    "sine": _plain(torch.sin),
    "sqrt": _plain(torch.sqrt),
    "tanh": _plain(torch.tanh),
    "add": _plain(torch.add),
    "and": _plain(torch.bitwise_and),
    "maximum": _plain(torch.maximum),
    "minimum": _plain(torch.minimum),
    "multiply": _plain(torch.mul),
    "or": _plain(torch.bitwise_or),
    "power": _plain(torch.pow),
    "remainder": _plain(torch.fmod),
    "select": _plain(torch.where),
    "subtract": _plain(torch.sub),
    "xor": _plain(torch.bitwise_xor),
    "divide": _divide,
    "compare": _compare,
    "clamp": lambda instruction, low, value, high: torch.minimum(torch.maximum(value, low), high),
    "concatenate": lambda instruction, *values: torch.cat(values, instruction.proto.dimensions[0]),
    "convert": lambda instruction, value: value.to(instruction.dtype),
    "get-tuple-element": lambda instruction, value: value[instruction.proto.tuple_index],
    "reshape": lambda instruction, value: value.reshape(instruction.sizes),
    "reverse": lambda instruction, value: value.flip(list(instruction.proto.dimensions)),
    "rng": lambda instruction, low, high: torch.rand(instruction.sizes, dtype=instruction.dtype) * (high - low) + low,
    "transpose": lambda instruction, value: value.permute(list(instruction.proto.dimensions)),
    "tuple": lambda instruction, *values: values,
    "batch-norm-training": _batch_norm,
    "broadcast": _broadcast,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "iota": _iota,
    "pad": _pad,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "scatter": _scatter,
    "slice": _slice,
    "sort": _sort,
    # Custom calls of the Neuron compiler
    "AwsNeuronCustomNativeKernel": _kernel,
    "AwsNeuronRmsNorm": _rms_norm,
    "AwsNeuronTopK": _top_k,
    "AwsNeuronArgMax": lambda instruction, value: value.argmax(int(instruction.proto.backend_config)),
    "AwsNeuronGeluApprxTanh": lambda instruction, value: torch.nn.functional.gelu(value, approximate="tanh"),
    "AwsNeuronSoftmax": lambda instruction, value: torch.softmax(value, int(instruction.proto.backend_config)),
    "AwsNeuronTransferWithStaticRing": lambda instruction, value: value,
}


def _combined(instruction: _Instruction, values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = _COMBINE[instruction.function](total, value)
    return total


def _all_to_all(instruction: _Instruction, values: list[Tensor]) -> list[Tensor]:
    dim = instruction.proto.dimensions[0]
    parts = [value.chunk(len(values), dim) for value in values]
    return [torch.cat([part[rank] for part in parts], dim) for rank in range(len(values))]


def _ranks(instruction: _Instruction, values: list[Any]) -> list[Tensor]:
    return [torch.tensor(rank, dtype=instruction.dtype) for rank in range(len(values))]


_COLLECTIVES: dict[str, Callable[[_Instruction, list[Any]], Sequence[Tensor]]] = {
    "all-gather": lambda instruction, values: [torch.cat(values, instruction.proto.dimensions[0])] * len(values),
    "all-reduce": lambda instruction, values: [_combined(instruction, values)] * len(values),
    "all-to-all": _all_to_all,
    "partition-id": _ranks,
    "reduce-scatter": lambda instruction, values: _combined(instruction, values).chunk(
        len(values), instruction.proto.dimensions[0]
    ),
    "replica-id": _ranks,
}
