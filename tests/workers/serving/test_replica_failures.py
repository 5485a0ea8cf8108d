"""Failures of loads and engine steps: the Neuron runtime's own messages replace vague causes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from tests.replica_configs import changed
from tests.workers.artifacts.test_artifact_fetcher import CONFIG
from tests.workers.host.test_facts_reading import tool
from tests.workers.tnx_runs import config
from workers.artifacts.sources.listing import SourceError
from workers.batching.step_loop import BatcherStats
from workers.compiled import host_sets
from workers.host import host_facts, start_phases
from workers.host.core_claims import CoresTaken
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.json_form import encoded
from workers.messages.replica_config import Origin
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.status import Failure, Phase, Reaction, ReplicaStatus
from workers.serving import replica as module
from workers.serving.backend import failure_of, local_contents
from workers.serving.replica import Replica

TAKEN = "NRT:nrt_allocate_neuron_cores   NeuronCore(s) not available - Requested:nc2-nc3 Available:1"


def failure(error: Exception, log: Path) -> Failure:
    """The failure of a load that wrote this log."""
    return failure_of("load-failed", error, "the load", config(log, log=str(log), cores=[2, 3]))


def replica(phase: Phase, failure: Failure | None = None) -> Replica:
    """A replica in this phase, without a process of its own."""
    replica = Replica.__new__(Replica)
    replica._changed = threading.Condition()
    replica._status = ReplicaStatus(version=1, phase=phase, pid=1, started=0.0, failure=failure)
    replica._batcher = None
    replica._began = time.monotonic()
    return replica


def test_a_vague_failure_is_explained_by_the_log(tmp_path: Path) -> None:
    """C libraries write to it. Lines from before this start do not count."""
    log = tmp_path / "m-0.log"
    log.write_text("nrt_execute status=1201\n")
    with log.open("ab") as file:
        host_facts.mark_log(file.fileno())
    vague = Failure("load-failed", "RuntimeError: boom", f"the log is {log}")
    assert failure(RuntimeError("boom"), log) == vague
    with log.open("a") as more:
        more.write("ERROR NRT:nrt_load   NEFF version mismatch supported: 1.1 received: 2.0\n")
    explained = failure(RuntimeError("boom"), log)
    assert (explained.id, explained.reaction) == ("neff-unsupported", Reaction.STOP)


@pytest.mark.parametrize(("phase", "reaction"), [(Phase.LOADING, Reaction.STOP), (Phase.READY, Reaction.RETRY)])
def test_only_a_replica_that_has_served_is_retried_after_any_fault(phase: Phase, reaction: Reaction) -> None:
    """Its model fits, since it once ran."""
    failing = replica(phase)
    failing._fail(Failure("hbm-exhausted", "the cores' memory is full", reaction=Reaction.STOP))
    assert failing._status.failure is not None
    assert failing._status.failure.reaction is reaction


@pytest.mark.parametrize("batcher", [None, SimpleNamespace(stats=BatcherStats(4, 0, 0, 0, 9, 9, None, False, None))])
def test_the_status_has_the_time_spent_on_compiling(batcher: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also during the load, whose deadline does not count this time."""
    spent = host_sets.Stopwatch(clock=iter([100.0, 160.0, 160.0]).__next__)
    monkeypatch.setattr(host_sets, "SPENT", spent)
    loading = replica(Phase.LOADING)
    loading._batcher = batcher  # type: ignore[assignment]
    loading._process_s = 1.5
    with host_sets.SPENT.running():
        assert loading._reading().compile_s == 60.0


