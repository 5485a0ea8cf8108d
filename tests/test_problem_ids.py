"""Problems that only the world around a fleet gives: each is made to happen here, beside the stories of other tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api.schemas import OperationRefused
from orchestrator.cli.client import AdminClient
from orchestrator.cluster import up as up_module
from orchestrator.cluster.up import FleetStart, Up, UpOptions
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.facts.topology import Machine
from tests.orchestrator.fakefleet import LiveAdmin
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.replica_configs import replica_config
from workers.engines.cpu.engine import CpuEngine
from workers.engines.open_engine import open_engine
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.serving.replica import Replica, set_environment

SPEC = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: echo}}\n"


def failed(work: Callable[[], object]) -> str:
    """The id of what the call fails with."""
    with pytest.raises(Failed) as raised:
        work()
    return raised.value.problem.id


@pytest.mark.parametrize("url", ["fleet.example", "ftp://fleet.example", "http://host:port"])
def test_an_address_that_is_none_is_told(url: str) -> None:
    """COREWRIGHT_URL as somebody may write it."""
    assert failed(lambda: AdminClient(url, "t", None).get("status")) == "fleet-url-wrong"


def test_a_wrong_token_is_told() -> None:
    """The admin API says invalid_token; the command says what to look at."""
    admin = LiveAdmin()
    try:
        assert failed(lambda: AdminClient(admin.url, "guessed", None).get("status")) == "fleet-refused"
    finally:
        admin.close()


def test_a_home_that_cannot_be_made_or_is_another_users_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is started."""
    (tmp_path / "file").write_text("")
    assert failed(Home(tmp_path / "file" / "home").prepare) == "home-unusable"
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert failed(Home(tmp_path / "home").prepare) == "home-unusable"


@pytest.mark.parametrize(
    ("id", "ask"),
    [
        ("host-unknown", lambda operator: operator.cordon("inf2.xlarge/9", None, True, "ada")),
        ("cordoned-whole", lambda operator: operator.cordon("inf2.xlarge/0", "1", False, "ada")),
        ("replica-unknown", lambda operator: operator.logs("a", 7, None, 0.0)),
    ],
)
def test_what_a_fleet_does_not_have_is_refused(id: str, ask: Callable[[Any], Any], tmp_path: Path) -> None:
    """The host is cordoned as a whole before."""

    async def play() -> str:
        async with Played(tmp_path, FakeCluster(), SPEC) as played:
            await played.settled()
            await played.operator.cordon("inf2.xlarge/0", None, True, "ada")
            with pytest.raises(OperationRefused) as refused:
                await ask(played.operator)
            return refused.value.problem.id

    assert virtually(play) == id


def test_an_apply_that_fails_for_no_known_reason_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watched file is tried again later."""
    from orchestrator.cluster.controller_actor import ControllerActor  # Ray: seconds

    async def apply(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of nobody's making")

    monkeypatch.setattr("orchestrator.api.revisions.apply", apply)
    actor = SimpleNamespace(_fleet=None)
    answer = asyncio.run(ControllerActor.apply(actor, SPEC, "f.yaml", "/", "ada", "watch"))  # type: ignore[arg-type]
    assert answer.error is not None
    assert (answer.error.id, answer.is_failure) == ("apply-failed", True)


# The daemon


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Up:
    """One that has started nothing."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "COREWRIGHT_HOME", "COREWRIGHT_FLEET"):
        monkeypatch.setenv(name, "")  # so that what a start sets is taken back
    home = Home(tmp_path)
    home.prepare()
    options = UpOptions(gateway=GatewaySettings(host="127.0.0.1", port=1, home=str(tmp_path)))
    return Up(home, options, FleetStart(SPEC, "f.yaml", "/", "f", (), Machine((0,))), lambda line: None)


@pytest.mark.parametrize("root", ["host", "/no/such/folder"])
def test_a_root_of_the_host_that_is_no_folder_is_told(root: str, daemon: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine with devices would be taken for one without."""
    monkeypatch.setenv("COREWRIGHT_HOST_ROOT", root)
    assert failed(lambda: daemon.run(lambda record: None)) == "setting-wrong"


def test_processes_that_do_not_die_are_told(daemon: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their pids; nothing new is started over them."""
    monkeypatch.setattr(up_module, "daemon_alive", lambda record: True)
    monkeypatch.setattr(up_module, "end_leftovers", lambda home, fleet, deadline: [11, 12])
    daemon.home.write_record(daemon._new_record())
    with pytest.raises(Failed, match="do not exit: 11, 12") as raised:
        up_module.end_previous(daemon.home, lambda line: None)
    assert raised.value.problem.id == "leftover-processes"


def raising(error: Exception) -> Callable[..., Any]:
    def work(*_: object, **__: object) -> Any:
        raise error

    return work


def test_a_ray_or_a_gateway_that_does_not_start_is_told(daemon: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, with the log to look at."""
    from orchestrator.cluster import gateways, own_ray

    monkeypatch.setattr(own_ray.OwnRay, "start", raising(RuntimeError("no room\nand pages of text")))
    assert failed(daemon._start_ray) == "ray-not-started"

    monkeypatch.setattr(gateways, "run_applications", raising(RuntimeError("the port was taken")))
    assert failed(daemon._start_gateway) == "gateway-not-started"


def test_a_controller_that_ends_by_itself_is_told(daemon: Up) -> None:
    """What it raised is the cause."""
    import ray

    error = ray.exceptions.RayTaskError("status", "a traceback", ValueError("a bug"))
    assert failed(lambda: daemon._follower.ask(raising(error))) == "controller-failed"


# Replicas


def config(**fields: Any) -> ReplicaConfig:
    return replica_config(**{"source": "", **fields})


def load_error(work: Callable[[], object]) -> str:
    with pytest.raises(EngineLoadError) as raised:
        work()
    return raised.value.id


def test_an_engine_that_is_not_there_or_has_no_model_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before any weights are read."""
    assert load_error(lambda: open_engine(config())) == "source-missing"
    assert load_error(lambda: open_engine(config(engine="nxd-inference"))) == "engine-not-installed"
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 64}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    engine = CpuEngine(tmp_path, slots=1, max_len=16, dtype="fp32")
    assert load_error(engine.load) == "engine-not-installed"


def test_a_library_that_has_read_the_environment_already_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have read another range of cores."""
    monkeypatch.setitem(sys.modules, "torch_xla", SimpleNamespace())
    assert load_error(lambda: set_environment({})) == "environment-late"


def test_a_first_generation_that_fails_is_told() -> None:
    """Nobody is sent to such a replica."""
    replica = Replica.__new__(Replica)
    replica._batcher = SimpleNamespace(spec=SimpleNamespace(vocab_size=8, width=0), submit=lambda request: None)
    replica._probed = SimpleNamespace(wait=lambda deadline: True)  # type: ignore[assignment]
    replica._probe_error = "NaN"
    replica._steps = SimpleNamespace(join=lambda deadline: None)  # type: ignore[assignment]
    assert load_error(replica._probe) == "probe-failed"
