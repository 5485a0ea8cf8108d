"""The defaults of an alias hold for each field that a request does not have, in every API that generates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.gateway.openai.protocol import ChatRequest, SamplingFields
from orchestrator.gateway.openai.template_variables import EFFORTS
from placements.spec.sections import RequestDefaults
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.scripted import ScriptedEngine, ScriptedReplica, save_tools_tokenizer
from tests.scripted_server import Call, RelayedReplica
from workers.messages.requests import GenerateRequest

USER = {"role": "user", "content": "Hi"}
DEFAULTS = {
    "system": "Be brief.",
    "max_tokens": 40,
    "temperature": 0.25,
    "top_p": 0.5,
    "top_k": 7,
    "stop": ["END"],
    "reasoning_effort": "low",
    "chat_template_kwargs": {"mood": "glad"},
}
ALIASES = {"aliases": ["brief", "plain"], "adapters": ["a"], "request_defaults": {"brief": DEFAULTS}}
CHATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 99},
    "/v1/responses": {"input": "Hi"},
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/invocations": {"inputs": "Hi"},
}
TEMPLATE = "{% if mood %}mood: {{ mood }}, effort: {{ reasoning_effort }}\n{% endif %}"


class Place:
    """A gateway whose one model remembers its requests and prompts."""

    def __init__(self, folder: Path) -> None:
        self.gateway = LiveGateway()
        tokenizer = save_tools_tokenizer(folder, "<tool_call>")
        config = folder / "tokenizer_config.json"
        fields = json.loads(config.read_text())
        config.write_text(json.dumps({**fields, "chat_template": TEMPLATE + fields["chat_template"]}))
        self.engine = ScriptedEngine(tokenizer, "Hello.", max_len=200)
        self._replica = ScriptedReplica(self.engine, tokenizer)
        self.requests: list[GenerateRequest] = []
        submit: Callable[..., None] = self._replica.batcher.submit

        def record(request: GenerateRequest, *rest: Any) -> None:
            self.requests.append(request)
            submit(request, *rest)

        self._replica.batcher.submit = record  # type: ignore[method-assign]
        self.model = routes("m", self._replica, engine="cpu", source=str(folder), max_len=200)  # type: ignore[arg-type]
        self.gateway.serve(msgspec.structs.replace(self.model, **ALIASES))

    def ask(self, path: str, **fields: Any) -> GenerateRequest:
        """The request that reaches the replica."""
        response = self.gateway.http.post(path, json={"model": "brief", **fields})
        assert response.status_code == 200, response.text
        return self.requests[-1]

    @property
    def prompt(self) -> str:
        return self.engine.prompts[-1].removeprefix("<|bos|>")

    def close(self) -> None:
        self.gateway.close()
        self._replica.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    built = Place(tmp_path_factory.mktemp("model"))
    yield built
    built.close()


def sampling(request: GenerateRequest) -> tuple[Any, ...]:
    return request.temperature, request.top_p, request.top_k, request.stop


@pytest.mark.parametrize("path", [*CHATS, *COMPLETIONS])
def test_a_request_without_a_field_gets_the_default(place: Place, path: str) -> None:
    """Its most tokens, too, except in Messages, which always have their own."""
    request = place.ask(path, **CHATS.get(path, {}), **COMPLETIONS.get(path, {}))

    assert sampling(request) == (0.25, 0.5, 7, ["END"])
    assert request.max_tokens == (99 if path == "/v1/messages" else 40)


@pytest.mark.parametrize("path", CHATS)
def test_a_chat_without_a_system_prompt_gets_the_default(place: Place, path: str) -> None:
    """And the variables of the chat template, one of them by a field of its own."""
    place.ask(path, **CHATS[path])

    assert place.prompt == "mood: glad, effort: low\nsystem: Be brief.\nuser: Hi\nassistant:"


@pytest.mark.parametrize("path", COMPLETIONS)
def test_a_completion_gets_no_system_prompt(place: Place, path: str) -> None:
    place.ask(path, **COMPLETIONS[path])

    assert place.prompt == "Hi"


SENT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"stop": "X", "max_tokens": 9},
    "/v1/completions": {"stop": "X", "max_tokens": 9},
    "/v1/messages": {"stop_sequences": ["X"], "max_tokens": 9},
    "/v1/responses": {"max_output_tokens": 9},
}


@pytest.mark.parametrize("path", SENT)
def test_values_of_the_request_come_first(place: Place, path: str) -> None:
    """Also a value that is false, as 0 is."""
    own = {**CHATS.get(path, {}), **COMPLETIONS.get(path, {}), "temperature": 0, "top_p": 1, **SENT[path]}
    takes_top_k = path != "/v1/responses"

    request = place.ask(path, **own, **({"top_k": 0} if takes_top_k else {}))

    assert sampling(request) == ((0, 1, 0, ["X"]) if takes_top_k else (0, 1, 7, ["END"]))
    assert request.max_tokens == 9


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({}, 0.25),
        ({"do_sample": True}, 0.25),
        ({"do_sample": False}, 0),
        ({"do_sample": True, "temperature": 0.75}, 0.75),
        ({"temperature": 0.75}, 0),
    ],
)
def test_the_temperature_replaces_lmis_greedy_default(
    place: Place, parameters: dict[str, Any], temperature: float
) -> None:
    """Unless the request says that it is greedy."""
    assert place.ask("/invocations", inputs="Hi", parameters=parameters).temperature == temperature


@pytest.mark.parametrize(
    ("path", "own"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "Own."}, USER]}),
        ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "Own."}, USER]}),
        ("/v1/messages", {**CHATS["/v1/messages"], "system": "Own."}),
        ("/v1/responses", {"input": "Hi", "instructions": "Own."}),
        ("/v1/responses", {"input": [{"role": "developer", "content": "Own."}, USER]}),
    ],
)
def test_a_chat_with_a_system_prompt_keeps_it_alone(place: Place, path: str, own: dict[str, Any]) -> None:
    """Its API may call it system, developer or instructions."""
    place.ask(path, **own)

    assert "Be brief." not in place.prompt
    assert "Own." in place.prompt


def test_template_variables_of_the_request_replace_the_default_ones(place: Place) -> None:
    place.ask("/v1/chat/completions", messages=[USER], chat_template_kwargs={"other": 1})

    assert "mood" not in place.prompt


@pytest.mark.parametrize("name", ["m", "plain"])
def test_other_names_of_the_model_have_no_defaults(place: Place, name: str) -> None:
    request = place.ask("/v1/chat/completions", messages=[USER], model=name)

    assert sampling(request) == (1, 1, 0, [])
    assert place.prompt == "user: Hi\nassistant:"


def test_an_adapter_has_the_defaults_of_the_alias_before_it(place: Place) -> None:
    """An adapter of the model's own name has none."""
    assert [place.ask("/v1/chat/completions", messages=[USER], model=f"{name}:a").top_k for name in ("brief", "m")] == [
        7,
        0,
    ]


