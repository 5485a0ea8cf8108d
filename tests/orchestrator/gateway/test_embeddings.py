"""Embeddings through a real gateway and data plane: each vector is the one of its text."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.access.keys import Allowance, KeyFile
from orchestrator.control.resolve.checkpoint_reader import tokenizer_key
from orchestrator.gateway.openai.answers import EmbeddingList
from orchestrator.messages.replica_states import ModelState
from orchestrator.process.home import Home
from placements.facts.encoders import Kind
from tests.fleet import until
from tests.orchestrator.encoded import EncoderReplica, HeldEncoder
from tests.orchestrator.gateways import VERSION, LiveGateway, routes
from tests.orchestrator.hostile import Wire, post
from tests.served import Served
from workers.engines.echo.engine import WIDTH, EchoEncoder, echo_vector
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec
from workers.messages.requests import AnswerPart, TokenEvent

MAX_LEN = 64
Make = Callable[..., EncoderReplica]


@pytest.fixture(scope="module")
def shared() -> Iterator[EncoderReplica]:
    replica = EncoderReplica()
    yield replica
    replica.close()


@pytest.fixture
def encoder() -> Iterator[Make]:
    made: list[EncoderReplica] = []

    def make(engine: Any = None) -> EncoderReplica:
        made.append(EncoderReplica(engine))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


@pytest.fixture
def served(gateway: LiveGateway, shared: EncoderReplica) -> LiveGateway:
    return gateway.serve(routes("e", shared, kind="embedding", max_len=MAX_LEN))


def embed(gateway: LiveGateway, given: Any, **fields: Any) -> httpx.Response:
    return gateway.http.post("/v1/embeddings", json={"model": "e", "input": given, **fields})


def vectors(answer: httpx.Response) -> list[tuple[float, ...]]:
    assert answer.status_code == 200, answer.text
    return [tuple(item["embedding"]) for item in answer.json()["data"]]


def error(answer: httpx.Response) -> tuple[int, str | None, str | None, str]:
    body = answer.json()["error"]
    return answer.status_code, body["code"], body["param"], body["message"]


def of(text: str | list[int], **fields: int) -> tuple[float, ...]:
    return echo_vector(EncodeInput([*text.encode()] if isinstance(text, str) else text, **fields))


def test_the_controller_gets_what_the_requests_need_of_the_engine(fresh_gateway: LiveGateway, encoder: Make) -> None:
    """Not the time in the replica's slots, of which it has more than its engine works on at once."""
    fresh_gateway.serve(routes("e", encoder(EchoEncoder(rows=8, max_len=64, step_ms=20.0)), kind="embedding"))
    assert embed(fresh_gateway, ["a"] * 12).status_code == 200
    total = fresh_gateway.controller.total
    until(lambda: total("encoded") == 1, 5, "the request is reported")
    assert total("inputs") == 12
    assert 2 * 0.02 <= total("prefill_s") < 1.0  # two batches
    assert total("work_s") == pytest.approx(total("prefill_s") * 12 / 16, rel=0.2)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("hello", ["hello"]),
        (["a", "bb", "a"], ["a", "bb", "a"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["x", [7, 8]], ["x", [7, 8]]),
    ],
)
def test_every_form_of_input_gives_its_vectors_in_order(served: LiveGateway, given: Any, parts: list[Any]) -> None:
    answer = embed(served, given)

    assert vectors(answer) == [of(part) for part in parts]
    body = answer.json()
    tokens = sum(map(len, parts))
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [item["index"] for item in body["data"]] == list(range(len(parts)))
    assert (body["object"], body["model"]) == ("list", "e")
    assert answer.headers["x-corewright-replica"] == "e/0"
    assert answer.headers["x-corewright-model-version"] == VERSION
    msgspec.json.decode(answer.content, type=EmbeddingList)


def test_base64_has_the_same_numbers_in_little_endian(served: LiveGateway) -> None:
    texts = ["a", "b" * 40]
    coded = embed(served, texts, encoding_format="base64").json()["data"]
    numbers = [struct.unpack(f"<{WIDTH}f", base64.b64decode(item["embedding"])) for item in coded]
    assert numbers == vectors(embed(served, texts, encoding_format="float")) == [of(text) for text in texts]


