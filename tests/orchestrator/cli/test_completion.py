"""`corewright completion`: a real shell completes commands, options and the names of the running fleet."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.main import run
from tests.orchestrator.fakefleet import TOKEN, LiveAdmin

BASH = """\
source {script}
COMP_WORDS=({words}); COMP_CWORD={number}
_corewright_completion corewright
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
COMMAND = Path(sys.executable).parent  # of `corewright`


def completions(words: list[str], tmp_path: Path, environment: dict[str, str]) -> list[str]:
    """What bash offers for the last of the words."""
    script = tmp_path / "corewright.bash"
    with script.open("w") as file:
        subprocess.run(["corewright", "completion", "bash"], env=environment, stdout=file, timeout=60, check=True)
    quoted = " ".join(f"'{word}'" for word in words)
    source = BASH.format(script=script, words=quoted, number=len(words) - 1)
    offered = subprocess.run(
        ["bash", "--norc", "-c", source], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    return offered.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["corewright", "get", "mod"], ["models"]),
        (["corewright", "get", "replicas", ""], ["chat/0", "chat/1"]),
        (["corewright", "describe", "inf"], ["inf2.48xlarge/0"]),
        (["corewright", "scale", "c"], ["chat"]),
        (["corewright", "drain", ""], ["inf2.48xlarge/0", "chat/0", "chat/1"]),
        (["corewright", "events", "--model", "s"], ["small"]),
        (["corewright", "completion", ""], ["bash", "zsh", "fish"]),
        (["corewright", "roll"], ["rollout"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bash_completes(words: list[str], offered: list[str], admin: LiveAdmin, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{COMMAND}:{os.environ['PATH']}",
        "COREWRIGHT_URL": admin.url,
        "COREWRIGHT_TOKEN": TOKEN,
    }
    assert completions(words, tmp_path, environment) == offered


def test_without_a_fleet_no_name_is_offered(tmp_path: Path) -> None:
    """And no error is printed into the command line."""
    environment = {**os.environ, "PATH": f"{COMMAND}:{os.environ['PATH']}", "COREWRIGHT_HOME": str(tmp_path)}
    environment.pop("COREWRIGHT_URL", None)
    assert completions(["corewright", "scale", ""], tmp_path, environment) == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_valid(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For each shell that is installed here."""
    assert run(["completion", shell]) == 0
    script = tmp_path / f"corewright.{shell}"
    script.write_text(capsys.readouterr().out)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", str(script)], check=True, timeout=60)
