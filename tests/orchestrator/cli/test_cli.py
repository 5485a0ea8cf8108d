"""The command line: exit codes, streams and the JSON that docs/cli.md promises.

Its fleet is played, behind the real admin API. The tables are golden files: UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import contextlib
import copy
import getpass
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_group

from orchestrator.api.schemas import OperationRefused
from orchestrator.cli import client as cli_client
from orchestrator.cli.app import COMMANDS, app
from orchestrator.cli.main import application, run
from orchestrator.cli.plan_result import model_lines
from orchestrator.cluster.settings import SETTINGS, resolve
from orchestrator.process.home import Home
from orchestrator.process.speed_record import record_of
from orchestrator.process.version import corewright_version
from placements.spec.json_schema import json_schema
from tests.fleet import until
from tests.orchestrator.fakefleet import AT, LOG, PLAN, ROLLOUT, SPEC, TOKEN, LiveAdmin, bad_spec, event
from tests.orchestrator.fleet_records import fleet_record
from workers.host import host_facts as this_host

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"

GOOD = """\
version: 1
name: two
hosts: {instance: inf2.48xlarge}
models:
  big: {source: org/big, tp_degree: 8, cores: ["0-7"]}
  small: {source: "s3://models/small"}
"""
BAD = """\
version: 1
models:
  a: {source: org/a, tp_degree: 8, cores: ["0-7"]}
  b: {source: org/b, tp_degree: 4, cores: ["6-9"], tp: 4}
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("COREWRIGHT_URL", "COREWRIGHT_TOKEN", *(setting.env for setting in SETTINGS[:-1])):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "good.yaml").write_text(GOOD)
    return str(tmp_path / "good.yaml")


@pytest.fixture
def bad(tmp_path: Path) -> str:
    (tmp_path / "bad.yaml").write_text(BAD)
    return str(tmp_path / "bad.yaml")


def data(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_version_prints_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON."""
    for command in (["version"], ["--version"]):
        assert run(command) == 0
        assert capsys.readouterr().out == f"{corewright_version()}\n"
    assert run(["version", "-o", "json"]) == 0
    assert data(capsys) == {"version": corewright_version()}


def test_a_valid_spec_with_warnings_exits_0(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings, such as for sources that are not on disk, are reported but do not fail."""
    assert run(["validate", good, "-o", "json"]) == 0

    problems = data(capsys)["problems"]
    assert [(problem["id"], problem["severity"]) for problem in problems] == [("checkpoint-unreadable", "warning")] * 2
    assert problems[0].keys() == {"id", "severity", "where", "what", "hint"}
    assert problems[0]["where"] == f"{good}:5:9"


@pytest.mark.parametrize(("command", "code"), [(["validate"], 0), (["plan"], 2)])
def test_a_missing_folder_is_an_error_unless_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], code: int
) -> None:
    """On emulated hosts, which are this machine; with `--offline` it is a warning that nothing was checked."""
    (tmp_path / "spec.yaml").write_text("hosts: {emulate: inf2.xlarge}\nmodels: {a: {source: ./nowhere}}\n")
    answers = []
    for options in ([], ["--offline"]):
        result = run([*command, str(tmp_path / "spec.yaml"), "-o", "json", *options])
        answers.append((result, [(problem["id"], problem["severity"]) for problem in data(capsys)["problems"]]))
    assert answers == [(1, [("model-not-found", "error")]), (code, [("checkpoint-unreadable", "warning")])]


