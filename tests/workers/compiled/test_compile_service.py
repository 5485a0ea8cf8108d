"""What a host does ahead of starts: several at once, but never more than its CPUs and its memory allow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.resolve.spec_file import load
from placements.engines.memory import PROCESS_GIB
from placements.resources.host_memory import host_memory
from tests.checkpoints import make_checkpoint
from tests.workers.tnx_runs import config
from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.sources.listing import Stopped
from workers.compiled import preparation
from workers.compiled.memory_gate import MemoryGate, need_gib
from workers.compiled.orders import Built
from workers.compiled.preparation import LOOKS, CompileService, Foreseen, looks_at_once
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

DEADLINE_S = 20.0


def model(name: str) -> ReplicaConfig:
    return config(Path("/models") / name, model=name)


class Played:
    """Replaces the work: counts the running jobs, and ends them when the test releases them."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.running: set[str] = set()
        self.most = 0
        self._ends: set[str] = set()
        self._changed = threading.Condition()

    def foresee(
        self, replica_config: ReplicaConfig, stop: threading.Event | None = None, warm: str | None = None
    ) -> Foreseen:
        self._work(replica_config.model.name)
        return Foreseen(missing=[replica_config.model.name])

    def build(self, replica_config: ReplicaConfig, progress: Progress, stop: threading.Event) -> Built:
        self._work(replica_config.model.name)
        return Built(wanted=[], seconds=0.0)

    def _work(self, name: str) -> None:
        with self._changed:
            self.begun.append(name)
            self.running.add(name)
            self.most = max(self.most, len(self.running))
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: name in self._ends, DEADLINE_S)
            self.running.discard(name)
            self._changed.notify_all()

    def end(self, *names: str) -> None:
        with self._changed:
            self._ends |= set(names)
            self._changed.notify_all()

    def until(self, *names: str) -> None:
        """These are at work, and no others."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.running == set(names), DEADLINE_S), self.running


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    result = Played()
    monkeypatch.setattr(preparation, "foresee", result.foresee)
    monkeypatch.setattr(preparation, "build", result.build)
    return result


def test_predictions_run_concurrently_within_their_limit(played: Played) -> None:
    """All waiters for the same config share one."""
    workshop = CompileService(looks=2)
    for waiter, name in [("1", "a"), ("2", "a"), ("3", "b"), ("4", "c")]:
        assert isinstance(workshop.foresee(waiter, model(name), 0.0), FetchStatus)
    with played._changed:
        assert played._changed.wait_for(lambda: len(played.running) == 2, DEADLINE_S)
    played.end("a", "b", "c")
    result = [workshop.foresee(waiter, model(name), DEADLINE_S) for waiter, name in zip("1234", "aabc", strict=True)]
    assert [item.missing for item in result if isinstance(item, Foreseen)] == [["a"], ["a"], ["b"], ["c"]]
    assert (sorted(played.begun), played.most) == (["a", "b", "c"], 2)


@given(st.integers(1, 512))
def test_concurrent_predictions_are_limited_by_the_cpus(cpus: int) -> None:
    """At least two, and the other CPUs are left to replicas that serve."""
    assert 2 <= looks_at_once(cpus) <= max(2, min(LOOKS, cpus))


def test_concurrent_compiles_stay_within_the_hosts_memory(played: Played) -> None:
    """One that does not fit waits, and smaller ones may overtake it."""
    needs = {"a": 64.0, "b": 64.0, "c": 20.0}
    workshop = CompileService(
        MemoryGate(lambda: 100.0 - sum(needs[name] for name in played.running)), need=lambda of: needs[of.model.name]
    )
    assert isinstance(workshop.compile("1", model("a"), 0.0), FetchStatus)
    played.until("a")
    assert isinstance(workshop.compile("2", model("b"), 0.0), FetchStatus)
    assert isinstance(workshop.compile("3", model("c"), 0.0), FetchStatus)
    played.until("a", "c")
    played.end("a")
    played.until("b", "c")
    played.end("b", "c")
    result = [workshop.compile(waiter, model(name), DEADLINE_S) for waiter, name in zip("123", "abc", strict=True)]
    assert [isinstance(item, Built) for item in result] == [True] * 3
    assert sorted(played.begun) == ["a", "b", "c"]


def test_a_compile_without_waiters_gives_up_its_turn(played: Played) -> None:
    """Before it has started."""
    workshop = CompileService(MemoryGate(lambda: 10.0), need=lambda _: 10.0)
    workshop.compile("1", model("a"), 0.0)
    played.until("a")
    workshop.compile("2", model("b"), 0.0)
    workshop.leave("2")
    played.end("a", "b")
    assert isinstance(workshop.compile("1", model("a"), DEADLINE_S), Built)
    workshop.compile("3", model("c"), 0.0)
    played.until("c")
    played.end("c")
    assert played.begun == ["a", "c"]


def test_an_unreadable_checkpoint_does_not_block_a_compile(played: Played, tmp_path: Path) -> None:
    """The compile itself reports the error."""
    workshop = CompileService(MemoryGate(lambda: 1.0))
    played.end("a")
    result = workshop.compile("1", config(tmp_path / "nowhere", model="a"), DEADLINE_S)
    assert isinstance(result, Built)


# Turns


class Crowd:
    """Threads that each hold a turn until the test releases them."""

    def __init__(self, turns: MemoryGate) -> None:
        self._turns = turns
        self.inside: dict[str, float] = {}
        self.stopped: set[str] = set()
        self.changed = threading.Condition()
        self._go: dict[str, threading.Event] = {}
        self._stop: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def come(self, name: str, need: float) -> None:
        self._go[name], self._stop[name] = threading.Event(), threading.Event()
        self._threads.append(threading.Thread(target=self._take, args=(name, need), daemon=True))
        self._threads[-1].start()

    def _take(self, name: str, need: float) -> None:
        try:
            with self._turns.turn(need, self._stop[name]):
                with self.changed:
                    self.inside[name] = need
                    self.changed.notify_all()
                assert self._go[name].wait(DEADLINE_S)
                with self.changed:
                    del self.inside[name]
                    self.changed.notify_all()
        except Stopped:
            with self.changed:
                self.stopped.add(name)
                self.changed.notify_all()

    def go(self, name: str) -> None:
        self._go[name].set()

    def stop(self, name: str) -> None:
        self._stop[name].set()

    def until(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, DEADLINE_S), (self.inside, self.stopped)

    def end(self) -> None:
        for name in self._go:
            self.go(name)
        for thread in self._threads:
            thread.join(DEADLINE_S)


def test_a_compile_that_exceeds_the_memory_runs_alone() -> None:
    """Its need is an estimate."""
    crowd = Crowd(MemoryGate(lambda: 10.0))
    crowd.come("large", 64.0)
    crowd.until(lambda: "large" in crowd.inside)
    crowd.come("small", 1.0)
    crowd.stop("small")
    crowd.until(lambda: "small" in crowd.stopped)
    crowd.come("next", 1.0)
    crowd.go("large")
    crowd.until(lambda: set(crowd.inside) == {"next"})
    crowd.end()


def test_memory_taken_by_other_processes_is_not_given_away() -> None:
    """Such as a replica that has begun to load."""
    free = [100.0]
    crowd = Crowd(MemoryGate(lambda: free[0]))
    crowd.come("first", 40.0)
    crowd.until(lambda: "first" in crowd.inside)
    free[0] = 30.0
    crowd.come("second", 40.0)
    crowd.come("third", 20.0)
    crowd.until(lambda: set(crowd.inside) == {"first", "third"})
    crowd.stop("second")
    crowd.until(lambda: "second" in crowd.stopped)
    crowd.end()


def test_reserved_memory_is_not_given_away_twice() -> None:
    """A compile allocates its memory over time."""
    crowd = Crowd(MemoryGate(lambda: 100.0))
    crowd.come("first", 60.0)
    crowd.until(lambda: "first" in crowd.inside)
    crowd.come("second", 60.0)
    crowd.come("third", 40.0)
    crowd.until(lambda: set(crowd.inside) == {"first", "third"})
    crowd.go("first")
    crowd.go("third")
    crowd.until(lambda: set(crowd.inside) == {"second"})
    crowd.end()


# What one needs


@pytest.mark.parametrize("engine", ["cpu", "transformers-neuronx", "nxd-inference"])
def test_a_host_estimates_memory_as_the_plan_does(tmp_path: Path, engine: str) -> None:
    """From the replica's config and the checkpoint, as `plan` from the spec."""
    make_checkpoint(tmp_path / "model", "llama")
    hosts = "emulate" if engine == "cpu" else "instance"
    (tmp_path / "spec.yaml").write_text(
        f"hosts: {{{hosts}: inf2.xlarge}}\n"
        f"models: {{m: {{engine: {engine}, source: ./model, tp_degree: 2, max_batch: 3, max_len: 64, dtype: fp32}}}}\n"
    )
    file = load(str(tmp_path / "spec.yaml"))
    assert file.spec is not None
    result = host_memory(file.spec.models[0], file.checkpoints["m"], engine)
    assert need_gib(config(tmp_path / "model", engine=engine)) == result.load + result.compile
    assert need_gib(config(tmp_path / "model", engine=engine), 200.0) == 200.0 + result.compile


def test_unknown_checkpoints_count_by_their_compiler(tmp_path: Path) -> None:
    """It takes most of the memory. So do unknown dtypes, which the compile rejects."""
    assert need_gib(config(tmp_path)) == 64.0 + PROCESS_GIB
    make_checkpoint(tmp_path / "model", "llama")
    assert need_gib(config(tmp_path / "model", dtype="fp64")) == 64.0 + PROCESS_GIB
    assert need_gib(config(tmp_path, engine="cpu", engine_options={"compile": True})) == 3.0 + PROCESS_GIB


def test_a_failed_compile_is_reported_to_each_waiter(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its id."""
    monkeypatch.setattr(preparation, "build", lambda *_: Failure("compile-failed", "the compiler crashed"))
    result = CompileService(MemoryGate(lambda: 10.0), need=lambda _: 1.0).compile("1", model("a"), DEADLINE_S)
    assert result == Failure("compile-failed", "the compiler crashed")
