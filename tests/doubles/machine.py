"""A machine with Neuron devices that is a folder: /dev, /sys and AWS's tools as corewright reads them, and interpreters
in which the Neuron packages are installed. What lies on its cores is told by the locks of living processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.doubles import PACKAGES

LIBRARY = Path(__file__).with_name("libnrt.c")
PROJECT = Path(__file__).parent.parent.parent
DRIVER = "2.19.64.0"
NAMES = {"inf2": "Inferentia2", "trn1": "Trainium1", "trn2": "Trainium2"}
TOOL = """#!{python} -IS
import os, sys
sys.path.insert(0, {packages!r})
for name, value in {env!r}.items():
    os.environ.setdefault(name, value)
from neuron_double.tools import {function}
sys.exit({function}(sys.argv[1:]))
"""


@dataclass(frozen=True)
class Machine:
    """One such folder, and what a process must be told to stand on it."""

    root: Path  # COREWRIGHT_HOST_ROOT: dev/, sys/ and opt/ lie below it
    state: Path  # NEURON_DOUBLE_STATE: its cores
    instance: str
    python: Path  # an interpreter with the project, what it needs, and the Neuron packages

    @property
    def env(self) -> dict[str, str]:
        """For commands and fleets that run on it."""
        return {
            "COREWRIGHT_HOST_ROOT": str(self.root),
            "NEURON_DOUBLE_STATE": str(self.state),
            "NEURON_DOUBLE_INSTANCE": self.instance,
        }

    def plan(self, *faults: Mapping[str, object]) -> None:
        """These faults come from now on; neuron_double/faults.py has the keys."""
        written = self.state / "faults.json.new"
        written.write_text(json.dumps(faults))
        written.replace(self.state / "faults.json")


def build_machine(folder: Path, instance: str = "inf2.48xlarge", *, driver: str = DRIVER) -> Machine:
    """Make it in ``folder``, which need not exist."""
    sys.path.insert(0, str(PACKAGES))
    try:
        from neuron_double.machine import INSTANCES
    finally:
        sys.path.remove(str(PACKAGES))
    facts = INSTANCES[instance]
    root, state = folder / "root", folder / "cores"
    state.mkdir(parents=True)
    for device in range(facts.devices):
        _write(root / f"dev/neuron{device}", "")
        _write_device(root / f"sys/devices/virtual/neuron_device/neuron{device}", device, facts)
    _write(root / "sys/devices/virtual/dmi/id/product_name", f"{instance}\n")
    _write(root / "sys/module/neuron/version", f"{driver}\n")
    cpus = f"{min(os.sched_getaffinity(0))}-{max(os.sched_getaffinity(0))}"
    _write(root / "sys/devices/system/node/node0/cpulist", f"{cpus}\n")
    env = {"NEURON_DOUBLE_STATE": str(state), "NEURON_DOUBLE_INSTANCE": instance}
    python = make_interpreter(folder / "venv")
    for name in ("neuron-ls", "neuron-monitor", "neuronx-cc"):
        text = TOOL.format(python=sys.executable, packages=str(PACKAGES), env=env, function=name.replace("-", "_"))
        _write(root / f"opt/aws/neuron/bin/{name}", text)
        (root / f"opt/aws/neuron/bin/{name}").chmod(0o755)
    library = root / "opt/aws/neuron/lib/libnrt.so.1"
    library.parent.mkdir(parents=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(LIBRARY)], check=True)
    return Machine(root, state, instance, python)


def make_interpreter(
    folder: Path, *, neuron: bool = True, instead: Mapping[str, str] | None = None, python: str = sys.executable
) -> Path:
    """A venv that has what this one has, the project, and the Neuron packages unless not ``neuron``; its python.

    ``instead`` are packages of other versions, each with nothing in it but that: {"ray": "2.44.0"}.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    site = next(folder.glob("lib/python3.*/site-packages"))
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "corewright-double.pth").write_text(
        "\n".join([*packages, str(PROJECT), *([str(PACKAGES)] if neuron else [])])
    )
    for name, version in (instead or {}).items():
        _write(site / name / "__init__.py", f"__version__ = {version!r}\n")
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        _write(site / f"{name}-{version}.dist-info/METADATA", metadata)
    for name in ("neuronx-cc", "libneuronpjrt-path") if neuron else ():
        _write(folder / "bin" / name, "#!/bin/sh\n")
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin" / "python"


def _write_device(folder: Path, device: int, facts: object) -> None:
    """The files of the Neuron Sysfs User Guide that corewright reads."""
    cores, count, family = facts.cores_per_device, facts.devices, facts.family  # type: ignore[attr-defined]
    connected = ", ".join(str(other) for other in ((device - 1) % count, (device + 1) % count)) if count > 1 else ""
    for name, text in {
        "core_count": str(cores),
        "connected_devices": connected,
        "info/serial_number": f"{device:016x}",
        "info/architecture/arch_type": "NCv2",
        "info/architecture/device_name": NAMES[family],
        "info/architecture/instance_type": family.capitalize(),
        "stats/hardware/mem_ecc_uncorrected": "0",
        "stats/hardware/sram_ecc_uncorrected": "0",
    }.items():
        _write(folder / name, f"{text}\n")
    for core in range(cores):
        _write(folder / f"neuron_core{core}/stats/status/success/total", "0\n")
        _write(folder / f"neuron_core{core}/stats/memory_usage/device_mem/tensors/total", "0\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
