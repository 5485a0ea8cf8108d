"""Reads the facts of this host by running tools and reading files, within deadlines and without raising."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import psutil

from placements.facts.cpu_layout import LAYOUTS, CpuLayout
from workers.host import host_facts
from workers.host.facts import neuron_monitor
from workers.host.facts.machine import HostFacts, Owner, ProcessDetail, SourceReadings, combine, owners
from workers.host.facts.neuron_ls import NeuronLs, parse_neuron_ls
from workers.host.facts.neuron_monitor import MonitorSample, parse_neuron_monitor
from workers.host.facts.sysfs import read_sysfs
from workers.host.facts.tools import NEURON_TOOLS, Output, find_tool, read_versions, run_tool

INSTALL = "install aws-neuronx-tools (Neuron Setup Guide)"


@dataclass(frozen=True)
class Places:
    """The paths that are read; tests use others."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    tools: str = NEURON_TOOLS

    @classmethod
    def of_this_host(cls) -> Places:
        """Returns the places below COREWRIGHT_HOST_ROOT, if it is set."""
        root = host_facts.host_root()
        return cls(root / "sys", root / "dev", str(root / NEURON_TOOLS.lstrip("/")))


@dataclass(frozen=True)
class SourceDeadlines:
    """Deadlines of the sources, in seconds. A full sample of neuron-monitor takes one to two."""

    neuron_ls_s: float = 5.0
    monitor_s: float = 4.0
    packages_s: float = 3.0


PATIENCE = SourceDeadlines()


def read_host_facts(places: Places | None = None, deadlines: SourceDeadlines = PATIENCE) -> HostFacts:
    """Returns the facts of this host, at most a few seconds after the sum of the deadlines.

    Runs no Neuron tool on a host without Neuron devices.
    """
    places = places or Places.of_this_host()
    sysfs = read_sysfs(places.sys / "devices/virtual/neuron_device")
    if sysfs is None and not any(places.dev.glob("neuron[0-9]*")):
        return combine(SourceReadings())
    neuron_ls, ls_problems = read_neuron_ls(deadlines.neuron_ls_s, places.tools)
    monitor, monitor_problems = read_neuron_monitor(deadlines.monitor_s, places.tools)
    pids = {process.pid for process in (neuron_ls.processes if neuron_ls else ())}
    pids |= {runtime.pid for runtime in (monitor.runtimes if monitor else ())}
    return combine(
        SourceReadings(
            product=host_facts.instance_type(places.dev, places.sys / "devices/virtual/dmi/id/product_name"),
            neuron_ls=neuron_ls,
            monitor=monitor,
            sysfs=sysfs,
            versions=read_versions(places.sys, deadlines.packages_s),
            processes={pid: read_process(pid) for pid in sorted(pids)},
            problems=(*ls_problems, *monitor_problems),
        )
    )


def read_neuron_ls(deadline_s: float, folder: str = NEURON_TOOLS) -> tuple[NeuronLs | None, tuple[str, ...]]:
    """Returns the output of neuron-ls and the problems of running it. None: not installed, or no output.

    ``--json-output`` is documented up to Neuron 2.33; 2.34 replaces it with ``--output-format json`` (AWS's notice "end
    of support for the neuron-ls JSON output format"), which is tried if the first fails.
    """
    path = find_tool("neuron-ls", folder)
    if path is None:
        return None, (f"neuron-ls: found neither in {folder} nor on PATH; {INSTALL}",)
    problems = []
    for arguments in (["--json-output"], ["--output-format", "json"]):
        output = run_tool([path, *arguments], deadline_s)
        if output.problem is None:
            return parse_neuron_ls(output.stdout), ()
        problems.append(output.problem)
    return None, (problems[0],)


def read_cpu_layout(instance: str | None) -> CpuLayout | None:
    """Returns the layout of this machine's CPUs from the kernel; None: unknown.

    ``instance`` is its type if it has Neuron devices. If there are several NUMA nodes, those of the devices are the
    ones that AWS publishes for the type, else those of neuron-ls, else the layout is unknown.
    """
    layout = host_facts.cpu_layout()
    if instance is None or layout is None or len(set(layout.nodes)) == 1:
        return layout
    if instance in LAYOUTS:
        return replace(layout, device_nodes=LAYOUTS[instance].device_nodes)
    listed, _ = read_neuron_ls(PATIENCE.neuron_ls_s, Places.of_this_host().tools)
    node_of = {device.index: device.numa_node for device in (listed.devices if listed else ())}
    nodes = tuple(node_of.get(index) for index in range(max(node_of, default=-1) + 1))
    return replace(layout, device_nodes=nodes) if nodes and None not in nodes else None


def who_holds(cores: Iterable[int], deadline_s: float = PATIENCE.neuron_ls_s) -> dict[int, Owner]:
    """Returns the owners of these cores according to neuron-ls, without this process."""
    listed, _ = read_neuron_ls(deadline_s, Places.of_this_host().tools)
    if listed is None:
        return {}
    pids = {process.pid for process in listed.processes} - {os.getpid()}
    other_processes = msgspec.structs.replace(
        listed, processes=tuple(process for process in listed.processes if process.pid in pids)
    )
    processes = {pid: read_process(pid) for pid in sorted(pids)}
    held = owners(combine(SourceReadings(neuron_ls=other_processes, processes=processes)))
    return {core: held[core] for core in sorted(set(cores)) if core in held}


def read_neuron_monitor(deadline_s: float, folder: str = NEURON_TOOLS) -> tuple[MonitorSample | None, tuple[str, ...]]:
    """Returns one sample of neuron-monitor and the problems of running it. None: not installed, or no output.

    The first line lacks values that take a period to measure, so lines are read until one is complete; at the deadline,
    the last line is used.
    """
    path = find_tool("neuron-monitor", folder)
    if path is None:
        return None, (f"neuron-monitor: found neither in {folder} nor on PATH; {INSTALL}",)
    try:
        with tempfile.NamedTemporaryFile("w", prefix="corewright-monitor-", suffix=".json") as config:
            json.dump(neuron_monitor.CONFIG, config)
            config.flush()
            output = run_tool([path, "-c", config.name], deadline_s, _has_whole_sample)
    except OSError as error:
        return None, (
            f"neuron-monitor: cannot write its config: {error}; check the free space of {tempfile.gettempdir()}",
        )
    line = _last_line(output)
    if line is None:
        return None, (output.problem,) if output.problem else ("neuron-monitor: exited without output",)
    return parse_neuron_monitor(line), ()


def _has_whole_sample(stdout: bytes) -> bool:
    if not stdout.endswith(b"\n"):
        return False
    return not parse_neuron_monitor(stdout.rstrip().rpartition(b"\n")[2]).problems


def _last_line(output: Output) -> bytes | None:
    """Returns the last complete line; ignores a partial one of a killed tool."""
    *complete, partial = output.stdout.split(b"\n")
    lines = [line for line in (*complete, partial if output.problem is None else b"") if line.strip()]
    return lines[-1] if lines else None


def read_process(pid: int) -> ProcessDetail:
    """Returns a process's command and its visible cores, as far as this user may read them."""
    command = visible = None
    try:
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            command = " ".join(process.cmdline()).encode(errors="replace").decode() or None
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            visible = process.environ().get("NEURON_RT_VISIBLE_CORES")
    except (psutil.Error, OSError, ValueError, OverflowError):
        pass  # gone, or a pid of another namespace
    return ProcessDetail(command=command, visible_cores=visible and visible.encode(errors="replace").decode())
