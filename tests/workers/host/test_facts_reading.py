"""Reading the facts of a host with tools that work, fail, hang, or are not installed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from placements.facts.cpu_layout import LAYOUTS, CpuLayout
from tests.fleet import until
from tests.workers.host.test_facts_sysfs import FILES, write
from workers.host import host_facts
from workers.host.facts.reading import (
    Places,
    SourceDeadlines,
    read_cpu_layout,
    read_host_facts,
    read_neuron_ls,
    read_neuron_monitor,
    read_process,
)
from workers.host.facts.tools import NEURON_TOOLS, Versions, parse_packages, run_tool

LISTING = """echo '[{"neuron_device": 0, "numa_node": "1"}, {"neuron_device": 1, "numa_node": 0}]'"""
SAMPLES = Path(__file__).parents[1] / "samples"


def tool(folder: Path, name: str, script: str) -> str:
    """A shell script in place of a tool."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(folder)


def test_neuron_ls_is_called_for_json(tmp_path: Path) -> None:
    folder = tool(tmp_path, "neuron-ls", f'[ "$1" = --json-output ] && cat {SAMPLES}/neuron-ls-inf2.48xlarge.json')

    listing, problems = read_neuron_ls(10.0, folder)

    assert listing is not None
    assert len(listing.devices) == 12
    assert problems == ()


def test_a_release_with_the_new_flag_is_called_with_it(tmp_path: Path) -> None:
    """Neuron 2.34 supports --output-format json only."""
    script = (
        f'[ "$*" = "--output-format json" ] && exec cat {SAMPLES}/neuron-ls-top-level-fields.json\n'
        'echo "unknown flag"; exit 1'
    )

    listing, problems = read_neuron_ls(10.0, tool(tmp_path, "neuron-ls", script))

    assert listing is not None
    assert len(listing.devices) == 2
    assert problems == ()


def test_a_missing_tool_is_a_problem_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem has the searched folder and the package to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_neuron_ls(1.0, str(tmp_path)) == (
        None,
        (f"neuron-ls: found neither in {tmp_path} nor on PATH; install aws-neuronx-tools (Neuron Setup Guide)",),
    )
    assert read_neuron_monitor(1.0, str(tmp_path))[0] is None


def test_the_problem_of_a_failed_tool_quotes_it(tmp_path: Path) -> None:
    """It has the exit code, the last line of the output, and the command to try."""
    folder = tool(tmp_path, "neuron-ls", 'echo "driver not found" >&2; exit 3')

    assert read_neuron_ls(10.0, folder) == (
        None,
        (f"neuron-ls: exited with code 3: driver not found; run `{tmp_path}/neuron-ls --json-output` by hand",),
    )


def test_a_hanging_tool_is_killed_with_its_children(tmp_path: Path) -> None:
    """Also the deadline holds."""
    folder = tool(tmp_path, "neuron-ls", f"sleep 600 & echo $! > {tmp_path}/child; wait")
    began = time.monotonic()

    output = run_tool([f"{folder}/neuron-ls"], 1.0)

    assert time.monotonic() - began < 10.0
    assert output.problem is not None
    assert "no complete output within 1 s" in output.problem
    child = int((tmp_path / "child").read_text())
    until(lambda: host_facts.process_start(child) is None, 10.0, "its child has ended")


def test_a_program_that_cannot_be_started_is_a_problem(tmp_path: Path) -> None:
    """Its file is not a program."""
    path = tmp_path / "neuron-ls"
    path.write_bytes(b"\x00")
    path.chmod(0o755)

    assert (run_tool([str(path)], 1.0).problem or "").startswith("neuron-ls: cannot be started: ")


def test_neuron_monitor_ends_with_a_killed_reader(tmp_path: Path) -> None:
    """It never exits by itself."""
    folder = tool(
        tmp_path, "neuron-monitor", f"echo $$ > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/pid; exec sleep 600"
    )
    script = "import sys; from workers.host.facts.reading import read_neuron_monitor as r; r(600.0, sys.argv[1])"
    with subprocess.Popen([sys.executable, "-c", script, folder]) as reader:
        until((tmp_path / "pid").exists, 30.0, "neuron-monitor was started")
        reader.kill()
    pid = int((tmp_path / "pid").read_text())
    until(lambda: host_facts.process_start(pid) is None, 10.0, "neuron-monitor has ended")


def test_neuron_monitor_is_read_until_a_line_is_complete(tmp_path: Path) -> None:
    """The first line lacks a group. After the second, the tool is killed."""
    script = f'[ "$1" = -c ] && grep -q memory_used "$2" && cat {SAMPLES}/neuron-monitor-inf2.48xlarge.jsonl; sleep 600'
    began = time.monotonic()

    sample, problems = read_neuron_monitor(60.0, tool(tmp_path, "neuron-monitor", script))

    assert sample is not None
    assert (len(sample.runtimes), sample.problems, problems) == (2, (), ())
    assert time.monotonic() - began < 30.0


