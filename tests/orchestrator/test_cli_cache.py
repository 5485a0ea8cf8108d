"""`corewright cache`: what the commands tell, their exit codes, and what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.cli import main as cli
from tests.checkpoints import make_checkpoint
from tests.doubles.machine import make_interpreter
from tests.s3 import S3Server
from tests.workers.neffs import COMPILER, finished, graph
from workers import neuron_cache
from workers.compiled import MANIFEST, entry
from workers.neff_cache.entries import read_entries

ECHO = "hosts: {emulate: inf2.xlarge}\nmodels: {parrot: {engine: echo}}\n"
TNX = """\
hosts: {{emulate: inf2.xlarge}}
engines: {{transformers-neuronx: {{python: {python}}}}}
models:
  llama:
    source: ./llama
    engine: transformers-neuronx
    dtype: fp32
    tp_degree: 2
    max_len: 64
    max_batch: 2
    {more}
"""
NEWER = "2.17.194.0+d312836f"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This host's, with a NEFF cache of its own."""
    monkeypatch.setattr(neuron_cache, "compilers", list)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neffs"))
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    (tmp_path / "home").mkdir()
    (tmp_path / "neffs").mkdir()
    return tmp_path / "home"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """A command with JSON; its exit code and what it tells."""

    def ran(*arguments: str) -> tuple[int, Any]:
        code = cli.run(["cache", *arguments, "-o", "json"])
        return code, json.loads(capsys.readouterr().out or "null")

    return ran


def compiled(home: Path, **manifest: Any) -> Path:
    with entry(home / "compiled", {"engine": "transformers-neuronx", **manifest}) as found:
        (found.path / "a.neff").write_text("NEFF")
        found.finish("/models/chat")
    return found.path


