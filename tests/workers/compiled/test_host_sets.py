"""Compiled artifacts are made once on a host, and what is not whole is never taken for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.workers.tnx_runs import BUCKETS, config
from workers.compiled import host_sets
from workers.compiled.host_sets import MANIFEST, entry, peek
from workers.compiled.manifest import LOCK_FILE
from workers.engines.manifest_parts import digest_of
from workers.engines.transformers_neuronx.engine import open_transformers_neuronx
from workers.messages.engine_protocol import EngineLoadError

Checkpoints = Callable[[str], Path]
DEADLINE_S = 60
WANTED = {"engine": "e", "shapes": [1, 2], "flags": {"a": None}}
# Says when it holds the entry and when it waits; compiles when it is told to, and then says whether it had to.
PROCESS = """
import json, logging, sys
from pathlib import Path
from workers.compiled import host_sets as compiled
logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
with compiled.entry(Path(sys.argv[1]), json.loads(sys.argv[2])) as found:
    had_to = not found.complete
    print("holds", had_to, flush=True)
    sys.stdin.readline()
    if had_to:
        with (found.path / "artifact").open("a") as file:
            file.write("compiled\\n")
        found.finish()
print("waited", compiled.SPENT.seconds > 0)
"""


def process(root: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(root), json.dumps(WANTED)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )


def line(of: subprocess.Popen[str]) -> str:
    assert of.stdout is not None
    return of.stdout.readline().strip()


def make(root: Path) -> Path:
    """Returns a complete entry."""
    with entry(root, WANTED) as held:
        (held.path / "artifact").write_text("compiled\n")
        held.finish()
    return held.path


def test_two_processes_compile_a_manifest_once(tmp_path: Path) -> None:
    """The second one waits, logs for which process, and finds it complete."""
    first = process(tmp_path)
    assert line(first) == "holds True"
    second = process(tmp_path)
    waiting = line(second)
    assert waiting.startswith("waiting for the process that holds")
    assert f"pid {first.pid}, compiling since" in waiting
    assert first.communicate("\n", DEADLINE_S)[0] == "waited False\n"
    assert line(second).startswith("waited ")
    assert line(second) == "holds False"
    assert second.communicate("\n", DEADLINE_S)[0] == "waited True\n"  # which is no fault of its start
    assert (first.returncode, second.returncode) == (0, 0)
    assert [path.read_text() for path in tmp_path.glob("*/artifact")] == ["compiled\n"]


def test_many_processes_hold_a_complete_entry_at_once(tmp_path: Path) -> None:
    """Loads take minutes and do not wait for each other."""
    make(tmp_path)
    several = [process(tmp_path) for _ in range(2)]
    assert [line(item) for item in several] == ["holds False"] * 2
    for item in several:
        item.communicate("\n", DEADLINE_S)


def test_a_killed_compile_leaves_an_empty_entry(tmp_path: Path) -> None:
    """Its lock is released and its files are removed."""
    first = process(tmp_path)
    assert line(first) == "holds True"
    (stray,) = (path / "stray" for path in tmp_path.iterdir() if path.is_dir())
    stray.write_text("half of a NEFF")
    first.kill()
    first.communicate(timeout=DEADLINE_S)
    with entry(tmp_path, WANTED) as held:
        assert not held.complete
        assert held.path == stray.parent
        assert list(held.path.iterdir()) == []


@pytest.mark.parametrize("manifest", ["", "{}", '{"engine": "e", "shapes": [1'])
def test_an_entry_with_another_manifest_is_incomplete(tmp_path: Path, manifest: str) -> None:
    """After a full disk or a manual change."""
    (make(tmp_path) / MANIFEST).write_text(manifest)
    with entry(tmp_path, WANTED) as held:
        assert not held.complete
        assert list(held.path.iterdir()) == []


def test_a_forked_child_does_not_hold_the_entry(tmp_path: Path) -> None:
    """A pool of processes may outlive the compile."""
    waits, ends = os.pipe()
    with entry(tmp_path, WANTED) as held:
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.read(waits, 1)
            os._exit(0)
    lock = os.open(held.path.with_name(f"{held.path.name}.lock"), os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises where somebody holds it
    finally:
        for descriptor in (waits, ends, lock):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_an_entry_with_missing_files_is_compiled_again(tmp_path: Path) -> None:
    """Although its manifest is there."""
    (make(tmp_path) / "artifact").unlink()
    with entry(tmp_path, WANTED, lambda path: (path / "artifact").exists()) as held:
        assert not held.complete
        assert not (held.path / MANIFEST).exists()


def test_an_entry_is_finished_after_its_files_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest comes last, so that a power failure leaves none beside missing files."""
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((str(path.relative_to(tmp_path)), any(tmp_path.glob(f"*/{MANIFEST}"))))
        real(descriptor)

    with entry(tmp_path, WANTED) as held:
        (held.path / "weights").mkdir()
        for name in ("artifact", "weights/one"):
            (held.path / name).write_text("compiled\n")
        monkeypatch.setattr(os, "fsync", fsync)
        held.finish()
    before = {name for name, is_finished in synced if not is_finished}
    name = held.path.name
    assert {f"{name}/artifact", f"{name}/weights/one", f"{name}/weights", name, f"{name}/{MANIFEST}.new"} <= before
    assert (name, True) in synced  # the manifest's own name


