"""Parses a line of ``neuron-monitor``: cores in use, memory by class, errors.

Field names: Neuron Monitor User Guide, "The JSON output format". The guide's own sample is not valid JSON, and any
section may be missing.
"""

from __future__ import annotations

import msgspec

from workers.host.facts.sections import Findings, Section, decode

# The groups that are read below. Without a config the tool reports every 5 s, and its first line lacks groups.
CONFIG = {
    "period": "1s",
    "neuron_runtimes": [
        {
            "tag_filter": ".*",
            "metrics": [{"type": "neuroncore_counters"}, {"type": "memory_used"}, {"type": "execution_stats"}],
        }
    ],
    "system_metrics": [{"type": "memory_info"}, {"type": "neuron_hw_counters"}],
}

INSTANCE_LABELS = {
    "instance_id": "instance_id",
    "instance_name": "instance_name",
    "availability_zone": "instance_availability_zone",
    "region": "instance_region",
    "subnet_id": "subnet_id",
}


class CoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one logical core by one process."""

    core: int
    utilization: float | None = None  # percent of the period
    memory: dict[str, int] = {}  # class -> bytes: constants (weights), model_code, tensors, ...

    @property
    def in_use(self) -> bool:
        """Returns whether the process uses the core: some releases list every core for every process."""
        return bool(self.utilization) or any(self.memory.values())


class Runtime(msgspec.Struct, frozen=True, kw_only=True):
    """A process with the Neuron runtime. Counts are per period, not since its start."""

    pid: int
    tag: str | None = None  # NEURON_PROCESS_TAG, else the pid
    cores: tuple[CoreUse, ...] = ()
    host_bytes: int | None = None
    device_bytes: int | None = None
    errors: dict[str, int] = {}  # generic, numerical, transient, model, runtime, hardware -> executions
    executions: dict[str, int] = {}  # completed, completed_with_err, timed_out, ... -> executions
    latency_s: dict[str, float] = {}  # p0, p1, p25, p50, p75, p99, p100 -> seconds of an execution


class Ecc(msgspec.Struct, frozen=True, kw_only=True):
    """The ECC events of one device since the driver was loaded. None: not reported."""

    device: int
    mem_corrected: int | None = None
    mem_uncorrected: int | None = None
    sram_corrected: int | None = None
    sram_uncorrected: int | None = None


class MonitorSample(msgspec.Struct, frozen=True, kw_only=True):
    """One parsed line."""

    runtimes: tuple[Runtime, ...] = ()
    ecc: tuple[Ecc, ...] = ()
    memory_total_bytes: int | None = None  # of the host
    memory_used_bytes: int | None = None
    instance_type: str | None = None
    instance: dict[str, str] = {}  # id, name, availability zone, region, subnet, with the labels of AWS's exporter
    device_count: int | None = None
    device_memory_bytes: int | None = None  # of each device
    cores_per_device: int | None = None  # logical cores
    problems: tuple[str, ...] = ()


def parse_neuron_monitor(line: str | bytes) -> MonitorSample:
    """Parses one line. Never raises; ``problems`` lists what cannot be read."""
    findings = Findings()
    value = decode(line, "neuron-monitor: the line", findings)
    root = Section(value, "neuron-monitor: ", findings)
    root.report_error()
    runtimes = [_runtime(section) for section in root.sections("neuron_runtime_data")]
    system = root.section("system_data")
    memory = system.section("memory_info")
    counters = system.section("neuron_hw_counters")
    instance = root.section("instance_info")  # this and the next do not depend on the config
    hardware = root.section("neuron_hardware_info")
    return MonitorSample(
        runtimes=tuple(runtime for runtime in runtimes if runtime is not None),
        ecc=_ecc(counters),
        memory_total_bytes=memory.integer("memory_total_bytes"),
        memory_used_bytes=memory.integer("memory_used_bytes"),
        instance_type=instance.text("instance_type"),
        instance=_instance(instance),
        device_count=hardware.integer("neuron_device_count"),
        device_memory_bytes=hardware.integer("neuron_device_memory_size", may_be_absent=True),
        cores_per_device=hardware.integer("neuroncore_per_device_count"),
        problems=findings(),
    )


def _runtime(section: Section) -> Runtime | None:
    section.report_error()
    pid = section.integer("pid")
    if pid is None:
        return None
    report = section.section("report")
    used = report.section("memory_used").section("neuron_runtime_used_bytes")
    stats = report.section("execution_stats")
    return Runtime(
        pid=pid,
        tag=section.text("neuron_runtime_tag", may_be_absent=True),
        cores=_core_uses(report, used),
        host_bytes=used.integer("host"),
        device_bytes=used.integer("neuron_device"),
        errors=_error_summary(stats),
        executions=stats.section("execution_summary").amounts(),
        latency_s=_latency(stats),
    )


def _core_uses(report: Section, used: Section) -> tuple[CoreUse, ...]:
    """Returns the utilization and memory of each core in either section."""
    counters = report.section("neuroncore_counters").numbered("neuroncores_in_use")
    memory = used.section("usage_breakdown").numbered("neuroncore_memory_usage")
    return tuple(
        CoreUse(
            core=core,
            utilization=counters[core].number("neuroncore_utilization") if core in counters else None,
            memory=memory[core].amounts() if core in memory else {},
        )
        for core in sorted(counters.keys() | memory.keys())
    )


def _error_summary(stats: Section) -> dict[str, int]:
    """Returns error counts by kind. The guide's sample has "numerical" and its text "numeric"."""
    errors = stats.section("error_summary").amounts()
    if "numeric" in errors:
        errors.setdefault("numerical", errors.pop("numeric"))
    return errors


def _latency(stats: Section) -> dict[str, float]:
    """Returns the latency of complete executions, host and device together. Null while idle."""
    latency = stats.raw("latency_stats")
    total = latency.get("total_latency") if isinstance(latency, dict) else None
    if not isinstance(total, dict):
        return {}
    return {str(p): float(s) for p, s in total.items() if isinstance(s, int | float) and not isinstance(s, bool)}


def _instance(instance: Section) -> dict[str, str]:
    """Returns the instance's properties by their labels in neuron-monitor-prometheus.py."""
    properties = {label: instance.text(key, may_be_absent=True) for label, key in INSTANCE_LABELS.items()}
    return {label: text for label, text in properties.items() if text is not None}


def _ecc(counters: Section) -> tuple[Ecc, ...]:
    devices = counters.sections("neuron_devices")
    events = []
    for device in devices:
        index = device.integer("neuron_device_index")
        if index is not None:
            events.append(
                Ecc(
                    device=index,
                    mem_corrected=device.integer("mem_ecc_corrected", may_be_absent=True),
                    mem_uncorrected=device.integer("mem_ecc_uncorrected"),
                    sram_corrected=device.integer("sram_ecc_corrected", may_be_absent=True),
                    sram_uncorrected=device.integer("sram_ecc_uncorrected"),
                )
            )
    if counters.has("neuron_devices") and not events:
        counters.findings.add(counters.place("neuron_devices"), "has no usable device")
    return tuple(sorted(events, key=lambda ecc: ecc.device))
