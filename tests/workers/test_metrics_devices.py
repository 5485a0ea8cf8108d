"""What neuron-monitor measures reaches /metrics under the names of AWS's own exporter, while the tool runs once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doubles.machine import build_machine
from tests.fleet import until
from workers.host.device_metrics import DeviceMonitor, Sums, device_families
from workers.host.facts.neuron_monitor import MonitorSample, parse_neuron_monitor
from workers.host.facts.reading import Places
from workers.messages.metric_family import MetricFamily

SAMPLE = Path(__file__).parent / "samples" / "neuron-monitor-inf2.48xlarge.jsonl"
LINE = SAMPLE.read_text().splitlines()[1]
DEADLINE_S = 20.0
# A tool that says once on which line it is, and then waits for its end.
TOOL = """#!/bin/sh
echo $$ >> {pids}
cat {line}
exec sleep 600
"""


def values(families: list[MetricFamily], name: str) -> dict[tuple[str, ...], float]:
    """The values of a family by the labels that are its own."""
    family = next(family for family in families if family.name == name)
    own = [
        i for i, label in enumerate(family.labels) if not label.startswith(("instance", "avail", "region", "subnet"))
    ]
    return {tuple(point.labels[i] for i in own): point.value for point in family.points}


def told(*samples: MonitorSample) -> list[MetricFamily]:
    sums = Sums()
    for sample in samples:
        sums.add(sample)
    return device_families(samples[-1], sums)


def build_host(folder: Path) -> Places:
    """A host with one device and a neuron-monitor."""
    (folder / "dev").mkdir()
    (folder / "dev/neuron0").touch()
    (folder / "line").write_text(LINE + "\n")
    tool = folder / "bin/neuron-monitor"
    tool.parent.mkdir()
    tool.write_text(TOOL.format(pids=folder / "pids", line=folder / "line"))
    tool.chmod(0o755)
    return Places(sys=folder / "sys", dev=folder / "dev", tools=str(tool.parent))


def pids(folder: Path) -> list[int]:
    file = folder / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_names_and_labels_are_those_of_the_exporter_of_aws() -> None:
    """Utilization as a ratio by core and runtime, memory by location and class, in bytes."""
    families = told(parse_neuron_monitor(LINE))

    assert values(families, "neuroncore_utilization_ratio")[("llama-0", "0")] == pytest.approx(0.4201)
    assert values(families, "neuroncore_memory_usage_constants")[("llama-0", "None", "0")] == 193_986_816
    assert values(families, "neuron_runtime_memory_used_bytes")[("llama-0", "neuron_device")] == 3_129_947_136
    assert values(families, "neuron_runtime_memory_used_bytes")[("4202", "host")] == 6_997_643_264
    assert values(families, "hardware_ecc_events")[("mem_ecc_corrected", "3")] > 0
    assert values(families, "neuron_hardware_info") == {("12", "2"): 1}


def test_every_series_says_which_instance_it_is_of() -> None:
    """With the labels of the exporter; what is not told is empty."""
    for family in told(parse_neuron_monitor(LINE)):
        assert family.labels[:2] == ("instance_type", "instance_id")
        assert all(point.labels[0] == "inf2.48xlarge" for point in family.points)


def test_counts_of_periods_add_up() -> None:
    """The tool tells what came since its last line; the counter is all of it."""
    sample = parse_neuron_monitor(LINE)

    assert values(told(sample, sample, sample), "execution_errors")[("llama-0", "hardware")] == 3
    assert values(told(sample, sample), "execution_status")[("llama-0", "timed_out")] == 4


def test_a_process_that_is_gone_leaves_no_series() -> None:
    """Its tag may be a pid: they would grow without end."""
    without: Any = json.loads(LINE)
    del without["neuron_runtime_data"][0]
    families = told(parse_neuron_monitor(LINE), parse_neuron_monitor(json.dumps(without)))

    assert {key[0] for key in values(families, "execution_errors")} == {"4202"}


def test_what_is_not_told_is_not_invented() -> None:
    """Of a line without anything there is no series at all."""
    assert [point for family in told(parse_neuron_monitor("{}")) for point in family.points] == []


def test_latency_is_told_by_percentile() -> None:
    """Where something was executed."""
    line: Any = json.loads(LINE)
    stats = line["neuron_runtime_data"][0]["report"]["execution_stats"]
    stats["latency_stats"] = {"total_latency": {"p50": 0.01, "p99": 0.02}, "device_latency": None}

    latency = values(told(parse_neuron_monitor(json.dumps(line))), "execution_latency_seconds")
    assert latency == {("llama-0", "p50"): 0.01, ("llama-0", "p99"): 0.02}


def test_the_tool_runs_once_however_often_it_is_asked(tmp_path: Path) -> None:
    """And it is not started before the first question."""
    monitor = DeviceMonitor(build_host(tmp_path))
    assert pids(tmp_path) == []
    try:
        monitor.families()
        assert monitor.wait_for_sample(DEADLINE_S)
        first, second = monitor.families(), monitor.families()

        assert first == second != []
        assert len(pids(tmp_path)) == 1
    finally:
        monitor.close()
    until(lambda: is_gone(pids(tmp_path)[0]), DEADLINE_S, "the tool has ended")


def test_the_made_machine_is_measured_as_a_real_one(tmp_path: Path) -> None:
    """By the tool where AWS installs it, below the root of the host."""
    machine = build_machine(tmp_path)
    monitor = DeviceMonitor(
        Places(machine.root / "sys", machine.root / "dev", str(machine.root / "opt/aws/neuron/bin"))
    )
    try:
        monitor.families()
        assert monitor.wait_for_sample(DEADLINE_S)
        families = monitor.families()
    finally:
        monitor.close()
    assert values(families, "neuron_hardware_info") == {("12", "2"): 1}
    assert values(families, "corewright_neuroncore_memory_total_bytes") == {(): 16 * 2**30}
    assert len(values(families, "hardware_ecc_events")) == 12 * 4


def test_a_host_without_the_tool_or_without_devices_measures_nothing(tmp_path: Path) -> None:
    """No numbers, no process and no error."""
    places = build_host(tmp_path)
    (tmp_path / "dev/neuron0").unlink()
    monitor = DeviceMonitor(places)

    assert (monitor.families(), monitor.wait_for_sample(0.2), pids(tmp_path)) == ([], False, [])


def test_the_tool_dies_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """Even when that one is killed and can say nothing more."""
    build_host(tmp_path)
    program = (
        "import sys, time; from pathlib import Path; from workers.host.device_metrics import DeviceMonitor; "
        "from workers.host.facts.reading import Places; root = Path(sys.argv[1]); "
        "monitor = DeviceMonitor(Places(sys=root / 'sys', dev=root / 'dev', tools=str(root / 'bin'))); "
        "monitor.families(); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[2])
    try:
        (pid,) = until(lambda: pids(tmp_path), DEADLINE_S, "the tool runs")
    finally:
        process.kill()
        process.wait()
    try:
        until(lambda: is_gone(pid), DEADLINE_S, "the tool has ended too")
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
