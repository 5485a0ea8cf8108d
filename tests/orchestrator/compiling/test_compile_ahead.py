"""`corewright compile`: everything is compiled before anything starts, as much at once as fits."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.cli.main import run
from orchestrator.compiling import compile_ahead, hub_push
from orchestrator.compiling.compile_ahead import Job
from orchestrator.control.resolve import offline_configs
from orchestrator.control.resolve.spec_file import load
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from tests.checkpoints import make_checkpoint
from tests.published_configs import PUBLISHED
from tests.s3 import S3Server
from tests.workers.played_process import process_of
from tests.workers.tnx_runs import config
from workers.artifacts.sources.listing import Stopped
from workers.artifacts.store.store import StoreSettings
from workers.compiled import neuron_target, preparation
from workers.compiled.memory_gate import startable
from workers.compiled.orders import Built, Order, Predicted, Reply, Wanted, Working
from workers.host import host_facts as this_host
from workers.host import json_process
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Trouble

DEADLINE_S = 60.0


def job(name: str, need_gib: float) -> Job:
    return Job(models=(name,), config=config(Path("/models/a")), keys=(name,), need_gib=need_gib)


JOBS = st.lists(st.floats(0.1, 200), min_size=1, max_size=12).map(
    lambda needs: [job(str(number), need) for number, need in enumerate(needs)]
)


@given(JOBS, st.floats(1, 300), st.integers(1, 8), st.integers(0, 12))
def test_compilations_fit_into_memory_and_never_idle(jobs: list[Job], memory_gib: float, most: int, at: int) -> None:
    """Their needs stay within the memory unless a single one exceeds it, and a job always runs while jobs wait."""
    running, waiting = jobs[:at][:most], jobs[at:]
    if sum(job.need_gib for job in running) > memory_gib:
        running = running[:1]
    begun = startable(waiting, running, memory_gib=memory_gib, jobs=most)
    together = [*running, *begun]
    assert len(together) <= most
    assert len(together) == 1 or not begun or sum(job.need_gib for job in together) <= memory_gib
    assert together or not waiting
    assert [job for job in waiting if job in begun] == list(begun)


@given(JOBS, st.floats(1, 300), st.integers(1, 8))
def test_all_compilations_start_eventually(jobs: list[Job], memory_gib: float, most: int) -> None:
    """In any order of ends."""
    waiting, running, rounds = list(jobs), list[Job](), 0
    while waiting or running:
        for next_job in startable(waiting, running, memory_gib=memory_gib, jobs=most):
            waiting.remove(next_job)
            running.append(next_job)
        running.pop(rounds % len(running))
        rounds += 1
    assert rounds == len(jobs)


def test_a_small_compilation_overtakes_one_that_does_not_fit() -> None:
    """Free memory is used."""
    jobs = startable([job("large", 64), job("small", 8)], [job("runs", 64)], memory_gib=100, jobs=8)
    assert [row.models for row in jobs] == [("small",)]


# The flow, with processes that are played


class Played:
    """Answers for the processes that predict and compile."""

    def __init__(self) -> None:
        self.compiled: list[str] = []  # by model
        self.targets: list[str | None] = []  # that the compilers were told
        self.logs: set[str] = set()
        self.warnings: list[str] = []
        self.pushed: list[bool] = []
        self.failures: dict[str, Failure] = {}
        self.stopped = False
        self.complete: set[str] = set()
        self.unsent: list[Failure] = []
        self.at_once = 0
        self.most_at_once = 0
        self.gate: threading.Barrier | None = None
        self._lock = threading.Lock()

    def __call__(
        self,
        command: str,
        order: Order,
        stop: threading.Event,
        limit_s: float | None = None,
    ) -> Iterator[Reply]:
        replica_config = order.config
        target = replica_config.place.env.get(neuron_target.OVERRIDE, "")
        key = f"key-of-{Path(replica_config.source or '').name}-{replica_config.dtype}{target}"
        wanted = Wanted(
            role="model",
            source=replica_config.source or "",
            manifest={"engine": replica_config.model.engine},
            folder=f"{replica_config.run.compiled}/{key}",
            complete=replica_config.model.name in self.complete,
            ahead=True,
        )
        if command == "predict":
            yield Predicted(engine=replica_config.model.engine, wanted=[wanted])
            return
        yield from self._compile(replica_config, key, wanted, order.push)

    def _compile(self, replica_config: ReplicaConfig, key: str, wanted: Wanted, push: bool) -> Iterator[Reply]:
        with self._lock:
            self.compiled.append(replica_config.model.name)
            self.targets.append(replica_config.place.env.get(neuron_target.OVERRIDE))
            self.logs.add(Path(replica_config.run.log).name)
            self.pushed.append(push)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        if self.gate is not None:
            self.gate.wait(DEADLINE_S)
        if self.stopped:
            raise Stopped(replica_config.model.name)
        yield Working(key=key, role="model", phase="compiling", done=1, total=2)
        with self._lock:
            self.at_once -= 1
        if replica_config.model.name in self.failures:
            yield Trouble(self.failures[replica_config.model.name])
            return
        done = [] if replica_config.model.name in self.complete else [key]
        whole = msgspec.structs.replace(wanted, complete=True)
        yield Built(wanted=[whole], compiled=done, warnings=self.warnings, unsent=self.unsent, seconds=1.5)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Played:
    compiler = Played()
    monkeypatch.setattr(preparation, "run_process", process_of(compiler))
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    return compiler


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


def test_models_with_the_same_manifest_are_compiled_once(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """They share a row."""
    path = spec({"x": "source: ./a", "y": "source: ./a", "z": "source: ./b"})
    code, report, _ = compiled(capsys, path)
    assert code == 0
    assert sorted(played.compiled) == ["x", "z"]
    assert sorted((model["models"], model["result"]) for model in report["models"]) == [
        (["x", "y"], "compiled"),
        (["z"], "compiled"),
    ]


def test_a_failure_does_not_stop_other_compilations(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It is reported with its id and its model, and the command fails."""
    played.failures["x"] = Failure("compiler-killed", "no memory", "take a larger host")
    code, report, said = compiled(capsys, spec({"x": "source: ./a", "z": "source: ./b"}))
    assert code == 1
    assert {tuple(model["models"]): model["result"] for model in report["models"]} == {
        ("x",): "failed",
        ("z",): "compiled",
    }
    assert "compiler-killed: x: no memory" in said


