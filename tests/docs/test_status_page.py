"""The status, records and files that docs/cli.md shows are those of the code."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.access.keys import KeyFile
from orchestrator.cli import main as cli
from orchestrator.cli.client import AdminClient
from orchestrator.control.journal.journal import Journal
from orchestrator.messages.replica_states import ModelState, State
from orchestrator.process.home import FleetRecord, Home
from orchestrator.process.speed_record import SpeedRecord
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from tests.docs.pages import CLI, ROOT, SOURCES, blocks, example, rows, section, shape, words
from tests.orchestrator.fakefleet import PLAN
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from workers.compiled.graph_sync import keep_of
from workers.compiled.host_sets import entry
from workers.host.core_claims import CoreClaim
from workers.host.start_phases import PHASES


def shown_status() -> Any:
    return json.loads(status_block("corewright status -o json"))


def status_block(command: str) -> str:
    block = next(b for b in blocks(CLI) if b.language == "console" and b.section == "corewright status")
    return next(p.partition("\n")[2] for p in block.text.split("$ ") if p.startswith(f"{command}\n"))


def told_by_a_controller(tmp_path: Path) -> dict[str, Any]:
    """The status of a fleet with a replica that runs, a core that somebody else holds, and a gateway that tells."""
    text = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: echo}}\n"

    async def play() -> dict[str, Any]:
        cluster = FakeCluster()
        cluster.held = {1: 99}
        async with Played(tmp_path, cluster, text) as played:
            await played.settled()
            report = DemandReport(gateway="g", number=1, seconds=1.0, models=[DemandWindow(model="a")])
            await played.controller.demand(report)
            status: dict[str, Any] = msgspec.to_builtins(played.controller.status())
            return status

    return virtually(play)


def test_every_condition_is_shown_and_described(tmp_path: Path) -> None:
    """In the order of the controller's status."""

    def types(status: Any, model: int) -> list[tuple[str, str]]:
        conditions = [("fleet", condition["type"]) for condition in status["conditions"]]
        return conditions + [("model", condition["type"]) for condition in status["models"][model]["conditions"]]

    real, shown = types(told_by_a_controller(tmp_path), 0), shown_status()
    assert all(types(shown, model) == real for model in range(len(shown["models"])))
    table = [row for row in rows(section(CLI, "corewright status")) if row[1] in ("fleet", "model")]
    assert [(row[1], words(row[0])[0]) for row in table] == real


def test_the_shown_status_has_the_controllers_keys(tmp_path: Path) -> None:
    """Fleet, models, replicas, hosts and leases."""
    answer = shape(told_by_a_controller(tmp_path))
    assert answer["hosts"].pop("quarantine") == dict.fromkeys(("core", "pid", "command", "cause"))
    shown = shape(shown_status())
    assert shown["hosts"].pop("quarantine") is None  # an empty list
    for phases in (status["models"]["replicas"].pop("load_phases") for status in (shown, answer)):
        assert set(phases or ()) <= set(PHASES)  # those of each engine are others
    assert shown == answer


def test_every_key_of_the_status_is_described(tmp_path: Path) -> None:
    """Those that do not say themselves what they are."""
    plain = {"name", "models", "hosts", "replicas", "id", "host", "cores", "model", "instance", "emulated", "message"}
    plain |= {"leases", "type", "free", "state", "since", "log_file"}
    plain |= {"strategy", "updated", "old", "replica"}  # of `rollout status`

    def names(value: Any) -> set[str]:
        return set().union(*({key} | names(item) for key, item in (value or {}).items())) if value else set()

    text = section(CLI, "corewright status").split("```")[-1]
    assert names(shape(told_by_a_controller(tmp_path))) - plain - set(words(text)) == set()


def test_the_shown_plan_of_a_model_has_its_keys() -> None:
    """Those of the played fleet, which another test compares with a real one; and each is described."""
    shown = example(CLI, "corewright plan")
    assert shape(shown) == shape(PLAN["models"][0])
    described = {word for row in rows(section(CLI, "corewright plan")) for word in words(row[0])}
    assert shown.keys() - {"model", "replicas"} <= described


def test_the_shown_status_table_is_that_of_the_shown_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` prints it so, with the console of the shown record."""
    record = msgspec.convert(example(CLI, "Files"), FleetRecord)
    monkeypatch.setattr(AdminClient, "get", lambda self, path, query=None, deadline_s=0.0: shown_status())
    monkeypatch.setattr("orchestrator.cli.views.the_fleet", lambda: AdminClient("", "", record))
    assert cli.run(["status"]) == 0
    assert capsys.readouterr().out == status_block("corewright status")


@pytest.mark.parametrize(("kind", "number"), [(State, 0), (ModelState, 1)])
def test_every_state_is_described(kind: type[State] | type[ModelState], number: int) -> None:
    """Of replicas and of models, in the order of the code."""
    tables = re.split(r"^\| state of ", section(CLI, "corewright status"), flags=re.MULTILINE)[1:]
    assert [words(row[0])[0] for row in rows(tables[number]) if words(row[0])] == [state.value for state in kind]


def test_the_shown_record_has_the_keys_of_fleet_json() -> None:
    """And their types."""
    shown = example(CLI, "Files")
    assert list(shown) == [field.name for field in msgspec.structs.fields(FleetRecord)]
    msgspec.convert(shown, FleetRecord)


def test_every_file_of_the_home_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is made there: at the top by what makes it, under logs/ by its name in the sources."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set below goes with this test
        monkeypatch.delenv(name)
    home = Home(tmp_path / "home")
    home.prepare()
    lock = home.lock()
    home.secure_ray()
    home.write_record(msgspec.convert(example(CLI, "Files"), FleetRecord))
    home.journal.write_text("{")
    Journal(home.journal).close()
    SpeedRecord(home.speeds, "1.0", 0.0).write(b"[]")
    KeyFile(home.keys).create("ci")
    Audit(home.audit).begin("command", "keys create")
    home.traces.mkdir()
    home.received.mkdir()
    keep_of(home.compiled).mkdir()
    home.store.mkdir()
    CoreClaim(home.claims(0), [0]).release()
    with entry(home.compiled, {}):
        pass
    made = {path.name for path in home.path.iterdir()}
    parts = [path.read_text() for path in SOURCES if path.is_relative_to(ROOT / "orchestrator")]
    used = {name for text in parts for name in re.findall(r'"([a-z]+\.log)"', text)}
    assert lock is not None
    os.close(lock)

    documented = [word for row in rows(section(CLI, "Files")) for word in words(row[0]) if not word.startswith("$")]

    documented = [word for word in documented if not re.fullmatch(r"audit\.log\.\d", word)]
    assert {word.partition("/")[0] for word in documented} == made | {"config.yaml"}
    logs = {word.removeprefix("logs/") for word in documented if word.startswith("logs/")}
    compiled = {"compile-MODEL.log", "compile-MODEL-TARGET.log"}
    assert logs == {home.log("MODEL", 0).name.replace("0", "N"), "generate-MODEL.log"} | compiled | (used - made)


def test_every_file_says_when_it_may_be_deleted() -> None:
    """None is left open."""
    assert all(len(row) == 3 and row[2] for row in rows(section(CLI, "Files")))
