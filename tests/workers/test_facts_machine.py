"""Facts put together from several sources, and who holds which core."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from workers.host.facts.machine import HostFacts, Owner, ProcessDetail, Readings, combine, owners
from workers.host.facts.neuron_ls import NeuronLs, parse_neuron_ls
from workers.host.facts.neuron_monitor import MonitorSample, parse_neuron_monitor
from workers.host.facts.numa import NumaNode
from workers.host.facts.sysfs import Sysfs, parse_sysfs
from workers.host.facts.versions import Versions

SAMPLES = Path(__file__).parent / "samples"
LLAMA = "ray::Replica[llama]"


def listed(instance: str) -> NeuronLs:
    return parse_neuron_ls((SAMPLES / f"neuron-ls-{instance}.json").read_text())


def monitored(instance: str) -> MonitorSample:
    return parse_neuron_monitor((SAMPLES / f"neuron-monitor-{instance}.jsonl").read_text().splitlines()[-1])


def driver() -> Sysfs:
    return parse_sysfs(json.loads((SAMPLES / "sysfs-inf2.json").read_text()))


def facts(**readings: Any) -> HostFacts:
    return combine(Readings(cpus=(0, 1), memory_bytes=2**34, **readings))


def told(**visible: str) -> dict[int, ProcessDetail]:
    """What processes were told to take: p4202="8"."""
    return {int(pid[1:]): ProcessDetail(visible_cores=cores) for pid, cores in visible.items()}


def test_a_host_without_devices_has_cpus_and_memory_only() -> None:
    """Nothing is missing there."""
    host = facts(numa=(NumaNode(node=0, cpus=(0, 1)),))

    assert (host.instance_type, host.devices, host.problems, host.cores) == (None, (), (), ())
    assert owners(host) == {}


def test_sources_that_agree_give_no_problem() -> None:
    """The whole of an inf2.48xlarge."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), monitor=monitored("inf2.48xlarge"), product="inf2.48xlarge")

    assert host.problems == ()
    assert host.instance_type == "inf2.48xlarge"
    assert host.cores == tuple(range(24))


def test_facts_cross_processes_unchanged() -> None:
    """As JSON too, for the admin API."""
    host = facts(
        neuron_ls=listed("inf2.48xlarge"),
        monitor=monitored("inf2.48xlarge"),
        sysfs=driver(),
        processes=told(p4101="0-7"),
    )

    assert msgspec.json.decode(msgspec.json.encode(host), type=HostFacts) == host


def test_ecc_counters_of_both_sources_are_joined() -> None:
    """The driver tells repairable events, neuron-monitor corrected ones."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), monitor=monitored("inf2.48xlarge"), sysfs=driver())

    assert (host.ecc[1].mem_repairable_uncorrected, host.ecc[3].mem_corrected) == (2, 1)
    assert len(host.ecc) == 12


def test_disagreement_is_named() -> None:
    """A lost device, another logical core size, another instance type: each has its problem."""
    host = facts(
        neuron_ls=listed("inf2.48xlarge"), monitor=monitored("trn2.48xlarge"), sysfs=driver(), product="inf2.48xlarge"
    )

    assert [problem.split(":")[0] for problem in host.problems] == [
        "devices",
        "devices",
        "cores of a device",
        "instance type",
    ]


def test_the_driver_stands_in_for_neuron_ls() -> None:
    """On Inferentia2 a logical core is a physical one, so its cores are known without the tool."""
    host = facts(sysfs=driver(), problems=("neuron-ls: found neither ...",))

    assert [(device.index, device.cores) for device in host.devices] == [(0, (0, 1)), (1, (2, 3))]
    assert host.problems == ("neuron-ls: found neither ...",)


def test_without_neuron_ls_logical_cores_of_trainium2_are_not_guessed() -> None:
    """Eight physical cores are four logical ones or eight."""
    sysfs = parse_sysfs(
        {"neuron0/core_count": "8", "neuron0/info/architecture/instance_type": "Trn2"}
        | {f"neuron0/stats/hardware/{name}_ecc_uncorrected": "0" for name in ("mem", "sram")}
    )

    host = facts(sysfs=sysfs)

    assert host.cores == ()
    assert "its logical cores are unknown without neuron-ls" in host.problems[0]
    assert facts(sysfs=sysfs, monitor=monitored("trn2.48xlarge")).cores == (0, 1, 2, 3)


def test_the_runtime_of_a_process_tells_the_version() -> None:
    """The runtime is often in the engine's image and no package of the host."""
    host = facts(neuron_ls=listed("trn2.48xlarge"), versions=Versions(driver="2.26.5.0"))

    assert host.versions == Versions(driver="2.26.5.0", runtime="2.34.10")


def test_neuron_ls_alone_gives_owners_by_device() -> None:
    """Of two processes on one device the one with the lower pid is named."""
    host = facts(neuron_ls=listed("inf2.48xlarge"))

    assert owners(host) == {core: Owner(4101, LLAMA) for core in range(8)} | {
        8: (4202, "python3 left_over.py"),
        9: (4202, "python3 left_over.py"),
    }


def test_two_processes_share_a_device_by_what_they_were_told() -> None:
    """NEURON_RT_VISIBLE_CORES tells what neuron-ls does not."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), processes=told(p4202="9", p4303="8"))

    assert {core: owner.pid for core, owner in owners(host).items() if core >= 8} == {8: 4303, 9: 4202}


def test_two_processes_share_a_device_by_what_is_seen_on_its_cores() -> None:
    """neuron-monitor sees 4202 on core 9 only; core 8 falls to the other process of the device."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), monitor=monitored("inf2.48xlarge"))

    assert {core: owner.pid for core, owner in owners(host).items() if core >= 8} == {8: 4303, 9: 4202}


def test_a_core_that_a_process_did_not_take_stays_free() -> None:
    """A process told to take core 8 leaves core 9 of the device alone."""
    ls = listed("inf2.48xlarge")
    only = msgspec.structs.replace(ls, processes=tuple(process for process in ls.processes if process.pid == 4202))

    assert owners(facts(neuron_ls=only, processes=told(p4202="8"))) == {8: (4202, "python3 left_over.py")}
    assert owners(facts(neuron_ls=only)).keys() == {8, 9}


def test_a_variable_that_contradicts_what_is_seen_is_not_believed() -> None:
    """The pid may be of another namespace, and its process another one."""
    host = facts(neuron_ls=listed("inf2.48xlarge"), processes=told(p4202="0-3"))

    assert {core for core, owner in owners(host).items() if owner.pid == 4202} == {8, 9}
    assert [problem.split(",")[0] for problem in host.problems] == ['process 4202: has NEURON_RT_VISIBLE_CORES="0-3"']


def test_tools_that_look_on_hold_nothing() -> None:
    """neuron-monitor has every device open and holds no core."""
    host = facts(neuron_ls=listed("trn1.32xlarge"))

    assert [process.pid for process in host.processes] == [900]
    assert owners(host) == {}


def test_a_process_of_another_container_is_an_owner_without_a_command() -> None:
    """neuron-ls gives its pid with an empty command."""
    host = facts(neuron_ls=listed("trn2.48xlarge"), monitor=monitored("trn2.48xlarge"))

    assert owners(host) == {0: (777, ""), 1: (777, "")}


def test_neuron_monitor_alone_gives_owners() -> None:
    """Without neuron-ls the command comes from the kernel."""
    host = facts(monitor=monitored("trn2.48xlarge"), processes={777: ProcessDetail(command="python3 serve.py")})

    assert owners(host) == {0: (777, "python3 serve.py"), 1: (777, "python3 serve.py")}
