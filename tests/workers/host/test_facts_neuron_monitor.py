"""Lines of neuron-monitor. The samples follow the Neuron Monitor User Guide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.host.facts.neuron_monitor import MonitorSample, parse_neuron_monitor

SAMPLES = Path(__file__).parents[1] / "samples"


def lines(instance: str) -> list[str]:
    return (SAMPLES / f"neuron-monitor-{instance}.jsonl").read_text().splitlines()


def broken(path: str, value: object) -> MonitorSample:
    """The sample of an inf2.48xlarge with one value replaced; ``...`` leaves it out. "a.0.b" is [a][0][b]."""
    sample: Any = json.loads(lines("inf2.48xlarge")[1])
    *parents, last = path.split(".")
    inside = sample
    for key in parents:
        inside = inside[int(key)] if isinstance(inside, list) else inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return parse_neuron_monitor(json.dumps(sample))


def test_each_core_of_a_process_has_utilization_and_memory_by_class() -> None:
    """Cores have their ids on the host."""
    runtime = parse_neuron_monitor(lines("inf2.48xlarge")[1]).runtimes[0]

    assert (runtime.pid, runtime.tag) == (4101, "llama-0")
    assert [use.core for use in runtime.cores] == list(range(8))
    assert runtime.cores[0].utilization == 42.01
    assert runtime.cores[0].memory["constants"] == 193_986_816
    assert (runtime.host_bytes, runtime.device_bytes) == (6_997_643_264, 8 * (193_986_816 + 176_285_056 + 20_971_520))


def test_errors_are_counted_by_kind() -> None:
    """Execution errors belong to a process, ECC events to a device."""
    sample = parse_neuron_monitor(lines("inf2.48xlarge")[1])

    assert sample.runtimes[0].errors["hardware"] == 1
    assert sample.runtimes[0].executions["timed_out"] == 2
    assert [ecc.device for ecc in sample.ecc] == list(range(12))
    assert [ecc.device for ecc in sample.ecc if ecc.mem_corrected] == [3]


def test_a_line_has_the_facts_of_the_host() -> None:
    """Instance, hardware and host memory."""
    sample = parse_neuron_monitor(lines("trn2.48xlarge")[0])

    assert (sample.instance_type, sample.device_count, sample.cores_per_device) == ("trn2.48xlarge", 16, 4)
    assert (sample.memory_total_bytes, sample.memory_used_bytes) == (824_633_720_832, 16_042_344_448)
    assert sample.problems == ()


def test_a_core_listed_with_zeros_is_not_in_use() -> None:
    """Some releases list every core for every process."""
    runtime = parse_neuron_monitor(lines("inf2.48xlarge")[1]).runtimes[1]

    assert [(use.core, use.in_use) for use in runtime.cores] == [(8, False), (9, True)]


def test_a_group_that_the_first_line_lacks_is_a_problem() -> None:
    """It has no process and no ECC counters yet; the rest is read."""
    sample = parse_neuron_monitor(lines("inf2.48xlarge")[0])

    assert sample.problems == ("neuron-monitor: system_data.neuron_hw_counters is missing",)
    assert (sample.runtimes, sample.ecc, sample.device_count) == ((), (), 12)


RUNTIME = "neuron_runtime_data.0"
PLACE = "neuron-monitor: neuron_runtime_data[0]"


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        ("neuron_runtime_data", ..., "neuron-monitor: neuron_runtime_data is missing"),
        ("neuron_runtime_data", {}, "neuron-monitor: neuron_runtime_data is an object, not an array"),
        ("system_data", ..., "neuron-monitor: system_data is missing"),
        ("system_data.memory_info", None, "neuron-monitor: system_data.memory_info is null"),
        ("system_data.memory_info.error", "gone", 'neuron-monitor: system_data.memory_info reports an error: "gone"'),
        ("system_data.neuron_hw_counters.neuron_devices", [], "neuron-monitor: system_data.neuron_hw_counters"),
        ("instance_info", ..., "neuron-monitor: instance_info is missing"),
        ("instance_info.error", "no IMDS", 'neuron-monitor: instance_info reports an error: "no IMDS"'),
        ("neuron_hardware_info", [], "neuron-monitor: neuron_hardware_info is an array, not an object"),
        ("neuron_hardware_info.error", "no driver", 'neuron-monitor: neuron_hardware_info reports an error: "no'),
        (f"{RUNTIME}.pid", "4101", f'{PLACE}.pid is "4101", not a non-negative integer'),
        (f"{RUNTIME}.error", "it ended", f'{PLACE} reports an error: "it ended"'),
        (f"{RUNTIME}.report", ..., f"{PLACE}.report is missing"),
        (f"{RUNTIME}.report.neuroncore_counters", ..., f"{PLACE}.report.neuroncore_counters is missing"),
        (f"{RUNTIME}.report.memory_used.neuron_runtime_used_bytes", ..., f"{PLACE}.report.memory_used.neuron_runtime"),
        (f"{RUNTIME}.report.execution_stats", 7, f"{PLACE}.report.execution_stats is a number, not an object"),
        (f"{RUNTIME}.report.execution_stats.error_summary", ..., f"{PLACE}.report.execution_stats.error_summary is"),
        (
            f"{RUNTIME}.report.neuroncore_counters.neuroncores_in_use.0.neuroncore_utilization",
            "high",
            f"{PLACE}.report.neuroncore_counters.neuroncores_in_use.0.neuroncore_utilization is",
        ),
        (f"{RUNTIME}.report.neuroncore_counters.neuroncores_in_use.nc0", {}, f"{PLACE}.report.neuroncore_counters"),
    ],
)
def test_a_broken_section_is_one_problem_with_its_place(path: str, value: object, problem: str) -> None:
    """Values that are missing inside it are not reported again."""
    problems = broken(path, value).problems

    assert [text[: len(problem)] for text in problems] == [problem]


def test_a_broken_section_does_not_affect_the_others() -> None:
    """Utilization is known where memory is not."""
    sample = broken(f"{RUNTIME}.report.memory_used", ...)

    assert sample.runtimes[0].cores[0].utilization == 42.01
    assert sample.runtimes[0].cores[0].memory == {}
    assert len(sample.runtimes) == 2
    assert len(sample.ecc) == 12


def test_numeric_and_numerical_errors_are_one_counter() -> None:
    """The guide uses both names."""
    sample = broken(f"{RUNTIME}.report.execution_stats.error_summary", {"numeric": 3})

    assert sample.runtimes[0].errors == {"numerical": 3}
