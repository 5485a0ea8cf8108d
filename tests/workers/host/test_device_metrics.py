"""Metrics of neuron-monitor, under the names of AWS's own exporter; the tool runs once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
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

SAMPLE = Path(__file__).parents[1] / "samples" / "neuron-monitor-inf2.48xlarge.jsonl"
LINE = SAMPLE.read_text().splitlines()[1]
DEADLINE_S = 20.0
# A tool that records its pid, writes one line, and waits to be killed.
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


def recorded(*samples: MonitorSample) -> list[MetricFamily]:
    """The families after these lines."""
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
    families = recorded(parse_neuron_monitor(LINE))

    assert values(families, "neuroncore_utilization_ratio")[("llama-0", "0")] == pytest.approx(0.4201)
    assert values(families, "neuroncore_memory_usage_constants")[("llama-0", "None", "0")] == 193_986_816
    assert values(families, "neuron_runtime_memory_used_bytes")[("llama-0", "neuron_device")] == 3_129_947_136
    assert values(families, "neuron_runtime_memory_used_bytes")[("4202", "host")] == 6_997_643_264
    assert values(families, "hardware_ecc_events")[("mem_ecc_corrected", "3")] > 0
    assert values(families, "neuron_hardware_info") == {("12", "2"): 1}


def test_every_series_has_the_labels_of_its_instance() -> None:
    """As in the exporter, unknown labels are empty."""
    for family in recorded(parse_neuron_monitor(LINE)):
        assert family.labels[:2] == ("instance_type", "instance_id")
        assert all(point.labels[0] == "inf2.48xlarge" for point in family.points)


def test_counts_of_periods_add_up() -> None:
    """The tool counts from its previous line; the metrics count from its start."""
    sample = parse_neuron_monitor(LINE)

    assert values(recorded(sample, sample, sample), "execution_errors")[("llama-0", "hardware")] == 3
    assert values(recorded(sample, sample), "execution_status")[("llama-0", "timed_out")] == 4


def test_a_process_that_is_gone_leaves_no_series() -> None:
    """Its tag may be a pid, so that series would accumulate."""
    without: Any = json.loads(LINE)
    del without["neuron_runtime_data"][0]
    families = recorded(parse_neuron_monitor(LINE), parse_neuron_monitor(json.dumps(without)))

    assert {key[0] for key in values(families, "execution_errors")} == {"4202"}


def test_an_empty_line_has_no_series() -> None:
    """Missing values are not reported as zero."""
    assert [point for family in recorded(parse_neuron_monitor("{}")) for point in family.points] == []


def test_latency_has_a_series_for_each_percentile() -> None:
    line: Any = json.loads(LINE)
    stats = line["neuron_runtime_data"][0]["report"]["execution_stats"]
    stats["latency_stats"] = {"total_latency": {"p50": 0.01, "p99": 0.02}, "device_latency": None}

    latency = values(recorded(parse_neuron_monitor(json.dumps(line))), "execution_latency_seconds")
    assert latency == {("llama-0", "p50"): 0.01, ("llama-0", "p99"): 0.02}


def test_the_tool_is_started_once_by_the_first_call(tmp_path: Path) -> None:
    """Later calls return its latest line."""
    monitor = DeviceMonitor(build_host(tmp_path))
    assert pids(tmp_path) == []
    try:
        until(monitor.families, DEADLINE_S, "a line has arrived")
        assert monitor.families() == monitor.families() != []
        assert len(pids(tmp_path)) == 1
    finally:
        monitor.close()
    until(lambda: is_gone(pids(tmp_path)[0]), DEADLINE_S, "the tool has ended")


def test_the_tool_below_the_root_of_the_host_is_used(tmp_path: Path) -> None:
    """In a container with the host mounted."""
    machine = build_machine(tmp_path)
    monitor = DeviceMonitor(
        Places(machine.root / "sys", machine.root / "dev", str(machine.root / "opt/aws/neuron/bin"))
    )
    try:
        families = until(monitor.families, DEADLINE_S, "a line has arrived")
    finally:
        monitor.close()
    assert values(families, "neuron_hardware_info") == {("12", "2"): 1}
    assert values(families, "corewright_neuroncore_memory_total_bytes") == {(): 16 * 2**30}
    assert len(values(families, "hardware_ecc_events")) == 12 * 4


@pytest.mark.parametrize("missing", ["dev/neuron0", "bin/neuron-monitor"])
def test_a_host_without_devices_or_the_tool_has_no_metrics(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that would read the tool ends."""
    places = build_host(tmp_path)
    (tmp_path / missing).unlink()
    monkeypatch.setenv("PATH", "")
    monitor = DeviceMonitor(places)

    assert monitor.families() == []
    until(lambda: not any(t.name == "neuron-monitor" for t in threading.enumerate()), DEADLINE_S, "it has ended")
    assert (monitor.families(), pids(tmp_path)) == ([], [])


def test_the_tool_dies_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """Also if that process is killed."""
    build_host(tmp_path)
    program = (
        "import sys, time; from pathlib import Path; from workers.host.device_metrics import DeviceMonitor; "
        "from workers.host.facts.reading import Places; root = Path(sys.argv[1]); "
        "monitor = DeviceMonitor(Places(sys=root / 'sys', dev=root / 'dev', tools=str(root / 'bin'))); "
        "monitor.families(); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=Path(__file__).parents[3])
    try:
        (pid,) = until(lambda: pids(tmp_path), DEADLINE_S, "the tool runs")
    finally:
        process.kill()
        process.wait()
    try:
        until(lambda: is_gone(pid), DEADLINE_S, "the tool has ended")
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)
