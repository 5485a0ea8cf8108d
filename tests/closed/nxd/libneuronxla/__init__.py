"""The compiler behind its persistent cache: that of ``neuron_double``."""

from __future__ import annotations

import json
from typing import Any

from closed_layer import blank
from neuron_double.compiler import cached_compile

__getattr__ = blank(__name__)


def neuron_xla_compile(module_bytes: bytes, compiler_flags: str, **_: Any) -> bytes:
    """Returns the NEFF. Raises RuntimeError with a planned fault."""
    text = module_bytes.decode()
    return cached_compile(text, compiler_flags, cores=json.loads(text)["cores"])


def neuron_xla_wlo_compile(module_bytes: bytes, compiler_flags: str, **_: Any) -> tuple[bytes, None]:
    """Returns the NEFF; it leaves the layout of the weights as it is."""
    return neuron_xla_compile(module_bytes, compiler_flags), None
