"""`corewright generate`: one answer of one model, without a fleet."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.cli import main as cli
from tests.checkpoints import CHAT_TEMPLATE, make_checkpoint, save_tokenizer
from tests.doubles.machine import Machine, build_machine
from tests.readable import is_readable
from tests.replica_configs import replica_config
from workers.compiled import preparation
from workers.engines.cpu.engine import CpuEngine
from workers.engines.echo.engine import EchoEngine
from workers.host.core_claims import CoreClaim, held_cores
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Trouble
from workers.serving import backend, generate_once
from workers.serving.generate_once import End, GenerateJob, Reply, TextPiece
from workers.text.tokenizer import TemplateInput, load_tokenizer

SPEC = """\
hosts: {emulate: inf2.24xlarge}
models:
  parrot: {engine: echo, tp_degree: 2, cores: ["0-1"]}
  slow: {engine: echo, tp_degree: 2, cores: ["2-3"], engine_options: {step_ms: 100}}
  real: {engine: cpu, source: ./model, max_len: 64}
  vectors: {engine: echo, kind: embedding}
"""
DEADLINE_S = 30


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file, in a home of its own."""
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COREWRIGHT_URL", raising=False)
    (tmp_path / "spec.yaml").write_text(SPEC)
    return str(tmp_path / "spec.yaml")


def claims(tmp_path: Path) -> Path:
    return tmp_path / "home" / "emulated" / "emu-0"


def test_the_answer_is_the_engines(spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Greedy, through a process of its own: the tokens that the engine gives when it is stepped by hand."""
    make_checkpoint(tmp_path / "model", "llama", eos=None)
    engine = CpuEngine(tmp_path / "model", slots=1, max_len=64, dtype="fp32")
    engine.load()
    tokenizer = load_tokenizer("cpu", str(tmp_path / "model"))
    ids = tokenizer.encode("A slot is one row")
    stream = tokenizer.stream(ids)
    expected, position = "", len(ids)
    token = int(engine.prefill([0], [ids])[0].argmax())
    for _ in range(8):
        expected += stream.push(token)
        token = int(engine.decode([0], [token], [position])[0].argmax())
        position += 1
    expected += stream.flush()

    code = cli.run(["generate", spec, "real", "--raw", "--prompt", "A slot is one row", "--max-tokens", "8"])

    assert (code, capfd.readouterr().out) == (0, expected + "\n")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build_machine(tmp_path_factory.mktemp("machine") / "inf2")


@pytest.mark.compile
@pytest.mark.parametrize("engine", ["transformers-neuronx", "nxd-inference"])
def test_a_neuron_engine_answers_like_the_cpu_engine(
    engine: str, spec: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the spec's interpreter for it, on the cores of the placement; token for token."""
    make_checkpoint(tmp_path / "model", "llama", eos=None)
    command = [sys.executable, "-m", "orchestrator.cli.main", "generate", spec]
    arguments = ["--prompt", "A slot is one row", "--max-tokens", "8"]
    expected = subprocess.run([*command, "real", *arguments], capture_output=True, check=True).stdout
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "graphs"))  # nobody has compiled it before
    (tmp_path / "spec.yaml").write_text(
        "hosts: {instance: inf2.48xlarge}\n"
        f"engines: {{{engine}: {{python: {machine.python}}}}}\n"
        "models:\n"
        "  first: {engine: echo}\n"
        f"  real: {{engine: {engine}, source: ./model, max_len: 64, tp_degree: 2, dtype: fp32, cores: ['4-5']}}\n"
    )

    answer = subprocess.run([*command, "real", *arguments], capture_output=True, check=False)

    compiling, loading = answer.stderr.decode().splitlines()
    assert compiling.startswith(f"compiling real ({engine}): model: ")
    assert loading == f"loading real ({engine}) on cores 4-5 of inf2.48xlarge/0"
    assert answer.stdout == expected
    assert sorted(lock.name for lock in machine.state.glob("nc*.lock")) == ["nc4.lock", "nc5.lock"]  # nothing else


