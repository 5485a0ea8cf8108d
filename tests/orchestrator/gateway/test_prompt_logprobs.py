"""The logprobs of prompts: OpenAI's `echo` and vLLM's `prompt_logprobs`, with the CPU engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.clients.place import DEMO
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.scripted import ScriptedReplica
from tests.served import Served
from workers.engines.cpu.engine import CpuEngine
from workers.text.tokenizer import load_tokenizer

MAX_LEN = 512
TEXT = "A NeuronCore is one compute core"
LONG = " ".join([TEXT] * 60)


@pytest.fixture(scope="module")
def served() -> Iterator[LiveGateway]:
    gateway = LiveGateway()
    engine = CpuEngine(DEMO, slots=4, max_len=MAX_LEN)
    engine.load()
    replica = ScriptedReplica(engine, load_tokenizer("cpu", str(DEMO)))
    gateway.serve(routes("m", replica, engine="cpu", source=str(DEMO), max_len=MAX_LEN))  # type: ignore[arg-type]
    yield gateway
    gateway.close()
    replica.close()


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(str(DEMO), dtype=torch.float32).eval()


def ids_of(text: str) -> list[int]:
    return load_tokenizer("cpu", str(DEMO)).encode(text)


def right(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def posted(served: LiveGateway, route: str = "/v1/completions", **body: Any) -> Any:
    response = served.http.post(route, json={"model": "m", "temperature": 0, "max_tokens": 1, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_the_requests_of_lm_eval_get_the_logprobs_of_prompt_and_answer(served: LiveGateway, model: Any) -> None:
    """Several prompts of token ids with echo; the first token of each has no logprob."""
    prompts = [ids_of(TEXT), ids_of("What is it?"), ids_of(LONG)[:400]]
    answer = posted(served, prompt=prompts, logprobs=1, echo=True, seed=1234)

    for ids, choice in zip(prompts, answer["choices"], strict=True):
        values, logprobs = choice["logprobs"], right(model, ids)
        assert len(values["tokens"]) == len(ids) + 1
        assert (values["token_logprobs"][0], values["top_logprobs"][0]) == (None, None)
        exact = [float(logprobs[at, id]) for at, id in enumerate(ids[1:])]
        assert values["token_logprobs"][1:-1] == pytest.approx(exact, abs=2e-4)
        best = logprobs.max(dim=-1).values.tolist()
        assert [max(top.values()) for top in values["top_logprobs"][1:]] == pytest.approx(best, abs=2e-4)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 3


def test_the_offsets_of_an_echo_are_those_of_its_text(served: LiveGateway) -> None:
    """The length of a special token that is not in the text of the prompt is 0."""
    (choice,) = posted(served, prompt=TEXT, logprobs=0, echo=True)["choices"]

    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert choice["text"].startswith(TEXT)
    begin = 0 if TEXT.startswith(tokens[0]) else 1
    assert offsets[:2] == [0, len(tokens[0]) * (1 - begin)]
    assert [choice["text"][at : at + len(token)] for token, at in zip(tokens, offsets, strict=True)][
        begin:-1
    ] == tokens[begin:-1]


def test_max_tokens_0_echoes_the_prompt_alone(served: LiveGateway) -> None:
    answer = posted(served, prompt=TEXT, logprobs=1, echo=True, max_tokens=0)

    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (TEXT, "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids_of(TEXT)) == answer["usage"]["total_tokens"]
    (choice,) = posted(served, prompt=TEXT, echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"]) == (TEXT, None)


def test_a_streamed_echo_has_the_same_logprobs(served: LiveGateway) -> None:
    body = {"model": "m", "prompt": TEXT, "max_tokens": 5, "temperature": 0, "logprobs": 2, "echo": True}
    (whole,) = served.http.post("/v1/completions", json=body).json()["choices"]
    streamed = served.http.post("/v1/completions", json={**body, "stream": True}).text

    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    chunks = [event["choices"][0] for event in events]
    joined = {
        name: [item for c in chunks if c["logprobs"] for item in c["logprobs"][name]] for name in whole["logprobs"]
    }
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert joined == whole["logprobs"]


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs_have_vllms_shape(served: LiveGateway, model: Any, chat: bool) -> None:
    """Each entry has the prompt's own token and the most probable ones by id, with logprob, rank and text. The list is
    beside the choices of a chat, and in each choice of a completion."""
    fields: dict[str, Any] = {"prompt_logprobs": 2, "return_token_ids": True}
    if chat:
        message = {"role": "user", "content": "What is a NeuronCore?"}
        answer = posted(served, "/v1/chat/completions", messages=[message], **fields)
        holder = answer
    else:
        answer = posted(served, prompt=LONG[:1200], **fields)
        holder = answer["choices"][0]
    ids, values = holder["prompt_token_ids"], holder["prompt_logprobs"]

    assert (len(values), values[0], answer["choices"][0]["logprobs"]) == (len(ids), None, None)
    for id, value, logprobs in zip(ids[1:], values[1:], right(model, ids), strict=False):
        best = logprobs.topk(2)
        assert value.keys() == {str(id), *map(str, best.indices.tolist())}
        assert value[str(id)]["logprob"] == pytest.approx(float(logprobs[id]), abs=2e-4)
        first = value[str(int(best.indices[0]))]
        assert (first["rank"], first["decoded_token"]) == (1, tokens_of(int(best.indices[0])))


def tokens_of(id: int) -> str:
    return load_tokenizer("cpu", str(DEMO)).token_bytes(id).decode(errors="replace")


def test_prompt_logprobs_are_not_streamed(served: LiveGateway) -> None:
    response = served.http.post(
        "/v1/completions", json={"model": "m", "prompt": "x", "stream": True, "prompt_logprobs": 1}
    )

    assert response.status_code == 400
    assert response.json()["error"]["message"].endswith("send stream: false, or echo and logprobs")


@pytest.mark.parametrize(
    ("fields", "param"), [({"echo": True, "logprobs": 1}, "echo"), ({"prompt_logprobs": 0}, "prompt_logprobs")]
)
def test_an_engine_without_the_logprobs_of_prompts_refuses_by_its_name(fields: dict[str, Any], param: str) -> None:
    """Before a replica gets the request; the text names the engines that have them."""
    gateway, replica = LiveGateway(), Served()
    gateway.serve(routes("e", replica))
    response = gateway.http.post("/v1/completions", json={"model": "e", "prompt": "a", "max_tokens": 1, **fields})
    gateway.close()
    replica.close()
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert "echo" in error["message"]
    assert "cpu" in error["message"]