def test_a_failed_sync_leaves_the_entry_unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only fsync reports a failed write."""

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with entry(tmp_path, WANTED) as held:
        (held.path / "artifact").write_text("compiled\n")
        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OSError, match="Input/output"):
            held.finish()
        assert not held.complete


@pytest.mark.parametrize("damage", ["missing", "short", "no record"])
def test_an_entry_with_changed_files_is_compiled_again(tmp_path: Path, damage: str) -> None:
    """Of each engine: the record lists all files."""
    made = make(tmp_path)
    if damage == "short":
        (made / "artifact").write_text("")
    else:
        (made / {"missing": "artifact", "no record": LOCK_FILE}[damage]).unlink()
    assert not peek(tmp_path, WANTED).complete
    with entry(tmp_path, WANTED) as held:
        assert list(held.path.iterdir()) == []


def test_a_forgotten_entry_stays_for_its_holders(tmp_path: Path) -> None:
    """The next compile removes its files."""
    made = make(tmp_path)
    with entry(tmp_path, WANTED) as held:
        held.forget()
        assert (made / "artifact").exists()
    with entry(tmp_path, WANTED) as held:
        assert not held.complete
        assert list(held.path.iterdir()) == []


# A root that is not to be written to


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a folder look like a read-only mount, also for root."""

    def make_so(root: Path) -> None:
        opening, making = os.open, os.mkdir

        def refuse(path: Any) -> None:
            if Path(os.fspath(path)).is_relative_to(root):
                raise OSError(errno.EROFS, "Read-only file system", str(path))

        def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                refuse(path)
            return opening(path, flags, *args, **kwargs)

        def made(path: Any, *args: Any, **kwargs: Any) -> None:
            if not Path(os.fspath(path)).exists():
                refuse(path)
            making(path, *args, **kwargs)

        def wrote(path: Path, *args: Any, **kwargs: Any) -> int:
            refuse(path)
            raise AssertionError(f"{path} is written to by a test that shall only read")

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "mkdir", made)
        monkeypatch.setattr(Path, "write_text", wrote)
        monkeypatch.setattr(Path, "write_bytes", wrote)

    return make_so


def test_a_complete_entry_on_a_read_only_root_is_used(tmp_path: Path, read_only: Callable[[Path], None]) -> None:
    """It was compiled on another host."""
    make(tmp_path)
    read_only(tmp_path)
    with entry(tmp_path, WANTED) as held:
        assert held.complete
        assert (held.path / "artifact").read_text() == "compiled\n"


