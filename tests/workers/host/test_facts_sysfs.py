"""Files of the driver below /sys, and lists of ids. Paths: Neuron Sysfs User Guide."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from workers.host.facts.sysfs import Sysfs, SysfsDevice, parse_sysfs, read_sysfs
from workers.host.host_facts import parse_cpulist

FILES: dict[str, str] = json.loads((Path(__file__).parents[1] / "samples" / "sysfs-inf2.json").read_text())


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_the_driver_has_the_cores_and_the_family_of_each_device() -> None:
    assert parse_sysfs(FILES) == Sysfs(
        devices=tuple(SysfsDevice(index=index, core_count=2, instance_type="Inf2") for index in range(2))
    )


def test_files_are_found_where_another_release_has_them() -> None:
    """Neuron Driver 2.31 moved nodes."""
    moved = {path.replace("info/architecture/", "about/"): text for path, text in FILES.items()}

    assert parse_sysfs(moved) == parse_sysfs(FILES)


@pytest.mark.parametrize(("text", "unhealthy"), [("hbm,sram\n", "hbm,sram"), ("\n", ""), ("none\n", "")])
def test_the_driver_names_the_parts_of_a_device_that_fail(text: str, unhealthy: str) -> None:
    """From driver 2.30 on (release notes of Neuron 2.32)."""
    files = FILES | {"neuron1/stats/hardware/health_status/unhealthy_components": text}
    assert [device.unhealthy for device in parse_sysfs(files).devices] == ["", unhealthy]


@pytest.mark.parametrize(
    ("path", "text", "problem"),
    [
        ("neuron0/core_count", None, "sysfs: neuron0/core_count is missing"),
        ("neuron0/core_count", "two", 'sysfs: neuron0/core_count is "two", not a non-negative integer'),
        ("neuron0/core_count", "-2", 'sysfs: neuron0/core_count is "-2", not a non-negative integer'),
    ],
)
def test_a_broken_file_is_a_problem(path: str, text: str | None, problem: str) -> None:
    """The rest is read."""
    files = {name: content for name, content in {**FILES, path: text}.items() if content is not None}

    sysfs = parse_sysfs(files)

    assert [text[: len(problem)] for text in sysfs.problems] == [problem]
    assert len(sysfs.devices) == 2


def test_the_files_of_the_folder_are_read(tmp_path: Path) -> None:
    """Without the folder there is no driver."""
    write(tmp_path, FILES | {"neuron0/reset": "", "neuron0/power/runtime_status": "x"})

    assert read_sysfs(tmp_path) == parse_sysfs(FILES)
    assert read_sysfs(tmp_path / "none") is None


def test_files_that_act_on_a_device_are_never_opened(tmp_path: Path) -> None:
    """``reset`` and ``notify_delay`` are for writing; here, opening them would block."""
    write(tmp_path, FILES)
    os.mkfifo(tmp_path / "neuron0" / "reset")
    os.mkfifo(tmp_path / "neuron0" / "info" / "notify_delay")

    assert read_sysfs(tmp_path) == parse_sysfs(FILES)


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    """A folder in its place stands for every error of the kernel."""
    write(tmp_path, FILES)
    family = tmp_path / "neuron0" / "info" / "architecture" / "instance_type"
    family.unlink()
    family.mkdir()

    sysfs = read_sysfs(tmp_path)

    assert sysfs is not None
    assert sysfs.devices[0] == SysfsDevice(index=0, core_count=2)
    assert sysfs.problems == (f"sysfs: {family}: Is a directory",)


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
def test_a_list_of_ids_is_parsed_or_rejected(text: str, ids: tuple[int, ...] | None) -> None:
    """Rejected: text that is not a list, and ids that no machine has."""
    assert parse_cpulist(text) == ids
