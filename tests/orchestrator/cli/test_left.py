"""Commands and options that were removed."""

from __future__ import annotations

import pytest

from orchestrator.cli.left import LEFT
from orchestrator.cli.main import run


@pytest.mark.parametrize("line", LEFT)
def test_a_removed_command_names_what_to_use_instead(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With arguments too, and as wrong usage."""
    assert run([*line.split(), "fleet.yaml"]) == 64
    assert (
        capsys.readouterr().err == f"error: command-removed: `corewright {line}` was removed\n    hint: {LEFT[line]}\n"
    )