def test_the_default_of_most_tokens_ends_where_the_model_does(place: Place) -> None:
    """The client has not sent it, so it causes no error."""
    assert place.ask("/v1/completions", prompt="x" * 179).max_tokens == 20


def test_counted_tokens_include_the_system_prompt(place: Place) -> None:
    """Of /tokenize and of Messages' count, as in the answer's usage."""
    http, chat = place.gateway.http, {"model": "brief", "messages": [USER]}
    used = http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"]

    assert http.post("/tokenize", json=chat).json()["count"] == used
    assert http.post("/v1/messages/count_tokens", json=chat).json()["input_tokens"] == used


def test_a_response_reports_the_defaults_that_it_has_used(place: Place) -> None:
    """`instructions` are those of the request."""
    response = place.gateway.http.post("/v1/responses", json={"model": "brief", "input": "Hi"}).json()

    assert (response["temperature"], response["top_p"], response["instructions"]) == (0.25, 0.5, None)


def test_a_new_default_reaches_a_running_gateway(place: Place) -> None:
    """With the next routes; the replica stays connected."""
    changed = msgspec.structs.replace(place.model, aliases=["brief"], request_defaults={"brief": {"top_k": 3}})
    place.gateway.serve(changed)
    try:
        assert place.ask("/v1/completions", prompt="Hi").top_k == 3
    finally:
        place.gateway.serve(msgspec.structs.replace(place.model, **ALIASES))


def test_a_forwarded_chat_gets_the_defaults_as_fields(gateway: LiveGateway) -> None:
    """With an image, the server of `engine: vllm` gets the client's own body; fields that are null count as missing."""
    replica = RelayedReplica(lambda call: call.answer({"object": "chat.completion", "choices": []}))
    try:
        model = routes("m", replica, engine="vllm")  # type: ignore[arg-type]
        gateway.serve(msgspec.structs.replace(model, **ALIASES))
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
        own = {"messages": [image], "max_completion_tokens": 5, "temperature": None, "top_p": 1, "seed": 5}

        gateway.http.post("/v1/chat/completions", json={"model": "brief", **own})

        (call,) = replica.calls
        assert isinstance(call, Call)
        without = {name: value for name, value in DEFAULTS.items() if name not in ("system", "max_tokens")}
        system = {"role": "system", "content": "Be brief."}
        sent = {name: value for name, value in call.body.items() if name != "model"}
        assert sent == {**without, **own, "temperature": 0.25, "messages": [system, image]}
    finally:
        replica.close()


def test_defaults_have_the_names_and_bounds_of_request_fields() -> None:
    """A spec cannot set what a request could not."""
    sampled = RequestDefaults.model_json_schema()["properties"]
    sent = msgspec.json.schema(SamplingFields)["$defs"]["SamplingFields"]["properties"]
    own = ("system", "stop", "chat_template_kwargs", "reasoning_effort")

    assert set(sampled) - {"system"} <= set(ChatRequest.__struct_fields__)
    for name in set(sampled) - set(own):
        ours, theirs = (schema[name]["anyOf"][0] for schema in (sampled, sent))
        assert {key: ours[key] for key in ours if key not in ("title", "description")} == theirs, name
    assert tuple(sampled["reasoning_effort"]["anyOf"][0]["enum"]) == EFFORTS