def test_ls_tells_states(home: Path, tmp_path: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """Of every graph and of every folder of artifacts."""
    finished(tmp_path / "neffs")
    graph(tmp_path / "neffs", "2" * 20, **{"model.log": "neuronx-cc failed with 70"})
    whole, damaged = compiled(home), compiled(home, lnc=2)
    (damaged / "a.neff").write_text("XXXX")
    code, told = run("ls")
    assert code == 0
    (cache,) = told["caches"]
    assert cache["place"] == str(tmp_path / "neffs")
    assert {one["key"]: (one["state"], one["words"]) for one in cache["entries"]} == {
        "2" * 20: ("FAILED", "neuronx-cc failed with 70"),
        "cd73c69136bf675613f6": ("SUCCESS", ""),
    }
    states = {one["name"]: (one["state"], one["damaged"], one["source"]) for one in told["compiled"]}
    assert states == {
        whole.name: ("whole", [], "/models/chat"),
        damaged.name: ("damaged", ["a.neff"], "/models/chat"),
    }
    assert told["models"] == []


def test_ls_shows_a_table(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people."""
    finished(tmp_path / "neffs")
    compiled(home)
    assert cli.run(["cache", "ls"]) == 0
    told = capsys.readouterr().out
    assert f"{COMPILER}  MODULE_cd73c69136bf675613f6+2c2d707e  SUCCESS" in told
    assert "/models/chat" in told


def test_retry_forgets_failures(tmp_path: Path, home: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """And the audit log has it."""
    failed = graph(tmp_path / "neffs", **{"model.log": "neuronx-cc failed with 70"})
    code, told = run("retry", "--dry-run")
    assert (code, [one["path"] for one in told["removed"]], failed.exists()) == (0, [str(failed)], True)
    run("retry", failed.name)
    assert not failed.exists()
    assert '"cache retry"' in (home / "audit.log").read_text()
    assert run("retry")[1]["removed"] == []


def test_prune_removes_what_is_of_no_use(tmp_path: Path, home: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """Unfinished, damaged and old; not what somebody holds, nor what is good."""
    good, old, damaged, unfinished, held = (compiled(home, lnc=lnc) for lnc in range(5))
    (damaged / "a.neff").unlink()
    (unfinished / MANIFEST).unlink()
    for path in (old, old.with_name(f"{old.name}.lock"), held, held.with_name(f"{held.name}.lock")):
        os.utime(path, (1e9, 1e9))
    with entry(home / "compiled", {"engine": "transformers-neuronx", "lnc": 4}) as kept:
        assert kept.complete
        os.utime(held.with_name(f"{held.name}.lock"), (1e9, 1e9))
        code, told = run("prune", "--older-than", "7")
    assert code == 0
    assert {Path(one["path"]) for one in told["removed"]} == {old, damaged, unfinished}
    assert [path.exists() for path in (good, old, damaged, unfinished, held)] == [True, False, False, False, True]


def test_prune_leaves_s3_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Other hosts need what is there."""
    assert cli.run(["cache", "prune", "--cache", "s3://neffs/chat"]) == 1
    assert "cache-elsewhere" in capsys.readouterr().err


def test_verify_of_what_compiles_nothing_is_a_hit(tmp_path: Path, run: Callable[..., tuple[int, Any]]) -> None:
    """Exit code 0."""
    (tmp_path / "spec.yaml").write_text(ECHO)
    code, told = run("verify", str(tmp_path / "spec.yaml"))
    assert (code, told["hit"]) == (0, True)
    assert [(one["model"], one["outcome"]) for one in told["models"]] == [("parrot", "hit")]


def test_a_model_that_the_spec_does_not_have_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With those that it has."""
    (tmp_path / "spec.yaml").write_text(ECHO)
    assert cli.run(["cache", "verify", str(tmp_path / "spec.yaml"), "--model", "chat"]) == 1
    assert "it has parrot" in capsys.readouterr().err


# In the interpreter of an engine


@pytest.fixture
def neuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes a spec of a Llama whose interpreter has the stand-ins and a compiler of that version."""
    monkeypatch.setenv("NEURON_DOUBLE_STATE", str(tmp_path / "cores"))
    make_checkpoint(tmp_path / "llama", "llama")

    def wrote(compiler: str = COMPILER, more: str = "") -> Path:
        monkeypatch.setenv("NEURON_DOUBLE_CC_VERSION", compiler)
        folder = tmp_path / f"venv-{compiler}"
        python = folder / "bin/python"
        if not folder.exists():
            python = make_interpreter(folder, instead={"neuronx_cc": compiler})
        (tmp_path / "spec.yaml").write_text(TNX.format(python=python, more=more))
        return tmp_path / "spec.yaml"

    return wrote


def compile_ahead(spec: Path, home: Path) -> None:
    """As `corewright compile` does, in the interpreter of the engine; without a device."""
    from orchestrator.home import Home
    from orchestrator.offline import configs
    from orchestrator.specfile import load
    from workers.build import Order
    from workers.config import ReplicaConfig

    ((_, config),) = configs(load(str(spec)), Home(home), heads=True)
    assert isinstance(config, ReplicaConfig)
    done = subprocess.run(
        [config.python or sys.executable, "-m", "workers.build", "compile"],
        input=msgspec.json.encode(Order(config=config)),
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.stdout, done.stderr[-2000:])


@pytest.mark.slow
def test_the_interpreter_of_the_engine_is_asked_and_another_host_is_warmed(
    tmp_path: Path,
    home: Path,
    neuron: Callable[..., Path],
    run: Callable[..., tuple[int, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its compiler is the one that counts, no core is claimed by asking, and what was compiled comes from S3."""
    with S3Server() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        more = f"neff_cache: {server.bucket('neffs')}"
        compile_ahead(neuron(more=more), home)
        code, told = run("verify", str(neuron(more=more)))
        assert (code, told["models"][0]["where"]) == (0, "compiled")
        code, told = run("verify", str(neuron(compiler=NEWER, more=more)))
        assert code == 1
        assert told["models"][0]["why"] == [{"field": "compiler version", "wanted": NEWER, "found": COMPILER}]
        assert not list((tmp_path / "cores").glob("*core*"))
        monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "another"))
        code, told = run("warm", str(neuron(more=more)))
        assert (code, told["models"][0]["problem"]) == (0, "")
        assert told["models"][0]["bytes"] > 0
    (local,) = (tmp_path / "another" / "neff").iterdir()
    (first,) = (home / "neff").iterdir()
    assert {one.name for one in read_entries(local)} == {one.name for one in read_entries(first)}
