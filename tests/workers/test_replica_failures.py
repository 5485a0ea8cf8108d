"""What a replica tells of its failures: the runtime's account in place of its own vague one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.workers.test_bringing import CONFIG
from tests.workers.test_facts_reading import tool
from workers.batching.batcher_stats import BatcherStats
from workers.host import host_facts
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.status import Failure, Phase, Reaction, ReplicaStatus
from workers.neff_cache import compiled_artifacts
from workers.serving.replica import Replica

TAKEN = "NRT:nrt_allocate_neuron_cores   NeuronCore(s) not available - Requested:nc2-nc3 Available:1"
VAGUE = Failure("load-failed", "RuntimeError: it did not work")


def replica(log: Path, phase: Phase = Phase.LOADING) -> Replica:
    made = Replica.__new__(Replica)
    made._config = SimpleNamespace(log=str(log), cores=[2, 3])  # type: ignore[assignment]
    made._status = ReplicaStatus(version=1, phase=phase, pid=1, started=0.0)
    return made


def test_the_log_says_what_the_error_does_not(tmp_path: Path) -> None:
    """C libraries write to it; what stood there before this start does not count."""
    log = tmp_path / "m-0.log"
    log.write_text("nrt_execute status=1201\n")
    with log.open("ab") as file:
        host_facts.mark_log(file.fileno())
    assert replica(log)._explained(VAGUE, RuntimeError("boom")) == VAGUE
    with log.open("a") as more:
        more.write("ERROR NRT:nrt_load   NEFF version mismatch supported: 1.1 received: 2.0\n")

    told = replica(log)._explained(VAGUE, RuntimeError("boom"))
    assert (told.id, told.reaction) == ("neff-unsupported", Reaction.STOP)
    assert replica(log, Phase.READY)._explained(VAGUE, RuntimeError("boom")).reaction is Reaction.RETRY


@pytest.mark.parametrize(
    "batcher", [None, SimpleNamespace(stats=BatcherStats(4, 0, 0, 0, 9, 9, None, 1.0, False, None))]
)
def test_it_tells_for_how_long_it_has_compiled(
    batcher: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads, where the deadline of its start waits for it, and ever after."""
    spent = compiled_artifacts.Stopwatch(clock=iter([100.0, 160.0, 160.0]).__next__)
    monkeypatch.setattr(compiled_artifacts, "SPENT", spent)
    made = replica(tmp_path / "m-0.log")
    made._batcher = batcher  # type: ignore[assignment]
    with compiled_artifacts.SPENT.running():
        assert made._reading().compile_s == 60.0


def test_what_an_engine_has_found_out_itself_stands(tmp_path: Path) -> None:
    """Its own cause is the better one, whatever the log says too."""
    error = EngineLoadError("weights-missing", "no safetensors", "copy them")
    found = Failure(error.id, error.what, error.hint)
    (tmp_path / "m-0.log").write_text("nrt_execute status=5\n")
    assert replica(tmp_path / "m-0.log")._explained(found, error) == found


@pytest.mark.parametrize(
    ("id", "reaction"), [("engine-not-installed", Reaction.STOP), ("weights-missing", Reaction.RETRY)]
)
def test_an_engine_that_is_not_installed_is_not_tried_again(id: str, reaction: Reaction, tmp_path: Path) -> None:
    """A further process would not have it either."""
    made = replica(tmp_path / "m-0.log")
    told: list[Failure] = []

    def load() -> None:
        raise EngineLoadError(id, "the cpu engine needs torch")

    made._load = load  # type: ignore[method-assign]
    made._fail = told.append  # type: ignore[assignment, method-assign]
    made._live()
    assert [(failure.id, failure.reaction) for failure in told] == [(id, reaction)]


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process that was told to take core 3."""
    process = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        stdin=subprocess.PIPE,
        env={**os.environ, "NEURON_RT_VISIBLE_CORES": "3"},
    )
    yield process
    process.kill()
    process.wait()


def test_taken_cores_are_told_with_their_owner(
    holder: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid and command, by neuron-ls of the host's own tools."""
    device = {"neuron_device": 1, "nc_count": 2, "neuroncore_ids": [2, 3], "memory_size": 1, "bdf": "00:1f.0"}
    device["neuron_processes"] = [{"pid": holder.pid, "command": "python", "neuron_runtime_version": "2.22"}]
    (tmp_path / "told.json").write_text(json.dumps([device]))
    tool(tmp_path / "opt/aws/neuron/bin", "neuron-ls", f"cat {tmp_path}/told.json")
    monkeypatch.setenv(host_facts.ROOT_VARIABLE, str(tmp_path))

    told = replica(tmp_path / "none.log")._explained(VAGUE, RuntimeError(TAKEN))

    assert (told.id, told.reaction) == ("cores-taken", Reaction.ELSEWHERE)
    assert "nc2-nc3 were requested, 1 of them" in told.what
    assert f"held: nc3 by pid {holder.pid} (python)" in told.what


@pytest.mark.slow
def test_a_log_has_no_progress_bars(checkpoint: Callable[[str], Path]) -> None:
    """Where an engine is opened, in a replica or for one answer, transformers draws none from then on."""
    config = msgspec.structs.replace(CONFIG, engine="cpu", source=str(checkpoint("llama")), draft_source=None)
    program = "import sys\n"
    program += "import msgspec\n"
    program += "from workers.engines.open_engine import open_engine\n"
    program += "from workers.messages.replica_config import ReplicaConfig\n"
    program += "open_engine(msgspec.json.decode(sys.argv[1], type=ReplicaConfig)).load()\n"
    done = subprocess.run(
        [sys.executable, "-c", program, msgspec.json.encode(config).decode()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Loading" not in done.stdout + done.stderr


def test_the_first_cause_stays_the_cause(tmp_path: Path) -> None:
    """A failed step ends the first generation too, which then fails for that reason."""
    failing = replica(tmp_path / "m-0.log", Phase.FAILED)
    failing._status = ReplicaStatus(version=2, phase=Phase.FAILED, pid=1, started=0.0, failure=VAGUE)
    failing._fail(Failure("probe-failed", "no answer"))
    assert failing._status.failure == VAGUE