@pytest.mark.parametrize("dimensions", [1, 3, WIDTH])
def test_dimensions_cut_each_vector_and_scale_it_to_length_1(served: LiveGateway, dimensions: int) -> None:
    vector = vectors(embed(served, "hello", dimensions=dimensions))[0]
    first = of("hello")[:dimensions]
    length = sum(number**2 for number in first) ** 0.5
    assert vector == pytest.approx([number / length for number in first], rel=1e-6)
    assert len(vector) == dimensions


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"input": ""}, None, "input", "input is empty"),
        ({"input": []}, None, "input", "input is empty"),
        ({"input": ["a", ""]}, None, "input", "input[1] is empty"),
        ({"input": ["a", None]}, None, "input", "got null"),
        ({"input": [[1], [257]]}, None, "input", "input[1]: 257 is not a token id"),
        ({"input": [-1]}, None, "input", "-1 is not a token id"),
        ({"input": ["a"] * 2049}, None, "input", "2049 is out of range"),
        ({"dimensions": 0}, None, "dimensions", "0 is out of range"),
        ({"dimensions": WIDTH + 1}, None, "dimensions", f"at least 1 and at most {WIDTH}"),
        ({"encoding_format": "int8"}, None, "encoding_format", "int8"),
        ({"input": ["a", "b" * 65]}, "context_length_exceeded", "input", "at most 64 tokens; input[1] has 65"),
        ({"truncate_prompt_tokens": 65}, None, "truncate_prompt_tokens", "65 is above the limit of this model, 64"),
        ({"truncate_prompt_tokens": 0}, None, "truncate_prompt_tokens", "0 leaves nothing"),
        ({"truncate": False, "truncate_prompt_tokens": 5}, None, "truncate", "exclude each other"),
        ({"prompt": "a", "prompt_name": "b"}, None, "prompt_name", "exclude each other"),
        ({"prompt_name": "query"}, None, "prompt_name", "'query' is not a prompt of this model; it has none"),
        ({"input": ["a", [1]], "prompt": "q: "}, None, "prompt", "input 1 has token ids"),
        ({"model": "nope"}, "model_not_found", "model", "does not exist"),
    ],
)
def test_a_wrong_field_is_named(
    served: LiveGateway, fields: dict[str, Any], code: str | None, param: str, words: str
) -> None:
    answer = served.http.post("/v1/embeddings", json={"model": "e", "input": "x", **fields})
    status, *named, message = error(answer)
    assert (status, *named) == (404 if code == "model_not_found" else 400, code, param)
    assert words in message


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [({"truncate": True}, MAX_LEN), ({"truncate_prompt_tokens": -1}, MAX_LEN), ({"truncate_prompt_tokens": 5}, 5)],
)
def test_long_inputs_are_cut_only_on_request(served: LiveGateway, fields: dict[str, Any], tokens: int) -> None:
    """Usage counts what was encoded. A body of more than 2 KiB is tokenized on a thread."""
    for given in ("b" * 70, "b" * 3000):
        answer = embed(served, [given, "a"], **fields)
        assert vectors(answer) == [of("b" * tokens), of("a")]
        assert answer.json()["usage"]["prompt_tokens"] == tokens + 1
    assert embed(served, "b" * 3000).status_code == 400


def test_a_prompt_of_the_request_is_before_each_text(served: LiveGateway) -> None:
    assert vectors(embed(served, ["a", "b"], prompt="q: ")) == [of("q: a"), of("q: b")]
    assert vectors(embed(served, "a", input_type="query")) == [of("a")]  # the model has no such prompt


@pytest.mark.parametrize("count", [1, 2048])
def test_a_request_is_one_ticket_however_many_inputs_it_has(gateway: LiveGateway, encoder: Make, count: int) -> None:
    """It is never split over replicas, though another one is idle."""
    replicas = [encoder(), encoder()]
    gateway.serve(routes("e", *replicas, kind="embedding", max_len=MAX_LEN))
    given = [f"text {number}" for number in range(count)]

    assert vectors(embed(gateway, given)) == [of(text) for text in given]
    assert sorted(len(replica.requests) for replica in replicas) == [0, 1]


