"""The status codes of the Neuron runtime."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

STATUS_NAMES: Mapping[int, str] = MappingProxyType(
    {
        1: "failure",
        2: "invalid NEFF, instruction or input",
        3: "invalid handle",
        4: "resource unavailable",
        5: "timeout",
        6: "hardware error",
        7: "queue full",
        9: "not enough cores",
        10: "unsupported NEFF version",
        11: "no host memory",
        13: "not initialized",
        14: "closed",
        15: "queue empty",
        101: "execution unit unrecoverable",
        1002: "bad input",
        1003: "numerical error",
        1004: "completed with an error",
        1005: "core busy",
        1006: "out of bounds",
        1100: "collectives pending",
        1200: "hardware error in collectives",
        1201: "uncorrectable error in HBM",
        1202: "uncorrectable error in a core",
        1203: "DMA aborted",
        1204: "notification queue overflow",
        1205: "repairable error in HBM",
        1206: "network proxy failed",
    }
)
"""Descriptions of NRT_STATUS in AWS's nrt_status.h."""