@pytest.mark.compile
def test_artifacts_compiled_by_another_host_come_from_the_cache(
    spec: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before the start of a replica: nothing is compiled, and no core is held meanwhile."""
    make_checkpoint(tmp_path / "model", "llama", eos=None)
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "graphs"))
    engine = "transformers-neuronx"
    fields = f"source: ./model, max_len: 64, tp_degree: 2, dtype: fp32, neff_cache: {tmp_path / 'shared'}"
    Path(spec).write_text(
        f"hosts: {{instance: inf2.48xlarge}}\nengines: {{{engine}: {{python: {machine.python}}}}}\n"
        f"models: {{real: {{engine: {engine}, {fields}}}}}\n"
    )
    command = [sys.executable, "-m", "orchestrator.cli.main"]
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "first"))
    subprocess.run([*command, "compile", spec, "--push"], capture_output=True, check=True)
    for graph in tmp_path.glob("shared/neuronxcc-*"):
        shutil.rmtree(graph)
    count = len((machine.state / "compiles.jsonl").read_text().splitlines())
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "second"))

    answer = subprocess.run(
        [*command, "generate", spec, "real", "--prompt", "Hi", "--raw", "--max-tokens", "2"],
        capture_output=True,
        check=False,
    )

    assert (answer.returncode, "all graphs came from" in answer.stderr.decode()) == (0, True), answer.stderr.decode()
    assert len((machine.state / "compiles.jsonl").read_text().splitlines()) == count


def test_a_failed_compilation_fails_the_command(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its id; graphs that only a device can compile are left to the load."""
    make_checkpoint(tmp_path / "model", "llama", eos=None)
    Path(spec).write_text(
        "hosts: {emulate: inf2.24xlarge}\n"
        "models: {real: {engine: cpu, source: ./model, max_len: 16, engine_options: {compile: true}}}\n"
    )
    foreseen = preparation.Foreseen(missing=["model: nothing was compiled"])
    monkeypatch.setattr(preparation, "foresee", lambda *_: foreseen)
    monkeypatch.setattr(preparation, "build", lambda *_: Failure("compiler-killed", "no memory", "take a larger host"))

    code = cli.run(["generate", spec, "real", "--prompt", "Hi"])

    said = capfd.readouterr().err
    assert (code, "compiler-killed" in said, "loading" in said) == (1, True, False)


def test_the_options_of_the_command_reach_the_request(spec: str) -> None:
    """Sampling options reach the request, and the chat template the prompt."""
    tokenizer = load_tokenizer("echo", None)
    job = GenerateJob(config=config(), prompt="Hi", max_tokens=7, temperature=0.5, top_k=9, top_p=0.8)

    request = generate_once._request(job, tokenizer, 64)

    assert (request.max_tokens, request.temperature, request.top_k, request.top_p) == (7, 0.5, 9, 0.8)
    assert request.prompt_ids == tokenizer.apply_chat_template(TemplateInput([{"role": "user", "content": "Hi"}]))


@pytest.mark.parametrize(("template", "raw"), [(CHAT_TEMPLATE, False), (CHAT_TEMPLATE, True), (None, False)])
def test_a_prompt_is_a_chat_if_the_model_has_a_template(template: str | None, raw: bool, tmp_path: Path) -> None:
    """Unless a plain prompt is requested: without the template a chat model may end its answer at once."""
    save_tokenizer(tmp_path, template)
    tokenizer = load_tokenizer("cpu", str(tmp_path))

    ids = generate_once._request(GenerateJob(config=config(), prompt="Hi", raw=raw), tokenizer, 64).prompt_ids

    chat = template is not None and not raw
    assert ids == (
        tokenizer.apply_chat_template(TemplateInput([{"role": "user", "content": "Hi"}]))
        if chat
        else tokenizer.encode("Hi")
    )


def test_a_template_that_rejects_a_prompt_is_reported_with_the_workaround(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "{{ raise_exception('a system message is needed') }}")
    job = GenerateJob(config=config(), prompt="Hi")

    with pytest.raises(generate_once._Refused, match="a system message is needed; --raw"):
        generate_once._request(job, load_tokenizer("cpu", str(tmp_path)), 64)


def test_an_answer_ends_with_its_slot() -> None:
    """Without --max-tokens: 128 tokens, or the remaining length."""
    tokenizer = load_tokenizer("echo", None)
    job = GenerateJob(config=config(), prompt="Hi", raw=True)

    assert [generate_once._request(job, tokenizer, length).max_tokens for length in (2048, 64)] == [128, 62]


@pytest.fixture
def answering(spec: str, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """The command in the midst of a long answer on cores 2 and 3, of steps that take 100 ms or the parameter."""
    Path(spec).write_text(SPEC.replace("step_ms: 100", f"step_ms: {getattr(request, 'param', 100)}"))
    command = subprocess.Popen(
        [sys.executable, "-m", "orchestrator.cli.main", "generate", spec, "slow", "--prompt", "Hello"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert command.stdout is not None
    assert len(command.stdout.read(1)) == 1
    yield command
    command.kill()
    command.communicate()


def test_the_cores_are_held_during_the_answer(answering: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Those of the placement, by the model's own process."""
    owners = held_cores(claims(tmp_path))

    assert sorted(owners) == [2, 3]
    assert answering.pid not in owners.values()


def test_ctrl_c_ends_the_process_too(answering: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """Before the command itself ends, with exit code 130."""
    answering.send_signal(signal.SIGINT)
    answering.communicate(timeout=DEADLINE_S)

    assert answering.returncode == 130
    assert held_cores(claims(tmp_path)) == {}


@pytest.mark.parametrize("answering", [3000], indirect=True)
def test_a_killed_command_leaves_no_process(answering: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """The model's process ends with its parent at once, in the middle of a step of 3 s."""
    (owner,) = set(held_cores(claims(tmp_path)).values())
    assert owner is not None
    watched = os.pidfd_open(owner)
    answering.kill()

    assert is_readable(watched, 2.0)
    os.close(watched)


def test_cores_in_use_by_a_fleet_are_not_taken(spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command reports the process that holds them."""
    claim = CoreClaim(claims(tmp_path), [0, 1])
    try:
        code = cli.run(["generate", spec, "parrot", "--prompt", "Hello"])
    finally:
        claim.release()

    output = capfd.readouterr()
    assert (code, output.out) == (1, "")
    assert "error: cores-taken: " in output.err
    assert f"(held: nc0-nc1 by pid {os.getpid()})" in output.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nobody", "--prompt", "x"], "error: model-unknown: "),
        (["parrot", "--prompt", ""], "error: generate-refused: the prompt is empty"),
        (
            ["parrot", "--raw", "--prompt", "x", "--max-tokens", "9999"],
            "error: generate-refused: 1 prompt tokens and",
        ),
        (["real", "--prompt", "x"], "error: model-not-found: "),
        (["vectors", "--prompt", "x"], "error: generate-refused: vectors does not generate: its kind is embedding"),
    ],
    ids=["model", "prompt", "length", "checkpoint", "encoder"],
)
def test_an_impossible_request_is_rejected(
    spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """With an id and a remedy; stdout is empty."""
    code = cli.run(["generate", spec, *arguments])

    output = capfd.readouterr()
    assert (code, output.out) == (1, "")
    assert said in output.err


def test_a_spec_with_errors_starts_nothing(spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of them are reported."""
    (tmp_path / "spec.yaml").write_text("models: {parrot: {engine: echo, tp: 2}}\n")

    assert cli.run(["generate", spec, "parrot", "--prompt", "x"]) == 1

    assert "unknown-key" in capfd.readouterr().err


def test_a_model_without_a_place_starts_nothing(spec: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The planner's reason is reported."""
    (tmp_path / "spec.yaml").write_text(SPEC.replace('tp_degree: 2, cores: ["2-3"]', "tp_degree: 12"))

    assert cli.run(["generate", spec, "slow", "--prompt", "x"]) == 1

    assert "slow has no place: nothing was started" in capfd.readouterr().err


def test_a_process_that_ends_without_a_report_is_reported(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With its exit status and the path of its log."""
    false = tmp_path / "false"
    false.write_text("#!/bin/sh\nkill -9 $$\n")
    false.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(false))

    assert cli.run(["generate", spec, "parrot", "--prompt", "x"]) == 1

    assert "error: replica-died: the process of parrot was killed by SIGKILL" in capfd.readouterr().err


# The process's own side


def config(**changes: Any) -> ReplicaConfig:
    plain: dict[str, Any] = {
        "model": "m",
        "replica": 0,
        "epoch": 0,
        "host": "h",
        "engine": "echo",
        "source": None,
        "dtype": "fp32",
        "slots": 2,
        "max_len": 64,
        "cores": [],
        "claims": None,
        "env": {},
        "log": "/nonexistent/m.log",
        "socket": "",
        "token": "",
    }
    return replica_config(**{**plain, **changes})


def replies_of(engine: Any, monkeypatch: pytest.MonkeyPatch, **job: Any) -> list[Reply]:
    """All that the process tells when it opens that engine."""
    replies: list[Reply] = []
    monkeypatch.setattr(backend, "open_engine", lambda config: engine)
    generate_once.run(GenerateJob(config=config(), prompt="Hi", raw=True, **job), replies.append)
    return replies


def test_the_answer_is_streamed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece for each token that completes text, then the end with the number of tokens."""
    *pieces, end = replies_of(EchoEngine(slots=1, max_len=64), monkeypatch, max_tokens=4)

    assert all(isinstance(piece, TextPiece) for piece in pieces)
    assert end == End(4, "length")


@pytest.mark.parametrize(
    ("error", "id"),
    [
        (EngineLoadError("weights-missing", "no weights"), "weights-missing"),
        (MemoryError(), "out-of-memory"),
        (RuntimeError("nrt_tensor_allocate status=4"), "hbm-exhausted"),
        (ZeroDivisionError("of nobody's making"), "load-failed"),
    ],
)
def test_a_failed_load_is_reported_by_the_id_of_its_cause(
    monkeypatch: pytest.MonkeyPatch, error: Exception, id: str
) -> None:
    """That of the Neuron runtime's fault if its messages show one."""

    def load() -> None:
        raise error

    (trouble,) = replies_of(SimpleNamespace(load=load, close=lambda: None), monkeypatch)

    assert isinstance(trouble, Trouble)
    assert trouble.failure.id == id


def test_a_failed_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a failure of the engine, after the tokens before it."""
    engine = EchoEngine(slots=1, max_len=64)

    def decode(*_: object) -> object:
        raise ZeroDivisionError("of nobody's making")

    monkeypatch.setattr(engine, "decode", decode)

    trouble = replies_of(engine, monkeypatch)[-1]

    assert isinstance(trouble, Trouble)
    assert trouble.failure.id == "engine-failed"