def test_the_status_of_a_load_has_the_phases_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller finds the one that runs by them."""
    monkeypatch.setattr(start_phases.START, "seconds", {"imports": 2.0})
    loading = replica(Phase.LOADING)
    loading._batcher, loading._process_s = None, 1.5
    assert loading._reading().load_phases == {"process": 1.5, "imports": 2.0}


def test_a_specific_error_of_an_engine_is_not_replaced(tmp_path: Path) -> None:
    """Whatever else the log shows."""
    error = EngineLoadError("weights-missing", "no safetensors", "copy them")
    (tmp_path / "m-0.log").write_text("nrt_execute status=5\n")
    assert failure(error, tmp_path / "m-0.log") == Failure(error.id, error.what, error.hint)


@pytest.mark.parametrize(
    ("error", "id", "reaction"),
    [
        (EngineLoadError("engine-not-installed", "the cpu engine needs torch"), "engine-not-installed", Reaction.STOP),
        (EngineLoadError("weights-missing", "no safetensors"), "weights-missing", Reaction.RETRY),
        (SourceError("source-missing", "no such bucket"), "source-missing", Reaction.RETRY),
        (CoresTaken([0, 1], {1: 99}), "cores-taken", Reaction.RETRY),
        (ZeroDivisionError("division by zero"), "load-failed", Reaction.RETRY),
    ],
)
def test_each_error_of_a_load_has_its_id_and_reaction(
    error: Exception, id: str, reaction: Reaction, tmp_path: Path
) -> None:
    """Another process would not have a missing engine either: only that one stops."""
    cause = failure(error, tmp_path / "none.log")
    assert (cause.id, cause.reaction) == (id, reaction)


def test_a_step_without_memory_has_the_cause_out_of_memory(tmp_path: Path) -> None:
    """Its text names the activity."""
    shortage = failure(MemoryError(), tmp_path / "none.log")
    assert (shortage.id, "the load" in shortage.what) == ("out-of-memory", True)


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    """A process with core 3 in its NEURON_RT_VISIBLE_CORES."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "NEURON_RT_VISIBLE_CORES": "3"},
    )
    assert process.stdout is not None
    process.stdout.readline()  # before that, it shows the environment of this process
    yield process
    process.kill()
    process.communicate()