def test_a_missing_entry_on_a_read_only_root_is_an_error(tmp_path: Path, read_only: Callable[[Path], None]) -> None:
    """With the folder and the system's message."""
    make(tmp_path)
    read_only(tmp_path)
    with pytest.raises(EngineLoadError) as caught, entry(tmp_path, WANTED | {"flags": {}}):
        pass
    assert caught.value.id == "compiled-unwritable"
    assert caught.value.what.startswith(f"cannot write compiled artifacts to {tmp_path}: ")
    assert "Read-only file system" in caught.value.what


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    """With its path."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineLoadError, match="compiled-unwritable"), entry(tmp_path / "file" / "compiled", WANTED):
        pass


def test_a_folder_that_cannot_be_emptied_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to another user."""
    (make(tmp_path) / MANIFEST).unlink()
    monkeypatch.setattr(host_sets.shutil, "rmtree", lambda path, ignore_errors: None)  # type: ignore[attr-defined]
    with pytest.raises(EngineLoadError, match="compiled-unwritable"), entry(tmp_path, WANTED):
        pass


def test_digests_that_cannot_be_cached_are_computed_each_time(
    tmp_path: Path, read_only: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Artifacts with weights load from a read-only root, too."""
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_text("weights")
    (tmp_path / "root").mkdir()
    known = digest_of(source, tmp_path / "other")
    read_only(tmp_path / "root")
    with caplog.at_level(logging.INFO):
        assert digest_of(source, tmp_path / "root") == known
    assert "Read-only file system" in caplog.text


# NEFFs that do not fit


@pytest.fixture
def machine(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    return neuron


def test_neffs_of_other_graphs_are_discarded(
    machine: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package compiles other graphs than the manifest names: that start fails, and the next one compiles."""
    runtime = importlib.import_module("neuron_double.runtime")
    graphs = importlib.import_module("transformers_neuronx.graphs")
    fields = {"compiled": str(tmp_path / "compiled"), **BUCKETS}

    def start() -> bool:
        runtime.reset_for_tests()
        engine: Any = open_transformers_neuronx(config(checkpoint("llama"), **fields))
        engine.load()
        return bool(engine.compiled)

    assert start()
    monkeypatch.setattr(graphs, "package_version", lambda name: "of a build that has the same version")
    with pytest.raises(EngineLoadError) as caught:
        start()
    assert caught.value.id == "artifacts-stale"
    assert str(tmp_path / "compiled") in caught.value.what
    assert "the next start compiles again" in caught.value.hint
    assert [start(), start()] == [True, False]


def test_another_missing_file_does_not_discard_the_neffs(
    machine: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifacts stay."""
    models = importlib.import_module("transformers_neuronx.llama.model")
    runtime = importlib.import_module("neuron_double.runtime")
    replica_config = config(checkpoint("llama"), compiled=str(tmp_path / "compiled"), **BUCKETS)
    open_transformers_neuronx(replica_config).load()

    def to_neuron(self: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/model/model.safetensors")

    with monkeypatch.context() as patched:
        patched.setattr(models.LlamaForSampling, "to_neuron", to_neuron)
        with pytest.raises(FileNotFoundError):
            open_transformers_neuronx(replica_config).load()
    runtime.reset_for_tests()
    engine: Any = open_transformers_neuronx(replica_config)
    engine.load()
    assert not engine.compiled


def test_compile_time_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a failed compile."""
    times = iter([0.0, 5.0, 10.0, 17.0])
    monkeypatch.setattr(host_sets, "SPENT", host_sets.Stopwatch(clock=times.__next__))
    with host_sets.compiling("a model", "its log is here"):
        pass
    assert host_sets.SPENT.seconds == 5.0
    with contextlib.suppress(KeyError), host_sets.compiling("a model", "its log is here"):
        raise KeyError
    assert host_sets.SPENT.seconds == 12.0


def test_the_stopwatch_runs_only_inside_its_context() -> None:
    """It adds up all runs, and can be read meanwhile."""
    now = 10.0
    watch = host_sets.Stopwatch(clock=lambda: now)
    with watch.running():
        now = 13.0
        assert watch.seconds == 3.0
    now = 20.0
    with contextlib.suppress(KeyError), watch.running():
        now = 21.0
        raise KeyError
    now = 30.0
    assert watch.seconds == 4.0
