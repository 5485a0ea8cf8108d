"""Reading the facts of a host with tools that answer, fail, hang, or are not there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fleet import until
from tests.workers.test_facts_sysfs import FILES, write
from workers.host import host_facts
from workers.host.facts.reading import (
    Deadlines,
    Places,
    read_host_facts,
    read_neuron_ls,
    read_neuron_monitor,
    read_process,
    usable_memory,
)
from workers.host.facts.tools import run_tool
from workers.host.facts.versions import Versions, parse_packages

SAMPLES = Path(__file__).parent / "samples"


def tool(folder: Path, name: str, script: str) -> str:
    """A shell script in place of a tool."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(folder)


def test_a_tool_that_answers_gives_its_facts(tmp_path: Path) -> None:
    """neuron-ls is asked for JSON."""
    folder = tool(tmp_path, "neuron-ls", f'[ "$1" = --json-output ] && cat {SAMPLES}/neuron-ls-inf2.48xlarge.json')

    told, problems = read_neuron_ls(10.0, folder)

    assert told is not None
    assert len(told.devices) == 12
    assert problems == ()


def test_a_release_with_the_new_flag_is_asked_again(tmp_path: Path) -> None:
    """Neuron 2.34 knows --output-format json only."""
    script = (
        f'[ "$*" = "--output-format json" ] && exec cat {SAMPLES}/neuron-ls-top-level-fields.json\n'
        'echo "unknown flag"; exit 1'
    )

    told, problems = read_neuron_ls(10.0, tool(tmp_path, "neuron-ls", script))

    assert told is not None
    assert len(told.devices) == 2
    assert problems == ()


def test_an_absent_tool_gives_none_and_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem says where it was sought and what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_neuron_ls(1.0, str(tmp_path)) == (
        None,
        (f"neuron-ls: found neither in {tmp_path} nor on PATH; install aws-neuronx-tools (Neuron Setup Guide)",),
    )
    assert read_neuron_monitor(1.0, str(tmp_path))[0] is None


def test_a_failing_tool_is_quoted(tmp_path: Path) -> None:
    """Exit code, its own last words, and the command to try."""
    folder = tool(tmp_path, "neuron-ls", 'echo "driver not found" >&2; exit 3')

    assert read_neuron_ls(10.0, folder) == (
        None,
        (f"neuron-ls: exited with code 3: driver not found; run `{tmp_path}/neuron-ls --json-output` by hand",),
    )


