"""neuron-ls, neuron-monitor and neuronx-cc, as far as they are asked. Each ``main`` takes the arguments of its tool."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from neuron_double.compiler import compile_graph, compiler_version
from neuron_double.machine import Instance, instance
from neuron_double.runtime import held

RUNTIME_VERSION = "2.22.19.0"


def neuron_ls(arguments: list[str]) -> int:
    """The JSON array of the Neuron LS User Guide, one object for each device, with the processes on it."""
    if not {"-j", "--json-output"} & set(arguments):
        sys.stderr.write("neuron-ls: only the JSON output is played here\n")
        return 2
    machine = instance()
    owners = held()
    devices = []
    for device in range(machine.devices):
        cores = list(range(device * machine.cores_per_device, (device + 1) * machine.cores_per_device))
        pids = sorted({pid for core in cores if (pid := owners.get(core)) is not None})
        record: dict[str, Any] = {
            "neuron_device": device,
            "bdf": f"00:{16 + device:02x}.0",
            "cpu_affinity": "",
            "numa_node": "-1",
            "connected_to": _neighbours(machine, device),
            "nc_count": len(cores),
            "memory_size": machine.memory_per_device,
            "neuroncore_ids": cores,
            "neuron_processes": [
                {"pid": pid, "command": _command(pid), "neuron_runtime_version": RUNTIME_VERSION} for pid in pids
            ],
        }
        if machine.lnc is not None:
            record["logical_neuroncore_config"] = machine.lnc
        devices.append(record)
    sys.stdout.write(json.dumps(devices, indent=2) + "\n")
    return 0


def neuron_monitor(arguments: list[str]) -> int:
    """One whole line, and then nothing more until it is ended."""
    machine = instance()
    by_pid: dict[int, list[int]] = {}
    for core, pid in held().items():
        if pid is not None:
            by_pid.setdefault(pid, []).append(core)
    line = {
        "neuron_runtime_data": [_runtime(pid, cores) for pid, cores in sorted(by_pid.items())],
        "system_data": {
            "memory_info": {"period": 1.0, "memory_total_bytes": 8 << 30, "memory_used_bytes": 2 << 30, "error": ""},
            "neuron_hw_counters": {
                "period": 1.0,
                "neuron_devices": [
                    {
                        "neuron_device_index": device,
                        "mem_ecc_corrected": 0,
                        "mem_ecc_uncorrected": 0,
                        "sram_ecc_uncorrected": 0,
                        "sram_ecc_corrected": 0,
                    }
                    for device in range(machine.devices)
                ],
                "error": "",
            },
        },
        "instance_info": {"instance_type": machine.name, "error": ""},
        "neuron_hardware_info": {
            "neuron_device_type": {"inf2": "inferentia2", "trn1": "trainium", "trn2": "trainium2"}[machine.family],
            "neuron_device_count": machine.devices,
            "neuron_device_memory_size": machine.memory_per_device,
            "neuroncore_per_device_count": machine.cores_per_device,
            **({} if machine.lnc is None else {"logical_neuroncore_config": machine.lnc}),
            "error": "",
        },
    }
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


def neuronx_cc(arguments: list[str]) -> int:
    """``--version``, or ``compile FILE --output FILE [flags]``."""
    if "--version" in arguments:
        sys.stdout.write(f"NeuronX Compiler version {compiler_version()}\n")
        return 0
    if arguments[:1] != ["compile"] or "--output" not in arguments:
        sys.stderr.write("usage: neuronx-cc compile FILE --output FILE [flags]\n")
        return 2
    at = arguments.index("--output")
    flags = [*arguments[2:at], *arguments[at + 2 :]]
    try:
        neff = compile_graph(Path(arguments[1]).read_text(), " ".join(flags))
    except RuntimeError:
        return 1
    Path(arguments[at + 1]).write_bytes(neff)
    sys.stdout.write("Compiler status PASS\n")
    return 0


def _runtime(pid: int, cores: list[int]) -> dict[str, Any]:
    uses = {str(core): {"neuroncore_utilization": 0.0} for core in cores}
    memory = {str(core): {"constants": 0, "model_code": 0, "tensors": 1 << 20} for core in cores}
    used = {
        "host": 1 << 20,
        "neuron_device": len(cores) << 20,
        "usage_breakdown": {"neuroncore_memory_usage": memory},
    }
    return {
        "pid": pid,
        "neuron_runtime_tag": _environment(pid).get("NEURON_PROCESS_TAG", str(pid)),
        "error": "",
        "report": {
            "neuroncore_counters": {"period": 1.0, "neuroncores_in_use": uses, "error": ""},
            "memory_used": {"period": 1.0, "neuron_runtime_used_bytes": used, "error": ""},
            "execution_stats": {"period": 1.0, "error_summary": {}, "execution_summary": {}, "error": ""},
        },
    }


def _neighbours(machine: Instance, device: int) -> list[int] | None:
    """A ring on inf2.48xlarge, a line on inf2.24xlarge, a 4 x 4 torus on the large Trainium machines."""
    if machine.devices == 1:
        return None
    if machine.devices == 16:
        row, column = divmod(device, 4)
        near = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        return sorted({(r % 4) * 4 + c % 4 for r, c in near})
    if machine.devices == 6:
        return [other for other in (device - 1, device + 1) if 0 <= other < 6]
    return sorted({(device - 1) % machine.devices, (device + 1) % machine.devices})


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
