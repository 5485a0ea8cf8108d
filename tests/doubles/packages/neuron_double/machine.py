"""The machine that the runtime stands on: an instance type, its cores, and the folder that plays the driver."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

GIB = 1024**3


@dataclass(frozen=True)
class Instance:
    """Numbers of AWS's hardware pages, at the default LNC."""

    name: str
    devices: int
    cores_per_device: int
    hbm_per_core_gib: int
    lnc: int | None = None

    @property
    def cores(self) -> int:
        return self.devices * self.cores_per_device

    @property
    def family(self) -> str:
        return "trn2" if self.name.startswith("trn2") else self.name.split(".")[0].removesuffix("n")

    @property
    def target(self) -> str:
        """What NEFFs are compiled for: inf2, trn1 and trn1n share one."""
        return "trn2" if self.family == "trn2" else "trn1"

    @property
    def memory_per_device(self) -> int:
        return self.cores_per_device * self.hbm_per_core_gib * GIB


INSTANCES = {
    one.name: one
    for one in (
        Instance("inf2.xlarge", 1, 2, 16),
        Instance("inf2.8xlarge", 1, 2, 16),
        Instance("inf2.24xlarge", 6, 2, 16),
        Instance("inf2.48xlarge", 12, 2, 16),
        Instance("trn1.2xlarge", 1, 2, 16),
        Instance("trn1.32xlarge", 16, 2, 16),
        Instance("trn1n.32xlarge", 16, 2, 16),
        Instance("trn2.3xlarge", 1, 4, 24, 2),
        Instance("trn2.48xlarge", 16, 4, 24, 2),
        Instance("trn2u.48xlarge", 16, 4, 24, 2),
    )
}


def instance() -> Instance:
    """By $NEURON_DOUBLE_INSTANCE. With an LNC of 1, Trainium 2 has twice the cores, and half of the HBM for each."""
    kind = INSTANCES[os.environ.get("NEURON_DOUBLE_INSTANCE", "inf2.48xlarge")]
    wished = os.environ.get("NEURON_LOGICAL_NC_CONFIG") or os.environ.get("NEURON_RT_VIRTUAL_CORE_SIZE")
    if kind.lnc == 2 and wished == "1":
        return Instance(kind.name, kind.devices, kind.cores_per_device * 2, kind.hbm_per_core_gib // 2, 1)
    return kind


def state() -> Path:
    """$NEURON_DOUBLE_STATE: lock files of the cores, planned faults, a record of what was compiled."""
    folder = Path(os.environ.get("NEURON_DOUBLE_STATE") or f"/tmp/neuron-double-{os.getuid()}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
