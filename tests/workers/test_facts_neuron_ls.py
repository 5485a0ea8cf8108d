"""What neuron-ls tells. The samples are written after the Neuron LS User Guide and after outputs that were seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.host.facts.neuron_ls import DeviceProcess, parse_neuron_ls

SAMPLES = Path(__file__).parent / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"neuron-ls-{name}.json").read_text()


def changed(**fields: object) -> str:
    """The output of a one-device host with some fields changed; None in place of a value leaves the field out."""
    (device,) = json.loads(sample("trn1.2xlarge"))
    device |= fields
    return json.dumps([{key: value for key, value in device.items() if value is not ...}])


@pytest.mark.parametrize(
    ("name", "devices", "cores", "instance_type"),
    [
        ("inf2.48xlarge", 12, 24, None),
        ("trn1.2xlarge", 1, 2, None),
        ("trn1.32xlarge", 16, 32, None),
        ("trn2.48xlarge", 16, 64, "trn2.48xlarge"),
        ("top-level-fields", 2, 8, "trn2.48xlarge"),
    ],
)
def test_every_form_of_the_output_gives_devices_and_cores(
    name: str, devices: int, cores: int, instance_type: str | None
) -> None:
    """An array, an array with the instance in each element, and an object around the devices: all are read."""
    told = parse_neuron_ls(sample(name))

    assert len(told.devices) == devices
    assert [core for device in told.devices for core in device.cores] == list(range(cores))
    assert told.instance_type == instance_type


def test_a_device_is_told_in_full() -> None:
    """Bytes are bytes, lists are lists, and the NUMA node that the tool writes as a text is a number."""
    device = parse_neuron_ls(sample("trn2.48xlarge")).devices[1]

    assert (device.index, device.cores, device.lnc, device.memory_bytes) == (1, (4, 5, 6, 7), 2, 96 * 2**30)
    assert (device.connected_to, device.bdf, device.numa_node) == ((13, 0, 5, 2), "0000:61:00.0", 1)
    assert device.cpu_affinity == (*range(48, 96), *range(144, 192))


def test_a_healthy_output_gives_no_problems() -> None:
    """null for the links of a single device, and -1 for its NUMA node, are no faults."""
    assert [parse_neuron_ls(sample(name)).problems for name in ("inf2.48xlarge", "trn1.2xlarge", "trn2.48xlarge")] == [
        (),
        (),
        (),
    ]


def test_processes_are_told_by_device() -> None:
    """The owner of a device has a pid, a command and the version of its runtime; a tool has none."""
    told = parse_neuron_ls(sample("inf2.48xlarge"))

    assert [process.device for process in told.processes if process.pid == 4101] == [0, 1, 2, 3]
    assert parse_neuron_ls(sample("trn1.32xlarge")).processes == (
        DeviceProcess(pid=900, device=0, command="neuron-monitor", runtime_version=None),
    )


def test_an_older_release_without_core_ids_is_counted_and_said_once() -> None:
    """The same gap in sixteen devices is one problem that names the first place."""
    assert parse_neuron_ls(sample("trn1.32xlarge")).problems == (
        "neuron-ls: device[0].neuroncore_ids is missing or empty; the ids are counted from nc_count (in 16 places)",
    )


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("", "neuron-ls: the output is empty"),
        ("unknown flag `json-output'", 'neuron-ls: the output is not JSON: it begins with "unknown flag'),
        ("[]", "neuron-ls: the list of devices is empty; check that the driver is loaded"),
        ('{"error": "no driver"}', 'neuron-ls: the output reports an error: "no driver"'),
        ('"text"', 'neuron-ls: device is "text", not an array'),
        ("[3]", "neuron-ls: device[0] is a number, not an object"),
        ("[" * 100_000, "neuron-ls: the output is nested too deeply"),
        (changed(neuron_device="0"), 'neuron-ls: device[0].neuron_device is "0", not a non-negative integer'),
        (changed(memory_size="32 GB"), 'neuron-ls: device[0].memory_size is "32 GB", not a non-negative integer'),
        (changed(memory_size=...), "neuron-ls: device[0].memory_size is missing"),
        (changed(memory_size=None), "neuron-ls: device[0].memory_size is null"),
        (changed(nc_count=True), 'neuron-ls: device[0].nc_count is "True", not a non-negative integer'),
        (changed(nc_count=4), "neuron-ls: device[0] has nc_count 4 but 2 neuroncore_ids, which are used"),
        (changed(neuroncore_ids=[]), "neuron-ls: device[0].neuroncore_ids is missing or empty"),
        (
            changed(neuroncore_ids=..., nc_count=10**6),
            "neuron-ls: device[0].neuroncore_ids is missing or empty, without",
        ),
        (changed(neuroncore_ids={"0": 1}), "neuron-ls: device[0].neuroncore_ids is an object, not an array"),
        (changed(numa_node="east"), 'neuron-ls: device[0].numa_node is "east", not the number of a NUMA node'),
        (changed(cpu_affinity="all"), 'neuron-ls: device[0].cpu_affinity is "all", not a list of CPUs'),
        (changed(neuron_processes=[{"command": "x"}]), "neuron-ls: device[0].neuron_processes[0].pid is missing"),
        (changed(error="no answer"), 'neuron-ls: device[0] reports an error: "no answer"'),
        (json.dumps(json.loads(sample("trn1.2xlarge")) * 2), "neuron-ls: device[1] repeats device 0"),
    ],
)
def test_what_cannot_be_read_is_named(output: str, problem: str) -> None:
    """A broken part gives one problem that begins with its place."""
    problems = parse_neuron_ls(output).problems

    assert [found[: len(problem)] for found in problems] == [problem]


def test_what_can_be_read_is_read_beside_what_cannot() -> None:
    """One broken field or device takes nothing else with it, and unknown keys are nobody's fault."""
    devices: list[Any] = json.loads(sample("inf2.48xlarge"))
    devices[2] = {"neuron_device": "?"}
    devices[3]["memory_size"] = []
    devices[4]["new_key"] = {"of": "a later release"}

    told = parse_neuron_ls(json.dumps(devices).encode())

    assert [device.index for device in told.devices] == [0, 1, *range(3, 12)]
    assert told.devices[2].memory_bytes is None
    assert told.devices[2].cores == (6, 7)
    assert len(told.problems) == 2


def test_two_devices_with_one_core_are_noticed() -> None:
    """A core of two devices would be counted twice."""
    devices: list[Any] = json.loads(sample("inf2.48xlarge"))
    devices[1]["neuroncore_ids"] = [1, 2]

    assert "neuron-ls: neuroncore_ids give core 1 to devices 0 and 1" in parse_neuron_ls(json.dumps(devices)).problems
