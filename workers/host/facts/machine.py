"""Combines the readings of a host's tools, driver and kernel into HostFacts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from workers.host.facts.neuron_ls import Device, DeviceProcess, NeuronLs
from workers.host.facts.neuron_monitor import MonitorSample, Runtime
from workers.host.facts.sections import Findings, excerpt
from workers.host.facts.sysfs import Sysfs, SysfsDevice
from workers.host.facts.tools import Versions
from workers.host.host_facts import parse_cpulist

# Tools that open devices without holding a core. neuron-ls lists them among all processes.
ONLOOKERS = frozenset({"neuron-ls", "neuron-monitor", "neuron-top"})
ONE_CORE_SIZE = frozenset({"Inf2", "Trn1"})  # families whose logical cores are physical cores


class ProcessDetail(msgspec.Struct, frozen=True, kw_only=True):
    """A process as the kernel shows it. None: not readable by this user."""

    command: str | None = None
    visible_cores: str | None = None  # its NEURON_RT_VISIBLE_CORES


class SourceReadings(msgspec.Struct, frozen=True, kw_only=True):
    """The reading of each source. None: the host does not have the source."""

    product: str | None = None  # the machine's name in its firmware: on EC2 the instance type
    neuron_ls: NeuronLs | None = None
    monitor: MonitorSample | None = None
    sysfs: Sysfs | None = None
    versions: Versions = Versions()
    processes: dict[int, ProcessDetail] = {}
    problems: tuple[str, ...] = ()


class NeuronProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that has Neuron devices open."""

    pid: int
    devices: tuple[int, ...]
    cores: tuple[int, ...] | None = None  # its NEURON_RT_VISIBLE_CORES; None: unknown
    command: str = ""  # "": not readable, such as for a process of another container
    runtime_version: str | None = None

    @property
    def holds_cores(self) -> bool:
        """Returns whether it may hold cores; monitoring tools do not."""
        words = self.command.split()
        return self.runtime_version is not None or not words or words[0].rsplit("/", 1)[-1] not in ONLOOKERS


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one host. ``problems``: what could not be read, where, and how to fix it."""

    instance_type: str | None  # None without Neuron devices
    devices: tuple[Device, ...]  # ascending
    processes: tuple[NeuronProcess, ...]  # ascending by pid
    versions: Versions
    runtimes: tuple[Runtime, ...]  # of neuron-monitor
    problems: tuple[str, ...]
    unhealthy: dict[int, str] = {}  # device -> its failing parts, as the driver reports them

    @property
    def cores(self) -> tuple[int, ...]:
        """The ids of all logical cores, ascending."""
        return tuple(sorted(core for device in self.devices for core in device.cores))


class Owner(NamedTuple):
    """The process that holds a core."""

    pid: int
    command: str


def combine(readings: SourceReadings) -> HostFacts:
    """Combines readings. Pure; never raises. Disagreements between sources become ``problems``."""
    findings = Findings()
    ls, monitor = readings.neuron_ls, readings.monitor
    sysfs = readings.sysfs.devices if readings.sysfs else ()
    devices = ls.devices if ls else ()
    if not devices:
        devices = _devices_of_driver(sysfs, monitor, findings)
    processes = _processes(readings, devices, findings)
    if ls and ls.devices:
        _compare_counts(devices, sysfs, monitor, findings)
    instance_type = _instance_type(readings, findings)
    sources = (readings.problems, *(source.problems for source in (ls, monitor, readings.sysfs) if source), findings())
    return HostFacts(
        instance_type=instance_type,
        devices=devices,
        processes=processes,
        versions=_versions(readings.versions, processes),
        runtimes=monitor.runtimes if monitor else (),
        problems=tuple(dict.fromkeys(problem for problems in sources for problem in problems)),
        unhealthy={device.index: device.unhealthy for device in sysfs if device.unhealthy},
    )


def owners(facts: HostFacts) -> dict[int, Owner]:
    """Returns the owner of each logical core that is known to be held.

    1. The process whose memory or utilization neuron-monitor reports on the core.
    2. Else the process that has the core in its NEURON_RT_VISIBLE_CORES and the device open.
    3. Else a process that has the device open and owns no core by 1 or 2, since neuron-ls reports devices only. The
       lowest pid if there are several.
    """
    commands = {process.pid: process.command for process in facts.processes}
    held: dict[int, int] = {}
    for runtime in _by_memory(facts.runtimes):  # 1
        for use in runtime.cores:
            if use.in_use:
                held.setdefault(use.core, runtime.pid)
    holders = [process for process in facts.processes if process.holds_cores]
    for process in holders:  # 2
        for core in process.cores or ():
            held.setdefault(core, process.pid)
    owning_pids = {*held.values(), *(process.pid for process in holders if process.cores is not None)}
    for process in holders:  # 3
        if process.pid not in owning_pids:
            for device in facts.devices:
                for core in device.cores if device.index in process.devices else ():
                    held.setdefault(core, process.pid)
    return {core: Owner(pid, commands.get(pid, "")) for core, pid in sorted(held.items())}


def _by_memory(runtimes: Iterable[Runtime]) -> list[Runtime]:
    """Sorts by device memory, the largest first: two runtimes on one core are a process and remains of another."""
    return sorted(runtimes, key=lambda runtime: (-(runtime.device_bytes or 0), runtime.pid))


def _processes(readings: SourceReadings, devices: tuple[Device, ...], findings: Findings) -> tuple[NeuronProcess, ...]:
    """Returns a process for each pid of neuron-ls and neuron-monitor."""
    listed: dict[int, list[DeviceProcess]] = {}
    for process in readings.neuron_ls.processes if readings.neuron_ls else ():
        listed.setdefault(process.pid, []).append(process)
    for runtime in readings.monitor.runtimes if readings.monitor else ():
        listed.setdefault(runtime.pid, [])
    device_of = {core: device.index for device in devices for core in device.cores}
    return tuple(_process(pid, on_devices, readings, device_of, findings) for pid, on_devices in sorted(listed.items()))


def _process(
    pid: int,
    on_devices: list[DeviceProcess],
    readings: SourceReadings,
    device_of: Mapping[int, int],
    findings: Findings,
) -> NeuronProcess:
    detail = readings.processes.get(pid, ProcessDetail())
    opened = {process.device for process in on_devices}
    runtimes = readings.monitor.runtimes if readings.monitor else ()
    used = {use.core for runtime in runtimes if runtime.pid == pid for use in runtime.cores if use.in_use}
    opened |= {device_of[core] for core in used if core in device_of}
    cores = parse_cpulist(detail.visible_cores) if detail.visible_cores else None
    if cores and not {device_of.get(core) for core in cores} <= opened:
        findings.add(
            f"process {pid}:",
            f"has NEURON_RT_VISIBLE_CORES={excerpt(detail.visible_cores)}, but is on "
            f"{_named(opened)}; the variable is ignored",
        )
        cores = None
    return NeuronProcess(
        pid=pid,
        devices=tuple(sorted(opened)),
        cores=cores or None,
        command=next((process.command for process in on_devices if process.command), detail.command or ""),
        runtime_version=next((process.runtime_version for process in on_devices if process.runtime_version), None),
    )


def _named(devices: set[int]) -> str:
    return f"the devices {', '.join(map(str, sorted(devices)))}" if devices else "no device"


def _devices_of_driver(
    sysfs: tuple[SysfsDevice, ...], monitor: MonitorSample | None, findings: Findings
) -> tuple[Device, ...]:
    """Returns devices from the driver alone, if neuron-ls lists none."""
    devices = []
    for device in sysfs:
        count = monitor.cores_per_device if monitor else None
        if count is None and device.instance_type in ONE_CORE_SIZE:
            count = device.core_count
        if count is None or count > 1024:
            findings.add(
                f"sysfs: neuron{device.index}:",
                "its logical cores are unknown without neuron-ls; install aws-neuronx-tools",
            )
            count = 0
        devices.append(
            Device(
                index=device.index,
                cores=tuple(range(device.index * count, (device.index + 1) * count)),
            )
        )
    return tuple(devices)


def _compare_counts(
    devices: tuple[Device, ...],
    sysfs: tuple[SysfsDevice, ...],
    monitor: MonitorSample | None,
    findings: Findings,
) -> None:
    remedy = "their releases differ, or a device is lost (`dmesg | grep neuron`)"
    if sysfs and len(sysfs) != len(devices):
        findings.add("devices:", f"neuron-ls lists {len(devices)}, the driver {len(sysfs)}; {remedy}")
    if monitor is None:
        return
    if monitor.device_count is not None and monitor.device_count != len(devices):
        findings.add("devices:", f"neuron-ls lists {len(devices)}, neuron-monitor {monitor.device_count}; {remedy}")
    counts = {len(device.cores) for device in devices if device.cores}
    if monitor.cores_per_device is not None and counts - {monitor.cores_per_device}:
        findings.add(
            "cores of a device:",
            f"neuron-ls gives {max(counts)}, neuron-monitor {monitor.cores_per_device}; "
            "check NEURON_LOGICAL_NC_CONFIG, which must be the same for all processes",
        )


def _instance_type(readings: SourceReadings, findings: Findings) -> str | None:
    """Returns the instance type of the first source that has it: neuron-ls, neuron-monitor, the firmware."""
    sources = {
        "neuron-ls": readings.neuron_ls and readings.neuron_ls.instance_type,
        "neuron-monitor": readings.monitor and readings.monitor.instance_type,
        "the firmware": readings.product,
    }
    names = {source: name for source, name in sources.items() if name}
    if len(set(names.values())) > 1:
        listing = ", ".join(f"{source} {excerpt(name)}" for source, name in names.items())
        findings.add("instance type:", f"the sources differ: {listing}; the first is used")
    return next(iter(names.values()), None)


def _versions(versions: Versions, processes: tuple[NeuronProcess, ...]) -> Versions:
    """Fills in the runtime's version from a running process: it is often in the engine's image, not a package."""
    running = [process.runtime_version for process in processes if process.runtime_version]
    return versions if versions.runtime or not running else msgspec.structs.replace(versions, runtime=running[0])
