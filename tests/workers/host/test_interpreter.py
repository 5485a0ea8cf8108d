"""Probes of interpreters, and their differences from the fleet."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.machine import make_interpreter
from workers.host.interpreter import FleetVersions, Interpreter, Interpreters, probe, refusal

FLEET = FleetVersions("0.1.0", "3.11.9", "2.60.0")
SOUND = Interpreter(
    python="/opt/venv/bin/python",
    version="3.11.9",
    ray="2.60.0",
    corewright="0.1.0",
    folders={"workers": "/w", "placements": "/p", "orchestrator": "/o"},
    packages={"neuronx-distributed-inference": "0.8.0", "torch": "2.13.0", "safetensors": "0.5", "numpy": "2.0"},
)


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_probe_has_the_versions_and_folders_of_this_interpreter() -> None:
    """No package is imported for it."""
    own = probe(sys.executable, 30.0)
    assert (own.trouble, own.version, own.ray) == (None, platform.python_version(), version("ray"))
    assert own.corewright == version("corewright")
    assert own.folders["workers"] == str(Path(__file__).parents[3] / "workers")
    assert own.packages["transformers"] == version("transformers")
    assert "transformers-neuronx" not in own.packages
    assert refusal(own, FLEET._replace(python=own.version, ray=version("ray"))) is None


def test_an_engine_is_found_by_the_metadata_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself is not imported."""
    info = tmp_path / "transformers_neuronx-0.13.380.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers-neuronx\nVersion: 0.13.380\n")
    package = tmp_path / "transformers_neuronx"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    assert probe(sys.executable, 30.0).engines == {"transformers-neuronx": "0.13.380"}


@pytest.mark.parametrize(
    ("body", "id", "detail"),
    [
        (None, "interpreter-missing", "does not exist"),
        ("exec sleep 60", "interpreter-hangs", "within 0.5 s"),
        ("echo no such engine >&2; exit 3", "interpreter-broken", "no such engine"),
        ("exit 0", "interpreter-broken", "exited with code 0"),
    ],
)
def test_a_file_that_is_not_an_interpreter_is_refused_in_time(
    body: str | None, id: str, detail: str, tmp_path: Path
) -> None:
    """It may be missing, hang, or be another program."""
    python = str(tmp_path / "python") if body is None else script(tmp_path / "python", body)
    began = time.monotonic()
    refused = refusal(probe(python, 0.5), FLEET)
    assert refused is not None
    assert refused.id == id
    assert detail in refused.what
    assert time.monotonic() - began < 10.0


def test_a_file_that_is_not_executable_is_refused(tmp_path: Path) -> None:
    """For example, a venv's activate script."""
    (tmp_path / "python").write_text("text")
    refused = refusal(probe(str(tmp_path / "python"), 5.0), FLEET)
    assert refused is not None
    assert refused.id == "interpreter-broken"


def changed(**fields: Any) -> Interpreter:
    return Interpreter(**{**{name: getattr(SOUND, name) for name in SOUND.__struct_fields__}, **fields})


@pytest.mark.parametrize(("beside", "absent"), [((), ("neuronx-cc",)), (("neuronx-cc",), ())])
def test_a_probe_has_the_commands_that_an_installed_package_lacks(
    beside: tuple[str, ...], absent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other environments on PATH do not count: their compiler may have another version."""
    python, other = make_interpreter(tmp_path / "venv", neuron=False), tmp_path / "other"
    other.mkdir()
    for folder, names in ((other, ("neuronx-cc",)), (python.parent, beside)):
        for name in names:
            script(folder / name, "exit 0")
    info = tmp_path / "site" / "neuronx_cc-2.21.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 2.21\n")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    monkeypatch.setenv("PATH", f"{other}:{os.environ['PATH']}")

    probed = probe(str(python), 30.0)

    assert (probed.scripts, probed.absent) == (str(python.parent), absent)


@pytest.mark.parametrize(("first", "absent"), [("user", ()), ("other", ("neuronx-cc",))])
def test_commands_beside_their_packages_are_the_interpreters_if_path_finds_them_first(
    first: str, absent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An example is pip install --user."""
    python = make_interpreter(tmp_path / "venv", neuron=False)
    info = tmp_path / "user/lib/python3/site-packages/neuronx_cc-2.21.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: neuronx-cc\nVersion: 2.21\n")
    for name in ("user", "other"):
        (tmp_path / name / "bin").mkdir(parents=True)
        script(tmp_path / name / "bin" / "neuronx-cc", "exit 0")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    monkeypatch.setenv("PATH", f"{tmp_path / first / 'bin'}:{tmp_path / 'user/bin'}:{os.environ['PATH']}")
    assert probe(str(python), 30.0).absent == absent