def test_a_request_whose_replica_is_lost_is_encoded_by_another(gateway: LiveGateway, encoder: Make) -> None:
    replicas = [encoder(HeldEncoder()), encoder(HeldEncoder())]
    gateway.serve(routes("e", *replicas, kind="embedding", max_len=MAX_LEN))
    answers: list[httpx.Response] = []
    asks = threading.Thread(target=lambda: answers.append(embed(gateway, ["a", "b"])))
    asks.start()
    until(lambda: any(replica.requests for replica in replicas), 10, "it has reached a replica")
    first = next(replica for replica in replicas if replica.requests)
    second = next(replica for replica in replicas if replica is not first)

    first.kill()
    until(lambda: bool(second.requests), 10, "it has reached the other one")
    second.engine.turns.release(10)  # type: ignore[attr-defined]
    asks.join(10)

    assert vectors(answers[0]) == [of("a"), of("b")]
    assert answers[0].headers["x-corewright-replica"] == f"e/{replicas.index(second)}"


class Wide(EchoEncoder):
    """Gives vectors of 1024 numbers, so that an answer has many parts, and rows that are in two of them."""

    @property
    def spec(self) -> EncoderSpec:
        narrow = super().spec
        return EncoderSpec(narrow.rows, narrow.buckets, narrow.vocab_size, 1023)

    def encode(self, inputs: Sequence[EncodeInput]) -> Any:
        rows = super().encode(inputs)
        for row in rows:
            row.numbers = (*row.numbers, *[0.5] * (1023 - WIDTH))
        return rows


def test_an_answer_in_many_parts_is_complete(gateway: LiveGateway, encoder: Make) -> None:
    """It is 4 MB of numbers; the client sees one answer."""
    gateway.serve(routes("e", encoder(Wide(64, MAX_LEN)), kind="embedding", max_len=MAX_LEN))
    given = [f"text {number}" for number in range(1000)]

    answer = embed(gateway, given)

    assert len(answer.content) > 2**22
    assert [row[:WIDTH] for row in vectors(answer)] == [of(text) for text in given]
    assert {row[WIDTH:] for row in vectors(answer)} == {(0.5,) * (1023 - WIDTH)}


def test_a_replica_lost_between_two_parts_costs_a_retry_only(gateway: LiveGateway, encoder: Make) -> None:
    """No part was delivered; the parts of the lost replica are thrown away."""
    replicas = [encoder(HeldEncoder()), encoder(HeldEncoder())]
    gateway.serve(routes("e", *replicas, kind="embedding", max_len=MAX_LEN))
    answers: list[httpx.Response] = []
    asks = threading.Thread(target=lambda: answers.append(embed(gateway, "a")))
    asks.start()
    until(lambda: any(replica.requests for replica in replicas), 10, "it has reached a replica")
    first, second = sorted(replicas, key=lambda replica: not replica.requests)
    first.plane.emit([TokenEvent(id=first.requests[0].id, part=AnswerPart(b"\0" * 12))])
    link = next(link for link in gateway.queue("e").links if link.route.socket == str(first.path))
    until(lambda: any(ticket.stream.events for ticket, _ in link.progress), 10, "the part has arrived")

    first.kill()
    until(lambda: bool(second.requests), 10, "it has reached the other one")
    second.engine.turns.release(10)  # type: ignore[attr-defined]
    asks.join(10)

    assert vectors(answers[0]) == [of("a")]


def test_a_client_that_leaves_cancels_its_request(gateway: LiveGateway, encoder: Make) -> None:
    replica = encoder(HeldEncoder())
    gateway.serve(routes("e", replica, kind="embedding", max_len=MAX_LEN))
    with Wire(gateway.port) as wire:
        wire.send(post({"model": "e", "input": ["a"] * 20}, "/v1/embeddings"))
        until(lambda: bool(replica.requests), 10, "it has reached the replica")
    until(lambda: bool(replica.batcher._cancelled), 10, "the cancellation has arrived")
    replica.engine.turns.release()  # type: ignore[attr-defined]
    until(lambda: gateway.queue("e").links.live == 0, 10, "its slot is free")
    assert replica.batcher.stats.live == 0


