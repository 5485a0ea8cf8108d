"""What the driver and the kernel tell below /sys. Paths: Neuron Sysfs User Guide."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from workers.host.facts.cpu_list import parse_cpulist
from workers.host.facts.numa import NumaNode, parse_numa, read_numa
from workers.host.facts.sysfs import parse_sysfs, read_sysfs

FILES: dict[str, str] = json.loads((Path(__file__).parent / "samples" / "sysfs-inf2.json").read_text())


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_devices_are_told_by_the_driver() -> None:
    """Identity, links and ECC counters of each device."""
    sysfs = parse_sysfs(FILES)

    first, second = sysfs.devices
    assert sysfs.problems == ()
    assert (first.index, first.core_count, first.connected_to) == (0, 2, (11, 1))
    assert (first.serial_number, first.device_name, first.instance_type) == ("9ff5434815c8bd80", "Inferentia2", "Inf2")
    assert (second.ecc.mem_uncorrected, second.ecc.mem_repairable_uncorrected, second.ecc.mem_corrected) == (0, 2, None)


def test_cores_are_told_with_memory_now_and_failures() -> None:
    """Classes of memory, and of the statuses those that are failures and happened."""
    core = parse_sysfs(FILES).devices[1].cores[1]

    assert (core.core, core.memory) == (1, {"collectives": 0, "model_code": 100, "tensors": 1000})
    assert core.failures == {"timeout": 1}


def test_counters_are_found_where_another_release_puts_them() -> None:
    """Neuron Driver 2.31 moved nodes: the end of the path counts, and a counter may be a directory."""
    moved = {path.replace("stats/hardware/", "health/ecc/"): text for path, text in FILES.items()}
    moved["neuron0/health/ecc/mem_ecc_uncorrected/total"] = "4"
    del moved["neuron0/health/ecc/mem_ecc_uncorrected"]

    assert parse_sysfs(moved).devices[0].ecc.mem_uncorrected == 4


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("neuron0/core_count", None, "sysfs: neuron0: core_count is missing"),
        ("neuron0/core_count", "two", 'sysfs: neuron0/core_count is "two", not a non-negative integer'),
        ("neuron0/connected_devices", "all", 'sysfs: neuron0/connected_devices is "all", not a list of devices'),
        ("neuron1/stats/hardware/sram_ecc_uncorrected", "", "sysfs: neuron1/stats/hardware/sram_ecc_uncorrected is"),
    ],
)
def test_a_broken_file_is_named(path: str, text: str | None, problem: str) -> None:
    """The rest is read."""
    files = {name: content for name, content in {**FILES, path: text}.items() if content is not None}

    sysfs = parse_sysfs(files)

    assert [found[: len(problem)] for found in sysfs.problems] == [problem]
    assert len(sysfs.devices) == 2


def test_the_folder_gives_the_same_as_its_files(tmp_path: Path) -> None:
    """Reading is no more than opening the files."""
    write(tmp_path, FILES | {"neuron0/reset": "", "neuron0/power/runtime_status": "x"})

    assert read_sysfs(tmp_path) == parse_sysfs(FILES)
    assert read_sysfs(tmp_path / "none") is None


def test_files_that_act_on_a_device_are_never_opened(tmp_path: Path) -> None:
    """``reset`` and ``notify_delay`` are for writing; a pipe in their place would block whoever opened it."""
    write(tmp_path, FILES)
    os.mkfifo(tmp_path / "neuron0" / "reset")
    os.mkfifo(tmp_path / "neuron0" / "info" / "notify_delay")

    assert read_sysfs(tmp_path) == parse_sysfs(FILES)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A link to nowhere stands for every error of the kernel."""
    write(tmp_path, {path: text for path, text in FILES.items() if not path.startswith("neuron1")})
    (tmp_path / "neuron0" / "info" / "serial_number").unlink()
    (tmp_path / "neuron0" / "info" / "serial_number").symlink_to(tmp_path / "nowhere")

    told = read_sysfs(tmp_path)

    assert told is not None
    assert told.devices[0].serial_number is None
    assert [problem for problem in told.problems if "serial_number: No such file" in problem]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0-2,8-9\n", (0, 1, 2, 8, 9)),
        ("7", (7,)),
        ("3,1,2-3", (1, 2, 3)),
        ("", ()),
        ("\n", ()),
        ("2-1", None),
        ("0-99999999", None),
        ("0-99999", None),
        ("a", None),
        ("-1", None),
        ("٣", None),
    ],
)
def test_lists_of_ids(text: str, ids: tuple[int, ...] | None) -> None:
    """Ranges and single ids, ascending; None for what is no list, and for one that no machine has."""
    assert parse_cpulist(text) == ids


def test_numa_nodes_hold_the_usable_cpus_only() -> None:
    """A container's mask cuts the nodes; a node with memory only has none."""
    nodes, problems = parse_numa({"node1": "4-7\n", "node0": "0-3\n", "node2": "\n"}, usable=(2, 3, 4))

    assert nodes == (NumaNode(node=0, cpus=(2, 3)), NumaNode(node=1, cpus=(4,)), NumaNode(node=2, cpus=()))
    assert problems == ()


def test_a_broken_numa_node_is_named(tmp_path: Path) -> None:
    """One node that cannot be read leaves the others."""
    write(tmp_path, {"node0/cpulist": "0-3\n", "node1/cpulist": "x\n", "node2/meminfo": ""})

    nodes, problems = read_numa(tmp_path, usable=(0, 1))

    assert nodes == (NumaNode(node=0, cpus=(0, 1)),)
    assert [problem.split(" ")[1].replace(str(tmp_path), "") for problem in problems] == [
        "/node2/cpulist:",
        "node1/cpulist",
    ]
