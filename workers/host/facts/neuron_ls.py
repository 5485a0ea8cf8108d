"""Parses ``neuron-ls --json-output``: the devices, and the processes that have them open."""

from __future__ import annotations

import msgspec

from workers.host.facts.cpu_list import parse_cpulist
from workers.host.facts.sections import Findings, Section, decode, described, elements

MOST_CORES = 1024  # per device; a larger number is invalid


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A Neuron device (/dev/neuron<index>). None: not readable."""

    index: int
    cores: tuple[int, ...]  # ids of its logical cores on the host, as in NEURON_RT_VISIBLE_CORES
    memory_bytes: int | None = None  # HBM of the device
    lnc: int | None = None  # physical cores per logical one; only on Trn2 and later
    connected_to: tuple[int, ...] = ()
    bdf: str | None = None  # PCI address: "0000:cc:00.0", in older releases "cc:00.0"
    numa_node: int | None = None
    cpu_affinity: tuple[int, ...] = ()

    @property
    def nc_count(self) -> int:
        """The number of its logical cores."""
        return len(self.cores)


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
        devices[index] = _device(section, index)
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
        return [section for section in elements(value, "neuron-ls: device", findings) if section.present]
    root = Section(value, "neuron-ls: the output", findings)
    root.report_error()
    for key, inside in value.items():
        if isinstance(inside, list) and any(
            isinstance(element, dict) and "neuron_device" in element for element in inside
        ):
            return [
                element for element in elements(inside, f"neuron-ls: {described(key)}", findings) if element.present
            ]
    if not root.has("error"):
        findings.add("neuron-ls: the output", "is an object without a list of devices")
    return []


def _instance_type(value: object, sections: list[Section]) -> str | None:
    top = Section(value, "neuron-ls: ", Findings()) if isinstance(value, dict) else None
    places = [*([top] if top else []), *sections]
    return next((name for place in places if (name := place.text("instance_type", may_be_absent=True))), None)


def _device(section: Section, index: int) -> Device:
    """Parses a device; field names from the Neuron LS User Guide and from observed outputs."""
    return Device(
        index=index,
        cores=_cores(section, index),
        memory_bytes=section.integer("memory_size"),  # bytes
        lnc=section.integer("logical_neuroncore_config", may_be_absent=True),
        connected_to=section.integers("connected_to", may_be_absent=True),  # null on hosts of one device
        bdf=section.text("bdf"),
        numa_node=_numa_node(section),
        cpu_affinity=_cpu_affinity(section),
    )


def _cores(section: Section, index: int) -> tuple[int, ...]:
    """Returns the core ids, else ids counted from ``nc_count``, assuming that all devices have equally many."""
    count = section.integer("nc_count")
    ids = section.integers("neuroncore_ids", may_be_absent=True)
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
    """Parses a number that the tool writes as a string; "-1" means none."""
    key = "numa_node"
    value = section.raw(key)
    text = str(value) if isinstance(value, int) else section.text(key, may_be_absent=True)
    if text is None or text == "-1":
        return None
    if text.isascii() and text.isdecimal() and len(text) <= 4:
        return int(text)
    section.findings.add(section.place(key), f"is {described(text)}, not the number of a NUMA node")
    return None


def _cpu_affinity(section: Section) -> tuple[int, ...]:
    text = section.text("cpu_affinity", may_be_absent=True)
    cpus = parse_cpulist(text or "")
    if cpus is None:
        section.findings.add(section.place("cpu_affinity"), f"is {described(text)}, not a list of CPUs")
    return cpus or ()


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
