"""Reading the facts of this host: what runs tools and opens files. Never raises, and ends by its deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from workers.host import host_facts
from workers.host.facts import neuron_monitor
from workers.host.facts.machine import HostFacts, Owner, ProcessDetail, Readings, combine, owners
from workers.host.facts.neuron_ls import NeuronLs, parse_neuron_ls
from workers.host.facts.neuron_monitor import MonitorSample, parse_neuron_monitor
from workers.host.facts.numa import read_numa
from workers.host.facts.sysfs import read_sysfs
from workers.host.facts.tools import NEURON_TOOLS, Output, find_tool, run_tool
from workers.host.facts.versions import read_versions

INSTALL = "install aws-neuronx-tools (Neuron Setup Guide)"


@dataclass(frozen=True)
class Places:
    """Where things are; other ones in tests."""

    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    tools: str = NEURON_TOOLS
    own_sys: Path = Path("/sys")  # of this container, whose limits are there

    @classmethod
    def of_this_host(cls) -> Places:
        """Below COREWRIGHT_HOST_ROOT, where that is set."""
        root = host_facts.host_root()
        return cls(root / "sys", root / "dev", str(root / NEURON_TOOLS.lstrip("/")))


@dataclass(frozen=True)
class Deadlines:
    """Seconds for each source. A full sample of neuron-monitor comes after one to two."""

    neuron_ls_s: float = 5.0
    monitor_s: float = 4.0
    packages_s: float = 3.0


PATIENCE = Deadlines()


def read_host_facts(places: Places | None = None, deadlines: Deadlines = PATIENCE) -> HostFacts:
    """The facts of this host. Takes as long as its tools, at most the sum of the deadlines and a few seconds.

    Without Neuron devices no Neuron tool is run.
    """
    places = places or Places.of_this_host()
    problems: list[str] = []
    cpus = host_facts.usable_cpus()
    numa, found = read_numa(places.sys / "devices/system/node", cpus)
    problems += found
    memory = usable_memory(places.own_sys)
    sysfs = read_sysfs(places.sys / "devices/virtual/neuron_device")
    if sysfs is None and not any(places.dev.glob("neuron[0-9]*")):
        return combine(Readings(cpus=cpus, memory_bytes=memory, numa=numa, problems=tuple(problems)))
    neuron_ls, found = read_neuron_ls(deadlines.neuron_ls_s, places.tools)
    problems += found
    monitor, found = read_neuron_monitor(deadlines.monitor_s, places.tools)
    problems += found
    pids = {process.pid for process in (neuron_ls.processes if neuron_ls else ())}
    pids |= {runtime.pid for runtime in (monitor.runtimes if monitor else ())}
    return combine(
        Readings(
            cpus=cpus,
            memory_bytes=memory,
            numa=numa,
            product=host_facts.instance_type(places.dev, places.sys / "devices/virtual/dmi/id/product_name"),
            neuron_ls=neuron_ls,
            monitor=monitor,
            sysfs=sysfs,
            versions=read_versions(places.sys, deadlines.packages_s),
            processes={pid: read_process(pid) for pid in sorted(pids)},
            problems=tuple(problems),
        )
    )


def read_neuron_ls(deadline_s: float, folder: str = NEURON_TOOLS) -> tuple[NeuronLs | None, tuple[str, ...]]:
    """What neuron-ls tells, and the problems of running it. None when it is not installed or told nothing.

    ``--json-output`` is documented up to Neuron 2.33; 2.34 takes ``--output-format json`` in its place (AWS's notice
    "end of support for the neuron-ls JSON output format"), so that is tried when the first fails.
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


def who_holds(cores: Iterable[int], deadline_s: float = PATIENCE.neuron_ls_s) -> dict[int, Owner]:
    """Who holds those cores of this host, as far as neuron-ls tells; this process is left out."""
    listed, _ = read_neuron_ls(deadline_s, Places.of_this_host().tools)
    if listed is None:
        return {}
    pids = {process.pid for process in listed.processes} - {os.getpid()}
    known = msgspec.structs.replace(
        listed, processes=tuple(process for process in listed.processes if process.pid in pids)
    )
    processes = {pid: read_process(pid) for pid in sorted(pids)}
    held = owners(combine(Readings(cpus=(), memory_bytes=0, neuron_ls=known, processes=processes)))
    return {core: held[core] for core in sorted(set(cores)) if core in held}


def read_neuron_monitor(deadline_s: float, folder: str = NEURON_TOOLS) -> tuple[MonitorSample | None, tuple[str, ...]]:
    """One sample of neuron-monitor, and the problems of running it. None when it is not installed or told nothing.

    Its first line lacks what takes a period to measure, so lines are read until one is whole, or the deadline comes;
    then the last line counts.
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
            f"neuron-monitor: its configuration cannot be written: {error}; is {tempfile.gettempdir()} full?",
        )
    line = _last_line(output)
    if line is None:
        return None, (output.problem,) if output.problem else ("neuron-monitor: ended without a line",)
    return parse_neuron_monitor(line), ()


def _has_whole_sample(stdout: bytes) -> bool:
    if not stdout.endswith(b"\n"):
        return False
    return not parse_neuron_monitor(stdout.rstrip().rpartition(b"\n")[2]).problems


def _last_line(output: Output) -> bytes | None:
    """The last whole line; what the tool was writing when it was ended does not count."""
    *whole, rest = output.stdout.split(b"\n")
    lines = [line for line in (*whole, rest if output.problem is None else b"") if line.strip()]
    return lines[-1] if lines else None


def read_process(pid: int) -> ProcessDetail:
    """Its command and the cores that it was told to take, as far as this user may read them."""
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


def usable_memory(sys: Path = Path("/sys")) -> int:
    """Bytes of memory that this host has, or that its container may use (cgroup v2) where that is less."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        limit = (sys / "fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            return min(total, int(limit))
    return total