def test_a_bad_spec_exits_1_with_every_problem_and_its_place(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All errors at once, each with file, line and column."""
    assert run(["validate", bad, "-o", "json"]) == 1

    errors = {problem["id"]: problem["where"] for problem in data(capsys)["problems"] if problem["severity"] == "error"}
    assert errors.keys() >= {"unknown-key", "pin-overlap"}
    assert all(where.startswith(f"{bad}:4:") for where in errors.values())


@pytest.mark.parametrize("replicas", ["2", "{min: 0, max: 2}"])
@pytest.mark.parametrize(("hosts", "code"), [("hosts: {emulate: inf2.48xlarge}\n", 1), ("", 0)])
def test_what_never_fits_is_valid_only_if_the_spec_leaves_its_hosts_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], replicas: str, hosts: str, code: int
) -> None:
    """Also a model of min 0, whose requests would wait for nothing."""
    models = "models:\n  base: {engine: echo, tp_degree: 24}\n  m: {engine: echo, tp_degree: 8, replicas: %s}\n"
    (tmp_path / "spec.yaml").write_text(hosts + models % replicas)

    assert run(["validate", str(tmp_path / "spec.yaml"), "-o", "json"]) == code

    (problem,) = data(capsys)["problems"]
    assert problem["severity"] == ("error" if code else "warning")
    assert problem["hint"] == "lower the min of the others, or add hosts; `corewright explain m` tries more"


def test_a_plan_for_an_empty_fleet_consists_of_changes(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a fleet every placement is a change: exit code 2, and stable JSON."""
    assert run(["plan", good, "-o", "json"]) == 2

    plan = data(capsys)
    assert plan["unplaced"] == []
    assert [placement["model"] for placement in plan["placements"]] == ["big", "small"]
    first = plan["placements"][0]
    assert first.keys() == {"model", "replica", "host", "cores", "threads", "env"}
    assert (first["replica"], first["host"], first["cores"]) == (0, "inf2.48xlarge/0", "0-7")
    assert first["env"]["NEURON_RT_VISIBLE_CORES"] == first["cores"]
    assert first["env"]["OMP_NUM_THREADS"] == str(first["threads"]) == "60"
    assert plan["placements"][1]["cores"] == plan["placements"][1]["env"]["NEURON_RT_VISIBLE_CORES"] == "8"


def test_the_plan_of_a_bad_spec_has_its_problems_and_no_placements(
    bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1; the JSON is still on stdout."""
    assert run(["plan", bad, "-o", "json"]) == 1

    plan = data(capsys)
    assert (plan["placements"], plan["unplaced"]) == ([], [])
    assert "pin-overlap" in {problem["id"] for problem in plan["problems"]}


def test_a_plan_with_unplaced_replicas_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the constraint and the numbers for each."""
    (tmp_path / "full.yaml").write_text(
        "hosts: {instance: inf2.48xlarge}\nmodels:\n  a: {source: org/a, tp_degree: 8, replicas: 4}\n"
    )

    assert run(["plan", str(tmp_path / "full.yaml"), "-o", "json"]) == 1

    plan = data(capsys)
    assert len(plan["placements"]) == 3
    (missing,) = plan["unplaced"]
    assert (missing["model"], missing["replica"]) == ("a", 3)
    assert "8 contiguous cores" in missing["problems"][0]["what"]


def test_a_plan_names_the_models_that_may_be_without_a_replica(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a spec of nothing but those would seem to be empty."""
    path = tmp_path / "spec.yaml"
    path.write_text(
        "hosts: {emulate: inf2.xlarge}\nmodels:\n"
        "  warm: {engine: echo}\n  hot: {engine: echo, replicas: {min: 0, max: 2}}\n"
        "  cold: {engine: echo, replicas: {min: 0, max: 1}}\n"
    )
    assert run(["plan", str(path)]) == 2
    assert "no replicas until the first request (min: 0): hot, cold\n" in capsys.readouterr().out


def test_plan_shows_what_was_measured_beyond_the_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `corewright verify`, on the type of machine."""
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    record = record_of(Home.from_environment())
    record.add_constants("inf2.48xlarge", "vllm", {"hbm_gib": 0.3, "host_gib": 1.25}, time.time())
    (tmp_path / "home").mkdir()
    record.write(record.content(time.time()))
    tiny = Path(__file__).parents[3] / "placements/examples/models/tiny"
    spec, again = tmp_path / "spec.yaml", tmp_path / "again.yaml"
    text = f"hosts: {{instance: inf2.48xlarge}}\nmodels: {{m: {{source: {tiny}}}}}\n"
    spec.write_text(text)
    again.write_text(text.replace("inf2.48xlarge", "trn1.32xlarge"))
    assert run(["plan", str(spec)]) == 2
    shown = capsys.readouterr().out
    assert "measured on inf2.48xlarge: 0.30 GiB on each core beyond the estimate (not in USABLE), 1.25 of" in shown
    assert run(["plan", str(again)]) == 2
    assert "measured" not in capsys.readouterr().out


def test_a_plan_shows_its_resources(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Threads and environments beside the core map and the replicas, except in the brief form."""
    assert run(["plan", good]) == 2
    long = capsys.readouterr().out
    assert run(["plan", good, "--brief"]) == 2
    brief = capsys.readouterr().out
    details = (
        "Threads on inf2.48xlarge/0: 192 CPUs - 8 reserved = 184",
        "Environment of each replica",
        "OMP_NUM_THREADS=60",
    )
    assert all(line in long and line not in brief for line in details)
    assert all(
        line in brief for line in ("9 of 24 cores in use", "small/0  inf2.48xlarge/0  8", "replicas: 2 to start")
    )


def test_a_plan_of_thousands_of_replicas_is_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Identical hosts share a map, and fifty replicas are listed."""
    hosts = "hosts: {instance: inf2.48xlarge, count: 500}\n"
    (tmp_path / "many.yaml").write_text(f"{hosts}models:\n  a: {{source: org/a, tp_degree: 8, replicas: 1000}}\n")
    assert run(["plan", str(tmp_path / "many.yaml")]) == 2
    out = capsys.readouterr().out
    assert len(out.splitlines()) < 200
    assert "... and 950 more; `-o json` has every replica" in out
    assert "hosts, inf2.48xlarge/" in out


def test_explain_suggests_remedies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a spec without a fleet; the exit code is 1 for a model below its `min`."""
    (tmp_path / "full.yaml").write_text(
        "hosts: {instance: inf2.48xlarge}\nmodels:\n"
        "  a: {source: org/a, tp_degree: 8, replicas: 4}\n  b: {source: org/b, priority: 1}\n"
    )
    assert run(["explain", "a", str(tmp_path / "full.yaml"), "-o", "json"]) == 1
    answer = data(capsys)
    assert (answer["fits"], [constraint["id"] for constraint in answer["failed"]]) == (False, ["no-room"])
    assert {"change": "replicas: 2", "id": "replicas"}.items() <= answer["suggestions"][1].items()
    assert run(["explain", "b", str(tmp_path / "full.yaml")]) == 0
    assert capsys.readouterr().out.startswith("b: 1 of 1 replica has a place (min 1, priority 1)\n")


def test_a_failed_plan_has_a_summary_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the number of unplaced replicas; their rows come first."""
    fields = "{source: org/a, replicas: 60}"
    (tmp_path / "many.yaml").write_text(f"hosts: {{instance: inf2.48xlarge}}\nmodels: {{a: {fields}}}\n")
    assert run(["plan", str(tmp_path / "many.yaml")]) == 1
    out = capsys.readouterr().out
    assert out.endswith("\n\nthe plan fails: 24 of 60 replicas have a place; 36 do not\n")
    rows = [line.split() for line in out.splitlines() if line.startswith("a/")]
    assert [row[-1] for row in rows[:37]] == ["unplaced"] * 36 + ["start"]
    assert "(and 35 more replicas for the same reason)" in out


def test_an_explanation_fits_into_80_columns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Hints are below what they apply to; if only the file is wrong, no missing remedy is reported."""
    text = (
        "hosts: [{instance: inf2.48xlarge}, {instance: trn1.32xlarge}]\nmodels:\n  a: {source: org/a, replicas: 70}\n"
    )
    (tmp_path / "many.yaml").write_text(text)
    assert run(["explain", "a", str(tmp_path / "many.yaml")]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "     hint: use fewer replicas" in out
    (tmp_path / "key.yaml").write_text(text.replace("70", "7, colour: red"))
    assert run(["explain", "a", str(tmp_path / "key.yaml")]) == 1
    out = capsys.readouterr().out
    assert "No change was tried: fix the errors above first." in out
    assert "No single change" not in out


def test_explain_works_where_the_spec_has_errors(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are the constraints that fail."""
    assert run(["explain", "b", bad, "-o", "json"]) == 1
    assert {"unknown-key", "pin-overlap"} <= {constraint["id"] for constraint in data(capsys)["failed"]}


def test_a_window_is_searched_for_in_the_plan_of_a_spec(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A free window needs no moves."""
    assert run(["plan", good, "--defrag", "12", "-o", "json"]) == 0
    answer = data(capsys)
    assert (answer["window"], answer["moves"]) == ({"host": "inf2.48xlarge/0", "cores": "12-23"}, [])


def test_the_schema_of_a_spec_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema"]) == 0
    assert data(capsys) == json_schema()


def test_yaml_output_is_the_json_as_yaml(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The two machine forms hold the same."""
    run(["plan", good, "-o", "json"])
    as_json = data(capsys)
    run(["plan", good, "-o", "yaml"])

    assert yaml.safe_load(capsys.readouterr().out) == as_json


def test_a_spec_is_read_from_standard_input(good: str) -> None:
    """With `-`."""
    result = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli.main", "validate", "-"], input=GOOD, capture_output=True, text=True
    )

    assert result.returncode == 0
    assert "<stdin>: valid" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["plan"],
        ["plan", "--brief"],
        ["plan", "x", "--defrag", "0"],
        ["plan", "--defrag", "4", "--offline"],
        ["explain", "big", "--offline"],
        ["explain"],
        ["schema", "x"],
        ["validate", "x", "--nope"],
        ["up", "x", "--port", "99999"],
        ["status", "-o", "x"],
    ],
)
def test_wrong_usage_exits_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """EX_USAGE, and the reason on stderr."""
    assert run(arguments) == 64
    assert "Error" in capsys.readouterr().err


def test_every_command_of_a_module_is_in_the_table() -> None:
    """A command that is not would be imported, but missing from the command line."""
    names = [name for commands in COMMANDS.values() for name in commands]
    assert len(names) == len(set(names))
    assert list(application().commands) == names
    assert set(get_group(app).commands) == set(names)


def test_the_help_cuts_no_sentence_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longer ones wrap. Each group has its title."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", *COMMANDS]


def test_an_invalid_choice_is_reported_with_the_valid_choices(capsys: pytest.CaptureFixture[str]) -> None:
    """In plain words, regardless of the command-line library."""
    assert run(["get", "placements"]) == 64

    stderr = capsys.readouterr().err
    assert "'placements' is not one of 'models', 'replicas'" in stderr
    assert "Value error" not in stderr


ABOUT_A_FLEET = [
    "status",
    "down",
    "apply SPEC",
    "diff SPEC",
    "explain chat",
    "plan --defrag 4",
    "get models",
    "describe chat",
    "events",
    "logs chat",
    "rollout status",
    "rollout history",
    "rollout undo",
    "rollout pause",
    "rollout resume",
    "rollout promote",
    "rollout restart chat",
    "scale chat 1",
    "load chat",
    "unload chat",
    "cordon inf2.48xlarge/0",
    "uncordon inf2.48xlarge/0",
    "drain chat/0",
    "hosts wait inf2.48xlarge/0",
]


@pytest.mark.parametrize("command", [command.split() for command in ABOUT_A_FLEET], ids=" ".join)
def test_without_a_fleet_its_commands_fail_with_no_fleet(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1."""
    assert run(command) == 1
    assert "error: no-fleet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        ("validate /no/such/spec.yaml", ["error: spec-unreadable: /no/such/spec.yaml cannot be read: No such file"]),
        ("validate BAD", ["pin-overlap", "unknown-key"]),
        ("explain z BAD", ["error: model-unknown"]),
        ("plan GOOD --defrag 24", ["error: no-window"]),
        ("up BAD", ["pin-overlap", "unknown-key"]),
        ("up GOOD", ["host-differs"]),  # it is valid elsewhere
        ("up GOOD --host 0.0.0.0", ["host-without-keys: --host 0.0.0.0", "corewright keys create"]),
        ("up - --watch", ["error: watch-needs-file"]),
    ],
)
def test_problems_go_to_stderr_and_nothing_is_created(
    command: str, texts: list[str], good: str, bad: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, without colors where there is no terminal, and without a traceback. A verdict is on stdout."""
    assert run([{"GOOD": good, "BAD": bad}.get(word, word) for word in command.split()]) == 1
    captured = capsys.readouterr()
    assert [text for text in texts if text not in captured.err] == []
    assert "\033" not in captured.err
    assert "Traceback" not in captured.err
    assert captured.out.startswith(f"{bad}: ") is (command == "validate BAD")
    assert not home.exists()


# A fleet that runs


@pytest.fixture
def fleet(admin: LiveAdmin, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveAdmin]:
    """The one of COREWRIGHT_URL, for this shell; its times are shown in UTC."""
    monkeypatch.setenv("COREWRIGHT_URL", admin.url)
    monkeypatch.setenv("COREWRIGHT_TOKEN", TOKEN)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield admin
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A spec that differs from the fleet's in one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.yaml").write_text(SPEC.replace("512", "1024"))
    return "new.yaml"


def golden(name: str, actual: str) -> str:
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        (GOLDEN / f"{name}.txt").write_text(actual)
    return (GOLDEN / f"{name}.txt").read_text()


SHOWN = [
    ("status", 0),
    ("plan new.yaml", 2),
    ("plan --brief new.yaml", 2),
    ("plan --defrag 8", 2),
    ("explain chat", 1),
    ("apply new.yaml", 0),
    ("apply new.yaml --dry-run", 2),
    ("diff new.yaml", 2),
    ("get models", 0),
    ("get models chat", 0),
    ("get replicas", 0),
    ("get replicas -l state=failed", 0),
    ("get hosts", 0),
    ("top --once", 0),
    ("get revisions", 0),
    ("get revisions 2", 0),
    ("get events", 0),
    ("get events small", 0),
    ("describe chat", 0),
    ("describe small", 0),
    ("describe chat/1", 0),
    ("describe inf2.48xlarge/0", 0),
    ("rollout status", 0),
    ("rollout history", 0),
    ("rollout undo", 0),
    ("rollout pause", 0),
    ("events --since 8", 0),
    ("logs chat", 0),
    ("config view", 0),
]


@pytest.mark.parametrize(("command", "code"), SHOWN, ids=[command for command, _ in SHOWN])
def test_a_command_prints_exactly_this(
    command: str, code: int, fleet: LiveAdmin, new: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stderr first, then the table."""
    assert run(command.split()) == code
    printed = capsys.readouterr()
    actual = (printed.err + printed.out).replace(str(home), "HOME")
    if command == "config view":  # its columns are as wide as the home's path
        actual = re.sub(r" {2,}", "  ", actual)
    assert actual == golden(command.replace(" ", "-").replace("/", "_"), actual)


WIDE = ["get models -o wide", "get replicas -o wide", "get hosts -o wide", "get hosts -o name"]


@pytest.mark.parametrize("command", WIDE)
def test_a_format_of_get_prints_exactly_this(
    command: str, fleet: LiveAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    """More columns than the table, or the names alone."""
    assert run(command.split()) == 0
    actual = capsys.readouterr().out
    assert actual == golden(command.replace(" ", "-"), actual)


@pytest.mark.parametrize("command", [c for c, _ in SHOWN if c.split()[0] not in ("logs", "top")])
def test_a_command_has_equal_json_and_yaml_output(
    command: str, fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without anything else on stdout."""
    run([*command.split(), "-o", "json"])
    as_json = data(capsys)
    run([*command.split(), "-o", "yaml"])
    assert yaml.safe_load(capsys.readouterr().out) == as_json


@pytest.mark.parametrize(
    ("command", "call", "says"),
    [
        ("rollout resume", ("resume",), "revision 3: progressing"),
        ("rollout promote", ("promote",), "revision 3: progressing"),
        ("rollout restart chat", ("restart", "chat"), "revision 3: progressing"),
        ("scale chat 1", ("scale", "chat", 1), "chat: 1 replica"),
        ("scale chat 0", ("scale", "chat", 0), "chat: 0 replicas"),
        ("scale chat auto", ("scale", "chat", None), "chat: as the spec says"),
        ("load chat", ("load", "chat"), "chat: loading"),
        ("unload chat", ("unload", "chat"), "chat: unloading"),
        ("drain chat/0", ("drain", "chat/0"), "chat/0: draining"),
        ("drain --deadline-s 90 a/0", ("drain", "a/0", 90.0), "a/0: draining"),
        ("drain --deadline-s 9 --keep-served a/1", ("drain", "a/1", 9.0, "keep_served"), "a/1: draining"),
        ("cordon inf2.48xlarge/0", ("cordon", "inf2.48xlarge/0", None, True), "inf2.48xlarge/0: cordoned"),
        ("cordon inf2.48xlarge/0:3", ("cordon", "inf2.48xlarge/0", "3", True), "inf2.48xlarge/0 cores 3: cordoned"),
        (
            "uncordon inf2.48xlarge/0:0-5",
            ("cordon", "inf2.48xlarge/0", "0-5", False),
            "inf2.48xlarge/0 cores 0-5: uncordoned",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_sends_the_name_of_its_user(
    command: str, call: tuple[Any, ...], says: str, fleet: LiveAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    """And prints one line about the change."""
    assert run(command.split()) == 0
    assert fleet.fleet.calls == [(*call, f"{getpass.getuser()}@{socket.gethostname()}")]
    assert capsys.readouterr().out.startswith(says)


@pytest.mark.parametrize(
    "command",
    [
        "scale chat many",
        "scale chat -1",
        "scale chat",
        "cordon inf2.48xlarge/0:x",
        "cordon inf2.48xlarge/0:",
        "cordon inf2.48xlarge/0:1,3",
        "get things",
        "get revisions x",
        "get models -l state",
        "get models -l stat=ready",
        "top --interval 0",
        "apply new.yaml --canary 1",
        "apply new.yaml --canary 0",
        "apply new.yaml --check-index x",
        "rollout",
        "rollout frobnicate",
        "rollout undo --to 0",
        "events --since -1",
        "logs chat --replica -1",
        "config",
    ],
)
def test_wrong_usage_sends_no_request(
    command: str, fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 64."""
    assert run(command.split()) == 64
    assert fleet.fleet.calls == []


@pytest.mark.parametrize("command", ["get models nope", "get replicas chat", "get hosts nope", "describe nope"])
def test_an_unknown_name_is_an_error_with_the_known_names(
    command: str, fleet: LiveAdmin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(command.split()) == 1
    stderr = capsys.readouterr().err
    assert "not-in-fleet" in stderr
    assert "it has" in stderr


def test_a_fleet_whose_status_has_another_form_is_an_error(
    fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the field and this version."""
    monkeypatch.setattr(fleet.fleet, "status", lambda: {**fleet.fleet.told_status, "ready": "yes"})
    assert run(["status"]) == 1
    stderr = capsys.readouterr().err
    assert "fleet-refused" in stderr
    assert f"corewright {corewright_version()} does: Expected `bool`, got `str` - at `$.ready`" in stderr


# apply, plan, diff


def test_plan_shows_the_controllers_plan(fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Unchanged in JSON; the request has the text, the file's name and its folder."""
    assert run(["plan", new, "-o", "json"]) == 2
    assert data(capsys) == fleet.fleet.told_plan
    assert fleet.fleet.calls == [("propose", Path(new).read_text(), new, str(Path.cwd()))]


OTHER_HOSTS = OperationRefused(
    "hosts-changed", "good.yaml is for other hosts than this fleet runs on", "corewright down, then up"
)


@pytest.mark.parametrize("command", ["plan", "plan --defrag 8", "explain big"])
def test_a_spec_for_other_hosts_is_planned_without_the_running_fleet(
    command: str, fleet: LiveAdmin, good: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line reports it; the output is that of `--offline`, without a request to the fleet."""
    fleet.fleet.refusal = OTHER_HOSTS
    code = run([*command.split(), good])
    output = capsys.readouterr()
    assert len(fleet.fleet.calls) == 1
    assert "good.yaml is for other hosts than the running fleet: planned without it, as with --offline\n" in output.err

    assert run([*command.split(), good, "--offline"]) == code != 1
    alone = capsys.readouterr()
    assert len(fleet.fleet.calls) == 1
    assert alone.out == output.out != ""
    assert "other hosts" not in alone.err


@pytest.mark.parametrize("command", ["apply", "apply --dry-run", "diff"])
def test_commands_about_the_running_fleet_still_reject_other_hosts(
    command: str, fleet: LiveAdmin, good: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preview without the fleet would show an impossible result."""
    fleet.fleet.refusal = OTHER_HOSTS
    assert run([*command.split(), good]) == 1
    assert "error: hosts-changed" in capsys.readouterr().err


@pytest.mark.parametrize("severity", ["error", "warning"])
def test_plan_reports_replicas_without_a_place(
    severity: str, fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and exits with 1 if they are within `min`."""
    what = "chat/2 needs 8 contiguous cores, the longest free run on inf2.48xlarge/0 is 7 (16-22)"
    problem = {"id": "no-room", "severity": severity, "where": "", "what": what, "hint": ""}
    fleet.fleet.told_plan["unplaced"] = [{"model": "chat", "replica": 2, "problems": [problem]}]
    assert run(["plan", new]) == (1 if severity == "error" else 2)
    assert f"\nunplaced: {what}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", ["plan new.yaml -o json", "apply new.yaml", "apply new.yaml --dry-run", "diff new.yaml"]
)
def test_a_spec_that_the_fleet_rejects_is_shown_with_its_problems(
    command: str, fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1."""
    fleet.fleet.refusal = bad_spec()
    assert run(command.split()) == 1
    printed = capsys.readouterr()
    assert "pin-overlap" in (printed.out if "json" in command else printed.err)


def test_apply_sends_its_conditions(fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The index of the plan, and the canary's share."""
    assert run(["apply", new, "--check-index", "41", "--canary", "0.25", "-o", "json"]) == 0
    assert data(capsys).keys() == {"changed", "revision", "index", "plan"}
    (call,) = fleet.fleet.calls
    assert (call[0], *call[5:]) == ("apply", "apply", 41, 0.25)


def test_a_dry_run_applies_nothing_and_compares_the_index(
    fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the controller would."""
    assert run(["apply", new, "--dry-run", "--check-index", "41"]) == 2
    assert run(["apply", new, "--dry-run", "--check-index", "40"]) == 1
    assert "index-changed" in capsys.readouterr().err
    assert {call[0] for call in fleet.fleet.calls} == {"propose"}


GONE: dict[str, Any] = {
    "model": "gone",
    "action": "delete",
    "tag": "restart",
    "fields": [],
    "replicas": {"before": 0, "after": 0},
}
GONE |= {"strategy": None, "outage_s": None, "predicted_s": None, "why": "", "possible": True}


def outage(seconds: float | None, strategy: str) -> dict[str, Any]:
    chat: dict[str, Any] = copy.deepcopy(PLAN["models"][0])
    return {**chat, "strategy": strategy, "outage_s": seconds}


@pytest.mark.parametrize("command", ["apply new.yaml", "rollout undo"])
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (GONE, "gone is deleted, with 0 replicas"),
        (outage(12.0, "hold"), "chat has no ready replica for about 12 s, and requests wait"),
        (outage(None, "in_place"), "chat has no ready replica for an unknown time"),
    ],
)
def test_a_deletion_or_a_predicted_outage_is_confirmed_on_a_terminal(
    command: str,
    model: dict[str, Any],
    says: str,
    fleet: LiveAdmin,
    new: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The changes are shown before the question. No changes nothing; yes applies exactly what was shown."""
    fleet.fleet.told_plan["models"].append(model)
    verb = command.split()[-1 if "undo" in command else 0]
    for name in ("orchestrator.cli.output.on_terminal", "orchestrator.cli.apply.on_terminal"):
        monkeypatch.setattr(name, lambda: True)
    monkeypatch.setattr("builtins.input", lambda: "")
    assert run(command.split()) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-2:] == [says, "Continue? [y/N] "]
    assert f"{model['model']}: " in shown.out
    assert [call[0] for call in fleet.fleet.calls] == ["propose"]

    monkeypatch.setattr("builtins.input", lambda: "y")
    assert run(command.split()) == 0
    assert [call[0] for call in fleet.fleet.calls] == ["propose", "propose", verb]
    if verb == "apply":
        assert fleet.fleet.calls[-1][-2] == 41  # the index of the plan that was shown

    capsys.readouterr()
    assert run([*command.split(), "--yes"]) == 0
    assert "Continue?" not in capsys.readouterr().err
    assert fleet.fleet.calls[-1][0] == verb


def test_the_spec_of_another_fleet_is_confirmed_on_a_terminal(
    fleet: LiveAdmin, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = "the spec is of the fleet b, and this fleet is a"
    problem = {"id": "fleet-name-differs", "severity": "warning", "where": "", "what": what, "hint": ""}
    fleet.fleet.told_plan["problems"].append(problem)
    for name in ("orchestrator.cli.output.on_terminal", "orchestrator.cli.apply.on_terminal"):
        monkeypatch.setattr(name, lambda: True)
    monkeypatch.setattr("builtins.input", lambda: "")

    assert run(["apply", new]) == 1

    assert capsys.readouterr().err.splitlines()[-2:] == [what, "Continue? [y/N] "]
    assert [call[0] for call in fleet.fleet.calls] == ["propose"]


def test_a_change_without_a_risk_is_not_confirmed(
    fleet: LiveAdmin, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal; without a terminal no change is confirmed."""
    fleet.fleet.told_plan["models"].append(GONE)
    assert run(["apply", new]) == 0
    fleet.fleet.told_plan["models"].pop()
    for name in ("orchestrator.cli.output.on_terminal", "orchestrator.cli.apply.on_terminal"):
        monkeypatch.setattr(name, lambda: True)
    assert run(["apply", new]) == 0
    assert "Continue?" not in capsys.readouterr().err


def test_undo_reports_its_changes_before_and_after(fleet: LiveAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    """The revision that it applies again, the changes, and the new revision."""
    assert run(["rollout", "undo", "--to", "1"]) == 0
    assert [call[0] for call in fleet.fleet.calls] == ["propose", "undo"]
    assert fleet.fleet.calls[-1][1] == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "going back to revision 1"
    assert "-/+ chat: replace (restart), in_place, outage 0 s, done in 19 s" in lines
    assert lines[-1] == "revision 4 (index 50) is revision 1 again"


# Waiting


def rollout_in(state: str, **more: Any) -> dict[str, Any]:
    return {**ROLLOUT, "state": state, **more}


def planned(**changes: Any) -> Callable[[LiveAdmin], object]:
    return lambda fleet: fleet.fleet.told_plan.update(changes)


def rolling(
    *rollouts: dict[str, Any], then: tuple[str, str] = ("", ""), **newest: str
) -> Callable[[LiveAdmin], object]:
    """The rollouts that the fleet reports one after the other, an event, and fields of the newest revision."""

    def prepare(fleet: LiveAdmin) -> None:
        fleet.fleet.rollouts = list(rollouts)
        fleet.fleet.history[0].update(newest)
        if then[0]:
            fleet.tell(event(43, *then))

    return prepare


NEXT = rollout_in("complete", revision=4)
BACK = ("RolledBack", "to revision 2")
CHANGED = OperationRefused("index-changed", "the fleet's index is 43, not 41", "review the new plan")
OUTCOMES: dict[str, tuple[Callable[[LiveAdmin], object], str, int, str, str]] = {  # ..., code, stdout, start of stderr
    "a plan without changes": (
        planned(changes=[], models=PLAN["models"][2:]),
        "plan new.yaml --brief",
        0,
        r"(?s).*nothing to do\n.*",
        "",
    ),
    "the removal of an idle model is a change": (
        planned(changes=[], models=[GONE]),
        "plan new.yaml",
        2,
        r"(?s).*\n- gone: delete\n.*\nmodels: 1 to delete; replicas: no changes\n.*",
        "",
    ),
    "an apply of the same spec": (
        lambda fleet: setattr(fleet.fleet, "changed", False),
        "apply new.yaml",
        0,
        "nothing to do: revision 3 is the same spec\n",
        "",
    ),
    "a diff of the same text": (lambda fleet: Path("new.yaml").write_text(SPEC), "diff new.yaml", 0, "", ""),
    "a refusal has its id and hint": (
        lambda fleet: setattr(fleet.fleet, "refusal", CHANGED),
        "apply new.yaml --check-index 41",
        1,
        "",
        "error: index-changed: the fleet's index is 43, not 41\n    hint: review the new plan\n",
    ),
    "promote counts what is left": (
        rolling(rollout_in("canary", canary=0.25, reason="waits"), ROLLOUT),
        "rollout promote",
        0,
        "promoting the canary of revision 3, which gets 25% of the requests\nchat: 1 old to replace\n"
        r"revision 3: progressing: chat: 1 of 2 ready, 1 old\n(?s:.*)",
        "",
    ),
    "waiting ends at its timeout": (
        lambda fleet: None,
        "apply new.yaml --wait --timeout 0.1",
        1,
        "(?s).*",
        r"(?s).*rollout-late.*the rollout continues",
    ),
    "waiting ends with another revision": (
        rolling(ROLLOUT, rollout_in("progressing", revision=4), then=("Applied", "by bob@wright")),
        "apply new.yaml --wait -o json",
        1,
        "",
        r"(?s).*rollout-replaced: revision 3: replaced by revision 4",
    ),
    "waiting reports a rollback": (
        rolling(ROLLOUT, NEXT, then=BACK, state="rolled_back", reason="chat/2 failed 3 times"),
        "apply new.yaml --wait",
        1,
        r"(?s).*revision 3: rolled back: chat/2 failed 3 times; replaced by revision 4\n",
        "",
    ),
    "a revision that was rolled back is not shown with the models of the next": (
        rolling(ROLLOUT, ROLLOUT, NEXT, then=BACK, state="rolled_back"),
        "rollout status --wait",
        1,
        r"revision 3: rolled back: replaced by revision 4\n",
        "",
    ),
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_command_ends_with_this_outcome(
    outcome: str, fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its exit code, all that it prints on stdout, and the start of what it prints on stderr."""
    prepare, command, code, out, err = OUTCOMES[outcome]
    prepare(fleet)
    assert run(command.split()) == code
    printed = capsys.readouterr()
    assert re.fullmatch(out, printed.out)
    assert re.match(err, printed.err)


@pytest.mark.slow
@pytest.mark.parametrize(("state", "code"), [("complete", 0), ("canary", 0), ("failed", 1), ("rolled_back", 1)])
@pytest.mark.parametrize("command", ["apply new.yaml", "rollout status"])
def test_waiting_ends_with_the_rollout(
    command: str, state: str, code: int, fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 when it is complete, or when its canary serves; events come on stderr meanwhile."""
    fleet.fleet.rollouts = [ROLLOUT, ROLLOUT, rollout_in(state, reason="because")]
    fleet.fleet.told_events.append(event(42, "Ready", "serves", model="chat", replica="chat/1"))
    assert run([*command.split(), "--wait"]) == code
    printed = capsys.readouterr()
    assert f"revision 3: {state.replace('_', ' ')}: because" in printed.out
    assert printed.err.count("Ready") == 1  # however often it asks
    assert "Failed" not in printed.err  # it was before the apply


def test_the_json_of_a_waiting_apply_has_the_rollouts_end(
    fleet: LiveAdmin, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One document."""
    fleet.fleet.rollouts = [rollout_in("complete")]
    assert run(["apply", new, "--wait", "-o", "json"]) == 0
    assert data(capsys)["rollout"]["state"] == "complete"


def waiting(call: tuple[Any, ...]) -> bool:
    """Returns whether this is a question that waits for an answer."""
    return (call[0] == "events" and call[3] > 0) or (call[0] == "logs" and call[4] > 0)


def interrupted(fleet: LiveAdmin, arguments: list[str], says: str) -> tuple[int, str, str]:
    """Ctrl-C once ``says`` is on stdout or stderr: exit code and both streams."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if says in line:
                break
        until(lambda: any(waiting(call) for call in fleet.fleet.calls), 20, "it waits")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        return process.returncode, "".join(lines) + out, err
    finally:
        process.kill()


def test_ctrl_c_does_not_stop_the_rollout(fleet: LiveAdmin, new: str) -> None:
    """The command reports this, and exits with 130."""
    code, _, err = interrupted(fleet, ["apply", str(Path(new).absolute()), "--wait"], "revision 3")
    assert code == 130
    assert err.endswith("the rollout continues: see `corewright rollout status`\n")
    assert "Traceback" not in err


def test_followed_events_are_printed_until_ctrl_c(fleet: LiveAdmin) -> None:
    """Which is not a failure; in JSON each event is one line."""
    threading.Timer(1.0, lambda: fleet.tell(event(13, "Ready", "serves", model="chat"))).start()
    code, out, err = interrupted(fleet, ["events", "-f", "-o", "json"], '"seq": 13')
    assert (code, err) == (0, "")
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [5, 8, 9, 12, 13]


def test_a_followed_log_is_printed_until_ctrl_c(fleet: LiveAdmin) -> None:
    """From the last printed byte, of the same replica."""
    code, out, err = interrupted(fleet, ["logs", "chat", "--replica", "1", "-f"], "ready")
    assert (code, err) == (0, "")
    assert out == LOG.decode()
    assert ("logs", "chat", 1, len(LOG), 30.0) in fleet.fleet.calls


def test_following_survives_a_restart_of_the_controller(
    fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its API is unavailable for a moment; the third request succeeds."""
    real, failures = cli_client.AdminClient.get, [1, 2]

    def get(self: Any, path: str, query: Any = None) -> Any:
        if path == "rollout" and failures:
            failures.pop()
            raise cli_client.Failed("fleet-unreachable", "away", "")  # type: ignore[attr-defined]
        return real(self, path, query)

    fleet.fleet.rollouts = [rollout_in("complete")]
    client = cli_client.AdminClient(fleet.url, TOKEN, None)
    monkeypatch.setattr(cli_client.AdminClient, "get", get)
    assert client.get_with_retries("rollout")["state"] == "complete"


def test_all_events_are_shown_for_any_number(fleet: LiveAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    """Page after page; without --since the last 20."""
    fleet.fleet.told_events = [event(number, "Tick", "t", model="chat") for number in range(1, 2502)]
    assert run(["events", "--since", "1", "-o", "json"]) == 0
    assert [item["seq"] for item in data(capsys)["events"]] == list(range(2, 2502))
    assert run(["events", "--model", "chat", "-o", "json"]) == 0
    assert [item["seq"] for item in data(capsys)["events"]] == list(range(2482, 2502))


# Settings


def test_a_setting_comes_from_option_environment_file_or_default(home: Path) -> None:
    """In this order; each shows its origin."""
    home.mkdir()
    (home / "config.yaml").write_text("port: 1\nhost: localhost\nwatch: yes\ndrain_s: 5\n")
    environ = {"COREWRIGHT_HOME": str(home), "COREWRIGHT_PORT": "2", "COREWRIGHT_HOST": "::1", "COREWRIGHT_WATCH": ""}
    settings = resolve({"port": 3, "host": None}, environ)
    assert settings.problems == ()
    rows = [(value.name, value.value, value.origin, value.where) for value in settings.values]
    assert [value for value in rows if value[0] == "dashboard" or value[2] != "default"] == [
        ("host", "::1", "environment", "COREWRIGHT_HOST"),
        ("port", 3, "flag", "--port"),
        ("dashboard", True, "default", ""),
        ("watch", True, "file", f"{home}/config.yaml:3:1"),
        ("drain_s", 5.0, "file", f"{home}/config.yaml:4:1"),
        ("home", str(home), "environment", "COREWRIGHT_HOME"),
    ]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("https://ops.example/console/", "https://ops.example/console/"),
        ("https://Ops.Example:443/fleets/A/console", "https://ops.example/fleets/A/console/"),
        ("http://head:80/console", "http://head/console/"),
        ("http://head:8080/console", "http://head:8080/console/"),
        ("https://[::1]:8443/console/", "https://[::1]:8443/console/"),
        ("https://ops.example/", None),
        ("https://me@ops.example/console/", None),
        ("https://ops.example/console/?x", None),
        ("https://ops.example/console/#cores", None),
        ("ops.example/console/", None),
        ("ftp://ops.example/console/", None),
    ],
)
def test_the_consoles_address_is_as_browsers_write_it(given: str, read: str | None, home: Path) -> None:
    """Since it is compared with the Host and the Origin that they send."""
    settings = resolve({"console_url": given}, {"COREWRIGHT_HOME": str(home)})
    assert (settings["console_url"], len(settings.problems)) == (read, int(read is None))


@pytest.mark.parametrize(
    ("text", "id", "place"),
    [
        ("port: 0\n", "setting-wrong", ":1:1"),
        ("port: true\n", "setting-wrong", ":1:1"),
        ("host: 3\n", "setting-wrong", ":1:1"),
        ("# x\nwatch: maybe\n", "setting-wrong", ":2:1"),
        ("drain_s: -1\n", "setting-wrong", ":1:1"),
        ("drain_s: .nan\n", "setting-wrong", ":1:1"),
        ("console_url: https://ops.example\n", "setting-wrong", ":1:1"),
        ("admin_port: 65536\n", "setting-wrong", ":1:1"),
        ("dashbord: no\n", "setting-unknown", ":1:1"),
        ("home: /x\n", "setting-unknown", ":1:1"),
        ("port: 1\nport: 2\n", "duplicate-key", ":2:1"),
        ("- port\n", "settings-unreadable", ":1:1"),
        ("port: [\n", "yaml-syntax", ":"),
    ],
)
def test_an_invalid_settings_file_stops_up_with_its_line(
    text: str, id: str, place: str, good: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`config view` reports the same."""
    home.mkdir()
    (home / "config.yaml").write_text(text)
    for command in (["up", good], ["config", "view"]):
        assert run(command) == 1
        stderr = capsys.readouterr().err
        assert f"{home}/config.yaml{place}" in stderr
        assert f"error: {id}: " in stderr


@pytest.mark.parametrize("text", ["", "# nothing\n", "port:\n"])
def test_an_empty_settings_file_sets_nothing(text: str, home: Path) -> None:
    """Nor does a key without a value."""
    home.mkdir()
    (home / "config.yaml").write_text(text)
    settings = resolve({}, {"COREWRIGHT_HOME": str(home)})
    assert (settings["port"], settings.problems) == (8080, ())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("COREWRIGHT_PORT", "x"),
        ("COREWRIGHT_PORT", "65536"),
        ("COREWRIGHT_DASHBOARD", "perhaps"),
        ("COREWRIGHT_DRAIN_S", "inf"),
    ],
)
def test_an_invalid_variable_is_reported_with_the_valid_values(
    name: str, value: str, good: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert run(["up", good]) == 1
    stderr = capsys.readouterr().err
    assert f"error: setting-wrong: {name}: " in stderr
    assert repr(value) in stderr


def test_a_host_of_the_environment_is_loopback_too(
    good: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever it comes from."""
    monkeypatch.setenv("COREWRIGHT_HOST", "0.0.0.0")
    assert run(["up", good]) == 1
    assert "host-without-keys: COREWRIGHT_HOST 0.0.0.0" in capsys.readouterr().err


def test_config_view_has_no_fleet_if_none_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Null, and exit code 0."""
    assert run(["config", "view", "-o", "json"]) == 0
    answer = data(capsys)
    assert answer["fleet"] is None
    assert [value["name"] for value in answer["shell"]] == [setting.name for setting in SETTINGS]


def test_commands_reach_a_fleet_below_a_proxys_path(
    fleet: LiveAdmin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path of COREWRIGHT_URL comes before that of the admin API; the proxy removes it."""
    send = HTTPConnection.request

    def proxied(self: HTTPConnection, method: str, path: str, *rest: Any) -> None:
        assert path.startswith("/fleets/two/admin/")
        send(self, method, path.removeprefix("/fleets/two"), *rest)

    monkeypatch.setattr(HTTPConnection, "request", proxied)
    monkeypatch.setenv("COREWRIGHT_URL", f"{fleet.url}/fleets/two/")
    assert run(["status", "-o", "json"]) == 0
    assert data(capsys)["name"] == "two"


def test_down_waits_for_the_daemon_to_end(fleet: LiveAdmin, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an address from the environment it only sends the request."""
    assert run(["down"]) == 0
    assert fleet.downs == 1


def test_down_of_this_homes_fleet_times_out_after_its_drain(
    fleet: LiveAdmin, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The drain of the running fleet plus a margin."""
    monkeypatch.delenv("COREWRIGHT_URL")
    Home(home).prepare()
    started = this_host.process_start(os.getpid())
    assert started is not None
    record = fleet_record(name="two", admin_url=fleet.url, token=TOKEN, pid=os.getpid(), started=started)
    Home(home).write_record(record)
    monkeypatch.setattr("orchestrator.cli.down.DOWN_SPARE_S", -19.8)
    assert run(["down"]) == 1
    assert "down-late" in capsys.readouterr().err
    with contextlib.suppress(OSError):
        Home(home).forget_fleet()


@pytest.mark.parametrize("ending", [False, True])
def test_down_signals_a_fleet_whose_controller_is_not_there_unless_it_ends_already(
    ending: bool, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is starting, for example: `up` gets SIGTERM. A second signal would end running requests at once."""
    Home(home).prepare()
    command = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(7)); print(flush=True); signal.pause()"
    with subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) as starting:
        assert starting.stdout is not None
        starting.stdout.readline()
        started = this_host.process_start(starting.pid)
        assert started is not None
        record = fleet_record(
            name="two", admin_url="http://127.0.0.1:9", token=TOKEN, pid=starting.pid, started=started, ending=ending
        )
        Home(home).write_record(record)
        monkeypatch.setattr("orchestrator.cli.down.DOWN_SPARE_S", -19.5)
        monkeypatch.setattr("orchestrator.cli.down.DRAIN_S", 20.0 if ending else 40.0)
        run(["down"])
        assert starting.poll() == (None if ending else 7)
        starting.kill()
    assert "fleet-unreachable" not in capsys.readouterr().err
    with contextlib.suppress(OSError):
        Home(home).forget_fleet()


@pytest.mark.parametrize("options", ["--keep-served", "--timeout 3"])
def test_an_option_of_drain_that_would_have_no_effect_is_wrong_usage(options: str) -> None:
    assert run(["drain", "inf2.48xlarge/0", *options.split()]) == 64


@pytest.mark.parametrize(
    ("url", "token", "part"),
    [
        ("http://[::1", "x", "'http://[::1' is not a valid URL"),
        ("http://127.0.0.1:x", "x", "is not a valid URL"),
        ("http://127.0.0.1:9", "a\nb", "COREWRIGHT_TOKEN has characters"),
        ("http://127.0.0.1:9", "\u00e9", "COREWRIGHT_TOKEN has characters"),
    ],
)
def test_a_wrong_address_or_token_is_an_error_that_does_not_show_the_token(
    url: str, token: str, part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COREWRIGHT_URL", url)
    monkeypatch.setenv("COREWRIGHT_TOKEN", token)
    assert run(["status"]) == 1
    shown = capsys.readouterr().err
    assert "error: fleet-url-wrong: " in shown
    assert part in shown
    assert token == "x" or token not in shown


@pytest.mark.parametrize("arguments", ["'a b'", "x --requests-per-minute 0", "x --model 'a b'"])
def test_an_invalid_key_does_not_claim_that_the_gateway_is_closed(
    arguments: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is said before the key is valid."""
    assert run(["keys", "create", *shlex.split(arguments)]) != 0
    assert "are rejected" not in capsys.readouterr().err


def test_a_changed_mapping_is_shown_by_its_keys() -> None:
    """Only the changed keys of `scaling`; the number of wanted replicas is not a field of the spec."""
    model = {
        "model": "m",
        "tag": "reconfigure",
        "strategy": None,
        "outage_s": None,
        "predicted_s": None,
        "why": "",
        "replicas": {"before": 1, "after": 0},
        "fields": [
            {"field": "replicas", "before": {"min": 1, "max": 1}, "after": {"min": 0, "max": 3}},
            {"field": "scaling", "before": {"auto": True, "idle_s": 600}, "after": {"auto": True, "idle_s": 20}},
            {"field": "objectives", "before": None, "after": {"ttft_ms": 5}},
        ],
    }
    assert model_lines(model)[1:] == [
        "    wanted: 1 -> 0",
        "    replicas.min: 1 -> 0",
        "    replicas.max: 1 -> 3",
        "    scaling.idle_s: 600 -> 20",
        '    objectives: unset -> {"ttft_ms": 5}',
    ]


def test_status_and_describe_show_a_host_that_ends(fleet: LiveAdmin, capsys: pytest.CaptureFixture[str]) -> None:
    """With the time of its end."""
    status = fleet.fleet.told_status
    status["hosts"][0] |= {"leaving": {"cause": "spot interruption", "until": AT + 120}, "cordoned": "all"}
    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert "leaving: spot interruption, it ends at 2026-11-20 14:10:05" in shown
    assert run(["describe", "inf2.48xlarge/0"]) == 0
    assert "cause spot interruption, until 2026-11-20 14:10:05" in capsys.readouterr().out
