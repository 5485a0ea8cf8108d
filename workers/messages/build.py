"""A version of corewright, as it is installed on the machines of a cluster."""

from __future__ import annotations

import msgspec


class Build(msgspec.Struct, frozen=True):
    """One version, in its own interpreter."""

    version: str
    python: str  # path of the interpreter, the same on each machine