def test_a_hanging_tool_is_ended_with_its_children(tmp_path: Path) -> None:
    """The deadline holds, and nothing is left running."""
    folder = tool(tmp_path, "neuron-ls", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    begun = time.monotonic()

    output = run_tool([f"{folder}/neuron-ls"], 1.0)

    assert time.monotonic() - begun < 10.0
    assert output.problem is not None
    assert "no complete output within 1 s" in output.problem
    child = int((tmp_path / "child").read_text())
    until(lambda: host_facts.process_start(child) is None, 10.0, "the kernel has ended it")


def test_a_program_that_cannot_be_started_is_a_problem(tmp_path: Path) -> None:
    """A file without a program in it."""
    path = tmp_path / "neuron-ls"
    path.write_bytes(b"\x00")
    path.chmod(0o755)

    assert (run_tool([str(path)], 1.0).problem or "").startswith("neuron-ls: cannot be started: ")


def test_neuron_monitor_is_read_until_a_line_is_whole(tmp_path: Path) -> None:
    """The first line lacks a group; the second has all, and the tool is ended though it would go on."""
    script = f'[ "$1" = -c ] && grep -q memory_used "$2" && cat {SAMPLES}/neuron-monitor-inf2.48xlarge.jsonl; sleep 600'
    begun = time.monotonic()

    sample, problems = read_neuron_monitor(60.0, tool(tmp_path, "neuron-monitor", script))

    assert sample is not None
    assert (len(sample.runtimes), sample.problems, problems) == (2, (), ())
    assert time.monotonic() - begun < 30.0


def test_at_the_deadline_the_last_line_counts(tmp_path: Path) -> None:
    """A sample with a gap is better than none; a line that was not written to its end does not count."""
    script = f"head -1 {SAMPLES}/neuron-monitor-inf2.48xlarge.jsonl; printf '{{\"neuron_run'; sleep 600"

    sample, problems = read_neuron_monitor(1.5, tool(tmp_path, "neuron-monitor", script))

    assert sample is not None
    assert sample.problems == ("neuron-monitor: system_data.neuron_hw_counters is missing",)
    assert problems == ()


def test_a_silent_neuron_monitor_is_a_problem(tmp_path: Path) -> None:
    """No line, no sample."""
    sample, problems = read_neuron_monitor(10.0, tool(tmp_path, "neuron-monitor", "exit 0"))

    assert (sample, problems) == (None, ("neuron-monitor: exited without output",))


def test_a_host_without_devices_runs_no_tool(tmp_path: Path) -> None:
    """This machine: CPUs and memory, and no problem for what it does not have."""
    folder = tool(tmp_path, "neuron-ls", f"touch {tmp_path}/ran")

    facts = read_host_facts(Places(sys=tmp_path / "sys", dev=tmp_path, tools=folder))

    assert facts.devices == ()
    assert facts.problems == ()
    assert set(facts.cpus) <= os.sched_getaffinity(0)
    assert facts.memory_bytes > 0
    assert not (tmp_path / "ran").exists()


def test_a_host_with_devices_is_read_from_all_its_sources(tmp_path: Path) -> None:
    """Tools, driver, kernel and firmware."""
    sys_folder, dev = tmp_path / "sys", tmp_path / "dev"
    write(sys_folder / "devices/virtual/neuron_device", FILES)
    write(
        sys_folder,
        {
            "module/neuron/version": "2.26.5.0\n",
            "devices/virtual/dmi/id/product_name": "inf2.48xlarge\n",
            "devices/system/node/node0/cpulist": "0-4095\n",
        },
    )
    write(dev, {"neuron0": ""})
    tool(tmp_path / "bin", "neuron-ls", f"cat {SAMPLES}/neuron-ls-inf2.48xlarge.json")
    tools = tool(tmp_path / "bin", "neuron-monitor", f"cat {SAMPLES}/neuron-monitor-inf2.48xlarge.jsonl; sleep 600")

    facts = read_host_facts(Places(sys_folder, dev, tools), Deadlines(20.0, 20.0, 10.0))

    assert (facts.instance_type, len(facts.devices), facts.versions.driver) == ("inf2.48xlarge", 12, "2.26.5.0")
    assert facts.numa[0].cpus == facts.cpus
    assert facts.monitor is not None
    assert [problem.split(":")[0] for problem in facts.problems] == ["devices"]  # the sample's driver shows two


def test_a_process_tells_its_cores() -> None:
    """From the environment that it was started with."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "NEURON_RT_VISIBLE_CORES": "4-7"},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # before its exec is over, /proc shows no environment
        detail = read_process(process.pid)
        process.communicate(b"\n")

    assert detail.visible_cores == "4-7"
    assert detail.command is not None
    assert "input()" in detail.command


@pytest.mark.parametrize("pid", [2**22 + 1, 2**40, 2**62])
def test_a_process_that_is_not_there_tells_nothing(pid: int) -> None:
    """Gone, or of another namespace."""
    detail = read_process(pid)

    assert (detail.command, detail.visible_cores) == (None, None)


@pytest.mark.parametrize(("limit", "least"), [("max\n", False), ("1048576\n", True)])
def test_memory_is_what_the_container_may_use(tmp_path: Path, limit: str, least: bool) -> None:
    """The smaller of the machine's and the cgroup's."""
    write(tmp_path, {"fs/cgroup/memory.max": limit})

    assert (usable_memory(tmp_path) == 1048576) is least


def test_package_listings_give_versions() -> None:
    """dpkg-query's and rpm's, which also say what is not installed."""
    listing = (
        "aws-neuronx-dkms 2.20.28.0\naws-neuronx-runtime-lib 2.25.57.0-166c7a468\n"
        "package aws-neuronx-tools is not installed\naws-neuronx-collectives \n"
    )

    assert parse_packages(listing) == Versions(driver="2.20.28.0", runtime="2.25.57.0-166c7a468")
