"""Claims that no process here can refute are refuted by given results of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.process.speed_record import SpeedRecord
from orchestrator.verify import parts
from orchestrator.verify.claims import Verdict
from orchestrator.verify.stand import Placed, Stand, TrialRun
from orchestrator.verify.trials import QUICK, trials_for
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES, Host, Machine
from placements.resources.estimate import speed
from tests.replica_configs import replica_config
from workers.artifacts.sources.listing import Stopped
from workers.compiled import preparation
from workers.compiled.orders import Wanted
from workers.host.facts.neuron_monitor import CoreUse, Runtime
from workers.messages.status import Failure, Reaction
from workers.serving.timed_answers import TimedAnswer

HOST = Host("inf2.24xlarge/0", TOPOLOGIES["inf2.24xlarge"], (0, 1), emulated=True)


class GivenStand(Stand):
    """A stand whose runs and compiles end as the test specifies."""

    def __init__(self, folder: Path) -> None:
        trials = trials_for("cpu", HOST, range(12), QUICK)
        self.folder, self.engine, self.failures = folder, "cpu", []
        self.trials = {trial.name: trial for trial in trials}
        config = replica_config(source=str(folder), engine="cpu", max_len=128, host=HOST.name)
        self.given = Placed(config, config.model, Checkpoint.from_config(self.trials["base"].configuration), (HOST,))
        self.runs_given: list[TrialRun] = []
        self.compiles_given: list[Failure | Stopped | None] = []

    def placed(self, name: str) -> Placed:
        return self.given

    def place(self, file: Any, name: str) -> Placed:
        return self.given

    def run(self, trial: Any, groups: Sequence[Any] = (), *, during: Any = lambda pid: None, **more: Any) -> TrialRun:
        during(os.getpid())
        return self.runs_given.pop(0)

    def compiled(self, config: Any, stop: Any = None) -> Failure | None:
        ended = self.compiles_given.pop(0)
        if isinstance(ended, Stopped):
            raise ended
        return ended


@pytest.fixture
def stand(tmp_path: Path) -> GivenStand:
    return GivenStand(tmp_path)


def answered(*tokens: int) -> TrialRun:
    return TrialRun(
        answers={"a": TimedAnswer(id="a", token_ids=list(tokens), at=[0.1 * i for i in range(len(tokens))])}
    )


def results(verdicts: Iterator[Verdict]) -> dict[str, str]:
    return {verdict.claim: verdict.result for verdict in verdicts}


@pytest.mark.parametrize(
    ("ended", "result"),
    [
        (Failure("compile-failed", "an error", reaction=Reaction.STOP), "proved"),
        (Failure("compile-failed", "an error", reaction=Reaction.RETRY), "refuted"),
        (None, "refuted"),
    ],
)
def test_a_failed_compile_that_would_be_repeated_is_refuted(
    stand: GivenStand, ended: Failure | None, result: str
) -> None:
    stand.compiles_given = [ended]
    assert parts._failing_compile(stand).result == result


@pytest.mark.parametrize(("complete", "result"), [(False, "proved"), (True, "refuted")])
def test_a_killed_compile_whose_remains_count_as_complete_is_refuted(
    stand: GivenStand, complete: bool, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Wanted(role="model", source="", manifest={}, folder="/sets/a", complete=complete, ahead=True)
    built = Wanted(role="model", source="", manifest={}, folder="/sets/a", complete=True, ahead=True)
    found = iter([[wanted], [built]])
    monkeypatch.setattr(preparation, "verify", lambda config: next(found))
    stand.compiles_given = [Stopped("killed"), None]
    assert parts._killed_compile(stand, stand.given).result == result


@pytest.mark.parametrize(
    ("after", "result"),
    [
        (answered(1, 2), "proved"),
        (answered(1, 3), "refuted"),
        (TrialRun(failure=Failure("neff-invalid", "the runtime rejects it")), "proved"),
        (TrialRun(failure=Failure("load-failed", "an unknown text")), "refuted"),
    ],
)
def test_a_damaged_graph_that_is_served_is_refuted(
    stand: GivenStand, after: TrialRun, result: str, tmp_path: Path
) -> None:
    (tmp_path / "graph.neff").write_bytes(b"x" * 300)
    (tmp_path / "weights.safetensors").write_bytes(b"x" * 900)
    stand.runs_given = [answered(1, 2), after]
    assert parts._damaged(stand, stand.given, tmp_path).result == result
    assert (tmp_path / "graph.neff").read_bytes() == b"x" * 100 + bytes(100) + b"x" * 100
    assert (tmp_path / "weights.safetensors").read_bytes() == b"x" * 900


@pytest.mark.parametrize(
    ("run", "needs_gib", "result"),
    [
        (TrialRun(failure=Failure("hbm-exceeded", "it does not fit")), 1e6, "proved"),
        (TrialRun(failure=Failure("load-failed", "an unknown text")), 1e6, "refuted"),
        (answered(1), 1e6, "refuted"),
        (answered(1), 0.1, "not run"),
    ],
)
def test_a_model_that_is_too_large_and_loaded_is_refuted(
    stand: GivenStand, run: TrialRun, needs_gib: float, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Placed, "needs_gib", needs_gib)
    stand.runs_given = [run]
    assert results(parts.faults(stand))["too-large"] == result


@pytest.mark.parametrize(("gib", "result"), [(0.5, "proved"), (40.0, "refuted")])
def test_more_memory_than_planned_is_refuted_and_recorded(
    stand: GivenStand, gib: float, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Less is not: a tiny model does not fill what a large one needs."""
    uses = (CoreUse(core=0, memory={"constants": int(gib * 2**30)}),)
    facts = SimpleNamespace(runtimes=(Runtime(pid=os.getpid(), cores=uses),))
    monkeypatch.setattr(parts, "read_host_facts", lambda: facts)
    stand.runs_given = [TrialRun(peak_gib=gib)]
    record = SpeedRecord(tmp_path / "speeds.json", "0.1.0", 0.0)
    verdicts = {verdict.claim: verdict for verdict in parts.memory(stand, record)}
    assert verdicts["hbm-estimate"].result == result
    assert verdicts["hbm-estimate"].values["gib_by_class"] == {"constants": gib}
    (constants,) = record.constants().values()
    assert (constants.hbm_gib > 0, constants.host_gib > 0) == (result == "refuted",) * 2


@pytest.mark.parametrize(("error", "result"), [(1e9, "proved"), (0.0, "refuted")])
def test_a_step_outside_the_error_of_its_estimate_is_refuted(
    stand: GivenStand, error: float, result: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parts, "speed", lambda *about: replace(speed(*about), decode_error=error))
    asked = [f"{length} {i}" for length in (7, 29, 58) for i in range(10)]
    at = [0.02 * i for i in range(1, 13)]
    stand.runs_given = [TrialRun(answers={id: TimedAnswer(id=id, token_ids=list(range(12)), at=at) for id in asked})]
    file: Any = SimpleNamespace(spec=SimpleNamespace(models=[stand.given.model]), machine=Machine((0, 1)))
    record = SpeedRecord(tmp_path / "speeds.json", "0.1.0", 0.0)
    (verdict,) = parts.speeds(stand, file, record, 0.0)
    assert (verdict.result, verdict.values["step_ms"]) == (result, pytest.approx(20.0, rel=0.03))
    assert record.changed
