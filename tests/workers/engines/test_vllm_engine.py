"""vLLM's server as `start_vllm` runs it, over its double: the real command line, sockets and processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from tests.doubles.openai_server import lora_weights, make_vllm
from tests.fleet import until
from tests.replica_configs import replica_config
from workers.engines.echo.engine import EOS_ID, VOCAB_SIZE, echo_tokens
from workers.engines.server.completion_relay import CompletionRelay
from workers.engines.server.server_process import CompletionServer
from workers.engines.vllm.engine import start_vllm
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import AnswerConstraint, FinishReason, GenerateRequest, TokenEvent
from workers.text.tokenizer import ByteTokenizer

DEADLINE_S = 60.0
SLOTS, MAX_LEN = 3, 256


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path)


def make_model(parent: Path) -> Path:
    folder = parent / "model"
    folder.mkdir()
    config = {"model_type": "llama", "vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_LEN}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    save_file({"model.layers.0.self_attn.o_proj.weight": torch.zeros(2, 3)}, folder / "model.safetensors")
    return folder


def config_of(model: Path, python: Path, **fields: Any) -> ReplicaConfig:
    settings = {"model": "tiny", "engine": "vllm", "dtype": "fp32", "slots": SLOTS, "max_len": MAX_LEN}
    settings |= {"source": str(model), "server_python": str(python), "socket": str(model.parent / "replica")}
    return replica_config(**{**settings, **fields})


class Run:
    """A relay over a server's processes, with its events."""

    def __init__(self, server: CompletionServer) -> None:
        self.folder = Path(server.address.path).parent
        self.events: list[TokenEvent] = []
        self.changed = threading.Condition()
        self.relay = CompletionRelay(server, ByteTokenizer(), self._receive)
        here = [process for process in psutil.process_iter() if self._is_here(process)]
        self.keeper = next(process for process in here if "keeper.py" in " ".join(process.cmdline()))
        (self.server,) = self.keeper.children()
        (self.engine,) = self.server.children()
        (self.worker,) = self.engine.children()

    def _is_here(self, process: psutil.Process) -> bool:
        try:
            return process.cwd() == str(self.folder)
        except psutil.Error:
            return False

    def _receive(self, events: list[TokenEvent]) -> None:
        with self.changed:
            self.events += events
            self.changed.notify_all()

    def submit(self, id: str = "a", **fields: Any) -> None:
        settings = {"id": id, "prompt_ids": [72, 105], "max_tokens": 20, "temperature": 0.0, **fields}
        self.relay.submit(GenerateRequest(**settings))

    def wait_tokens(self, id: str = "a") -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: any(e.id == id and e.token_ids for e in self.events), DEADLINE_S), id

    def end(self, id: str = "a") -> TokenEvent:
        with self.changed:
            assert self.changed.wait_for(lambda: any(e.id == id and e.finish for e in self.events), DEADLINE_S), id
            return next(event for event in self.events if event.id == id and event.finish)

    def ids(self, id: str = "a") -> list[int]:
        self.end(id)
        return [token for event in self.events if event.id == id for token in event.token_ids]

    def running(self, name: str = "running") -> int:
        _, text = self._server_get("/metrics")
        line = next(line for line in text.decode().splitlines() if line.startswith(f"vllm:num_requests_{name}"))
        return int(float(line.rpartition(" ")[2]))

    def _server_get(self, route: str) -> tuple[int, bytes]:
        return self.relay._server.address.get(route)

    def connection(self) -> http.client.HTTPConnection:
        """A request of another client."""
        connection = self.relay._server.address.connection(DEADLINE_S)
        body = json.dumps({"model": "tiny", "prompt": [1], "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection

    def health(self) -> int:
        return self._server_get("/health")[0]


@pytest.fixture
def own(model: Path, python: Path) -> Iterator[Run]:
    """For tests that end it."""
    run = Run(start_vllm(config_of(model, python)))
    yield run
    run.relay.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Iterator[tuple[Run, Path]]:
    model = make_model(tmp_path_factory.mktemp("shared"))
    run = Run(start_vllm(config_of(model, python)))
    yield run, model
    run.relay.close()


@pytest.fixture
def faults(shared: tuple[Run, Path]) -> Path:
    """The file that plans the shared server's faults."""
    return shared[1] / "faults.json"


@pytest.fixture
def run(shared: tuple[Run, Path], faults: Path) -> Iterator[Run]:
    """The shared server, idle, without faults."""
    run, _ = shared
    run.events.clear()
    yield run
    run.worker.resume()
    until(lambda: run.relay.stats.live == 0, DEADLINE_S, "all requests have ended")
    faults.unlink(missing_ok=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


def test_ragged_requests_beyond_the_slots_get_their_own_tokens(run: Run) -> None:
    prompts = {f"r{i}": [40 + i, *range(40, 40 + i % 7)] for i in range(10)}
    for id, prompt in prompts.items():
        run.submit(id, prompt_ids=prompt, max_tokens=1 + len(prompt) % 5)

    for id, prompt in prompts.items():
        assert run.ids(id) == echo_tokens(prompt, 1 + len(prompt) % 5)


@pytest.mark.parametrize(
    ("fields", "count", "finish"),
    [
        ({"logit_bias": {EOS_ID: 100.0}}, 1, FinishReason.STOP),
        ({"logit_bias": {EOS_ID: 100.0}, "min_tokens": 4}, 5, FinishReason.STOP),
        ({"logit_bias": {EOS_ID: 100.0}, "ignore_eos": True}, 20, FinishReason.LENGTH),
        ({"logit_bias": {65: 100.0}, "stop_token_ids": [65]}, 1, FinishReason.STOP),
        ({"logit_bias": {65: 100.0}, "stop": ["AAA"]}, 3, FinishReason.STOP),
        ({}, 20, FinishReason.LENGTH),
    ],
    ids=["eos", "min_tokens", "ignore_eos", "stop id", "stop string", "max_tokens"],
)
def test_each_limit_ends_an_answer_where_the_server_ends_it(
    run: Run, fields: dict[str, Any], count: int, finish: FinishReason
) -> None:
    run.submit(**fields)

    assert (run.end().finish, len(run.ids())) == (finish, count)


def test_logprobs_and_several_tokens_in_a_chunk(run: Run, faults: Path) -> None:
    """Each token keeps its own logprobs, also where the server sends several at once."""
    faults.write_text('{"chunk": 4}')

    run.submit(logprobs=2)

    assert run.ids() == echo_tokens([72, 105], 20)
    assert [item.id for event in run.events for item in event.logprobs] == run.ids()


def test_a_cancelled_request_frees_its_slot_in_the_server(run: Run) -> None:
    run.worker.suspend()
    run.submit()
    until(lambda: run.running() == 1, DEADLINE_S, "it has a slot")

    run.relay.cancel("a")

    assert run.end().finish is FinishReason.CANCELLED
    until(lambda: run.running() == 0, DEADLINE_S, "the slot is free")


def test_a_stopped_engine_shows_as_a_step_that_lasts_though_health_is_200(run: Run) -> None:
    run.worker.suspend()
    run.submit()
    until(lambda: run.running() == 1, DEADLINE_S, "it has a slot")

    assert run.health() == 200
    assert run.relay.stats.step_started_at is not None
    run.worker.resume()
    assert run.ids() == echo_tokens([72, 105], 20)


@pytest.mark.parametrize("victim", ["server", "engine", "worker"])
def test_a_killed_process_ends_the_others_and_answers_every_request(own: Run, victim: str) -> None:
    """The engine's processes outlive the server, and the keeper ends them."""
    own.worker.suspend()
    own.submit()
    until(lambda: own.running() == 1, DEADLINE_S, "it has a slot")

    getattr(own, victim).send_signal(signal.SIGKILL)

    with pytest.raises(RuntimeError):
        own.relay.run()
    assert own.end().finish in (FinishReason.UNSERVED, FinishReason.ERROR)
    assert gone([own.server, own.engine, own.worker])


def test_a_drained_server_that_is_closed_leaves_no_process_and_no_folder(own: Run) -> None:
    own.submit()

    assert own.relay.drain(DEADLINE_S)
    own.relay.close()

    assert own.ids() == echo_tokens([72, 105], 20)
    assert gone([own.keeper, own.server, own.engine, own.worker])
    assert not own.folder.exists()


@pytest.mark.parametrize("do", ["error", "end", "reset"])
@pytest.mark.parametrize("after", [0, 3])
def test_only_a_finish_reason_is_success(run: Run, faults: Path, do: str, after: int) -> None:
    """A request without a token may run elsewhere, unless the server reports that it failed."""
    faults.write_text(json.dumps({"do": do, "after": after}))

    run.submit()

    assert run.end().finish is (FinishReason.UNSERVED if after == 0 and do != "error" else FinishReason.ERROR)
    assert run.ids() == echo_tokens([72, 105], after)


def test_requests_beyond_the_slots_wait_in_the_replica(run: Run) -> None:
    """And take the slots of those that are cancelled; the server has no queue."""
    run.worker.suspend()
    for number in range(SLOTS * 2):
        run.submit(f"r{number}")
    until(lambda: run.running() == SLOTS, DEADLINE_S, "all slots are taken")
    for number in range(SLOTS):
        run.relay.cancel(f"r{number}")
    until(lambda: run.relay.stats.waiting == 0, DEADLINE_S, "the others have the slots")
    run.worker.resume()

    assert [run.ids(f"r{number}") for number in range(SLOTS, SLOTS * 2)] == [echo_tokens([72, 105], 20)] * SLOTS


def test_a_server_whose_queue_is_full_refuses_for_now(run: Run) -> None:
    """The limit is that of `--max-num-queued-reqs`; another replica may answer the request."""
    run.worker.suspend()
    others = [run.connection() for _ in range(SLOTS + 8)]
    until(lambda: run.running() + run.running("waiting") == SLOTS + 8, DEADLINE_S, "the queue is full")

    run.submit("late")

    assert run.end("late").finish is FinishReason.UNSERVED
    for other in others:
        other.close()
    until(lambda: run.running() + run.running("waiting") == 0, DEADLINE_S, "the server is idle")


def test_a_schema_that_the_server_refuses_is_the_clients_fault(run: Run) -> None:
    run.submit(guide=AnswerConstraint('{"type": "odd"}'))

    assert run.end().finish is FinishReason.INVALID
    assert "schema" in (run.end().error or "")


def test_the_server_is_ready_only_when_it_answers(model: Path, python: Path) -> None:
    """While it loads, its socket is there and refuses connections."""
    loading = model.with_suffix(".loading")
    os.mkfifo(loading)
    started: list[CompletionServer] = []
    thread = threading.Thread(target=lambda: started.append(start_vllm(config_of(model, python))))
    thread.start()

    path = until(lambda: next(model.parent.glob("*/s"), None), DEADLINE_S, "the socket is bound")
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(str(path))
    assert not started
    loading.write_bytes(b"")
    thread.join(DEADLINE_S)

    (server,) = started
    server.stop()


def test_a_flag_that_vllm_does_not_have_is_a_failed_start(model: Path, python: Path) -> None:
    with pytest.raises(EngineLoadError, match="exit code 2"):
        start_vllm(config_of(model, python, engine_options={"no_such_flag": 1}))


def pooled(model: Path, *modes: str, dense: bool = False) -> Path:
    """Makes a folder of sentence-transformers of a checkpoint."""
    types = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = [{"path": "" if i == 0 else f"{i}_{name}", "type": f"models.{name}"} for i, name in enumerate(types)]
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": list(modes)}))
    if dense:
        (model / "2_Dense").mkdir()
        shape = {"in_features": 2, "out_features": 1, "activation_function": "torch.nn.Identity"}
        (model / "2_Dense" / "config.json").write_text(json.dumps(shape))
    return model


def test_a_pooling_server_embeds_token_ids(model: Path, python: Path) -> None:
    """All inputs of a request in one, each with its own row; what the server refuses is the client's error."""
    run = Run(start_vllm(config_of(pooled(model, "lasttoken"), python, kind="embedding")))
    try:
        inputs = [[1, 2, 5], [7], *([n] * n for n in range(1, 200))]
        run.submit(prompt_ids=[], inputs=[EncodeInput(ids) for ids in inputs])
        run.submit("refused", prompt_ids=[], inputs=[EncodeInput([])])
        run.end()
        parts = [event.part.data for event in run.events if event.id == "a" and event.part is not None]
        rows = np.frombuffer(b"".join(parts), np.float32).reshape(len(inputs), run.relay.spec.width)

        sums = [[len(ids), sum(ids), ids[-1]] for ids in inputs]
        assert np.allclose(rows, [[number / max(1, *row) for number in row] for row in sums])
        assert run.end("refused").finish is FinishReason.INVALID
        with pytest.raises(ValueError, match="the limit is 256"):
            run.submit("long", prompt_ids=[], inputs=[EncodeInput([1] * (MAX_LEN + 1))])
        with pytest.raises(ValueError, match="does not generate"):
            run.submit("text")
    finally:
        run.relay.close()


@pytest.mark.parametrize(("modes", "dense"), [([], False), (["max"], False), (["mean", "cls"], False), (["cls"], True)])
def test_a_folder_that_vllm_pools_otherwise_is_not_started(
    model: Path, python: Path, modes: list[str], dense: bool
) -> None:
    """A plain checkpoint is one too: its vectors would not be those of the other engines."""
    if modes:
        pooled(model, *modes, dense=dense)
    with pytest.raises(EngineLoadError) as refused:
        start_vllm(config_of(model, python, kind="embedding"))

    assert refused.value.id == "encoder-unsupported"


def test_adapters_are_loaded_changed_and_removed_in_the_server(model: Path, python: Path, tmp_path: Path) -> None:
    """Each by a request for it. The server lists those that are loaded; more than it can hold wait."""
    folders = {name: adapter_folder(tmp_path / name, name) for name in ("x", "y", "z")}
    adapters = {name: folders[name] for name in "xy"}
    run = Run(start_vllm(config_of(model, python, adapters=adapters, engine_options={"max_loras": 1})))
    try:
        for id in ("x", "y"):
            run.submit(id, adapter=id)
        run.submit("own")
        assert run.ids("own") == echo_tokens([72, 105], 20)
        for id in ("x", "y"):
            assert run.ids(id) == echo_tokens([ord(id), 72, 105], 20)

        run.relay.set_adapters({"y": folders["z"]})
        run.submit("new", adapter="y")
        assert run.ids("new") == echo_tokens([ord("z"), 72, 105], 20)
        with pytest.raises(ValueError, match="no adapter 'x'"):
            run.submit("gone", adapter="x")
        cards = json.loads(run._server_get("/v1/models")[1])["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("tiny@base", None),
            ("tiny", "tiny@base"),
            ("tiny:y@1", "tiny@base"),
        ]
    finally:
        run.relay.close()


def adapter_folder(path: Path, weights: str) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_text('{"r": 8}')
    (path / "adapter_model.safetensors").write_bytes(lora_weights(weights))
    return str(path)


@pytest.mark.parametrize(("options", "block"), [({}, 0), ({"prefix_cache": True, "block_size": 16}, 16)])
def test_routing_counts_blocks_of_the_prefix_cache(
    model: Path, python: Path, options: dict[str, Any], block: int
) -> None:
    """Those of the option, if the metrics do not show another size."""
    server = start_vllm(config_of(model, python, engine_options=options))
    try:
        assert server.spec.prefix_block == block
    finally:
        server.stop()


def test_a_server_on_a_port_refuses_other_clients(model: Path, tmp_path: Path) -> None:
    """vLLM before 0.14 has no unix sockets, and every user of the machine reaches a port."""
    server = start_vllm(config_of(model, make_vllm(tmp_path / "vllm", "0.13.0")))
    ended: list[TokenEvent] = []
    relay = CompletionRelay(server, ByteTokenizer(), ended.extend)
    try:
        relay.submit(GenerateRequest(id="a", prompt_ids=[72, 105], max_tokens=3))
        until(lambda: ended and ended[-1].finish, DEADLINE_S, "the answer")
        assert ended[-1].finish == FinishReason.LENGTH
        assert server.address.port
        body = json.dumps({"model": "tiny", "prompt": [72, 105]}).encode()
        assert server.address.post("/v1/completions", body, DEADLINE_S)[0] == http.client.UNAUTHORIZED
    finally:
        relay.close()
