"""Outputs of neuron-ls. The samples follow the Neuron LS User Guide and observed outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workers.host.facts.neuron_ls import DeviceProcess, parse_neuron_ls

SAMPLES = Path(__file__).parents[1] / "samples"


def sample(name: str) -> str:
    return (SAMPLES / f"neuron-ls-{name}.json").read_text()


def changed(**fields: object) -> str:
    """The output of a one-device host with some fields changed; ``...`` leaves the field out."""
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
    """An array, an array with the instance in each element, and an object around the devices."""
    listing = parse_neuron_ls(sample(name))

    assert len(listing.devices) == devices
    assert [core for device in listing.devices for core in device.cores] == list(range(cores))
    assert listing.instance_type == instance_type


def test_the_instance_may_stand_in_an_object_of_its_own() -> None:
    """Neuron 2.34 adds fields at the top, whose names AWS has not published."""
    devices = json.loads(sample("inf2.48xlarge"))
    listing = parse_neuron_ls(json.dumps({"instance": {"instance_type": "inf2.48xlarge"}, "devices": devices}))
    assert (listing.instance_type, len(listing.devices), listing.problems) == ("inf2.48xlarge", 12, ())


def test_a_healthy_output_gives_no_problems() -> None:
    """Fields that are null on hosts with one device are not problems."""
    assert [parse_neuron_ls(sample(name)).problems for name in ("inf2.48xlarge", "trn1.2xlarge", "trn2.48xlarge")] == [
        (),
        (),
        (),
    ]


def test_a_process_is_listed_once_for_each_of_its_devices() -> None:
    """A monitoring tool has no runtime version."""
    listing = parse_neuron_ls(sample("inf2.48xlarge"))

    assert [process.device for process in listing.processes if process.pid == 4101] == [0, 1, 2, 3]
    assert parse_neuron_ls(sample("trn1.32xlarge")).processes == (
        DeviceProcess(pid=900, device=0, command="neuron-monitor", runtime_version=None),
    )


def test_core_ids_that_an_older_release_lacks_are_counted_with_one_problem() -> None:
    """The same gap in sixteen devices is one problem, at the first place."""
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
        (changed(nc_count="two"), 'neuron-ls: device[0].nc_count is "two", not a non-negative integer'),
        (changed(nc_count=...), "neuron-ls: device[0].nc_count is missing"),
        (changed(nc_count=None), "neuron-ls: device[0].nc_count is null"),
        (changed(nc_count=True), 'neuron-ls: device[0].nc_count is "True", not a non-negative integer'),
        (changed(nc_count=4), "neuron-ls: device[0] has nc_count 4 but 2 neuroncore_ids, which are used"),
        (changed(neuroncore_ids=[]), "neuron-ls: device[0].neuroncore_ids is missing or empty"),
        (
            changed(neuroncore_ids=..., nc_count=10**6),
            "neuron-ls: device[0].neuroncore_ids is missing or empty, without",
        ),
        (changed(neuroncore_ids={"0": 1}), "neuron-ls: device[0].neuroncore_ids is an object, not an array"),
        (changed(neuron_processes=[{"command": "x"}]), "neuron-ls: device[0].neuron_processes[0].pid is missing"),
        (changed(error="no answer"), 'neuron-ls: device[0] reports an error: "no answer"'),
        (json.dumps(json.loads(sample("trn1.2xlarge")) * 2), "neuron-ls: device[1] repeats device 0"),
    ],
)
def test_a_broken_part_is_one_problem_with_its_place(output: str, problem: str) -> None:
    problems = parse_neuron_ls(output).problems

    assert [text[: len(problem)] for text in problems] == [problem]


def test_a_broken_field_or_device_does_not_affect_the_others() -> None:
    """Unknown keys are ignored."""
    devices: list[Any] = json.loads(sample("inf2.48xlarge"))
    devices[2] = {"neuron_device": "?"}
    devices[3]["nc_count"] = []
    devices[4]["new_key"] = {"of": "a later release"}

    listing = parse_neuron_ls(json.dumps(devices).encode())

    assert [device.index for device in listing.devices] == [0, 1, *range(3, 12)]
    assert listing.devices[2].cores == (6, 7)
    assert len(listing.problems) == 2


def test_a_core_of_two_devices_is_a_problem() -> None:
    """It would be counted twice."""
    devices: list[Any] = json.loads(sample("inf2.48xlarge"))
    devices[1]["neuroncore_ids"] = [1, 2]

    assert "neuron-ls: neuroncore_ids give core 1 to devices 0 and 1" in parse_neuron_ls(json.dumps(devices)).problems
