"""The part of XLA's HLO messages that transformers-neuronx writes and reads, with openxla's public field numbers.

The classes are built from the tables below at import, so no generated code is needed.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder

PRIMITIVE_TYPES = {
    "PRIMITIVE_TYPE_INVALID": 0,
    "PRED": 1,
    "S8": 2,
    "S16": 3,
    "S32": 4,
    "S64": 5,
    "U8": 6,
    "U16": 7,
    "U32": 8,
    "U64": 9,
    "F16": 10,
    "F32": 11,
    "F64": 12,
    "TUPLE": 13,
    "OPAQUE_TYPE": 14,
    "C64": 15,
    "BF16": 16,
    "TOKEN": 17,
    "F8E5M2": 19,
    "F8E4M3FN": 20,
}
ALIAS_KINDS = {"UNDEFINED_ALIAS": 0, "MAY_ALIAS": 1, "MUST_ALIAS": 2}

# A message, then its fields as name=number:type. A type in lower case is a scalar; * is repeated.
XLA_DATA = """
LayoutProto minor_to_major=1:*int64 memory_space=8:int64
ShapeProto element_type=2:PrimitiveType dimensions=3:*int64 tuple_shapes=4:*ShapeProto layout=5:LayoutProto
  is_dynamic_dimension=6:*bool
ProgramShapeProto parameters=1:*ShapeProto result=2:ShapeProto parameter_names=3:*string
OpMetadata op_type=1:string op_name=2:string source_file=3:string source_line=4:int32
LiteralProto shape=1:ShapeProto preds=2:*bool u8s=3:bytes s32s=4:*int32 s64s=5:*int64 u32s=6:*uint32 u64s=7:*uint64
  f32s=8:*float f64s=9:*double f16s=11:bytes bf16s=13:bytes s8s=15:bytes u16s=16:bytes s16s=17:bytes f8e4m3fns=20:bytes
WindowDimension size=1:int64 stride=2:int64 padding_low=3:int64 padding_high=4:int64 window_dilation=5:int64
  base_dilation=6:int64 window_reversal=7:bool
Window dimensions=1:*WindowDimension
PaddingDimension edge_padding_low=1:int64 edge_padding_high=2:int64 interior_padding=3:int64
PaddingConfig dimensions=1:*PaddingDimension
GatherDimensionNumbers offset_dims=1:*int64 collapsed_slice_dims=2:*int64 start_index_map=3:*int64
  index_vector_dim=4:int64
ScatterDimensionNumbers update_window_dims=1:*int64 inserted_window_dims=2:*int64
  scatter_dims_to_operand_dims=3:*int64 index_vector_dim=4:int64
DotDimensionNumbers lhs_contracting_dimensions=1:*int64 rhs_contracting_dimensions=2:*int64
  lhs_batch_dimensions=3:*int64 rhs_batch_dimensions=4:*int64
ReplicaGroup replica_ids=1:*int64
"""
HLO = """
SliceDimensions start=1:int64 limit=2:int64 stride=3:int64
HloInstructionProto name=1:string opcode=2:string shape=3:ShapeProto metadata=7:OpMetadata literal=8:LiteralProto
  parameter_number=9:int64 tuple_index=13:int64 dimensions=14:*int64 window=15:Window
  slice_dimensions=17:*SliceDimensions dynamic_slice_sizes=20:*int64 padding_config=21:PaddingConfig
  distribution=23:int32 epsilon=24:float feature_index=25:int64 channel_id=26:int64 custom_call_target=28:string
  dot_dimension_numbers=30:DotDimensionNumbers gather_dimension_numbers=33:GatherDimensionNumbers
  gather_slice_sizes=34:*int64 id=35:int64 operand_ids=36:*int64 called_computation_ids=38:*int64
  backend_config=43:bytes scatter_dimension_numbers=48:ScatterDimensionNumbers replica_groups=49:*ReplicaGroup
  is_stable=60:bool comparison_direction=63:string
HloComputationProto name=1:string instructions=2:*HloInstructionProto program_shape=4:ProgramShapeProto id=5:int64
  root_id=6:int64
AliasEntryProto output_shape_index=1:*int64 parameter_number=2:int64 parameter_shape_index=3:*int64 kind=4:Kind
HloInputOutputAliasProto entries=1:*AliasEntryProto
HloModuleProto name=1:string entry_computation_name=2:string computations=3:*HloComputationProto
  host_program_shape=4:ProgramShapeProto id=5:int64 entry_computation_id=6:int64
  input_output_alias=8:HloInputOutputAliasProto
"""

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = ("int32", "int64", "uint32", "uint64", "float", "double", "bool", "string", "bytes")
_ENUMS = ("PrimitiveType", "Kind")


def publish(module: str, namespace: dict[str, Any]) -> None:
    """Puts the classes of ``torch_neuronx.pyhlo.xla_data_pb2`` or ``hlo_pb2`` into ``namespace``, that of ``module``.

    They are then pickled by that module's name, as generated ones are.
    """
    if module.endswith("xla_data_pb2"):
        table, enum, values, imports = XLA_DATA, "PrimitiveType", PRIMITIVE_TYPES, ()
    else:
        table, enum, values, imports = HLO, "Kind", ALIAS_KINDS, (_file_name("torch_neuronx.pyhlo.xla_data_pb2"),)
    file = descriptor_pb2.FileDescriptorProto(
        name=_file_name(module), package="xla", syntax="proto3", dependency=imports
    )
    kinds = file.enum_type.add(name=enum)
    for name, number in values.items():
        kinds.value.add(name=name, number=number)
    for line in table.replace("\n  ", " ").strip().splitlines():
        name, *fields = line.split()
        message = file.message_type.add(name=name)
        for field in fields:
            _add_field(message, field)
    # The pool keeps the description of a module that a test imports again.
    descriptor = descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    builder.BuildMessageAndEnumDescriptors(descriptor, namespace)
    builder.BuildTopDescriptorsAndMessages(descriptor, module, namespace)


def _file_name(module: str) -> str:
    return module.replace(".", "/").replace("_pb2", ".proto")


def _add_field(message: Any, text: str) -> None:
    name, rest = text.split("=")
    number, kind = rest.split(":")
    label = _FIELD.LABEL_REPEATED if kind.startswith("*") else _FIELD.LABEL_OPTIONAL
    kind = kind.lstrip("*")
    field = message.field.add(name=name, number=int(number), label=label)
    if kind in _SCALARS:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type = _FIELD.TYPE_ENUM if kind in _ENUMS else _FIELD.TYPE_MESSAGE
        field.type_name = f".xla.{kind}"