@pytest.mark.parametrize(
    ("path", "fields", "kind", "words"),
    [
        ("/v1/embeddings", {"input": "x"}, "generate", "of kind generate: it has /v1/chat/completions and"),
        ("/v1/embeddings", {"input": "x"}, "rerank", "of kind rerank: it has /v1/rerank and /v1/score"),
        ("/v1/completions", {"prompt": "x"}, "embedding", "it has /v1/embeddings and /v1/score, and not /v1/com"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "classification", "has /classify"),
        ("/rerank", {"query": "x", "documents": ["y"]}, "embedding", "and not /rerank"),
        ("/classify", {"input": "x"}, "generate", "and not /classify"),
    ],
)
def test_a_model_of_another_kind_names_the_right_route(
    gateway: LiveGateway, replica: Callable[..., Served], path: str, fields: dict[str, Any], kind: Kind, words: str
) -> None:
    gateway.serve(routes("e", replica(), kind=kind))
    status, *named, message = error(gateway.http.post(path, json={"model": "e", **fields}))
    assert (status, *named) == (400, "route_not_served", "model")
    assert words in message


def test_a_waiting_request_is_tokenized_for_the_kind_that_answers(gateway: LiveGateway, encoder: Make) -> None:
    """It is encoded if the model is still of its kind, and rejected with the reason if not."""
    gateway.serve(msgspec.structs.replace(routes("e", kind="embedding", max_len=MAX_LEN), holds=True, tokenizer="1"))
    answers: list[httpx.Response] = []
    given = ["a" * 40, "b" * 40]  # together longer than an input may be
    asks = threading.Thread(target=lambda: answers.append(embed(gateway, given)))
    asks.start()
    until(lambda: gateway.queue("e").waiting == 1, 10, "it waits")
    table = routes("e", encoder(), kind="embedding", max_len=MAX_LEN)
    gateway.serve(msgspec.structs.replace(table, tokenizer="2"))
    asks.join(10)
    assert vectors(answers.pop()) == [of(text) for text in given]

    gateway.serve(msgspec.structs.replace(routes("e", kind="embedding", max_len=MAX_LEN), holds=True, tokenizer="2"))
    asks = threading.Thread(target=lambda: answers.append(embed(gateway, "a")))
    asks.start()
    until(lambda: gateway.queue("e").waiting == 1, 10, "it waits")
    gateway.controller.set(msgspec.structs.replace(routes("e", state=ModelState.LOADING), holds=True, tokenizer="2"))
    asks.join(10)
    assert error(answers[0])[:2] == (400, "route_not_served")


def test_a_key_is_charged_for_the_tokens_of_the_inputs(encoder: Make) -> None:
    gateway = LiveGateway()
    try:
        gateway.serve(routes("e", encoder(), kind="embedding", max_len=MAX_LEN))
        _, secret = KeyFile(Home(gateway.home).keys).create("k", allowance=Allowance(tokens_per_minute=1000))
        until(lambda: gateway.http.get("/v1/models").status_code == 401, 10, "a key is required")
        headers = {"authorization": f"Bearer {secret}"}
        body = {"model": "e", "input": ["x" * 50] * 12}
        first = gateway.http.post("/v1/embeddings", json=body, headers=headers)
        assert first.status_code == 200
        assert int(first.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(400, abs=20)
        assert error(gateway.http.post("/v1/embeddings", json=body, headers=headers))[:2] == (
            429,
            "rate_limit_exceeded",
        )
    finally:
        gateway.close()


def test_metrics_count_inputs_and_tokens_by_replica(encoder: Make) -> None:
    gateway = LiveGateway()
    try:
        gateway.serve(routes("e", encoder(), kind="embedding", max_len=MAX_LEN))
        assert embed(gateway, ["abc", "de"]).status_code == 200
        lines = gateway.http.get("/metrics").text.splitlines()
        assert 'corewright_encoded_inputs_total{model="e",replica="0"} 2.0' in lines
        assert 'vllm:prompt_tokens_total{model_name="e",engine="0"} 5.0' in lines
        assert 'vllm:request_success_total{model_name="e",engine="0",finished_reason="stop"} 1.0' in lines
        assert not any(line.startswith("vllm:kv_cache_usage_perc{") for line in lines)
    finally:
        gateway.close()


def test_models_show_their_kind(served: LiveGateway) -> None:
    assert served.http.get("/v1/models/e").json()["kind"] == "embedding"


# With tokenizers and models of real formats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sentence-transformers: its own limit of tokens, prompts that are not pooled, and a normalisation."""
    pytest.importorskip("torch")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    from tests.encoders import HIDDEN, save_encoder

    root = tmp_path_factory.mktemp("encoder")
    save_encoder(root / "plain", "bert")
    model = SentenceTransformer(
        modules=[
            Transformer(str(root / "plain"), max_seq_length=20),
            Pooling(HIDDEN, "mean", include_prompt=False),
            Normalize(),
        ],
        device="cpu",
        prompts={"query": "w1 w2 ", "document": "w3 ", "mark": "w4 w5 w6 "},
        default_prompt_name="mark",
    )
    model.save(str(root / "saved"))
    return root / "saved"


@pytest.fixture(scope="module")
def real(folder: Path) -> Iterator[LiveGateway]:
    from workers.engines.cpu.encoder import CpuEncoder

    replica = EncoderReplica(CpuEncoder(folder, kind="embedding", rows=8, max_len=MAX_LEN))
    gateway = LiveGateway()
    gateway.serve(routes("e", replica, kind="embedding", engine="cpu", source=str(folder), max_len=MAX_LEN))
    yield gateway
    gateway.close()
    replica.close()


TEXTS = ["w7 w8", "w9 " * 30, "W10", "w11 w12 w13 w14 "]
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({}, "encode", {}),
    ({"prompt": ""}, "encode", {"prompt": ""}),
    ({"prompt": "w20 "}, "encode", {"prompt": "w20 "}),
    ({"prompt_name": "query"}, "encode", {"prompt_name": "query"}),
    ({"input_type": "query"}, "encode_query", {}),
    ({"input_type": "document"}, "encode_document", {}),
    ({"dimensions": 12}, "encode", {"truncate_dim": 12, "normalize_embeddings": True}),
]