def test_the_failure_of_taken_cores_has_their_owner(
    holder: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pid and command, as reported by neuron-ls; else a start may try these cores again."""
    device = {"neuron_device": 1, "nc_count": 2, "neuroncore_ids": [2, 3], "memory_size": 1, "bdf": "00:1f.0"}
    device["neuron_processes"] = [{"pid": holder.pid, "command": "python", "neuron_runtime_version": "2.22"}]
    (tmp_path / "listing.json").write_text(json.dumps([device]))
    tool(tmp_path / "opt/aws/neuron/bin", "neuron-ls", f"cat {tmp_path}/listing.json")
    monkeypatch.setenv(host_facts.ROOT_VARIABLE, str(tmp_path))

    taken = failure(RuntimeError(TAKEN), tmp_path / "none.log")

    assert (taken.id, taken.reaction, taken.held) == ("cores-taken", Reaction.ELSEWHERE, True)
    assert "nc2-nc3 were requested, 1 of them" in taken.what
    assert f"held: nc3 by pid {holder.pid} (python)" in taken.what

    (tmp_path / "listing.json").write_text(json.dumps([{**device, "neuron_processes": []}]))
    late = failure(RuntimeError(TAKEN), tmp_path / "none.log")
    assert (late.reaction, late.held) == (Reaction.ELSEWHERE, False)
    assert "held: by no process now" in late.what


@pytest.mark.slow
def test_a_log_has_no_progress_bars(checkpoint: Callable[[str], Path]) -> None:
    """After an engine is opened, in a replica or by `corewright generate`, transformers draws none."""
    cpu = changed(CONFIG, engine="cpu", source=str(checkpoint("llama")), draft_source=None)
    program = "import sys\n"
    program += "import msgspec\n"
    program += "from workers.engines.open_engine import open_engine\n"
    program += (
        "from workers.messages.json_form import decoded\nfrom workers.messages.replica_config import ReplicaConfig\n"
    )
    program += "open_engine(decoded(sys.argv[1], ReplicaConfig)).load()\n"
    done = subprocess.run(
        [sys.executable, "-c", program, encoded(cpu).decode()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Loading" not in done.stdout + done.stderr


def test_a_trial_that_an_engine_ends_fails_for_the_engines_reason(tmp_path: Path) -> None:
    """Which a step reports after it has ended its requests, on another thread."""

    class Broken:
        spec = SimpleNamespace(vocab_size=8, width=0)

        def submit(self, request: GenerateRequest) -> None:
            failing._emit([TokenEvent(id=request.id, finish=FinishReason.ERROR, error="RuntimeError: boom")])

        def run(self, after_step: object) -> None:
            assert failing._probed.wait(10)
            raise MemoryError

        stats = BatcherStats(4, 0, 0, 0, 9, 9, None, False, None)

    failing = replica(Phase.LOADING)
    failing._config = config(tmp_path, log=str(tmp_path / "none.log"))
    failing._batcher, failing._plane = Broken(), None  # type: ignore[assignment]
    failing._probed, failing._probe_error = threading.Event(), None
    failing._steps = threading.Thread(target=failing._run_batcher)
    failing._steps.start()
    with pytest.raises(EngineLoadError, match="boom") as error:
        failing._probe()
    failing._fail(Failure(error.value.id, error.value.what))

    assert failing._status.failure is not None
    assert failing._status.failure.id == "out-of-memory"


# Starts a replica without Ray, waits until it is ready or has failed, and prints its status.
REPLICA = """
import os, sys
output = os.fdopen(os.dup(1), "wb")
import msgspec
from workers.messages.json_form import decoded
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Phase
from workers.serving.replica import Replica
replica = Replica(decoded(sys.argv[1], ReplicaConfig))
status = replica.watch(0, 0)
while status.phase is Phase.LOADING:
    status = replica.watch(status.version, 60)
output.write(msgspec.json.encode(status))
output.flush()
os._exit(0)
"""


@pytest.mark.live
@pytest.mark.parametrize(
    ("engine", "phase", "id"), [("echo", Phase.READY, None), ("nxd-inference", Phase.FAILED, "engine-not-installed")]
)
def test_a_replica_reports_the_end_of_its_load(engine: str, phase: Phase, id: str | None) -> None:
    """Its process runs on after a failure, until the status is read."""
    with tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp") as folder:
        path = Path(folder)
        placed = config(path, engine=engine, log=str(path / "m-0.log"), socket=str(path / "s"), cores=[])
        result = subprocess.run(
            [sys.executable, "-c", REPLICA, encoded(placed).decode()],
            capture_output=True,
            timeout=100,
            check=True,
        )
    status = msgspec.json.decode(result.stdout, type=ReplicaStatus)
    assert (status.phase, status.failure and status.failure.id) == (phase, id)


@pytest.mark.parametrize(("engine", "is_read"), [("cpu", True), ("nxd-inference", False)])
def test_weights_are_read_ahead(engine: str, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the load begins; not where a compile has saved what is loaded."""
    weights = tmp_path / "model-00001-of-00001.safetensors"
    weights.touch()
    (tmp_path / "config.json").touch()
    loading, read = replica(Phase.LOADING), queue.SimpleQueue[list[Path]]()
    loading._config, loading._uses, loading._claim = config(tmp_path, engine=engine), contextlib.ExitStack(), None
    monkeypatch.setattr(module, "set_environment", lambda planned: None)
    monkeypatch.setattr(module, "read_ahead", read.put)
    monkeypatch.setattr(module, "open_backend", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loading._load()

    for thread in threading.enumerate():
        if thread.name == "read ahead":
            thread.join(10)
    assert [read.get(timeout=10) for _ in range(is_read)] == [[weights]] * is_read
    assert read.empty()


def test_files_that_were_replaced_since_the_first_load_stop_the_replica(tmp_path: Path) -> None:
    """With the folder and the command that accepts them; a file with the same name and size is another one, too."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    os.utime(folder / "config.json", ns=(10**18, 10**18))
    loads = config(folder)
    first = local_contents(loads)
    again = changed(loads, contents=first)
    assert local_contents(again) == first != ""
    os.utime(folder / "config.json", ns=(10**18, 10**18 + 1))

    with pytest.raises(EngineLoadError) as refused:
        local_contents(again)

    change = failure(refused.value, tmp_path / "m.log")
    assert (change.id, change.reaction) == ("source-changed", Reaction.STOP)
    assert str(folder) in change.what
    assert f"corewright rollout restart {loads.model.name}" in change.hint


def test_a_fetched_folder_is_not_compared(tmp_path: Path) -> None:
    """The store never changes it."""
    fetched = changed(
        config(tmp_path), contents="other", origins={"source": Origin(source="s3://m", folder=str(tmp_path))}
    )
    assert fetched.local_folders() == []
    with pytest.raises(EngineLoadError):
        local_contents(changed(fetched, origins={}))
