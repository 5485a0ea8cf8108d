"""`corewright compile`: everything is compiled before anything starts, as much at once as fits."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import compileahead
from orchestrator.buildorder import Job, startable
from orchestrator.cli.main import run
from orchestrator.home import Home
from orchestrator.specfile import load
from tests.checkpoints import make_checkpoint
from tests.workers.tnx_runs import config
from workers import ahead
from workers.artifacts.keeping import StoreSettings
from workers.artifacts.listing import Stopped
from workers.build import Built, Predicted, Told, Trouble, Wanted, Working
from workers.config import ReplicaConfig
from workers.status import Failure

DEADLINE_S = 60.0


def job(name: str, need_gib: float) -> Job:
    return Job(models=(name,), config=config(Path("/models/a")), keys=(name,), need_gib=need_gib)


JOBS = st.lists(st.floats(0.1, 200), min_size=1, max_size=12).map(
    lambda needs: [job(str(number), need) for number, need in enumerate(needs)]
)


@given(JOBS, st.floats(1, 300), st.integers(1, 8), st.integers(0, 12))
def test_what_is_begun_fits_and_somebody_always_works(jobs: list[Job], memory_gib: float, most: int, at: int) -> None:
    """Needs stay within the memory unless a single one is above it, and never does nobody work while jobs wait."""
    running, waiting = jobs[:at][:most], jobs[at:]
    if sum(one.need_gib for one in running) > memory_gib:
        running = running[:1]
    begun = startable(waiting, running, memory_gib=memory_gib, jobs=most)
    together = [*running, *begun]
    assert len(together) <= most
    assert len(together) == 1 or not begun or sum(one.need_gib for one in together) <= memory_gib
    assert together or not waiting
    assert [one for one in waiting if one in begun] == list(begun)


@given(JOBS, st.floats(1, 300), st.integers(1, 8))
def test_all_are_begun_in_the_end(jobs: list[Job], memory_gib: float, most: int) -> None:
    """Whichever ends first."""
    waiting, running, rounds = list(jobs), list[Job](), 0
    while waiting or running:
        for one in startable(waiting, running, memory_gib=memory_gib, jobs=most):
            waiting.remove(one)
            running.append(one)
        running.pop(rounds % len(running))
        rounds += 1
    assert rounds == len(jobs)


def test_a_small_one_passes_one_that_does_not_fit() -> None:
    """The memory that is left is not left idle."""
    found = startable([job("large", 64), job("small", 8)], [job("runs", 64)], memory_gib=100, jobs=8)
    assert [one.models for one in found] == [("small",)]


# The flow, with processes that are played


class Played:
    """Answers for the processes that predict and compile."""

    def __init__(self) -> None:
        self.compiled: list[str] = []  # by model
        self.pushed: list[bool] = []
        self.failures: dict[str, Failure] = {}
        self.stopped = False
        self.complete: set[str] = set()
        self.at_once = 0
        self.most_at_once = 0
        self.gate: threading.Barrier | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        command: str,
        one: ReplicaConfig,
        stop: threading.Event,
        limit_s: float | None = None,
        *,
        push: bool = False,
    ) -> Iterator[Told]:
        key = f"key-of-{Path(one.source or '').name}-{one.dtype}"
        wanted = Wanted(
            role="model",
            source=one.source or "",
            manifest={"engine": one.engine},
            folder=f"{one.compiled}/{key}",
            complete=one.model in self.complete,
            ahead=True,
        )
        if command == "predict":
            yield Predicted(engine=one.engine, wanted=[wanted])
            return
        yield from self._compile(one, key, wanted, push)

    def _compile(self, one: ReplicaConfig, key: str, wanted: Wanted, push: bool) -> Iterator[Told]:
        with self._lock:
            self.compiled.append(one.model)
            self.pushed.append(push)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        if self.gate is not None:
            self.gate.wait(DEADLINE_S)
        if self.stopped:
            raise Stopped(one.model)
        yield Working(key=key, role="model", phase="compiling", done=1, total=2)
        with self._lock:
            self.at_once -= 1
        if one.model in self.failures:
            yield Trouble(self.failures[one.model])
            return
        done = [] if one.model in self.complete else [key]
        yield Built(wanted=[msgspec.structs.replace(wanted, complete=True)], compiled=done, seconds=1.5)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Played:
    found = Played()
    monkeypatch.setattr(ahead, "answers", found)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b"):
        make_checkpoint(folder / name, "llama")
    return folder


COMPILED = "engine: cpu, max_len: 64, engine_options: {compile: true}"


@pytest.fixture
def spec(models: Path, tmp_path: Path) -> Callable[[dict[str, str]], str]:
    """Writes a spec of these models; gives its path."""

    def write(fields: dict[str, str]) -> str:
        lines = [f"  {name}: {{{COMPILED}, {more}}}" for name, more in fields.items()]
        path = models / f"{tmp_path.name}.yaml"
        path.write_text("\n".join(["hosts: {emulate: inf2.48xlarge}", "models:", *lines]))
        return str(path)

    return write


def compiled(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    code = run(["compile", *arguments, "-o", "json"])
    output = capsys.readouterr()
    return code, json.loads(output.out or "{}"), output.err


def test_models_that_look_for_the_same_are_compiled_once(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They share a row."""
    path = spec({"x": "source: ./a", "y": "source: ./a", "z": "source: ./b"})
    code, told, _ = compiled(capsys, path)
    assert code == 0
    assert sorted(played.compiled) == ["x", "z"]
    assert sorted((one["models"], one["result"]) for one in told["models"]) == [
        (["x", "y"], "compiled"),
        (["z"], "compiled"),
    ]


