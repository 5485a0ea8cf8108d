"""Serializes constants of types that HLO stores as bytes."""

import torch

from torch_neuronx.pyhlo import xla_data_pb2

_DTYPES = {
    "S8": torch.int8,
    "U8": torch.uint8,
    "S16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8E4M3FN": torch.float8_e4m3fn,
}


def serialize_torch(value, element_type):
    """Returns the little-endian bytes of ``value``, a number or nested lists of numbers, as the HLO element type."""
    dtype = _DTYPES[xla_data_pb2.PrimitiveType.Name(element_type)]
    return bytes(torch.as_tensor(value).to(dtype).reshape(-1).contiguous().view(torch.uint8).tolist())
