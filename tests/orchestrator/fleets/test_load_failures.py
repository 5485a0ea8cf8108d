"""One live fleet in which most models cannot be loaded, each for another reason."""

from __future__ import annotations

import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.control.decisions.replica_view import BREAKER_AFTER, BREAKER_PAUSE_S, FIRST_BACKOFF_S
from orchestrator.control.resolve.spec_file import examine, this_machine
from placements.spec.problems import has_errors
from tests.checkpoints import MAX_POSITIONS, make_checkpoint, save_tokenizer
from tests.fleet import LiveFleet, until

HEALTHY = "healthy"
ALLOWED = "allowed"  # a pickle, with the word that allows it
READY_S = 120.0  # while six others start and fail beside it
BROKEN_S = 360.0  # 31 s of pauses and six starts of every model, with two CPUs for all
REQUEST_S = 120.0
PAUSES = {failures: FIRST_BACKOFF_S * 2 ** (failures - 1) for failures in range(1, BREAKER_AFTER)}
PAUSES[BREAKER_AFTER] = BREAKER_PAUSE_S
FAILED_AT = re.compile(r"^(\S+ \S+) ERROR workers\.serving\.replica: ([a-z-]+): ", re.MULTILINE)

# 1024 slots of 2^20 tokens are 2^47 bytes of keys in one tensor with these heads: no process has so many addresses, so
# the system refuses at once, whatever it promises of memory, and fills none.
VAST = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8192}
VAST_LEN, VAST_SLOTS = 1 << 20, 1024


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def pickle_weights(path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def cut_a_weight(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    name = "model.norm.weight"
    save_file(weights | {name: weights[name][:7].clone()}, path / "model.safetensors", metadata={"format": "pt"})


def remove_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


def make_vast(path: Path) -> None:
    """A model of a few megabytes whose KV cache is vast, but for its config.json, which would show that to the
    planner."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": VAST_LEN}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **shape, **VAST)).save_pretrained(path)
    save_tokenizer(path)
    edit(path / "config.json", num_attention_heads=1, num_key_value_heads=1, head_dim=1)


@dataclass(frozen=True)
class Fault:
    """What is done to a model's checkpoint before `up`, and what `status` must then say."""

    id: str
    says: tuple[str, ...]
    spoil: Callable[[Path], Any]
    fields: str = ""
    # What validation would refuse is done after it, and the first request then starts the model.
    later: Callable[[Path], Any] | None = None


FAULTS = {
    "no-weights": Fault(
        "weights-missing",
        ("is missing model.safetensors",),
        lambda p: None,
        later=lambda p: (p / "model.safetensors").unlink(),
    ),
    "cut-off": Fault(
        "weights-broken",
        ("model.safetensors cannot be read",),
        lambda p: None,
        later=lambda p: truncate(p / "model.safetensors"),
    ),
    "shapes": Fault("weights-mismatch", ("model.norm.weight is [7], not [64]",), cut_a_weight),
    "pickle": Fault(
        "pickle-refused",
        ("pytorch_model.bin", "allow_pickle: true", "save_pretrained"),
        lambda p: None,
        later=pickle_weights,
    ),
    "no-tokenizer": Fault(
        "no-tokenizer", ("has no tokenizer", "save_pretrained"), lambda p: None, later=remove_tokenizer
    ),
    "family": Fault(
        "unknown-family",
        ("model_type 't5'", "config.json"),
        lambda p: None,
        later=lambda p: edit(p / "config.json", model_type="t5"),
    ),
    "vast": Fault(
        "out-of-memory",
        ("128.00 TiB were requested", f"{VAST_SLOTS} slots of {VAST_LEN} tokens", "available", "max_batch"),
        lambda p: None,
        fields=f", max_len: {VAST_LEN}, max_batch: {VAST_SLOTS}",
        later=lambda p: edit(p / "config.json", **VAST),
    ),
}
WOKEN = [name for name, fault in FAULTS.items() if fault.later is not None]


@dataclass
class Course:
    """What was seen of the fleet until every faulty model's breaker was open."""

    pauses: dict[str, set[tuple[int, float]]] = field(default_factory=lambda: defaultdict(set))  # (failures, seconds)
    failed_at: dict[str, list[float]] = field(default_factory=dict)  # of each start, in seconds, by the replica's log
    last: dict[str, Any] = field(default_factory=dict)  # by model, its entry in the last status
    before: Any = None  # the healthy replica's entry when it was ready
    answers: list[Any] = field(default_factory=list)  # of the healthy model, one after the other
    expected: dict[str, list[int]] = field(default_factory=dict)  # of the two that can be loaded, by ``generate``
    allowed: Any = None  # the answer of the model whose pickle is allowed
    woken: dict[str, httpx.Response] = field(default_factory=dict)  # what the request that started it got
    refused: dict[str, httpx.Response] = field(default_factory=dict)  # what a request at the end got


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Course]:
    folder = tmp_path_factory.mktemp("faults")
    spec = folder / "spec.yaml"
    spec.write_text(lay_out(folder))
    course = Course(expected={name: generated(folder / name) for name in (HEALTHY, ALLOWED)})
    with LiveFleet(spec) as live:
        follow(live, course)
        yield course


def lay_out(folder: Path) -> str:
    """Make the checkpoints; gives the spec."""
    lines = ["version: 1", "name: faults", "hosts: {emulate: inf2.48xlarge}", "defaults: {engine: cpu}", "models:"]
    lines.append(f"  {HEALTHY}: {{source: ./{HEALTHY}, max_len: 128}}")
    lines.append(f"  {ALLOWED}: {{source: ./{ALLOWED}, max_len: 128, allow_pickle: true}}")
    for name in (HEALTHY, ALLOWED):
        make_checkpoint(folder / name, "llama", eos=None)
    pickle_weights(folder / ALLOWED)
    for name, fault in FAULTS.items():
        if name == "vast":
            make_vast(folder / name)
        else:
            make_checkpoint(folder / name, "llama")
        fault.spoil(folder / name)
        replicas = ", replicas: {min: 0, max: 1}" if fault.later is not None else ""
        lines.append(f"  {name}: {{source: ./{name}{fault.fields or ', max_len: 128'}{replicas}}}")
    return "\n".join(lines) + "\n"


PROMPT = [7, 300, 41, 99, 250, 18]
NEW_TOKENS = 40


def generated(path: Path) -> list[int]:
    """What transformers' ``generate`` gives for the prompt that all models get."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(str(path)).eval()
    how = GenerationConfig(do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    tokens: list[int] = model.generate(torch.tensor([PROMPT]), generation_config=how)[0, len(PROMPT) :].tolist()
    return tokens


def ask(live: LiveFleet, model: str, count: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": count, "temperature": 0, "return_token_ids": True}
    return httpx.post(f"{live.url}/v1/completions", json=body, timeout=REQUEST_S)


def replica_of(status: Any, model: str) -> Any:
    """The entry of a model's only replica; None before it has one."""
    replicas = next(entry for entry in status["models"] if entry["name"] == model)["replicas"]
    return replicas[0] if replicas else None


def follow(live: LiveFleet, course: Course) -> None:
    """Wait for the healthy model, wake the sleeping ones, and look on until every breaker is open.

    The healthy model is asked again and again all the while.
    """

    def healthy() -> Any:
        assert live.process.poll() is None, f"up has ended: {live.output()}"
        completed = live.corewright("status", "-o", "json")
        if completed.returncode != 0:  # it is not there yet
            return None
        status = json.loads(completed.stdout)
        all_broken(status, course)
        return ready(replica_of(status, HEALTHY))

    course.before = until(healthy, READY_S, "the healthy model is ready")
    ended = threading.Event()

    def answers() -> None:
        while not ended.is_set():
            try:
                course.answers.append(ask(live, HEALTHY, NEW_TOKENS).json()["choices"][0]["token_ids"])
            except (httpx.HTTPError, KeyError) as error:
                course.answers.append(repr(error))

    def wake(name: str) -> None:
        course.woken[name] = ask(live, name)

    clients = [threading.Thread(target=answers, daemon=True)]
    for name in WOKEN:
        later = FAULTS[name].later
        assert later is not None
        body = {"model": name, "prompt": "x"}  # so that the gateway has its tokenizer
        httpx.post(f"{live.url}/tokenize", json=body, timeout=REQUEST_S).raise_for_status()
        later(live.spec.parent / name)
        clients.append(threading.Thread(target=wake, args=(name,), daemon=True))
    for client in clients:
        client.start()
    try:
        until(lambda: all_broken(live.status(), course), BROKEN_S, "every breaker is open")
    finally:
        ended.set()
        for client in clients:
            client.join(REQUEST_S)
    course.allowed = ask(live, ALLOWED, NEW_TOKENS).json()
    course.refused = {name: ask(live, name) for name in FAULTS}
    course.last = {entry["name"]: entry for entry in live.status()["models"]}
    for name, fault in FAULTS.items():
        course.failed_at[name] = failures_in(Path(course.last[name]["replicas"][0]["log_file"]).read_text(), fault.id)


def failures_in(log: str, id: str) -> list[float]:
    """When a replica's starts have failed with ``id``. A log misses none, as readings of the status may."""
    stamps = [stamp for stamp, name in FAILED_AT.findall(log) if name == id]
    return [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").timestamp() for stamp in stamps]


def ready(replica: Any) -> Any:
    return replica if replica is not None and replica["state"] == "ready" else None


def all_broken(status: Any, course: Course) -> bool:
    replicas = {name: replica_of(status, name) for name in FAULTS}
    for name, replica in replicas.items():
        if replica is not None and replica["pause_s"] is not None:
            course.pauses[name].add((replica["failures"], replica["pause_s"]))
    return all(replica is not None and replica["failures"] >= BREAKER_AFTER for replica in replicas.values())


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_status_shows_each_fault_with_its_cause(course: Course, name: str) -> None:
    """The id, and a text with the file, the tensor or the numbers; for the model and its replica."""
    fault, model = FAULTS[name], course.last[name]
    (replica,) = model["replicas"]
    assert (model["state"], replica["state"]) == ("failed", "failed")
    assert model["reason"] == replica["reason"]
    assert replica["reason"].startswith(f"{fault.id}: ")
    assert [words for words in fault.says if words not in replica["reason"]] == []


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAULTS)
def test_the_pauses_double_until_the_breaker_opens(course: Course, name: str) -> None:
    """1, 2, 4, 8 and 16 seconds, then ten minutes; six starts, so five restarts, as in the status."""
    times = course.failed_at[name]
    waited = [later - earlier for earlier, later in pairwise(times)]
    least = [PAUSES[failures] for failures in range(1, BREAKER_AFTER)]
    assert len(times) == BREAKER_AFTER
    assert [(measured, wanted) for measured, wanted in zip(waited, least, strict=True) if measured < wanted] == []
    assert course.pauses[name] <= set(PAUSES.items())
    (replica,) = course.last[name]["replicas"]
    assert (replica["failures"], replica["restarts"], replica["pause_s"]) == (6, 5, BREAKER_PAUSE_S)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_healthy_model_is_not_affected(course: Course) -> None:
    """Meanwhile it answers as ``generate`` does, in the same process."""
    (replica,) = course.last[HEALTHY]["replicas"]
    assert len(course.answers) > 100
    assert [answer for answer in course.answers if answer != course.expected[HEALTHY]] == []
    assert (replica["state"], replica["restarts"], replica["pid"]) == ("ready", 0, course.before["pid"])


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_pickle_that_the_spec_allows_is_served(course: Course) -> None:
    """`allow_pickle: true` reaches the replica, and its answer is that of ``generate``."""
    assert course.allowed["choices"][0]["token_ids"] == course.expected[ALLOWED]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_request_gets_503_with_the_cause(course: Course) -> None:
    """The one that started the model, and each later one."""
    assert sorted(course.woken) == sorted(WOKEN)
    for name, response in [*course.woken.items(), *course.refused.items()]:
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (503, "model_unavailable")
        assert FAULTS[name].id in error["message"]
        assert "retry-after" in response.headers


def test_an_unknown_model_type_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    """config.json has it, so `validate` and `up` report it at the line of the source."""
    make_checkpoint(tmp_path / "m", "llama")
    edit(tmp_path / "m" / "config.json", model_type="t5")
    text = "hosts: {emulate: inf2.48xlarge}\nmodels:\n  m: {source: ./m, engine: cpu}\n"
    file = examine(text, "spec.yaml", str(tmp_path), this_machine())
    assert has_errors(file.problems)
    assert [(problem.id, problem.where) for problem in file.problems] == [("unknown-family", "spec.yaml:3:7")]


def test_a_length_beyond_the_positions_is_rejected_before_anything_starts(tmp_path: Path) -> None:
    """Like memory problems that config.json shows."""
    make_checkpoint(tmp_path / "m", "llama")
    text = f"hosts: {{emulate: inf2.48xlarge}}\nmodels:\n  m: {{source: ./m, max_len: {MAX_POSITIONS + 1}}}\n"
    file = examine(text, "spec.yaml", str(tmp_path), this_machine())
    assert [problem.id for problem in file.problems] == ["max-len-exceeds-positions"]
