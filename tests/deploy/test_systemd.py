"""The systemd units of a cluster, judged by systemd itself and by Ray's parser."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from orchestrator.cluster.ray_names import NodeDeclaration
from placements.facts.topology import TOPOLOGIES
from tests.deploy.ray_start import ROOT, check_health, check_host, check_ports, options

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
ANALYZE = shutil.which("systemd-analyze")


def service(name: str) -> dict[str, list[str]]:
    """The settings of [Service]; one may be given several times."""
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    settings: dict[str, list[str]] = {}
    for line in text.partition("[Service]\n")[2].partition("[Install]")[0].splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def variables(text: str) -> dict[str, str]:
    """An environment file, as systemd reads it: no comment after a value, quotes removed."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {key: "".join(shlex.split(value)) for key, _, value in (line.partition("=") for line in lines)}


def started(name: str) -> list[str]:
    """The words of ExecStart after `ray start`, with ${NAME} replaced from the environment files."""
    instance = TOPOLOGIES["inf2.24xlarge"]
    environment = variables((FOLDER / "ray.env").read_text()) | variables(NodeDeclaration(instance).environment)
    (line,) = service(name)["ExecStart"]
    program, *words = shlex.split(line)
    assert program == f"{environment['PATH'].partition(':')[0]}/ray"
    assert words[0] == "start"
    return [re.sub(r"\$\{(\w+)\}", lambda match: environment[match[1]], word) for word in words[1:]]


def test_systemd_waits_for_the_drain_of_a_worker_and_not_of_the_head() -> None:
    """On SIGTERM Ray drains its node for a time, before it ends its processes."""
    from ray._private.ray_constants import RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S

    (stop_s,) = service("ray-worker.service")["TimeoutStopSec"]
    assert int(stop_s) > RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S + 10
    assert "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0" in service("ray-head.service")["Environment"]


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Programs are looked up in a folder of this test: the units' own is that of an installation."""
    assert ANALYZE is not None
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for unit in UNITS:
        (tmp_path / unit.name).write_text(re.sub(r"/opt/[\w/]+/bin/(ray|corewright)\b", str(program), unit.read_text()))
    result = subprocess.run(
        [ANALYZE, "verify", *(str(tmp_path / unit.name) for unit in UNITS)], capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_ray_accepts_the_command_of_the_head() -> None:
    """With fixed ports and health checks, and no CPUs for others' work."""
    params = options(started("ray-head.service"))

    assert (params["head"], params["block"], params["port"], params["num_cpus"]) == (True, True, 6379, 0)
    check_ports(params)
    check_health(params)


def test_ray_accepts_the_command_of_a_worker() -> None:
    """With the label and the cores that `corewright node-resources` wrote on this machine."""
    params = options(started("ray-worker.service"))

    assert (params["block"], params["address"]) == (True, "10.0.0.10:6379")
    check_ports(params)
    check_host(params, "inf2.24xlarge")


@pytest.mark.parametrize("name", ["ray-head.service", "ray-worker.service"])
def test_a_unit_waits_for_its_processes_and_starts_again(name: str) -> None:
    """The environment of all is one file; the home is a folder that systemd makes for the user alone."""
    settings = service(name)

    assert settings["EnvironmentFile"][0] == "/etc/corewright/ray.env"
    assert (settings["Restart"], settings["KillMode"], settings["LimitNOFILE"]) == (["always"], ["mixed"], ["65536"])
    home = variables((FOLDER / "ray.env").read_text())["COREWRIGHT_HOME"]
    assert f"/var/lib/{settings['StateDirectory'][0].split()[0]}" == home
    assert settings["StateDirectoryMode"] == ["0700"]


def test_a_worker_reads_the_file_that_it_wrote_before() -> None:
    """It may be missing when the first of the two commands runs."""
    settings = service("ray-worker.service")
    (before,) = settings["ExecStartPre"]

    assert settings["EnvironmentFile"][1] == "-" + before.rstrip("'").rpartition("> ")[2]
    assert f"corewright node-resources --env > %t/{settings['RuntimeDirectory'][0]}/" in before


def test_the_store_of_the_head_is_a_folder_of_its_own() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.read_string((FOLDER / "ray-head.service").read_text())
    store = re.search(r"RAY_gcs_storage=rocksdb RAY_gcs_storage_path=(\S+)", (FOLDER / "ray-head.service").read_text())

    assert store is not None
    assert store[1] in [f"/var/lib/{name}" for name in unit["Service"]["StateDirectory"].split()]
