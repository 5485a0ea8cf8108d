"""Facts of a host combined from several sources, and the owners of its cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from workers.host.facts.machine import HostFacts, Owner, ProcessDetail, SourceReadings, combine, owners
from workers.host.facts.neuron_ls import NeuronLs, parse_neuron_ls
from workers.host.facts.neuron_monitor import MonitorSample, parse_neuron_monitor
from workers.host.facts.sysfs import Sysfs, parse_sysfs
from workers.host.facts.tools import Versions

SAMPLES = Path(__file__).parents[1] / "samples"
LLAMA = "ray::Replica[llama]"


def listed(instance: str) -> NeuronLs:
    return parse_neuron_ls((SAMPLES / f"neuron-ls-{instance}.json").read_text())


def monitored(instance: str) -> MonitorSample:
    return parse_neuron_monitor((SAMPLES / f"neuron-monitor-{instance}.jsonl").read_text().splitlines()[-1])


def driver() -> Sysfs:
    return parse_sysfs(json.loads((SAMPLES / "sysfs-inf2.json").read_text()))


def facts(**readings: Any) -> HostFacts:
    return combine(SourceReadings(**readings))


def visible(**cores_of: str) -> dict[int, ProcessDetail]:
    """Processes with NEURON_RT_VISIBLE_CORES, such as p4202="8"."""
    return {int(pid[1:]): ProcessDetail(visible_cores=cores) for pid, cores in cores_of.items()}


def test_a_host_without_devices_has_no_problems() -> None:
    """It has no Neuron tools or driver, and needs none."""
    host = facts()

    assert (host.instance_type, host.devices, host.problems, host.cores) == (None, (), (), ())
    assert owners(host) == {}


def test_sources_that_agree_give_no_problem() -> None:
    """All sources of an inf2.48xlarge."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), monitor=monitored("inf2.48xlarge"), product="inf2.48xlarge")

    assert host.problems == ()
    assert host.instance_type == "inf2.48xlarge"
    assert host.cores == tuple(range(24))


def test_each_difference_between_sources_is_a_problem() -> None:
    """A lost device, another logical core size, another instance type."""
    host = facts(
        neuron_ls=listed("inf2.48xlarge"), monitor=monitored("trn2.48xlarge"), sysfs=driver(), product="inf2.48xlarge"
    )

    assert [problem.split(":")[0] for problem in host.problems] == [
        "devices",
        "devices",
        "cores of a device",
        "instance type",
    ]


def test_devices_come_from_the_driver_without_neuron_ls() -> None:
    """On Inferentia2 a logical core is a physical one, so its cores are known without the tool."""
    host = facts(sysfs=driver(), problems=("neuron-ls: found neither ...",))

    assert [(device.index, device.cores) for device in host.devices] == [(0, (0, 1)), (1, (2, 3))]
    assert host.problems == ("neuron-ls: found neither ...",)


def test_without_neuron_ls_logical_cores_of_trainium2_are_not_guessed() -> None:
    """Eight physical cores are four logical ones or eight."""
    sysfs = parse_sysfs({"neuron0/core_count": "8", "neuron0/info/architecture/instance_type": "Trn2"})

    host = facts(sysfs=sysfs)

    assert host.cores == ()
    assert "its logical cores are unknown without neuron-ls" in host.problems[0]
    assert facts(sysfs=sysfs, monitor=monitored("trn2.48xlarge")).cores == (0, 1, 2, 3)


def test_the_runtime_version_is_that_of_a_running_process() -> None:
    """The runtime is often in the engine's image instead of a package of the host."""
    host = facts(neuron_ls=listed("trn2.48xlarge"), versions=Versions(driver="2.26.5.0"))

    assert host.versions == Versions(driver="2.26.5.0", runtime="2.34.10")


def test_owners_by_neuron_ls_hold_whole_devices() -> None:
    """Of two processes on one device, the one with the lower pid counts."""
    host = facts(neuron_ls=listed("inf2.48xlarge"))

    assert owners(host) == {core: Owner(4101, LLAMA) for core in range(8)} | {
        8: (4202, "python3 left_over.py"),
        9: (4202, "python3 left_over.py"),
    }


def test_processes_on_one_device_own_their_visible_cores() -> None:
    """neuron-ls reports the device only; NEURON_RT_VISIBLE_CORES has the cores."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), processes=visible(p4202="9", p4303="8"))

    assert {core: owner.pid for core, owner in owners(host).items() if core >= 8} == {8: 4303, 9: 4202}


def test_processes_on_one_device_own_the_cores_that_they_use() -> None:
    """neuron-monitor reports 4202 on core 9 only; core 8 is owned by the other process of the device."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), monitor=monitored("inf2.48xlarge"))

    assert {core: owner.pid for core, owner in owners(host).items() if core >= 8} == {8: 4303, 9: 4202}


def test_a_core_that_is_not_visible_to_the_process_of_its_device_is_free() -> None:
    """A process with core 8 does not hold core 9 of the device."""
    ls = listed("inf2.48xlarge")
    only = msgspec.structs.replace(ls, processes=tuple(process for process in ls.processes if process.pid == 4202))

    assert owners(facts(neuron_ls=only, processes=visible(p4202="8"))) == {8: (4202, "python3 left_over.py")}
    assert owners(facts(neuron_ls=only)).keys() == {8, 9}


def test_visible_cores_on_other_devices_are_ignored() -> None:
    """The pid may belong to another namespace, where it is another process."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), processes=visible(p4202="0-3"))

    assert {core for core, owner in owners(host).items() if owner.pid == 4202} == {8, 9}
    assert [problem.split(",")[0] for problem in host.problems] == ['process 4202: has NEURON_RT_VISIBLE_CORES="0-3"']


def test_monitoring_tools_hold_no_cores() -> None:
    """neuron-monitor opens every device."""
    host = facts(neuron_ls=listed("trn1.32xlarge"))

    assert [process.pid for process in host.processes] == [900]
    assert owners(host) == {}


def test_a_process_of_another_container_is_an_owner_without_a_command() -> None:
    """neuron-ls reports its pid with an empty command."""
    host = facts(neuron_ls=listed("trn2.48xlarge"), monitor=monitored("trn2.48xlarge"))

    assert owners(host) == {0: (777, ""), 1: (777, "")}


def test_owners_come_from_neuron_monitor_without_neuron_ls() -> None:
    """Without neuron-ls the command comes from the kernel."""
    host = facts(monitor=monitored("trn2.48xlarge"), processes={777: ProcessDetail(command="python3 serve.py")})

    assert owners(host) == {0: (777, "python3 serve.py"), 1: (777, "python3 serve.py")}
