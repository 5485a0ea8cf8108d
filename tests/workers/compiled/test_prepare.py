"""What a start would look for is told before it, and what is compiled ahead is what it then takes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from tests.doubles import Neuron, neuron  # noqa: F401 - the fixture
from tests.replica_configs import changed
from tests.workers.tnx_runs import BUCKETS, config
from workers.artifacts.sources.listing import Stopped
from workers.compiled import preparation
from workers.compiled.host_sets import MANIFEST
from workers.compiled.orders import Built, Order, Predicted, Reply, Wanted, Working
from workers.engines.transformers_neuronx.engine import open_transformers_neuronx
from workers.host import file_lock
from workers.messages.json_form import encoded
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Reaction, Trouble
from workers.serving import prepare

Checkpoints = Callable[[str], Path]
PROJECT = Path(__file__).parents[3]
DEADLINE_S = 120.0


@pytest.fixture(autouse=True)
def machine(neuron: Neuron, monkeypatch: pytest.MonkeyPatch) -> Neuron:  # noqa: F811
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    return neuron


def replies_to(command: str, replica_config: ReplicaConfig, **fields: Any) -> list[Reply]:
    """All that is told, without a process of its own."""
    results: list[Reply] = []
    prepare.run(command, Order(config=replica_config, **fields), results.append)
    return results


def wanted(replica_config: ReplicaConfig, **fields: Any) -> list[Wanted]:
    (result,) = replies_to("predict", replica_config, **fields)
    assert isinstance(result, Predicted)
    return result.wanted


def trouble(replies: list[Reply]) -> str:
    assert isinstance(replies[-1], Trouble)
    return replies[-1].failure.id


def compiles(machine: Neuron) -> int:
    with contextlib.suppress(FileNotFoundError):
        return len((machine.state / "compiles.jsonl").read_text().splitlines())
    return 0


def kept(source: Path, tmp_path: Path, **fields: Any) -> ReplicaConfig:
    return config(source, compiled=str(tmp_path / "compiled"), **BUCKETS | fields)


def test_a_start_uses_the_predicted_artifacts(checkpoint: Checkpoints, machine: Neuron, tmp_path: Path) -> None:
    """They are compiled without a core, and the start compiles nothing."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    (before,) = wanted(replica_config)
    assert (before.complete, before.ahead, compiles(machine)) == (False, True, 0)
    *working, built = replies_to("compile", replica_config)
    assert [reply.phase for reply in working if isinstance(reply, Working)] == ["looking", "compiling", "done"]
    assert isinstance(built, Built)
    assert built.compiled == [before.key]
    assert machine.held() == {}
    (after,) = wanted(replica_config)
    assert after == msgspec.structs.replace(before, complete=True, prediction=after.prediction)
    assert [each.prediction.outcome for each in (before, after)] == ["compile", "hit"]
    count = compiles(machine)
    engine: Any = open_transformers_neuronx(replica_config)
    engine.load()
    assert (engine.compiled, compiles(machine) - count) == (False, 0)


def test_complete_artifacts_are_not_compiled_again(checkpoint: Checkpoints, machine: Neuron, tmp_path: Path) -> None:
    """The result names no compiled set."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    replies_to("compile", replica_config)
    count = compiles(machine)
    *_, built = replies_to("compile", replica_config)
    assert isinstance(built, Built)
    assert (built.compiled, built.pulled, compiles(machine) - count) == ([], [], 0)


def test_a_compile_reports_that_it_waits_for_another(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Only while the set is locked."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    (before,) = wanted(replica_config)
    phases: list[str] = []
    with contextlib.ExitStack() as other:
        lock = Path(before.folder).with_name(f"{before.key}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        other.enter_context(file_lock.shared(lock))

        def tell(reply: Reply) -> None:
            if isinstance(reply, Working):
                phases.append(reply.phase)
                other.close()

        prepare.run("compile", Order(config=replica_config), tell)
    assert phases == ["waiting", "looking", "compiling", "done"]


def test_a_failed_push_does_not_fail_the_compile(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The result has its error."""
    replica_config = kept(checkpoint("llama"), tmp_path, neff_cache="/proc/nowhere")
    *_, built = replies_to("compile", replica_config, push=True)
    assert isinstance(built, Built)
    assert (len(built.compiled), built.pushed) == (1, [])
    assert [failure.id for failure in built.unsent] == ["neff-cache-unwritable"]
    (after,) = wanted(replica_config)
    assert after.complete


