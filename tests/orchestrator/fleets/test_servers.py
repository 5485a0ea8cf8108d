"""Servers as engines under a fleet: the double of vLLM as `engine: vllm` and as a command, beside the cpu engine."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from placements.facts.core_range import CoreRange
from tests.doubles.openai_server import lora_weights, make_vllm
from tests.encoders import save_encoder
from tests.fleet import LiveFleet, until
from tests.orchestrator.clients import Admin, Load, Question, Sent, complete, echo_text
from tests.s3 import S3Server
from tests.workers.engines.test_vllm_engine import pooled
from workers.engines.server.server_process import Address

TINY = Path(__file__).parents[3] / "placements" / "examples" / "models" / "tiny"
SPEC = """\
hosts: {{emulate: inf2.24xlarge}}
engines: {{vllm: {{python: {python}}}}}
defaults: {{dtype: fp32, max_len: 256, max_batch: 4, deadlines: {{drain_s: 5}}}}
models:
  tokens: {{source: {model}, engine: vllm, tp_degree: 2, engine_options: {{max_loras: 1}}, adapters: {{{adapters}}}}}
  own: {{source: {tiny}, engine: cpu}}
  vectors: {{source: {vectors}, kind: embedding, engine: vllm, max_len: 64}}
  bodies:
    engine: server
    source: {model}
    tp_degree: 2
    server:
      command: [{python}, -m, vllm.entrypoints.cli.main, serve, "{{model}}", --served-model-name, inside,
        --uds, "{{socket}}", --max-model-len, "256", --max-num-seqs, "2"]
      listen: unix
      slots: 2