def test_a_failure_keeps_no_other_from_being_compiled(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told with its id and its model, and the command fails."""
    played.failures["x"] = Failure("compiler-killed", "no memory", "take a larger host")
    code, told, said = compiled(capsys, spec({"x": "source: ./a", "z": "source: ./b"}))
    assert code == 1
    assert {tuple(one["models"]): one["result"] for one in told["models"]} == {("x",): "failed", ("z",): "compiled"}
    assert "compiler-killed: x: no memory" in said


def test_only_the_models_that_are_named_are_compiled(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that the spec has not is refused."""
    path = spec({"x": "source: ./a", "z": "source: ./b"})
    assert compiled(capsys, path, "--model", "z")[0] == 0
    assert played.compiled == ["z"]
    code, _, said = compiled(capsys, path, "--model", "w")
    assert (code, "model-unknown" in said) == (1, True)


def test_as_many_are_compiled_at_once_as_fit(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both where there is room, one after the other where there is none or where somebody wants it."""
    path = spec({"x": "source: ./a", "z": "source: ./b"})
    played.gate = threading.Barrier(2)
    assert compiled(capsys, path, "--memory-gb", "100")[0] == 0
    played.gate, played.most_at_once = None, 0
    assert compiled(capsys, path, "--memory-gb", "100", "--jobs", "1")[0] == 0
    code, _, said = compiled(capsys, path, "--memory-gb", "5")
    assert (code, played.most_at_once) == (0, 1)
    assert "it is compiled alone" not in said
    assert "it is compiled alone" in compiled(capsys, path, "--memory-gb", "1")[2]


def test_progress_is_lines_where_there_is_no_terminal(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step once, and nothing of it on stdout."""
    _, _, said = compiled(capsys, spec({"x": "source: ./a"}))
    assert said.splitlines() == ["x: looking what is compiled", "x: compiling graph 2 of 2", "x: done"]


def test_what_is_pushed_needs_a_place(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A neff_cache of one of the models at least."""
    code, _, said = compiled(capsys, spec({"x": "source: ./a"}), "--push")
    assert (code, "push-nowhere" in said, played.compiled) == (1, True, [])
    path = spec({"x": f"source: ./a, neff_cache: {tmp_path / 'neffs'}", "z": "source: ./b"})
    assert compiled(capsys, path, "--push")[0] == 0
    assert played.pushed == [True, True]


def test_a_spec_with_errors_is_not_compiled(played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its problems are told."""
    (tmp_path / "bad.yaml").write_text("models: {x: {engine: cpu}}")
    code, _, said = compiled(capsys, str(tmp_path / "bad.yaml"))
    assert (code, "nothing was compiled" in said, played.compiled) == (1, True, [])


def test_ctrl_c_ends_the_compilers(
    spec: Callable[[dict[str, str]], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one who looks on leaves, and every process is told to end before the command does."""
    began, ended = threading.Event(), []

    def answers(command: str, one: ReplicaConfig, stop: threading.Event, *_: Any, **__: Any) -> Iterator[Told]:
        if command == "predict":
            wanted = Wanted(role="model", source="", manifest={}, folder="/k", complete=False, ahead=True)
            yield Predicted(engine="cpu", wanted=[wanted])
            return
        began.set()
        assert stop.wait(DEADLINE_S)
        ended.append(one.model)
        raise Stopped("x")

    monkeypatch.setattr(ahead, "answers", answers)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    home = Home.from_environment()
    flow = compileahead.CompileAhead(
        load(spec({"x": "source: ./a"})), home, StoreSettings(root=str(tmp_path)), lambda _: None
    )

    def leave(step: compileahead.Step) -> None:
        if step.phase == "queued":
            raise KeyboardInterrupt

    jobs = flow.prepare().jobs
    running = flow.run([*jobs, dataclasses.replace(jobs[0], models=("another",))], memory_gib=0.1, most=1)
    monkeypatch.setattr(flow, "_watch", leave)
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert began.is_set()
    assert ended == ["x"]


def test_a_compile_that_was_ended_says_so(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a failure like another: what it made does not count."""
    played.stopped = True
    code, told, said = compiled(capsys, spec({"x": "source: ./a"}))
    assert (code, told["models"][0]["failure"]["id"]) == (1, "compile-stopped")
    assert "compile-stopped" in said
