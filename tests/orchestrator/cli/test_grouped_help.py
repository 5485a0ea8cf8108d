"""`corewright --help` lists each command once, in a group, and cuts no sentence."""

from __future__ import annotations

import re

import pytest

from orchestrator.cli.grouped_help import GROUPS
from orchestrator.cli.main import COMMANDS, run


def test_each_command_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(name for names in COMMANDS.values() for name in names)


def test_the_help_cuts_no_sentence_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Longer ones wrap."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert "..." not in text.replace("[ARGS]...", "")
    assert max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", *GROUPS]
