"""Writes an HLO module while a Python function calls ``dtype[sizes].Operation(operands, field=value)``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch_neuronx.pyhlo import hlo_pb2, xla_data_pb2

_TYPES = xla_data_pb2.PrimitiveType
_OPCODES = {"Exp": "exponential", "Cos": "cosine", "Sin": "sine"}  # the others are the hyphenated method names
_OPERATIONS = {  # method -> number of operands; None: any number
    **dict.fromkeys(("Parameter", "Constant", "Iota", "ReplicaId", "PartitionId"), 0),
    **dict.fromkeys(("Abs", "Broadcast", "Convert", "Cos", "Exp", "Floor", "GetTupleElement", "Log", "Logistic"), 1),
    **dict.fromkeys(("Negate", "Not", "ReduceScatter", "Reshape", "Reverse", "Rsqrt", "Sin", "Slice", "Sqrt"), 1),
    **dict.fromkeys(("Tanh", "Transpose"), 1),
    **dict.fromkeys(("Add", "And", "Compare", "Divide", "Dot", "Gather", "Maximum", "Minimum", "Multiply", "Or"), 2),
    **dict.fromkeys(("Pad", "Power", "Remainder", "Subtract", "Xor"), 2),
    **dict.fromkeys(("BatchNormTraining", "Clamp", "Scatter", "Select"), 3),
    **dict.fromkeys(("AllGather", "AllReduce", "AllToAll", "Concatenate", "CustomCall", "DynamicSlice"), None),
    **dict.fromkeys(("DynamicUpdateSlice", "Reduce", "ReduceWindow", "Rng", "Sort", "Tuple"), None),
}
_WITH_FUNCTION = {"all-reduce", "reduce", "reduce-scatter", "reduce-window", "scatter", "sort"}
_BYTES = {"s8s", "u8s", "s16s", "u16s", "f16s", "bf16s", "f8e4m3fns"}  # fields of a literal that hold bytes


class HloScribe:
    """Writes one module; its attributes ``f32``, ``s32`` and so on are the scalar types."""

    context: HloScribe | None = None  # the scribe whose function is running

    def __init__(self, constant_serializer=None, counter=0):
        """``constant_serializer`` gives the bytes of constants of narrow types; identifiers begin after ``counter``."""
        self.constant_serializer, self.counter = constant_serializer, counter
        self.aliases = []
        for name, number in _TYPES.items():
            setattr(self, name.lower(), HloShape(xla_data_pb2.ShapeProto(element_type=number)))

    def get_dtype(self, name):
        """Returns the scalar type of that name."""
        return getattr(self, name)

    def next_id(self):
        """Returns an identifier that nothing in the module has."""
        self.counter += 1
        return self.counter

    def __call__(self, function):
        """Returns a new scribe that has written ``function``."""
        scribe = HloScribe(self.constant_serializer, self.counter)
        scribe.write(function)
        return scribe

    def write(self, function):
        """Writes the module that ``function(scribe)`` describes; its result is the root.

        Raises ValueError for parameters that are not numbered in order, and for an alias of no output.
        """
        self.module_proto = module = hlo_pb2.HloModuleProto()
        self.entry_computation = entry = module.computations.add()
        outer, HloScribe.context = HloScribe.context, self
        try:
            root = function(self)
        finally:
            HloScribe.context = outer
        parameters = [instruction for instruction in entry.instructions if instruction.opcode == "parameter"]
        for number, parameter in enumerate(parameters):
            if parameter.parameter_number != number:
                raise ValueError(f"{parameter.name}: parameter_number needs to be {number}")
            entry.program_shape.parameters.add().CopyFrom(parameter.shape)
            entry.program_shape.parameter_names.append(f"p{number}")
        entry.program_shape.result.CopyFrom(root.shape_proto)
        entry.root_id = root.instruction.id
        module.id = module.entry_computation_id = entry.id = self.next_id()
        name = "".join(part.title() for part in function.__name__.split("_"))
        module.name = module.entry_computation_name = entry.name = f"{name}.{entry.id}"
        module.host_program_shape.CopyFrom(entry.program_shape)
        self._write_aliases(root)

    def _write_aliases(self, root):
        is_tuple = root.shape_proto.element_type == _TYPES.TUPLE
        outputs = list(root.instruction.operand_ids) if is_tuple else [root.instruction.id]
        for output, parameter, must in self.aliases:
            if output not in outputs:
                raise ValueError(f"instruction {output} has an alias and is not an output of the root")
            kind = "MUST_ALIAS" if must else "MAY_ALIAS"
            alias = self.module_proto.input_output_alias.entries.add(parameter_number=parameter, kind=kind)
            if is_tuple:
                alias.output_shape_index.append(outputs.index(output))


class HloShape:
    """A type, with its sizes; and, if an instruction gave it, that instruction's result."""

    def __init__(self, shape_proto):
        """``shape_proto`` is a ``ShapeProto``; without dimensions it is a scalar or a tuple."""
        self.shape_proto = shape_proto

    @property
    def scribe(self):
        """The scribe whose function is running."""
        return HloScribe.context

    @property
    def dtype(self):
        """The scalar type."""
        return self.scribe.get_dtype(_TYPES.Name(self.shape_proto.element_type).lower())

    @property
    def sizes(self):
        """The dimensions, a tuple."""
        return tuple(self.shape_proto.dimensions)

    def __getitem__(self, sizes):
        """Returns this type with ``sizes``, a number or several, in row-major layout."""
        sizes = list(sizes) if isinstance(sizes, Iterable) else [sizes]
        shape = xla_data_pb2.ShapeProto(element_type=self.shape_proto.element_type, dimensions=sizes)
        shape.is_dynamic_dimension[:] = [False] * len(sizes)
        shape.layout.minor_to_major[:] = list(reversed(range(len(sizes))))
        return HloShape(shape)

    def __call__(self, *parts):
        """Returns the tuple of these shapes, for the type ``tuple``."""
        shape = xla_data_pb2.ShapeProto(element_type=self.shape_proto.element_type)
        shape.tuple_shapes.extend(part.shape_proto for part in parts)
        return HloShape(shape)

    def get_tuple_element(self, tuple_index):
        """Returns the shape of one element of a tuple."""
        shape = xla_data_pb2.ShapeProto()
        shape.CopyFrom(self.shape_proto.tuple_shapes[tuple_index])
        return HloShape(shape)

    def set_alias_to(self, parameter, must=False):
        """The output shares memory with ``parameter``. Raises TypeError for the result of another instruction."""
        if parameter.instruction.opcode != "parameter":
            raise TypeError(f"instruction {parameter.instruction.name} is not a parameter")
        self.scribe.aliases.append((self.instruction.id, parameter.instruction.parameter_number, must))


