"""Parses ``neuron-ls --json-output``: the devices, and the processes that have them open."""

from __future__ import annotations

import msgspec

from workers.host.facts.sections import Findings, Section, decode, described, objects

MOST_CORES = 1024  # per device; a larger number is invalid


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A Neuron device (/dev/neuron<index>)."""

    index: int
    cores: tuple[int, ...]  # ids of its logical cores on the host, as in NEURON_RT_VISIBLE_CORES
    numa_node: int | None = None  # None: unknown


class DeviceProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has a device open. neuron-ls reports the device, not the cores."""

    pid: int
    device: int
    command: str | None = None
    runtime_version: str | None = None  # None for tools, which open devices without the runtime


class NeuronLs(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed output."""

    devices: tuple[Device, ...] = ()  # ascending
    processes: tuple[DeviceProcess, ...] = ()
    instance_type: str | None = None
    problems: tuple[str, ...] = ()


def parse_neuron_ls(output: str | bytes) -> NeuronLs:
    """Parses an output. Never raises; ``problems`` lists what cannot be read."""
    findings = Findings()
    value = decode(output, "neuron-ls: the output", findings)
    sections = _device_sections(value, findings)
    devices: dict[int, Device] = {}
    processes: list[DeviceProcess] = []
    for section in sections:
        section.report_error()
        index = section.integer("neuron_device")
        if index is None or index in devices:
            if index is not None:
                findings.add(section.where, f"repeats device {index} and is ignored")
            continue
        devices[index] = Device(index=index, cores=_cores(section, index), numa_node=_numa_node(section))
        processes += _processes(section, index)
    if value == []:
        findings.add(
            "neuron-ls: the list of devices", "is empty; check that the driver is loaded (`lsmod | grep neuron`)"
        )
    _check_distinct(devices, findings)
    return NeuronLs(
        devices=tuple(device for _, device in sorted(devices.items())),
        processes=tuple(processes),
        instance_type=_instance_type(value, sections),
        problems=findings(),
    )


def _device_sections(value: object, findings: Findings) -> list[Section]:
    """Returns the objects of the devices, from any of three formats.

    1. An array with one object per device (Neuron LS User Guide, --json-output); later releases add ``instance_type``
       and ``instance_id`` to each.
    2. An object with the devices in one of its fields (announced for Neuron 2.34 as ``--output-format json``, keys not
       published): the array whose objects have a ``neuron_device``.
    3. An object without devices, which can only report an error.
    """
    if not isinstance(value, dict):
        return objects(value, "neuron-ls: device", findings)
    root = Section(value, "neuron-ls: the output", findings)
    root.report_error()
    for key, inside in value.items():
        if isinstance(inside, list) and any(
            isinstance(element, dict) and "neuron_device" in element for element in inside
        ):
            return objects(inside, f"neuron-ls: {described(key)}", findings)
    if not root.has("error"):
        findings.add("neuron-ls: the output", "is an object without a list of devices")
    return []


def _instance_type(value: object, sections: list[Section]) -> str | None:
    inner = value.values() if isinstance(value, dict) else ()
    places = [*(Section(each, "neuron-ls: ", Findings()) for each in (value, *inner)), *sections]
    return next((name for place in places if (name := place.text("instance_type", may_be_absent=True))), None)


def _cores(section: Section, index: int) -> tuple[int, ...]:
    """Returns the core ids, else ids counted from ``nc_count``, assuming that all devices have equally many."""
    count = section.integer("nc_count")
    ids = section.integers("neuroncore_ids")
    if ids:
        if count is not None and count != len(ids):
            section.findings.add(section.where, f"has nc_count {count} but {len(ids)} neuroncore_ids, which are used")
        return tuple(sorted(set(ids)))
    if count is None or count > MOST_CORES or index > MOST_CORES:
        section.findings.add(section.place("neuroncore_ids"), "is missing or empty, without a usable nc_count")
        return ()
    if not section.raw("neuroncore_ids"):  # else it is a finding already
        section.findings.add(section.place("neuroncore_ids"), "is missing or empty; the ids are counted from nc_count")
    return tuple(range(index * count, (index + 1) * count))


def _numa_node(section: Section) -> int | None:
    """Returns the NUMA node, a number or its text; -1 stands for none."""
    text = str(section.raw("numa_node"))
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 5 else None


def _processes(section: Section, device: int) -> list[DeviceProcess]:
    processes = []
    for process in section.sections("neuron_processes", may_be_absent=True):
        pid = process.integer("pid")
        if pid is None:
            continue
        version = process.text("neuron_runtime_version", may_be_absent=True)
        processes.append(
            DeviceProcess(
                pid=pid,
                device=device,
                command=process.text("command", may_be_absent=True),  # empty for a process of another container
                runtime_version=None if version == "NA" else version,
            )
        )
    return processes


def _check_distinct(devices: dict[int, Device], findings: Findings) -> None:
    device_of: dict[int, int] = {}
    for index, device in sorted(devices.items()):
        for core in device.cores:
            if core in device_of:
                findings.add("neuron-ls: neuroncore_ids", f"give core {core} to devices {device_of[core]} and {index}")
                break
            device_of[core] = index