def test_only_the_named_models_are_compiled(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that the spec does not have is rejected."""
    path = spec({"x": "source: ./a", "z": "source: ./b"})
    assert compiled(capsys, path, "--model", "z")[0] == 0
    assert played.compiled == ["z"]
    code, _, said = compiled(capsys, path, "--model", "w")
    assert (code, "model-unknown" in said) == (1, True)


def test_as_many_compilations_run_at_once_as_fit(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Both if there is room, one after the other if there is not or by request."""
    path = spec({"x": "source: ./a", "z": "source: ./b"})
    played.gate = threading.Barrier(2)
    assert compiled(capsys, path, "--memory-gb", "100")[0] == 0
    played.gate, played.most_at_once = None, 0
    assert compiled(capsys, path, "--memory-gb", "100", "--jobs", "1")[0] == 0
    code, _, said = compiled(capsys, path, "--memory-gb", "5")
    assert (code, played.most_at_once) == (0, 1)
    assert "it is compiled alone" not in said
    assert "it is compiled alone" in compiled(capsys, path, "--memory-gb", "1")[2]
    played.complete = {"x", "z"}
    assert "it is compiled alone" not in compiled(capsys, path, "--memory-gb", "1")[2]


def test_a_waiting_compilation_shows_its_reason(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory, or the limit of concurrent compilations."""
    path = spec({"x": "source: ./a", "z": "source: ./b"})
    said = compiled(capsys, path, "--memory-gb", "100", "--jobs", "1")[2]
    assert ("z: waiting for its turn" in said, "waiting for memory" in said) == (True, False)
    assert "z: waiting for memory" in compiled(capsys, path, "--memory-gb", "5")[2]


def test_a_complete_set_uses_no_memory_budget(played: Played, spec: Callable[[dict[str, str]], str]) -> None:
    """A set that is only verified and pushed needs no compiler."""
    played.complete = {"x"}
    home = Home.from_environment()
    file = load(spec({"x": "source: ./a", "z": "source: ./b"}))
    jobs = compile_ahead.CompileAhead(file, home, StoreSettings(root=str(home.store)), lambda _: None).prepare()[0]
    assert [(job.models, job.need_gib > 0) for job in jobs] == [(("x",), False), (("z",), True)]


def test_an_interpreter_that_times_out_is_reported_as_such(
    spec: Callable[[dict[str, str]], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It did not end by itself."""
    silent = contextlib.nullcontext(SimpleNamespace(stdout=(), wait=lambda: None))
    monkeypatch.setattr(json_process, "running", lambda *_, **__: silent)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    path = spec({"x": "source: ./a"})
    assert "x: the process that predicted the artifacts of x ended" in compiled(capsys, path)[2]
    monkeypatch.setattr(compile_ahead, "PREDICT_S", 0.0)
    code, report, said = compiled(capsys, path)
    assert (code, report["models"][0]["failure"]["id"]) == (1, "cache-not-verified")
    assert "the process that predicted the artifacts of x had no result within 0 s" in said


def test_a_model_without_replicas_is_planned_by_all_commands(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it were the only model: with min 0, and beside others that fill the host. If it is pinned, each target
    counts.
    """
    monkeypatch.delenv(neuron_target.OVERRIDE, raising=False)
    (tmp_path / "spec.yaml").write_text(
        "hosts: [{instance: inf2.xlarge}, {instance: trn2.48xlarge}]\n"
        f"defaults: {{engine: nxd-inference, source: {models / 'a'}, dtype: bf16, max_len: 64}}\n"
        "models:\n"
        "  full: {tp_degree: 2, cores: ['inf2.xlarge/0:0-1']}\n"
        "  idle: {tp_degree: 2, replicas: {min: 0, max: 1}}\n"
        "  pinned: {replicas: {min: 0, max: 2}, cores: ['inf2.xlarge/0:0', 'trn2.48xlarge/0:0']}\n"
    )
    file = load(str(tmp_path / "spec.yaml"))
    assert file.spec is not None
    offline = offline_configs.OfflineConfigs(file, Home.from_environment())
    places = {model.name: offline.places(model) for model in file.spec.models}
    assert {name: list(each) for name, each in places.items() if not isinstance(each, Failure)} == {
        "full": ["trn1"],
        "idle": ["trn1"],
        "pinned": ["trn1", "trn2-lnc2"],
    }


def test_a_model_that_fits_nowhere_fails_in_all_commands(
    played: Played,
    spec: Callable[[dict[str, str]], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the same id: `cache verify` reports no hit for what `compile` does not compile."""
    path = spec({"x": "source: ./a"})
    empty = offline_configs.plan(load(path).spec.model_copy(update={"models": ()}), load(path).hosts)  # type: ignore[attr-defined, union-attr]
    monkeypatch.setattr(offline_configs, "plan", lambda *_: empty)
    code, report, _ = compiled(capsys, path)
    assert (code, report["models"][0]["failure"]["id"]) == (1, "no-room")
    assert run(["cache", "verify", path, "-o", "json"]) == 1
    assert "no-room" in json.loads(capsys.readouterr().out)["models"][0]["reason"]


SEVERAL = """\
hosts:
  - {{instance: inf2.48xlarge}}
  - {{instance: trn1.32xlarge}}
  - {{instance: trn2.48xlarge}}
defaults: {{engine: nxd-inference, dtype: bf16, max_len: 64, tp_degree: 2}}
models:
  wide:
    source: {a}
    replicas: 3
    cores: ["inf2.48xlarge/0:0-1", "trn1.32xlarge/0:0-1", "trn2.48xlarge/0:0-1"]
  narrow: {{source: {a}, cores: ["trn2.48xlarge/0:2-3"]}}
"""


@pytest.fixture
def several(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A spec for hosts of three types, whose engine is on this machine; its path."""

    async def as_told(config: ReplicaConfig, *_: Any) -> ReplicaConfig:
        return config

    monkeypatch.setattr(offline_configs, "resolve_engine", as_told)
    monkeypatch.delenv(neuron_target.OVERRIDE, raising=False)
    (tmp_path / "several.yaml").write_text(SEVERAL.format(a=models / "a"))
    return str(tmp_path / "several.yaml")


def test_a_model_on_hosts_of_several_targets_is_compiled_for_each(
    played: Played, several: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for inf2 and trn1, whose code is the same, and once for trn2, together with the model that is only there.
    Each compilation has a separate log.
    """
    code, report, said = compiled(capsys, several)
    assert code == 0, said
    assert sorted(map(str, played.targets)) == ["trn1", "trn2"]
    assert [(model["models"], model["target"], model["result"]) for model in report["models"]] == [
        (["wide"], "trn1", "compiled"),
        (["wide", "narrow"], "trn2-lnc2", "compiled"),
    ]
    assert played.logs == {"compile-wide-trn1.log", "compile-wide-trn2-lnc2.log"}
    assert "wide for trn1: done" in said


def test_a_machine_with_devices_compiles_for_other_targets(
    played: Played, several: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The compiler gets a target if it is not that of the machine. A target set by the user applies to all."""
    monkeypatch.setattr(this_host, "instance_type", lambda: "trn1.32xlarge")
    assert compiled(capsys, several)[0] == 0
    assert sorted(map(str, played.targets)) == ["None", "trn2"]
    played.targets.clear()
    monkeypatch.setenv(neuron_target.OVERRIDE, "trn1")
    code, report, _ = compiled(capsys, several)
    assert (code, played.targets) == (0, [None])
    assert [model["models"] for model in report["models"]] == [["wide", "narrow"]]


def test_an_unresponsive_cache_is_reported(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Once for a model, though each of its sets was looked up; compiled sets count."""
    played.warnings = ["the cache at s3://neffs does not answer"] * 2
    code, report, said = compiled(capsys, spec({"x": "source: ./a"}))
    assert (code, report["models"][0]["warnings"]) == (0, ["the cache at s3://neffs does not answer"])
    assert said.count("x: the cache at s3://neffs does not answer") == 1


def test_progress_is_printed_as_lines_without_a_terminal(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step once, and nothing of it on stdout."""
    _, _, said = compiled(capsys, spec({"x": "source: ./a"}))
    assert said.splitlines() == ["x: checking what is compiled", "x: compiling graph 2 of 2", "x: done"]


def test_push_needs_a_place(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A neff_cache of at least one of the models."""
    code, _, said = compiled(capsys, spec({"x": "source: ./a"}), "--push")
    assert (code, "push-nowhere" in said, played.compiled) == (1, True, [])
    path = spec({"x": f"source: ./a, neff_cache: {tmp_path / 'neffs'}", "z": "source: ./b"})
    code, _, said = compiled(capsys, path, "--push")
    assert (code, played.pushed) == (0, [True, True])
    assert "not pushed, because neff_cache is not set: z" in said


@pytest.mark.parametrize("place", ["/proc/nowhere", "s3://nowhere/neffs"])
def test_a_place_that_cannot_be_pushed_to_is_reported_before_anything_is_compiled(
    place: str,
    played: Played,
    spec: Callable[[dict[str, str]], str],
    s3_server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Not after hours."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    code, _, said = compiled(capsys, spec({"x": f"source: ./a, neff_cache: {place}"}), "--push")
    assert (code, played.compiled) == (1, [])
    assert "neff-cache-unwritable" in said or "s3-no-bucket" in said


def test_a_failed_push_does_not_fail_the_compilation(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The result is compiled; the reason is shown beside it, and the command fails."""
    played.unsent = [Failure("s3-denied", "s3:PutObject is not allowed", "ask for it")]
    path = spec({"x": f"source: ./a, neff_cache: {tmp_path / 'neffs'}"})
    code, report, said = compiled(capsys, path, "--push")
    assert (code, report["models"][0]["result"], report["models"][0]["unsent"]["id"]) == (1, "compiled", "s3-denied")
    assert report["models"][0]["folders"]
    assert "s3-denied: x is compiled but not pushed: s3:PutObject is not allowed" in said


def test_the_hub_is_checked_first_and_its_failure_loses_no_result(
    played: Played,
    spec: Callable[[dict[str, str]], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rejected token costs no hours, and a hub that becomes unreachable later costs no result."""

    def refused(*_: Any) -> Any:
        raise Failed("hub-push-failed", "the hub refuses me/neffs with 401", "log in")

    path = spec({"x": "source: ./a"})
    monkeypatch.setattr(hub_push, "opened", refused)
    assert compiled(capsys, path, "--push-to-hub", "me/neffs")[0] == 1
    assert played.compiled == []
    monkeypatch.setattr(hub_push, "opened", lambda _: None)
    monkeypatch.setattr(hub_push, "push_to_hub", refused)
    code, report, said = compiled(capsys, path, "--push-to-hub", "me/neffs")
    assert (code, report["models"][0]["result"], report["hub"]) == (1, "compiled", [])
    assert "hub-push-failed" in said
    assert run(["compile", path, "--push-to-hub", "me/neffs"]) == 1
    assert "compiled" in capsys.readouterr().out


def test_a_compile_that_is_known_to_fail_is_announced(
    played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning comes before the compile, and only for the models that are compiled."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-8B"]))
    model = "{source: ./a, engine: nxd-inference, tp_degree: 8}"
    path = tmp_path / "spec.yaml"
    path.write_text(f"hosts: {{instance: inf2.48xlarge}}\nmodels: {{x: {model}, y: {model}}}\n")
    said = compiled(capsys, str(path), "--model", "y")[2]
    assert "warning: known-failure: y: neuronx-cc does not compile" in said
    assert "known-failure: x" not in said


def test_a_spec_with_errors_is_not_compiled(played: Played, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its problems are reported."""
    (tmp_path / "bad.yaml").write_text("models: {x: {engine: cpu}}")
    code, _, said = compiled(capsys, str(tmp_path / "bad.yaml"))
    assert (code, "nothing was compiled" in said, played.compiled) == (1, True, [])


def test_ctrl_c_ends_the_compilers(
    spec: Callable[[dict[str, str]], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every process is stopped before the command exits."""
    began, ended = threading.Event(), []

    def answers(command: str, order: Order, stop: threading.Event, *_: Any, **__: Any) -> Iterator[Reply]:
        if command == "predict":
            wanted = Wanted(role="model", source="", manifest={}, folder="/k", complete=False, ahead=True)
            yield Predicted(engine="cpu", wanted=[wanted])
            return
        began.set()
        assert stop.wait(DEADLINE_S)
        ended.append(order.config.model.name)
        raise Stopped("x")

    monkeypatch.setattr(preparation, "run_process", process_of(answers))
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    home = Home.from_environment()
    flow = compile_ahead.CompileAhead(
        load(spec({"x": "source: ./a"})), home, StoreSettings(root=str(tmp_path)), lambda _: None
    )

    def leave(step: compile_ahead.BuildStep) -> None:
        if step.phase == "queued":
            raise KeyboardInterrupt

    jobs = flow.prepare()[0]
    running = flow.run([*jobs, dataclasses.replace(jobs[0], models=("another",))], memory_gib=0.1, most=2)
    monkeypatch.setattr(flow, "_watch", leave)
    with pytest.raises(KeyboardInterrupt):
        next(running)
    assert began.is_set()
    assert ended == ["x"]


def test_an_ended_compilation_is_a_failure(
    played: Played, spec: Callable[[dict[str, str]], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its results are discarded."""
    played.stopped = True
    code, report, said = compiled(capsys, spec({"x": "source: ./a"}))
    assert (code, report["models"][0]["failure"]["id"]) == (1, "compile-stopped")
    assert "compile-stopped" in said
