"""Real vLLM on the CPU under a fleet (`make test VLLM=1`), beside the cpu engine with the same checkpoint."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.checkpoints import byte_level_tokenizer, make_adapter, make_checkpoint, merged_model
from tests.fleet import LiveFleet, until

PYTHON = os.environ.get("COREWRIGHT_VLLM_PYTHON")
START_S = 400.0  # vLLM imports torch in three processes
GONE_S = 10.0  # with a grace of 5 s
TEXTS = (
    "The quick",
    "A slot is one row of the batch, with",
    "Zwölf",
    "0123",
    "brown fox jumps over",
    "日本語",
    "a",
    "of",
)
SPEC = """\
hosts: {{emulate: inf2.48xlarge}}
engines: {{vllm: {{python: {python}}}}}
defaults: {{dtype: fp32, max_len: 256, max_batch: {slots}}}
models:
  served: {{source: {source}, engine: vllm, tp_degree: 2, engine_options: {{max_loras: 2}}, adapters: {{{adapters}}}}}
  own: {{source: {source}, engine: cpu}}
"""
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(PYTHON is None, reason="set COREWRIGHT_VLLM_PYTHON, or use make test VLLM=1"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose heads have a size that vLLM's CPU back end supports."""
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", hidden=128, eos=None)


@pytest.fixture(scope="module")
def fleet(source: Path) -> Iterator[LiveFleet]:
    with LiveFleet(SPEC.format(python=PYTHON, source=source, slots=4, adapters="")) as fleet:
        yield fleet.wait_ready(START_S)
        fleet.stop()


