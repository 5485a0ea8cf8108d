"""The types of tensors in a NEFF's description, of which the package makes a table at import."""

from types import SimpleNamespace

_NAMES = ("UINT8", "INT8", "INT16", "INT32", "INT64", "UINT16", "UINT64", "FLOAT16", "FLOAT", "DOUBLE", "BFLOAT16")
MetaTensor = SimpleNamespace(DataType=SimpleNamespace(**{name: number for number, name in enumerate(_NAMES)}))