"""
ROLES = ("actor", "keeper", "server", "engine", "worker")
SLOTS = {"tokens": 4, "bodies": 2}
GONE_S = 10.0  # for the processes of a dead replica, with a grace of 5 s
READY_S = 60.0
CHAOS_SEED = 3
PACE = 4  # exact answers between two kills

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of its own: the double writes what it receives into it."""
    return shutil.copytree(TINY, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def adapters() -> Iterator[None]:
    """Two LoRA adapters in S3."""
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        weights = {f"{name}/adapter_model.safetensors": lora_weights(name) for name in "xy"}
        server.bucket("loras", weights | {f"{name}/adapter_config.json": b'{"r": 8}' for name in "xy"})
        yield


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    save_encoder(folder, "qwen3")
    return pooled(folder, "lasttoken")


@pytest.fixture(scope="module")
def fleet(python: Path, model: Path, vectors: Path, adapters: None) -> Iterator[LiveFleet]:
    with LiveFleet(SPEC.format(python=python, model=model, tiny=TINY, vectors=vectors, adapters="")) as fleet:
        yield fleet.wait_ready()
        fleet.stop()


def received(model: Path, prompt: Any) -> list[Any]:
    """The bodies with this prompt that reached the server."""
    bodies = [json.loads(line) for line in (model / "received.jsonl").read_text().splitlines()]
    return [body for body in bodies if body.get("prompt") == prompt]


def tree(admin: Admin, id: str) -> dict[str, psutil.Process]:
    """The processes of a replica, by role."""
    processes = [psutil.Process(admin.replica(id)["pid"])]
    while len(processes) < len(ROLES):
        (child,) = processes[-1].children()
        processes.append(child)
    return dict(zip(ROLES, processes, strict=True))


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_ready(admin: Admin, id: str) -> None:
    until(lambda: admin.replica(id)["state"] == "ready", READY_S, f"{id} is ready")


def server_load(processes: dict[str, psutil.Process]) -> list[int]:
    """The requests that run and that wait in a server, by its own metrics."""
    (path,) = Path(processes["server"].cwd()).glob("s*")
    _, text = Address(path=str(path)).get("/metrics")
    return [int(float(line.split()[-1])) for line in text.decode().splitlines() if "num_requests" in line]


def waiting(fleet: LiveFleet, name: str) -> int:
    """The requests that wait in the gateway."""
    families = text_string_to_metric_families(fleet.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.labels.get("model_name") == name]
    return sum(int(sample.value) for sample in samples if sample.name == "vllm:num_requests_waiting")


def test_a_forwarded_answer_and_its_usage_are_the_servers(fleet: LiveFleet, model: Path) -> None:
    """Complete and streamed; fields that corewright does not know reach the server."""
    fields: dict[str, Any] = {"prompt": "whole", "max_tokens": 9, "x_own": {"deep": [1]}}
    whole = complete(fleet, "bodies", **fields).json()
    lines = complete(fleet, "bodies", **fields, stream=True, stream_options={"include_usage": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    assert whole["choices"][0]["text"] == echo_text("whole", 9)
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == echo_text("whole", 9)
    assert whole["usage"] == events[-1]["usage"] == {"prompt_tokens": 5, "completion_tokens": 9, "total_tokens": 14}
    assert {whole["model"], *(event["model"] for event in events)} == {"bodies"}
    assert [(body["model"], body["x_own"]) for body in received(model, "whole")] == [("inside", {"deep": [1]})] * 2


def test_vectors_of_vllm_are_those_of_their_tokens(fleet: LiveFleet) -> None:
    """Of texts and of ids, in their order; a chat is not for such a model."""
    answer = fleet.http.post("/v1/embeddings", json={"model": "vectors", "input": [[7, 9], [3]]}).json()
    chat = fleet.http.post(
        "/v1/chat/completions", json={"model": "vectors", "messages": [{"role": "user", "content": "x"}]}
    )
    score = fleet.http.post("/v1/score", json={"model": "vectors", "text_1": "w1 w2", "text_2": ["w1 w2"]}).json()

    rows = [item["embedding"] for item in answer["data"]]
    assert rows == [pytest.approx([2 / 16, 1, 9 / 16]), pytest.approx([1 / 3, 1, 1])]
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert score["data"][0]["score"] == pytest.approx(1)
    assert (chat.status_code, chat.json()["error"]["code"]) == (400, "route_not_served")


def test_a_chat_with_an_image_is_answered_by_vllm_itself(fleet: LiveFleet, model: Path) -> None:
    """Whose usage counts."""
    parts = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": "data:,a"}}]
    body = {"model": "tokens", "messages": [{"role": "user", "content": parts}], "max_tokens": 5}
    answer = fleet.http.post("/v1/chat/completions", json=body).json()

    assert answer["choices"][0]["message"]["content"] == echo_text(json.dumps(parts), 5)
    assert answer["usage"]["prompt_tokens"] == len(json.dumps(parts))


def test_adapters_of_s3_change_while_the_replicas_run(
    fleet: LiveFleet, model: Path, python: Path, vectors: Path
) -> None:
    """Each answers under its own name; more than the server can hold take turns; a removed one is unknown."""
    pid = fleet.replica("tokens/0")["pid"]

    def apply(adapters: str) -> None:
        fleet.spec.write_text(SPEC.format(python=python, model=model, tiny=TINY, vectors=vectors, adapters=adapters))
        applied = fleet.corewright("apply", str(fleet.spec))
        assert applied.returncode == 0, applied.stderr
        until(lambda: fleet.status()["rollout"]["state"] == "complete", READY_S, "the replica has the adapters")

    def answers(*names: str) -> list[str]:
        with ThreadPoolExecutor(len(names)) as pool:
            sent = pool.map(lambda name: complete(fleet, name, prompt="lora", max_tokens=9), names)
            return [answer.json()["choices"][0]["text"] for answer in sent]

    apply("a: s3://loras/x, b: s3://loras/y")
    own, x, y = answers("tokens", "tokens:a", "tokens:b")
    assert len({own, x, y}) == 3
    cards = {card["id"]: card["parent"] for card in fleet.http.get("/v1/models").json()["data"]}
    others = dict.fromkeys(("tokens", "own", "bodies", "vectors"))
    assert cards == {**others, "tokens:a": "tokens", "tokens:b": "tokens"}

    apply("a: s3://loras/y")
    assert answers("tokens:a", "tokens") == [y, own]
    assert complete(fleet, "tokens:b", prompt="lora").status_code == 404
    apply("")
    assert complete(fleet, "tokens:a", prompt="lora").status_code == 404
    assert fleet.replica("tokens/0")["pid"] == pid


def test_an_error_of_the_server_reaches_the_client(fleet: LiveFleet) -> None:
    """As an error of the API's own shape, also where the server answers a stream with 200."""
    answers = [complete(fleet, "bodies", logprobs=100, stream=stream) for stream in (False, True)]

    assert [answer.status_code for answer in answers] == [400, 400]
    assert {answer.json()["error"]["message"] for answer in answers} == {"too many logprobs"}


@pytest.mark.parametrize("name", ["bodies", "tokens"])
def test_a_server_never_has_more_requests_than_slots(fleet: LiveFleet, name: str) -> None:
    """Those that wait in the gateway take the slots of clients that leave, and get their answers."""
    processes = tree(Admin(fleet.home), f"{name}/0")
    slots = SLOTS[name]
    staying: dict[str, Any] = {"model": name, "prompt": "stays", "max_tokens": 9}
    expected = complete(fleet, **staying).json()["choices"][0]["text"]
    processes["worker"].suspend()
    try:
        leaving = [Sent(fleet, {**staying, "prompt": "leaves"}) for _ in range(slots)]
        until(lambda: server_load(processes) == [slots, 0], READY_S, "all slots are taken")
        sent = [Sent(fleet, staying) for _ in range(slots + 1)]
        until(lambda: waiting(fleet, name) == slots + 1, READY_S, "others wait in the gateway")
        for each in leaving:
            each.close()
        until(lambda: waiting(fleet, name) == 1, READY_S, "they have the slots")
        until(lambda: server_load(processes) == [slots, 0], READY_S, "the server has no more than the slots")
    finally:
        processes["worker"].resume()

    assert [each.answer()["choices"][0]["text"] for each in sent] == [expected] * (slots + 1)


def kill(admin: Admin, id: str, role: str) -> None:
    """Kills a process of a replica, and watches its others end: until then its cores are leased."""
    processes, cores = tree(admin, id), set(CoreRange.parse(admin.replica(id)["cores"]))
    deadline = time.monotonic() + GONE_S

    processes[role].kill()

    def all_gone() -> bool:
        (host,) = admin.status()["hosts"]
        leased = {core for lease in host["leases"] for core in CoreRange.parse(lease["cores"])}
        if left := {name for name, process in processes.items() if not is_gone(process)}:
            assert cores <= leased, f"{left} of {id} live, and of its cores {cores} some are free: {leased}"
            assert time.monotonic() < deadline, f"{left} of {id} live {GONE_S} s after the end of its {role}"
        return not left

    until(all_gone, GONE_S + 5.0, f"all processes of {id} are gone")


def questions(fleet: LiveFleet) -> Callable[[int, int], Question]:
    """Plain and streamed questions to all models in turn, whose answers were taken from an undisturbed fleet."""
    bodies: list[dict[str, Any]] = [
        {"model": name, "prompt": prompt, "max_tokens": count, "temperature": 0}
        for name in ("tokens", "bodies", "own")
        for prompt, count in (("The cat", 60), ("Once upon a time", 8))
    ]
    texts = [complete(fleet, **body).json()["choices"][0]["text"] for body in bodies]

    def question(client: int, number: int) -> Question:
        index = (client + number) % len(bodies)
        return {**bodies[index], "stream": number % 2 == 0}, texts[index]

    return question


def test_a_killed_server_loses_no_request(fleet: LiveFleet) -> None:
    """Each gets its exact answer or a documented error, and the replica returns."""
    admin, load = Admin(fleet.home), Load(fleet, questions(fleet), clients=6)
    with load:
        load.wait_answered(PACE, kind="exact")
        kill(admin, "bodies/0", "server")
        until_ready(admin, "bodies/0")
        load.wait_answered(PACE, kind="exact")

    assert load.wrong == []


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_whatever_process_is_killed_the_replica_returns_and_no_request_is_lost(fleet: LiveFleet) -> None:
    """Every process of both kinds of servers once, in a random order. The breaker allows five deaths of a replica, so
    the one of the test above is left out."""
    victims = [(id, role) for id in ("tokens/0", "bodies/0") for role in ROLES]
    victims.remove(("bodies/0", "server"))
    random.Random(CHAOS_SEED).shuffle(victims)
    admin, load = Admin(fleet.home), Load(fleet, questions(fleet), clients=6)
    with load:
        for id, role in victims:
            until_ready(admin, id)
            load.wait_answered(PACE, kind="exact")
            kill(admin, id, role)
        for id in ("tokens/0", "bodies/0"):
            until_ready(admin, id)
        load.wait_answered(PACE, kind="exact")

    assert load.wrong == []
