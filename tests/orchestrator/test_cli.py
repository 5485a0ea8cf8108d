"""The command line: exit codes, streams and the JSON that docs/cli.md promises. No fleet runs here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.main import run
from orchestrator.version import corewright_version

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
    monkeypatch.delenv("COREWRIGHT_URL", raising=False)
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
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"{corewright_version()}\n"
    assert run(["version", "-o", "json"]) == 0
    assert data(capsys) == {"version": corewright_version()}


def test_a_valid_spec_with_warnings_exits_0(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Warnings are told and do not fail; sources that are not on disk are one."""
    assert run(["validate", good, "-o", "json"]) == 0

    problems = data(capsys)["problems"]
    assert [(problem["id"], problem["severity"]) for problem in problems] == [("checkpoint-unreadable", "warning")] * 2
    assert problems[0].keys() == {"id", "severity", "where", "what", "hint"}
    assert problems[0]["where"] == f"{good}:5:9"


def test_a_bad_spec_exits_1_with_every_problem_at_its_place(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All errors come at once, each with file, line and column."""
    assert run(["validate", bad, "-o", "json"]) == 1

    errors = {problem["id"]: problem["where"] for problem in data(capsys)["problems"] if problem["severity"] == "error"}
    assert errors.keys() >= {"unknown-key", "pin-overlap"}
    assert all(where.startswith(f"{bad}:4:") for where in errors.values())


def test_problems_go_to_stderr_and_the_verdict_to_stdout(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """For a person the problems are on stderr, uncoloured without a terminal."""
    assert run(["validate", bad]) == 1

    captured = capsys.readouterr()
    assert "pin-overlap" in captured.err
    assert "\033" not in captured.err
    assert captured.out.startswith(f"{bad}: ")


def test_plan_of_an_empty_fleet_is_all_changes(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a fleet every placement is a change: exit code 2, and the JSON is stable."""
    assert run(["plan", good, "-o", "json"]) == 2

    plan = data(capsys)
    assert plan["unplaced"] == []
    assert [placement["model"] for placement in plan["placements"]] == ["big", "small"]
    first = plan["placements"][0]
    assert first.keys() == {"model", "replica", "host", "cores", "threads", "env"}
    assert (first["replica"], first["host"], first["cores"]) == (0, "inf2.48xlarge/0", "0-7")
    assert first["env"]["NEURON_RT_VISIBLE_CORES"] == first["cores"]
    assert first["env"]["OMP_NUM_THREADS"] == str(first["threads"]) == "61"
    assert plan["placements"][1]["cores"] == plan["placements"][1]["env"]["NEURON_RT_VISIBLE_CORES"] == "8"


def test_plan_of_a_bad_spec_has_its_problems_and_no_placements(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; the JSON is on stdout all the same."""
    assert run(["plan", bad, "-o", "json"]) == 1

    plan = data(capsys)
    assert (plan["placements"], plan["unplaced"]) == ([], [])
    assert "pin-overlap" in {problem["id"] for problem in plan["problems"]}


def test_plan_that_leaves_something_unplaced_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is named with the constraint and the numbers."""
    (tmp_path / "full.yaml").write_text(
        "hosts: {instance: inf2.48xlarge}\nmodels:\n  a: {source: org/a, tp_degree: 8, replicas: 4}\n"
    )

    assert run(["plan", str(tmp_path / "full.yaml"), "-o", "json"]) == 1

    plan = data(capsys)
    assert len(plan["placements"]) == 3
    (missing,) = plan["unplaced"]
    assert (missing["model"], missing["replica"]) == ("a", 3)
    assert "8 contiguous cores" in missing["problems"][0]["what"]


def test_yaml_output_is_the_json_as_yaml(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The two machine forms hold the same."""
    run(["plan", good, "-o", "json"])
    as_json = data(capsys)
    run(["plan", good, "-o", "yaml"])

    assert yaml.safe_load(capsys.readouterr().out) == as_json


def test_a_spec_comes_from_standard_input_too(good: str) -> None:
    """`-` is standard input."""
    result = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli.main", "validate", "-"], input=GOOD, capture_output=True, text=True
    )

    assert result.returncode == 0
    assert "<stdin>: valid" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [["frobnicate"], ["plan"], ["validate", "x", "--nope"], ["up", "x", "--port", "99999"], ["status", "-o", "x"]],
)
def test_wrong_usage_exits_64(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """EX_USAGE, and the reason on stderr."""
    assert run(arguments) == 64
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["down"]])
def test_commands_about_a_fleet_say_that_there_is_none(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 and the id `no-fleet`."""
    assert run(command) == 1
    assert "error: no-fleet" in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Not a traceback."""
    assert run(["validate", "/no/such/spec.yaml"]) == 1
    assert "spec-unreadable: /no/such/spec.yaml cannot be read: No such file" in capsys.readouterr().err


def test_up_refuses_to_listen_to_the_network(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another address than loopback waits for keys."""
    assert run(["up", good, "--host", "0.0.0.0"]) == 1
    assert "host-not-loopback" in capsys.readouterr().err


def test_up_starts_nothing_of_a_bad_spec(bad: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every problem is told, and nothing is made or started."""
    assert run(["up", bad]) == 1

    captured = capsys.readouterr()
    assert "pin-overlap" in captured.err
    assert "unknown-key" in captured.err
    assert not home.exists()


def test_up_says_what_this_version_cannot_start(good: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neuron engines, remote sources and another machine are clear errors of `up`, not of `validate`."""
    assert run(["up", good]) == 1

    told = capsys.readouterr().err
    assert "host-differs" in told
    assert "engine-not-served" in told
    assert not home.exists()
