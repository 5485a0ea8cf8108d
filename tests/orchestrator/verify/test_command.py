"""The command `corewright verify`: the processes that it starts, and its report when a part cannot be measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli import main as cli
from orchestrator.control.resolve.spec_file import SpecFile, examine, this_machine
from orchestrator.process.failure import Failed
from orchestrator.process.speed_record import SpeedRecord
from orchestrator.verify import parts, verification
from orchestrator.verify.claims import CLAIMS, Verdict, proved
from orchestrator.verify.stand import TrialRun
from placements.facts.topology import Machine
from workers.messages.status import Failure
from workers.serving.timed_answers import TimedAnswer


def test_the_facts_of_the_machine_are_judged_without_models_on_the_disk_of_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """/tmp may be in memory, and making models needs torch. Later commands read the rate."""
    read = []
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(parts, "read_rate", lambda folder: read.append(folder) or 2e8)
    monkeypatch.setattr(verification, "Stand", None)
    cli.run(["verify", "--only", "facts", "-o", "json"])
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert [each["claim"] for each in verdicts] == [claim.id for claim in CLAIMS.values() if claim.part == "facts"]
    assert read == [tmp_path / "home"]
    assert [each.read_bytes_s for each in this_machine().measured.values()] == [2e8]


def test_a_claim_that_an_error_prevents_from_being_measured_is_not_run() -> None:
    """The report has the measurements before the error, which may have taken an hour."""

    def broken() -> Iterator[Verdict]:
        yield proved("compile-killed", True, "nothing was accepted as complete")
        raise Failed("verify-failed", "the reference ended", "see its log")

    verdicts = list(verification._measured("compiler", broken()))
    assert [(each.claim, each.result) for each in verdicts] == [
        ("compile-killed", "proved"),
        ("compile-failed", "not run"),
        ("damaged-artifact", "not run"),
    ]
    assert verdicts[1].finding == "verify-failed: the reference ended"


KILLED = """
import os, signal
from orchestrator.verify.verification import workspace
with workspace() as folder:
    (folder / "model").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_folder_of_a_killed_verification_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a running one, nor what a link leads to."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    command, env = [sys.executable, "-c", KILLED], {**os.environ, "TMPDIR": str(tmp_path)}
    killed = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    left, other = Path(killed.stdout.strip()), tmp_path / "other"
    assert (left / "model").is_dir()
    (other / "model").mkdir(parents=True)
    (tmp_path / f"{verification.WORKSPACE}link").symlink_to(other)
    with verification.workspace() as first:
        (first / "model").mkdir()
        assert not left.exists()
        with verification.workspace() as second:
            assert (first / "model").is_dir()
    assert not first.exists()
    assert not second.exists()
    assert (other / "model").is_dir()


# -- The models of the spec

TEXT = "hosts: {emulate: inf2.24xlarge}\nmodels: {m: {engine: echo}}\n"


def speeds(run: TrialRun, tmp_path: Path, instance: str | None = None, text: str = TEXT) -> Verdict:
    file: SpecFile = examine(text, "spec.yaml", "/", Machine((0, 1), instance), folders="ignore")
    config = SimpleNamespace(max_len=128, model=SimpleNamespace(engine="echo"))
    stand: Any = SimpleNamespace(
        place=lambda file, name: SimpleNamespace(config=config, host=file.hosts[-1]), run=lambda *_: run
    )
    (verdict,) = parts.speeds(stand, file, SpeedRecord(tmp_path / "speeds.json", "0.1.0", 0.0), 0.0)
    return verdict


def test_a_model_whose_cores_are_taken_is_not_run(tmp_path: Path) -> None:
    """A fleet may serve the model meanwhile."""
    taken = TrialRun(failure=Failure("cores-taken", "core 0 is held by pid 7"))
    verdict = speeds(taken, tmp_path)
    assert (verdict.result, verdict.finding) == ("not run", "cores-taken: core 0 is held by pid 7")


def test_an_answer_without_steps_refutes_the_speed_with_its_error(tmp_path: Path) -> None:
    run = TrialRun(answers={"4 0": TimedAnswer(id="4 0", finish="error", error="the logits are not finite")})
    verdict = speeds(run, tmp_path)
    assert verdict.result == "refuted"
    assert verdict.finding == "the answer 4 0 has 0 steps: the logits are not finite"


def test_a_model_with_its_place_on_another_machine_is_not_run(tmp_path: Path) -> None:
    text = "hosts: [{instance: inf2.48xlarge}, {instance: trn2.48xlarge}]\nmodels: {m: {engine: echo}}\n"
    verdict = speeds(TrialRun(), tmp_path, "inf2.48xlarge", text)
    assert (verdict.result, verdict.finding) == (
        "not run",
        "the place of the model is trn2.48xlarge/0, another machine",
    )
