"""`up` says what it cannot start before anything starts, and `down` says what it leaves behind. No fleet runs here."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.cli import doctor as doctor_command
from orchestrator.cli.main import run
from orchestrator.settings import SETTINGS
from workers.interpreter import Interpreter, probe

SPEC = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  a: {source: MODEL, engine: ENGINE}
"""
TINY = Path(__file__).parents[2] / "placements" / "examples" / "models" / "tiny"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("COREWRIGHT_URL", "COREWRIGHT_TOKEN", *(setting.env for setting in SETTINGS[:-1])):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def spec(folder: Path, engine: str, more: str = "") -> str:
    path = folder / "spec.yaml"
    path.write_text(SPEC.replace("MODEL", str(TINY)).replace("ENGINE", engine) + more)
    return str(path)


class NoFleet(Exception):
    """Raised where `up` would start the fleet."""


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every interpreter is like this one, without torch; no fleet can be started."""
    here = probe(sys.executable, 30.0)
    packages = {name: version for name, version in here.packages.items() if name != "torch"}

    def without(python: str) -> Interpreter:
        return msgspec.structs.replace(here, python=python, packages=packages)

    def start(*_: Any) -> None:
        raise NoFleet

    monkeypatch.setattr(doctor_command, "probe", without)
    monkeypatch.setattr("orchestrator.cli.up.Daemon", start)


@pytest.mark.parametrize(
    ("more", "python", "place"),
    [("", sys.executable, "spec.yaml:4:"), ("engines: {cpu: {python: /opt/own/python}}\n", "/opt/own/python", ":5:")],
)
def test_up_refuses_an_engine_that_its_interpreter_does_not_have(
    more: str, python: str, place: str, no_torch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At once, with the command that installs it; whether it is this interpreter or one that the spec names."""
    assert run(["up", spec(tmp_path, "cpu", more)]) == 1
    told = capsys.readouterr().err
    assert f"error: engine-not-installed: {python} has no torch, which the engine cpu needs" in told
    assert f"{python} -m pip install torch" in told
    assert place in told


def test_up_starts_an_engine_that_needs_no_package(no_torch: None, tmp_path: Path) -> None:
    """The check refuses nothing that would work."""
    with pytest.raises(NoFleet):
        run(["up", spec(tmp_path, "echo")])


def test_the_doctor_finds_an_engine_that_is_not_installed(
    no_torch: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same finding as that of `up`."""
    assert run(["doctor", spec(tmp_path, "cpu")]) == 1
    assert "error: engine-not-installed: " in capsys.readouterr().err
