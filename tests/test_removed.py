"""What was removed is answered by an error that names what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.cli.main import run
from orchestrator.cluster.settings import resolve
from placements.spec.parse import parse
from placements.spec.problems import Problem
from placements.spec.removed import COMMANDS, SETTINGS, VALUES


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_names_what_to_use_instead(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With arguments too, and as wrong usage."""
    assert run([*line.split(), "fleet.yaml"]) == 64
    said = capsys.readouterr().err
    assert said == f"error: command-removed: `corewright {line}` was removed\n    hint: {COMMANDS[line]}\n"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_names_what_to_use_instead(name: str, tmp_path: Path) -> None:
    """In the file and in a variable, also for the commands that read only the store's settings."""
    (tmp_path / "config.yaml").write_text(f"{name}: 1\n")
    variable = f"COREWRIGHT_{name.upper()}"
    settings = resolve({}, {"COREWRIGHT_HOME": str(tmp_path), variable: "1"}, only=("store_bytes",))
    assert settings.problems == (
        Problem("setting-removed", "error", f"{tmp_path}/config.yaml:1:1", f"{name} was removed", SETTINGS[name]),
        Problem("setting-removed", "error", "", f"{variable} was removed", SETTINGS[name]),
    )


@pytest.mark.parametrize("line", VALUES)
def test_a_value_of_a_spec_names_what_to_use_instead(line: str) -> None:
    """At its place, and not as an unknown value."""
    field, _, value = line.partition(": ")
    outer, _, inner = field.partition(".")
    text = f"models: {{chat: {{engine: echo, {outer}: {{{inner}: {value}}}}}}}\n"

    (problem,) = parse(text, "fleet.yaml").problems
    assert (problem.id, problem.severity, problem.what) == ("value-removed", "error", f"{line} was removed")
    assert (problem.hint, problem.where) == (VALUES[line], f"fleet.yaml:1:{text.index(inner) + 1}")