def _method(name, operand_count):
    opcode = _OPCODES.get(name) or re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()

    def write(self, *operands, to_apply=None, constant_value=None, replica_groups=None, **fields):
        if operand_count is not None and len(operands) != operand_count:
            raise ValueError(f"{name} accepts {operand_count} operands; received {len(operands)}")
        scribe = self.scribe
        instruction = scribe.entry_computation.instructions.add(opcode=opcode, id=scribe.next_id())
        instruction.shape.CopyFrom(self.shape_proto)
        instruction.name = f"{opcode}.{instruction.id}"
        instruction.operand_ids[:] = [operand.instruction.id for operand in operands]
        if opcode in _WITH_FUNCTION:
            inner = scribe(to_apply)
            scribe.module_proto.computations.insert(0, inner.entry_computation)
            instruction.called_computation_ids.append(inner.entry_computation.id)
            scribe.counter = inner.counter
        for group in replica_groups or ():
            instruction.replica_groups.add(replica_ids=getattr(group, "replica_ids", group))
        if constant_value is not None:
            _write_literal(scribe, instruction, constant_value)
        for key, value in fields.items():
            _set_field(instruction, key, value)
        result = HloShape(self.shape_proto)
        result.instruction = instruction
        return result

    return write


def _write_literal(scribe, instruction, value):
    element_type = instruction.shape.element_type
    literal, field = instruction.literal, f"{_TYPES.Name(element_type).lower()}s"
    literal.shape.CopyFrom(instruction.shape)
    if field in _BYTES:
        setattr(literal, field, scribe.constant_serializer(value, element_type))
    else:
        getattr(literal, field)[:] = value if isinstance(value, Iterable) else [value]


def _set_field(message, name, value):
    current = getattr(message, name)
    if isinstance(value, Mapping):
        _set_fields(current, value)
    elif isinstance(current, int | float | str | bytes):
        setattr(message, name, value)
    elif hasattr(current, "add"):  # repeated messages
        for item in value:
            if isinstance(item, Mapping):
                _set_fields(current.add(), item)
            else:
                current.add().CopyFrom(item)
    elif hasattr(current, "extend"):  # repeated numbers
        current[:] = value
    else:
        current.CopyFrom(value)


def _set_fields(message, values):
    for name, value in values.items():
        _set_field(message, name, value)


for _name, _count in _OPERATIONS.items():
    setattr(HloShape, _name, _method(_name, _count))