@pytest.mark.parametrize(("fields", "method", "options"), CASES)
def test_vectors_are_those_of_sentence_transformers(
    real: LiveGateway, folder: Path, fields: dict[str, Any], method: str, options: dict[str, Any]
) -> None:
    """With the folder's prompts, cut at the folder's limit, which only `truncate` allows."""
    from sentence_transformers import SentenceTransformer

    expected = getattr(SentenceTransformer(str(folder), device="cpu"), method)(TEXTS, **options)
    for given, row in zip(vectors(embed(real, TEXTS, truncate=True, **fields)), expected.tolist(), strict=True):
        assert given == pytest.approx(row, abs=1e-5)
    assert error(embed(real, TEXTS, **fields))[1] == "context_length_exceeded"
    assert "at most 20 tokens; input[1] has" in error(embed(real, TEXTS, **fields))[3]


def test_real_clients_get_the_same_vectors(real: LiveGateway) -> None:
    """openai's asks for base64 and decodes it; LangChain's sends tokens of another tokenizer unless it is told not
    to."""
    import openai
    from langchain_openai import OpenAIEmbeddings
    from pydantic import SecretStr

    plain = vectors(embed(real, ["w7 w8", "w9"]))
    client = openai.OpenAI(base_url=f"{real.url}/v1", api_key="none")
    answer = client.embeddings.create(model="e", input=["w7 w8", "w9"])
    assert [tuple(item.embedding) for item in answer.data] == plain
    assert len(client.embeddings.create(model="e", input="w7", dimensions=4).data[0].embedding) == 4
    options: dict[str, Any] = {"base_url": f"{real.url}/v1", "api_key": SecretStr("none")}
    chain = OpenAIEmbeddings(model="e", check_embedding_ctx_length=False, **options)
    assert [tuple(row) for row in chain.embed_documents(["w7 w8", "w9"])] == plain
    assert tuple(chain.embed_query("w9")) == plain[1]


@pytest.mark.parametrize("name", ["sentence_bert_config.json", "config_sentence_transformers.json", "modules.json"])
def test_a_key_of_tokenizers_changes_with_the_prompts_and_limits_of_a_folder(name: str, tmp_path: Path) -> None:
    """Otherwise a gateway would use those that it has read before."""
    (tmp_path / name).write_text("{}")
    before = tokenizer_key("cpu", str(tmp_path))
    (tmp_path / name).write_text('{"prompts": {"query": "q: "}}')
    assert tokenizer_key("cpu", str(tmp_path)) != before


def test_a_folder_that_cannot_be_read_is_reported(gateway: LiveGateway, shared: EncoderReplica, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.LSTM", "path": ""}]))
    gateway.serve(routes("e", shared, kind="embedding", engine="cpu", source=str(tmp_path)))
    status, code, _, message = error(embed(gateway, "x"))
    assert (status, code) == (503, "tokenizer_unavailable")
    assert "LSTM" in message
