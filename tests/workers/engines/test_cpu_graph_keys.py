"""What the compiled code of the cpu engine depends on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from workers.engines.cpu import artifacts
from workers.engines.cpu.engine import CpuEngine
from workers.messages.engine_protocol import EngineLoadError

Shape = dict[str, Any]
SHAPE: Shape = {
    "dtype": "fp32",
    "slots": 2,
    "max_len": 32,
    "prefill_buckets": [16],
    "decode_buckets": [32],
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with nothing but a config."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


def test_the_same_model_on_the_same_machine_has_one_manifest(source: Path) -> None:
    """It is JSON, and holds no path of the model."""
    first = artifacts.manifest(source, **SHAPE)
    assert json.loads(json.dumps(first)) == artifacts.manifest(source, **SHAPE)
    assert str(source) not in json.dumps(first)


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "bf16"},
        {"slots": 3},
        {"max_len": 64, "decode_buckets": [64]},
        {"prefill_buckets": [8, 16]},
        {"decode_buckets": [16, 32]},
    ],
)
def test_another_shape_has_another_manifest(source: Path, other: Shape) -> None:
    """Each is a graph of its own."""
    assert artifacts.manifest(source, **SHAPE | other) != artifacts.manifest(source, **SHAPE)


def _other_config(source: Path, _: pytest.MonkeyPatch) -> None:
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 2}))


def _other_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = source / "other-g++"
    fake.write_text("#!/bin/sh\necho another 1.0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))


def _other_python(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/elsewhere")


def _other_cpu(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "cpu_target", lambda: "x86_64 plain 00000000")


def _other_torch(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.1" if name == "torch" else version(name))


@pytest.mark.parametrize("file", ["own.py", "parts/rotary.py"])
def test_a_manifest_covers_the_checkpoints_own_code_where_it_is_run(source: Path, file: str) -> None:
    """A change of any of its files changes the manifest; code that is not run does not."""
    (source / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    (source / "parts").mkdir()
    for name in ("own.py", "parts/rotary.py"):
        (source / name).write_text("a = 1")

    def manifests() -> list[dict[str, Any]]:
        return [artifacts.manifest(source, **SHAPE, trust_remote_code=run) for run in (True, False)]

    before = manifests()
    assert manifests() == before
    (source / file).write_text("a = 2")
    after = manifests()
    assert [new == other for new, other in zip(after, before, strict=True)] == [False, True]


def test_an_engine_puts_the_checkpoints_code_into_its_manifest(source: Path) -> None:
    """The entry that it looks up depends on that code."""
    (source / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    engine = CpuEngine(source, slots=1, max_len=16, compile=True, trust_remote_code=True)
    before = engine.buildable().manifest
    (source / "own.py").write_text("a = 1")
    assert engine.buildable().manifest != before


@pytest.mark.parametrize("change", [_other_config, _other_compiler, _other_python, _other_cpu, _other_torch])
def test_another_machine_or_model_has_another_manifest(
    source: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, pytest.MonkeyPatch], None]
) -> None:
    """Code of one does not do for the other, or torch would not find it."""
    before = artifacts.manifest(source, **SHAPE)
    change(source, monkeypatch)
    assert artifacts.manifest(source, **SHAPE) != before


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint has the remedy, and the variable where one names another compiler."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineLoadError) as caught:
        artifacts.check_compiler()
    assert (caught.value.id, "g++" in caught.value.what, "apt-get" in caught.value.hint) == (
        "compiler-missing",
        True,
        True,
    )
    monkeypatch.setenv("CXX", "clang-of-mine")
    with pytest.raises(EngineLoadError, match="clang-of-mine"):
        artifacts.check_compiler()


def test_a_manifest_needs_no_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicting is for machines that compile nothing as well."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    assert artifacts.manifest(source, **SHAPE)["compiler"] == ""


def test_compiling_without_a_compiler_is_a_load_error(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load fails before anything is compiled, and leaves no complete entry."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    engine = CpuEngine(checkpoint("llama"), slots=1, max_len=16, threads=1, compile=True, compiled=tmp_path / "kept")
    with pytest.raises(EngineLoadError, match="compiler-missing"):
        engine.load()
    assert list((tmp_path / "kept").glob("*/corewright.json")) == []


def test_a_missing_config_is_a_load_error(tmp_path: Path) -> None:
    """Its path is in the error."""
    with pytest.raises(EngineLoadError, match="config-unreadable"):
        artifacts.manifest(tmp_path, **SHAPE)


def test_an_entry_without_code_is_not_whole(tmp_path: Path) -> None:
    """Whatever else lies there."""
    (tmp_path / artifacts.CODE).mkdir()
    assert not artifacts.is_whole(tmp_path)
    (tmp_path / artifacts.CODE / "a.so").touch()
    assert artifacts.is_whole(tmp_path)