def test_at_the_deadline_the_last_complete_line_counts(tmp_path: Path) -> None:
    """A sample with a gap is better than none."""
    script = f"head -1 {SAMPLES}/neuron-monitor-inf2.48xlarge.jsonl; printf '{{\"neuron_run'; sleep 600"

    sample, problems = read_neuron_monitor(1.5, tool(tmp_path, "neuron-monitor", script))

    assert sample is not None
    assert sample.problems == ("neuron-monitor: system_data.neuron_hw_counters is missing",)
    assert problems == ()


def test_a_silent_neuron_monitor_is_a_problem(tmp_path: Path) -> None:
    sample, problems = read_neuron_monitor(10.0, tool(tmp_path, "neuron-monitor", "exit 0"))

    assert (sample, problems) == (None, ("neuron-monitor: exited without output",))


def test_a_host_without_devices_runs_no_tool(tmp_path: Path) -> None:
    """A host without a driver has no problems."""
    folder = tool(tmp_path, "neuron-ls", f"touch {tmp_path}/ran")

    facts = read_host_facts(Places(sys=tmp_path / "sys", dev=tmp_path, tools=folder))

    assert facts.devices == ()
    assert facts.problems == ()
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
        },
    )
    write(dev, {"neuron0": ""})
    tool(tmp_path / "bin", "neuron-ls", f"cat {SAMPLES}/neuron-ls-inf2.48xlarge.json")
    tools = tool(tmp_path / "bin", "neuron-monitor", f"cat {SAMPLES}/neuron-monitor-inf2.48xlarge.jsonl; sleep 600")

    facts = read_host_facts(Places(sys_folder, dev, tools), SourceDeadlines(20.0, 20.0, 10.0))

    assert (facts.instance_type, len(facts.devices), facts.versions.driver) == ("inf2.48xlarge", 12, "2.26.5.0")
    assert len(facts.runtimes) == 2
    assert [problem.split(":")[0] for problem in facts.problems] == ["devices"]  # the sample's driver shows two


def test_the_visible_cores_of_a_process_are_read_from_its_environment() -> None:
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
def test_a_missing_process_has_no_details(pid: int) -> None:
    """It has ended, or has its pid in another namespace."""
    detail = read_process(pid)

    assert (detail.command, detail.visible_cores) == (None, None)


def test_package_listings_give_versions() -> None:
    """Lines of dpkg-query and rpm about missing packages are ignored."""
    listing = (
        "aws-neuronx-dkms 2.20.28.0\naws-neuronx-runtime-lib 2.25.57.0-166c7a468\n"
        "package aws-neuronx-tools is not installed\naws-neuronx-collectives \n"
    )

    assert parse_packages(listing) == Versions(driver="2.20.28.0", runtime="2.25.57.0-166c7a468")


TWO_NODES = {
    **{f"cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)},
    "cpu/cpufreq/policy0": "",
    "node/node0/cpulist": "0-1,4-5\n",
    "node/node1/cpulist": "2-3,6-7\n",
    "node/node2/cpulist": "\n",  # memory only
}
ONE_NODE = {name: text for name, text in TWO_NODES.items() if not name.startswith("node/")}
CORES = ((0, 4), (1, 5), (2, 6), (3, 7))


@pytest.mark.parametrize(
    ("kernel", "instance", "listing", "expected"),
    [
        (TWO_NODES, "inf2.48xlarge", "exit 1", CpuLayout(CORES, (0, 0, 1, 1), LAYOUTS["inf2.48xlarge"].device_nodes)),
        (TWO_NODES, "inf2.24xlarge", LISTING, CpuLayout(CORES, (0, 0, 1, 1), (1, 0))),
        (TWO_NODES, "inf2.24xlarge", LISTING.replace('"1"', '"-1"'), None),
        (TWO_NODES, "inf2.24xlarge", "exit 1", None),
        (TWO_NODES, None, "exit 1", CpuLayout(CORES, (0, 0, 1, 1))),
        (ONE_NODE, "inf2.8xlarge", "exit 1", CpuLayout(CORES, (0, 0, 0, 0))),
        (ONE_NODE | {"cpu/cpu8/topology/thread_siblings_list": "4,8\n"}, None, "exit 1", None),
        (ONE_NODE | {"cpu/cpu8/topology/thread_siblings_list": "all\n"}, None, "exit 1", None),
        ({}, None, "exit 1", None),
    ],
)
def test_the_layout_of_the_cpus_is_that_of_the_kernel(
    kernel: dict[str, str],
    instance: str | None,
    listing: str,
    expected: CpuLayout | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes of devices are those of the type, else of neuron-ls; with one node they do not matter."""
    write(tmp_path / "sys/devices/system", kernel)
    tool(tmp_path / NEURON_TOOLS.lstrip("/"), "neuron-ls", listing)
    monkeypatch.setenv("COREWRIGHT_HOST_ROOT", str(tmp_path))

    assert read_cpu_layout(instance) == expected