@pytest.mark.parametrize(
    ("interpreter", "engine", "id", "detail"),
    [
        (changed(version="3.10.12"), None, "interpreter-python-differs", "Python 3.10.12"),
        (changed(ray="2.59.0"), None, "interpreter-ray-differs", "Ray 2.59.0, and the fleet runs on Ray 2.60.0"),
        (changed(ray=None), None, "interpreter-ray-differs", "no Ray"),
        (changed(corewright=None, folders={"workers": None}), None, "interpreter-corewright-differs", "no corewright"),
        (changed(corewright="0.2.0"), None, "interpreter-corewright-differs", "corewright 0.2.0"),
        (changed(folders={"workers": None}), None, "interpreter-corewright-differs", "not found: workers"),
        (SOUND, "transformers-neuronx", "engine-not-installed", "no transformers-neuronx"),
        (changed(packages={"numpy": "2.0"}), "cpu", "engine-not-installed", "has no torch and no safetensors"),
        (
            changed(scripts="/opt/venv/bin", absent=("neuronx-cc",)),
            *("nxd-inference", "engine-not-installed", "/opt/venv/bin has no neuronx-cc, which the Neuron packages"),
        ),
        (
            changed(packages={**SOUND.packages, "transformers": "4.56.2"}),
            *("cpu", "engine-not-installed", "needs 4.57 or later"),
        ),
    ],
)
def test_each_difference_from_the_fleet_has_its_id(
    interpreter: Interpreter, engine: str | None, id: str, detail: str
) -> None:
    """Its hint has the command that installs the right version."""
    refused = refusal(interpreter, FLEET, engine)
    assert refused is not None
    assert refused.id == id
    assert detail in refused.what
    assert refused.hint


def test_a_missing_corewright_is_installed_from_the_fleets_wheel() -> None:
    """No package index has it."""
    refused = refusal(changed(corewright=None), FLEET)
    assert refused is not None
    assert refused.hint.endswith(f"{SOUND.python} -m pip install corewright-{FLEET.corewright}-py3-none-any.whl")


@pytest.mark.parametrize("engine", [None, "cpu", "nxd-inference"])
def test_an_interpreter_like_the_fleets_is_accepted(engine: str | None) -> None:
    """Patch versions of Python may differ."""
    assert refusal(SOUND, FLEET, engine) is None


def test_concurrent_callers_share_one_probe(tmp_path: Path) -> None:
    """A hanging interpreter costs its deadline once, instead of once for each replica."""
    calls = tmp_path / "calls"
    python = script(tmp_path / "python", f"echo x >> {calls}\nexec sleep 60")
    interpreters = Interpreters()
    with ThreadPoolExecutor(4) as pool:
        probes = list(pool.map(lambda _: interpreters.ask(python, 1.0), range(4)))
    assert {interpreter.trouble for interpreter in probes} == {"hangs"}
    assert calls.read_text() == "x\n"


def test_a_probe_is_cached_until_a_package_is_installed(tmp_path: Path) -> None:
    """The times of the interpreter and of its package folders count. Failed probes are not cached."""
    calls, packages = tmp_path / "calls", tmp_path / "site-packages"
    packages.mkdir()
    answer = json.dumps({"version": "3.11.9", "libraries": [str(packages)]})
    python = script(tmp_path / "python", f"echo x >> {calls}\necho '{answer}'")
    interpreters = Interpreters()

    assert interpreters.ask(python).version == "3.11.9"
    assert interpreters.ask(python).version == "3.11.9"
    assert calls.read_text() == "x\n"

    os.utime(packages, ns=(1, 1))
    interpreters.ask(python)
    assert calls.read_text() == "x\nx\n"

    script(tmp_path / "python", f"echo x >> {calls}\nexit 3")
    assert interpreters.ask(python).trouble == interpreters.ask(python).trouble == "no-python"
    assert calls.read_text() == "x\n" * 4
