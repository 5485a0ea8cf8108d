"""`corewright get`: selects items by their fields, and follows their changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert
from msgspec.structs import replace

from orchestrator.cli.get import ListFormat, follow_items, matchers
from orchestrator.cli.listing import TABLES, selected
from orchestrator.cli.output import paint_state
from orchestrator.cli.views import MOST_HOSTS, MOST_REPLICAS, status_text
from orchestrator.messages.fleet_status import FleetStatus, ModelInFleet, ReplicaInFleet
from tests.orchestrator.fakefleet import STATUS, TOKEN, LiveAdmin, replica, status_of

REPLICAS = [replica("chat/0", "0-7"), replica("chat/1", "8-15", "failed", pid=None), replica("small/0", "16", live=0)]


@pytest.mark.parametrize(
    ("selector", "ids"),
    [
        ([("state", True, "ready")], ["chat/0", "small/0"]),
        ([("state", False, "ready")], ["chat/1"]),
        ([("model", True, "chat"), ("state", True, "ready")], ["chat/0"]),
        ([("live", True, "0")], ["small/0"]),
        ([("pid", True, "")], ["chat/1"]),
        ([("stopped", True, "false")], ["chat/0", "chat/1", "small/0"]),
        ([("model", True, "none")], []),
    ],
)
def test_items_are_selected_by_the_text_of_their_fields(selector: Any, ids: list[str]) -> None:
    """A missing value is an empty text; all conditions must hold."""
    assert [item["id"] for item in selected(REPLICAS, selector)] == ids


@pytest.mark.parametrize(
    ("text", "conditions"),
    [
        ("state=ready", [("state", True, "ready")]),
        ("state==ready", [("state", True, "ready")]),
        ("state!=ready", [("state", False, "ready")]),
        ("state=ready,model!=chat", [("state", True, "ready"), ("model", False, "chat")]),
        ("cores=0-3,8", [("cores", True, "0-3,8")]),
        ("a==,b=", [("a", True, ""), ("b", True, "")]),
    ],
)
def test_a_selector_is_read_as_kubectl_reads_it(text: str, conditions: list[tuple[str, bool, str]]) -> None:
    """But a comma without a condition after it belongs to the text."""
    assert matchers(text) == conditions


def test_an_unknown_field_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no item has a field 'stat'; they have compile_s, compiled, cores, .*state"):
        selected(REPLICAS, [("stat", True, "ready")])


def test_without_items_every_selector_selects_nothing() -> None:
    assert selected([], [("stat", True, "ready")]) == []


def changed(**values: Any) -> ReplicaInFleet:
    return convert({**REPLICAS[0], **values}, ReplicaInFleet)


FOLLOWED = [changed(), changed(epoch=2), changed(state="draining"), changed(state="draining"), changed()]


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        (ListFormat.TABLE, ["REPLICA", "chat/0   ready", "chat/0   draining", "chat/0   ready"]),
        (ListFormat.WIDE, ["REPLICA", "chat/0   ready", "chat/0   ready", "chat/0   draining", "chat/0   ready"]),
        (ListFormat.NAME, ["chat/0", "chat/0", "chat/0"]),
    ],
)
def test_only_an_item_whose_row_changes_is_printed_again(
    output: ListFormat, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The epoch is a column of the wide table only."""
    follow_items(TABLES["replicas"], FOLLOWED[:1], FOLLOWED[1:], output)

    printed = capsys.readouterr().out.splitlines()
    assert [line[: len(start)] for line, start in zip(printed, lines, strict=True)] == lines


def test_changes_in_json_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    """So that a program can read them as they come."""
    follow_items(TABLES["replicas"], FOLLOWED[:1], FOLLOWED[1:], ListFormat.JSON)

    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert states == ["ready", "draining", "ready"]


@pytest.mark.parametrize(
    ("column", "cell", "shown"),
    [
        ("STATE", "ready", "\x1b[32mready\x1b[0m"),
        ("STATE", "failed", "\x1b[31mfailed\x1b[0m"),
        ("STATE", "-", "-"),
        ("MODEL", "ready", "ready"),
    ],
)
def test_only_states_are_colored(column: str, cell: str, shown: str) -> None:
    """A model may be called ready."""
    assert paint_state(column, cell) == shown


def fleet_of(replicas: int, unready: int, hosts: int) -> FleetStatus:
    """A status with so many replicas of one model, of which ``unready`` are loading, on so many hosts."""
    states = ["loading"] * unready + ["ready"] * (replicas - unready)
    own = [replica(f"chat/{i}", "0", state) for i, state in enumerate(states)]
    machines = [{**STATUS["hosts"][0], "name": f"inf2.48xlarge/{i}"} for i in range(hosts)]
    healthy = [{**machine, "cordoned": [], "quarantine": []} for machine in machines[1:]]
    model = {**STATUS["models"][0], "replicas": own}
    return status_of({**STATUS, "models": [model], "hosts": [machines[0], *healthy]})


@pytest.mark.parametrize(("replicas", "unready", "rows"), [(12, 2, 12), (500, 2, 2), (500, 0, 0), (500, 40, 12)])
def test_the_status_of_many_replicas_shows_those_that_are_not_ready(replicas: int, unready: int, rows: int) -> None:
    text = status_text(fleet_of(replicas, unready, 1))

    lines = [line for line in text.splitlines() if line.startswith("chat/")]
    assert len(lines) == rows
    if replicas > MOST_REPLICAS:
        assert f"{replicas - unready} of {replicas} replicas are ready" in text


def test_the_count_of_replicas_leaves_out_models_without_one() -> None:
    """19 ready replicas and 7 unloaded models are 19 of 19."""
    status = fleet_of(19, 0, 1)
    idle = convert(STATUS["models"][1], ModelInFleet)
    text = status_text(replace(status, models=[*status.models, *(replace(idle, name=f"m{i}") for i in range(7))]))

    assert "19 of 19 replicas are ready" in text


def test_the_status_of_many_hosts_shows_those_with_a_problem() -> None:
    """And the sums of the others."""
    lines = status_text(fleet_of(1, 0, 100)).splitlines()

    table = [line.split() for line in lines if line.startswith(("HOST", "inf2.48xlarge/0 ", "99 more"))]
    assert [row[0] for row in table] == ["HOST", "inf2.48xlarge/0", "99"]
    assert table[2] == ["99", "more", str(99 * 24), str(99 * 16), str(99 * 4), str(99 * 3), "99"]
    assert MOST_HOSTS < 100


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No colors, whatever runs the tests."""
    monkeypatch.setenv("NO_COLOR", "1")


def test_watch_prints_an_item_when_it_changes_until_ctrl_c(admin: LiveAdmin, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "COREWRIGHT_URL": admin.url,
        "COREWRIGHT_TOKEN": TOKEN,
        "COREWRIGHT_HOME": str(tmp_path),
    }
    command = [sys.executable, "-m", "orchestrator.cli.main", "get", "models", "chat", "--watch", "-o", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        states = [json.loads(process.stdout.readline())["state"]]
        admin.fleet.told_status["models"][0]["state"] = "failed"
        states.append(json.loads(process.stdout.readline())["state"])
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=30)
        assert (states, process.returncode, rest, errors) == (["degraded", "failed"], 0, "", "")
    finally:
        process.kill()
        process.wait()