def complete(fleet: LiveFleet, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": "The quick", "max_tokens": 24, "temperature": 0, **fields}
    answer = fleet.http.post("/v1/completions", json=body, timeout=START_S)  # vLLM compiles for the first logprobs
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def tree(fleet: LiveFleet) -> dict[str, psutil.Process]:
    """The processes of the replica, by role."""
    (replica,) = [each for model in fleet.status()["models"] if model["name"] == "served" for each in model["replicas"]]
    actor = psutil.Process(replica["pid"])
    (keeper,) = actor.children()
    (server,) = keeper.children()
    others = {child.cmdline()[0]: child for child in server.children(recursive=True)}
    return {"actor": actor, "keeper": keeper, "server": server} | {
        role: process for role, process in others.items() if role.startswith("VLLM::")
    }


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_greedy_answers_are_those_of_the_cpu_engine(fleet: LiveFleet) -> None:
    """Ragged prompts and lengths, more at once than slots."""
    questions = [{"prompt": each, "max_tokens": 8 + 5 * index} for index, each in enumerate(TEXTS)]
    with ThreadPoolExecutor(len(questions)) as pool:
        served = list(pool.map(lambda fields: text(complete(fleet, "served", **fields)), questions))
        own = list(pool.map(lambda fields: text(complete(fleet, "own", **fields)), questions))

    assert served == own
    assert len(set(own)) == len(own)


def test_a_chat_and_its_stream_are_those_of_the_cpu_engine(fleet: LiveFleet) -> None:
    """The template is rendered by the gateway; a stream has the same text, and usage of our own count."""
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "temperature": 0}
    own = fleet.http.post("/v1/chat/completions", json={**body, "model": "own"}).json()
    streamed = {**body, "model": "served", "stream": True, "stream_options": {"include_usage": True}}
    answer = fleet.http.post("/v1/chat/completions", json=streamed)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]

    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert "".join(pieces) == own["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == own["usage"]["completion_tokens"] == 20


def test_logprobs_are_those_of_the_cpu_engine(fleet: LiveFleet) -> None:
    """Of the tokens and of the best beside them, within the rounding of float32."""
    served, own = (complete(fleet, model, logprobs=3)["choices"][0]["logprobs"] for model in ("served", "own"))

    assert served["tokens"] == own["tokens"]
    assert served["token_logprobs"] == pytest.approx(own["token_logprobs"], abs=1e-3)


def test_a_schema_is_satisfied(fleet: LiveFleet) -> None:
    """By vLLM's own guided decoding."""
    body = {
        "model": "served",
        "messages": [{"role": "user", "content": "Answer"}],
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
    }
    answer = fleet.http.post("/v1/chat/completions", json=body).json()

    value = json.loads(answer["choices"][0]["message"]["content"])
    assert value.keys() == {"ok", "n"}
    assert value["n"] in (1, 2)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_image_for_a_model_that_reads_only_text_is_vllms_error(fleet: LiveFleet, stream: bool) -> None:
    """The body is forwarded, and the cause comes back."""
    parts = [{"type": "text", "text": "Hi"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    body = {"model": "served", "messages": [{"role": "user", "content": parts}], "max_tokens": 4, "stream": stream}
    answer = fleet.http.post("/v1/chat/completions", json=body)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "rejected_by_server")


def test_stop_strings_and_seeds_work(fleet: LiveFleet) -> None:
    """Stop strings end an answer as on the cpu engine; a seed repeats a sampled answer."""
    whole = text(complete(fleet, "own"))
    stop = whole[5:8]
    assert text(complete(fleet, "served", stop=[stop])) == whole[: whole.index(stop)]
    sampled = [text(complete(fleet, "served", temperature=1.0, seed=11)) for _ in range(2)]
    assert sampled[0] == sampled[1] != whole


def test_a_client_that_leaves_frees_its_slot(fleet: LiveFleet) -> None:
    body = {"model": "served", "prompt": "The", "max_tokens": 240, "stream": True, "ignore_eos": True}
    with fleet.http.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    pid = fleet.replica("served/0")["pid"]
    until(lambda: fleet.replica("served/0")["live"] == 0, 30.0, "the slot is free")
    until(lambda: (fleet.replica("served/0")["server"] or {}).get("kv_usage") == 0.0, 60.0, "the server is idle, too")
    assert fleet.replica("served/0")["pid"] == pid


def test_adapters_change_while_the_server_runs(fleet: LiveFleet, source: Path, tmp_path: Path) -> None:
    """Their answers are those of transformers with merged weights, also at once with the model's own."""
    folders = [make_adapter(tmp_path / name, source, seed) for seed, name in enumerate("xy")]
    expected = [merged_text(source, folder) for folder in folders]
    own, process = text(complete(fleet, "own")), fleet.replica("served/0")["pid"]
    assert len({own, *expected}) == 3

    set_adapters(fleet, source, a=folders[0], b=folders[1])
    names = ("served", "served:a", "served:b")
    with ThreadPoolExecutor(len(names)) as pool:
        assert list(pool.map(lambda name: text(complete(fleet, name)), names)) == [own, *expected]

    set_adapters(fleet, source, a=folders[1])
    assert text(complete(fleet, "served:a")) == expected[1]
    removed = fleet.http.post("/v1/completions", json={"model": "served:b", "prompt": "a", "max_tokens": 1})
    assert (removed.status_code, removed.json()["error"]["code"]) == (404, "model_not_found")

    set_adapters(fleet, source)
    assert [card["id"] for card in fleet.http.get("/v1/models").json()["data"]] == ["served", "own"]
    assert fleet.replica("served/0")["pid"] == process


def set_adapters(fleet: LiveFleet, source: Path, **folders: Path) -> None:
    """Applies the spec with these adapters, and waits until the replica has them."""
    adapters = ", ".join(f"{name}: {folder}" for name, folder in folders.items())
    fleet.spec.write_text(SPEC.format(python=PYTHON, source=source, slots=4, adapters=adapters))
    applied = fleet.corewright("apply", str(fleet.spec))
    assert applied.returncode == 0, applied.stderr
    until(lambda: fleet.status()["rollout"]["state"] == "complete", 60.0, "the replica has the adapters")


def merged_text(source: Path, adapter: Path) -> str:
    """Returns what transformers answers to the prompt of `complete`."""
    tokenizer = byte_level_tokenizer()
    prompt = torch.tensor([tokenizer.encode("The quick").ids])
    ids = merged_model(source, adapter).generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
    return tokenizer.decode(ids.tolist())


@pytest.mark.parametrize("role", ["server", "VLLM::EngineCore", "VLLM::Worker", "keeper", "actor"])
def test_a_killed_process_ends_all_others_and_the_replica_returns(fleet: LiveFleet, role: str) -> None:
    """The cores are free when the last process is gone, and not before."""
    until(lambda: fleet.replica("served/0")["state"] == "ready", START_S, "the replica is ready")
    expected = text(complete(fleet, "own"))
    processes = tree(fleet)
    assert role in processes, processes

    processes[role].send_signal(signal.SIGKILL)

    until(lambda: all(map(is_gone, processes.values())), GONE_S + 10.0, f"all processes end after {role}")
    until(lambda: fleet.replica("served/0")["state"] == "ready", START_S, "the replica is ready again")
    assert text(complete(fleet, "served")) == expected


def test_an_update_and_a_drain_leave_no_process(fleet: LiveFleet, source: Path) -> None:
    """The old server ends before the new one has its cores; `down` ends all."""
    before = tree(fleet)
    fleet.spec.write_text(SPEC.format(python=PYTHON, source=source, slots=3, adapters=""))
    applied = fleet.corewright("apply", str(fleet.spec))
    assert applied.returncode == 0, applied.stderr

    def updated() -> bool:
        (replicas,) = [model["replicas"] for model in fleet.status()["models"] if model["name"] == "served"]
        return [(each["state"], each["pid"] != before["actor"].pid) for each in replicas] == [("ready", True)]

    until(updated, START_S, "the new version is ready")
    until(lambda: all(map(is_gone, before.values())), GONE_S, "the old server is gone")
    after = tree(fleet)

    drained = fleet.corewright("unload", "served")
    assert drained.returncode == 0, drained.stderr
    until(lambda: all(map(is_gone, after.values())), GONE_S + 20.0, "an unloaded model has no process")