def test_a_prediction_reads_no_weights(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """The config is enough: remote weights are not on the machine that predicts."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    head = tmp_path / "head"
    head.mkdir()
    for name in ("config.json", "generation_config.json"):
        (head / name).write_bytes((checkpoint("llama") / name).read_bytes())
    (with_weights,) = wanted(replica_config)
    (without,) = wanted(changed(replica_config, source=str(head)))
    assert without.manifest == with_weights.manifest
    (on_cpu,) = wanted(kept(head, tmp_path, engine="cpu", engine_options={"compile": True}))
    assert on_cpu.ahead


def test_a_draft_has_its_own_artifacts(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Its graphs differ."""
    replica_config = kept(checkpoint("llama"), tmp_path, draft_source=str(checkpoint("llama")), draft_k=3)
    result = wanted(replica_config)
    assert [reply.role for reply in result] == ["model", "draft"]
    assert result[0].key != result[1].key
    *_, built = replies_to("compile", replica_config)
    assert isinstance(built, Built)
    assert built.compiled == [reply.key for reply in result]


def test_a_model_that_needs_cores_to_compile_is_reported(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """GPT-NeoX's class saves no files."""
    replica_config = kept(checkpoint("gpt_neox"), tmp_path, prefill_buckets=[], decode_buckets=[])
    (result,) = wanted(replica_config)
    assert (result.ahead, result.folder, result.complete) == (False, "", False)
    assert trouble(replies_to("compile", replica_config)) == "compile-needs-device"


@pytest.mark.parametrize("engine", ["cpu", "echo"])
def test_an_engine_that_compiles_nothing_needs_no_artifacts(
    checkpoint: Checkpoints, tmp_path: Path, engine: str
) -> None:
    """Its `compile` succeeds."""
    replica_config = kept(checkpoint("llama"), tmp_path, engine=engine)
    assert wanted(replica_config) == []
    (built,) = replies_to("compile", replica_config)
    assert isinstance(built, Built)
    assert built.wanted == []


def test_unsupported_configs_are_reported_by_id(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """By predict and by compile."""
    replica_config = kept(checkpoint("llama"), tmp_path, dtype="fp64")
    assert trouble(replies_to("predict", replica_config)) == "bad-dtype"
    assert trouble(replies_to("compile", replica_config)) == "bad-dtype"


def test_a_failed_compile_leaves_no_complete_set(checkpoint: Checkpoints, machine: Neuron, tmp_path: Path) -> None:
    """The next one starts over."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    machine.plan({"at": "compile", "exit": 70})
    assert isinstance(replies_to("compile", replica_config)[-1], Trouble)
    machine.plan()
    (result,) = wanted(replica_config)
    assert not result.complete


def test_every_part_of_the_environment_that_a_compiler_reads_is_a_part_of_the_key(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flags come from the environment, not from the config."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    (before,) = wanted(replica_config)
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    (after,) = wanted(replica_config)
    assert before.key != after.key


# In processes of their own


@pytest.fixture
def processes(machine: Neuron, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts ``python -m workers.serving.prepare COMMAND`` with its order; ended with the test."""
    path = os.pathsep.join([str(PROJECT), machine.env["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    results: list[subprocess.Popen[bytes]] = []

    def start(command: str, replica_config: ReplicaConfig) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.serving.prepare", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        results.append(process)
        assert process.stdin is not None
        process.stdin.write(encoded(Order(config=replica_config, parent=os.getpid())))
        process.stdin.close()
        return process

    yield start
    for process in results:
        process.kill()
        process.wait()


def told_by(process: subprocess.Popen[bytes]) -> Iterator[Reply]:
    assert process.stdout is not None
    return (msgspec.json.decode(line, type=Reply) for line in process.stdout)


@pytest.mark.compile
def test_two_processes_compile_a_set_once(
    checkpoint: Checkpoints, machine: Neuron, tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """The second one waits, and reports that it compiled nothing."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    ends = [
        list(told_by(process))[-1]
        for process in [processes("compile", replica_config), processes("compile", replica_config)]
    ]
    assert sorted(len(end.compiled) for end in ends if isinstance(end, Built)) == [0, 1]
    graphs = {json.loads(line)["hlo"] for line in (machine.state / "compiles.jsonl").read_text().splitlines()}
    assert compiles(machine) == len(graphs)


@pytest.mark.live
def test_a_killed_compile_leaves_no_complete_set_and_no_compiler(
    checkpoint: Checkpoints, machine: Neuron, tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """SIGKILL within a graph. The next one compiles."""
    replica_config = kept(checkpoint("llama"), tmp_path)
    machine.plan({"at": "compile", "hangs": True})
    process = processes("compile", replica_config)
    compilers = _compilers(machine, count=2)
    process.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(compilers, timeout=DEADLINE_S)
    assert (len(gone), alive) == (2, [])
    (result,) = wanted(replica_config)
    assert not result.complete
    assert not (Path(result.folder) / MANIFEST).exists()
    machine.plan()
    *_, built = replies_to("compile", replica_config)
    assert isinstance(built, Built)
    assert built.compiled == [result.key]


@pytest.mark.compile
@pytest.mark.parametrize(
    ("fault", "id", "reaction", "words"),
    [
        (
            {"says": "checking\nan unknown error"},
            "compile-failed",
            "stop",
            "an unknown error",
        ),
        ({"says": "[NCC_IXCG856] MATCH_REPLACE8 Instruction expects"}, "known-failure", "stop", "MATCH_REPLACE8"),
        ({"die": True}, "compiler-killed", "retry", "memory"),
    ],
)
def test_only_a_killed_compile_is_repeated(
    fault: dict[str, Any],
    id: str,
    reaction: str,
    words: str,
    checkpoint: Checkpoints,
    machine: Neuron,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The failure is that of a replica's compile process. If it is unknown, it has the compiler's last lines."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), machine.env["PYTHONPATH"]]))
    machine.plan({"at": "compile", **fault})
    order = Order(config=kept(checkpoint("llama"), tmp_path, log=str(tmp_path / "log")))
    failure = preparation.run_process("compile", order, threading.Event())
    assert isinstance(failure, Failure)
    assert (failure.id, failure.reaction) == (id, Reaction(reaction))
    assert words in failure.what


@pytest.mark.compile
def test_a_stopped_compile_ends_its_compilers(
    checkpoint: Checkpoints, machine: Neuron, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it raises Stopped."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT), machine.env["PYTHONPATH"]]))
    replica_config = kept(checkpoint("llama"), tmp_path, log=str(tmp_path / "log"))
    machine.plan({"at": "compile", "hangs": True})
    stop = threading.Event()
    results: list[psutil.Process] = []

    def end() -> None:
        results.extend(_compilers(machine, count=2))
        stop.set()

    waiter = threading.Thread(target=end)
    waiter.start()
    with pytest.raises(Stopped):
        preparation.run_process("compile", Order(config=replica_config), stop)
    waiter.join()
    assert [process for process in results if process.is_running() and process.status() != "zombie"] == []


@pytest.mark.compile
def test_a_prediction_names_unread_weights(
    checkpoint: Checkpoints, machine: Neuron, tmp_path: Path, processes: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Artifacts of NxD Inference contain them. Once they are read or compiled, the folder is known."""
    replica_config = kept(checkpoint("llama"), tmp_path, engine="nxd-inference")
    (unread,) = wanted(replica_config)
    assert "model.safetensors" in {Path(name).name for name in unread.unread}
    assert (unread.folder, unread.complete, unread.ahead) == ("", False, True)
    (read,) = wanted(replica_config, read=True)
    assert (read.unread, bool(read.key)) == ([], True)
    assert wanted(replica_config) == [read]
    *_, built = told_by(processes("compile", replica_config))
    assert isinstance(built, Built)
    assert built.compiled == [read.key]
    assert machine.held() == {}


def _compilers(machine: Neuron, count: int) -> list[psutil.Process]:
    """The processes of a compiler that hangs, once there are so many."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.05)):
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            pids = (machine.state / "compilers").read_text().split()
            if len(pids) >= count:
                return [psutil.Process(int(pid)) for pid in pids]
        pause.wait(0.05)
    raise AssertionError("no compiler was started")
