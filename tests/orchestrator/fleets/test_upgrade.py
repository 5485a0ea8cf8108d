"""An upgrade of corewright on a cluster, and the way back, while requests go on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Load, Streamed, echo_questions, echo_text
from tests.orchestrator.conftest import temporary_home

ROOT = Path(__file__).parents[3]
PACKAGES = ("placements", "workers", "orchestrator")
PREVIOUS = "0.0.9"
TOKENS = 1500  # 15 s: less than a gateway that ends has for its requests
UPGRADE_S = 180
START_S = 30  # of host actors, and until gateways that end are gone
PARTS = {"ControllerActor": 1, "HostActor": 3, ":gateway": 2, "Replica[": 3}  # titles of processes
SPEC = """\
version: 1
name: upgraded
hosts: {emulate: inf2.48xlarge, count: 2}
defaults: {engine: echo, max_len: 4096, tp_degree: 8, engine_options: {step_ms: 10}}
models:
  chat: {replicas: 2}
  code: {}
"""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def install(folder: Path, version: str) -> Path:
    """Returns the command of a copy of this tree that has that version, in an environment of its own."""
    tree, environment = folder / version / "tree", folder / version / "venv"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__", "models"))
    about = tree / f"corewright-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: corewright\nVersion: {version}\n")
    subprocess.run(
        [sys.executable, "-m", "venv", "--copies", "--without-pip", str(environment)], check=True, timeout=60
    )
    (libraries,) = environment.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (libraries / "corewright.pth").write_text("\n".join([str(tree), *others]) + "\n")
    command = environment / "bin" / "corewright"
    command.write_text(f"#!{environment}/bin/python\nfrom orchestrator.cli.main import main\n\nmain()\n")
    command.chmod(0o755)
    return command


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster with a head without cores, and two machines of 24."""
    from ray.cluster_utils import Cluster

    with temporary_home() as folder:
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        monkeypatch.setenv("RAY_TMPDIR", str(folder))
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_log_monitor": False})
        for machine in ("a", "b"):
            nodes.add_node(
                num_cpus=2,
                include_log_monitor=False,
                resources={f"nc{core}": 1 for core in range(24)},
                labels={"corewright-host": machine, "corewright-instance": "inf2.48xlarge"},
            )
        yield nodes.address
        nodes.shutdown()


def test_a_fleet_is_upgraded_and_taken_back_while_it_serves(address: str) -> None:
    """Controller, gateways and replicas run in the interpreter of the other version then; no request is without an
    answer, and a stream that began before ends."""
    current = importlib.metadata.version("corewright")
    with temporary_home() as home, temporary_home() as versions:
        commands = {version: install(versions, version) for version in (PREVIOUS, current)}
        join = ("--ray-address", address, "--detach")
        fleet = LiveFleet(SPEC, home=home, arguments=join, spare=True, command=commands[PREVIOUS])
        assert fleet.process.wait(120) == 0, fleet.output()
        until(lambda: runs(fleet, versions, PREVIOUS), START_S, "the fleet runs in its version")
        broken = install(versions, "0.0.8")
        actor = broken.parents[2] / "tree" / "orchestrator" / "on_ray" / "controller_actor.py"
        actor.write_text(actor.read_text().replace("        home = Home(Path(settings.home))\n", "        1 / 0\n", 1))
        fleet.command = broken
        failed = fleet.corewright("up", str(fleet.spec), "--port", str(fleet.port), *join, "--upgrade")
        assert "upgrade-failed" in failed.stderr, failed.stderr
        until(lambda: runs(fleet, versions, PREVIOUS), START_S, "the controller of before runs again")
        fleet.command = commands[current]
        refused = fleet.corewright("up", str(fleet.spec), *join)
        assert "fleet-version-differs" in refused.stderr
        with Load(fleet, echo_questions(("chat", "code"), seed=7), clients=3) as load:
            load.wait_answered(20)
            for version in (current, PREVIOUS):
                stream = Streamed(fleet, "chat", "before the upgrade", TOKENS)
                until(stream.begun.is_set, 30, "the stream has begun")
                upgrade(fleet, commands[version], join)
                until(partial(runs, fleet, versions, version), START_S, f"the fleet runs in {version}")
                until(stream.done.is_set, 60, "the stream has ended")
                assert stream.text == echo_text("before the upgrade", TOKENS), (stream.error, stream.broken)
                load.wait_answered(20)
        assert load.wrong == []
        assert load.failed == {}
        down = fleet.corewright("down")
        assert down.returncode == 0, down.stderr


def upgrade(fleet: LiveFleet, command: Path, join: tuple[str, ...]) -> None:
    fleet.command = command
    arguments = ("up", str(fleet.spec), "--port", str(fleet.port), *join, "--upgrade")
    with fleet.log.open("ab") as log:
        ended = subprocess.run(
            [str(command), *arguments], env=fleet.env, stdout=log, stderr=log, timeout=UPGRADE_S, check=False
        )
    assert ended.returncode == 0, fleet.output()


def runs(fleet: LiveFleet, versions: Path, version: str) -> bool:
    """Returns whether all parts of the fleet run in the environment of that version, and none in another one."""
    titles: dict[str, list[str]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.exe().startswith(f"{versions}/"):
                titles.setdefault(Path(process.exe()).parts[-4], []).append(" ".join(process.cmdline()))
    counts = {kind: sum(kind in title for title in titles.get(version, ())) for kind in PARTS}
    return counts == PARTS and titles.keys() == {version} and fleet.http.get("/version").json()["version"] == version
