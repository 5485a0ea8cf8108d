"""Real clients against a gateway in this process: their requests are served, and they understand the answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.gateway.openai.answers import ChatCompletion, ErrorAnswer, ModelList, TextCompletion
from orchestrator.gateway.openai.request_builder import Detokenized, Tokenized
from orchestrator.gateway.openapi import openapi
from orchestrator.gateway.routes import ROUTES
from tests.checkpoints import EOS_ID
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.scripted import ScriptedEngine, ScriptedReplica, save_tools_tokenizer
from tests.served import Served
from tests.workers.tables import TableEngine, table

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
HELLO = [{"role": "user", "content": "Hi"}]
PARIS = {"city": "Paris", "days": 2}
CALLS = {
    "hermes": f"Wait. <tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': PARIS})}\n</tool_call>\n"
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3": f"<|python_tag|>{json.dumps({'name': 'get_weather', 'parameters': PARIS})}; "
    '{"name": "now", "parameters": {}}',
    "mistral": f"[TOOL_CALLS][{json.dumps({'name': 'get_weather', 'arguments': PARIS})}, "
    '{"name": "now", "arguments": {}}]',
}
MARKS = {"hermes": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}


class Place:
    """A gateway with the echo model `echo`, one scripted model for each format of calls, and `any`: a model of random
    weights."""

    def __init__(self, folder: Path) -> None:
        self.gateway = LiveGateway()
        self.engines: dict[str, ScriptedEngine] = {}
        echo = Served()
        self._replicas: list[Any] = [echo]
        table_of = [with_aliases(routes("echo", echo), "gpt-4o", "org/model")]
        for format, mark in MARKS.items():
            tokenizer = save_tools_tokenizer(folder / format, mark)
            self.engines[format] = ScriptedEngine(tokenizer, CALLS[format])
            self._add(table_of, format, self.engines[format], tokenizer, folder / format)
        vocabulary = tokenizer.vocab_size
        model = TableEngine(table(vocabulary, spread=2.0), max_len=4096, eos=[EOS_ID])
        self._add(table_of, "any", model, tokenizer, folder / "mistral")
        self.gateway.serve(*table_of)
        self.url = f"{self.gateway.url}/v1"

    def _add(self, table_of: list[Any], name: str, engine: Any, tokenizer: Any, source: Path) -> None:
        self._replicas.append(ScriptedReplica(engine, tokenizer))
        table_of.append(routes(name, self._replicas[-1], engine="cpu", source=str(source)))

    def close(self) -> None:
        self.gateway.close()
        for replica in self._replicas:
            replica.close()


def with_aliases(model: Any, *aliases: str) -> Any:
    return msgspec.structs.replace(model, aliases=list(aliases))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    built = Place(tmp_path_factory.mktemp("models"))
    yield built
    built.close()


def post(place: Place, path: str, **body: Any) -> httpx.Response:
    return place.gateway.http.post(path, json=body)


def chat(place: Place, model: str, **fields: Any) -> httpx.Response:
    return post(place, "/v1/chat/completions", model=model, messages=HELLO, **fields)


def deltas(response: httpx.Response) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item)["choices"][0] for item in data[:-1]]


# Plain HTTP: what the shapes are


@pytest.mark.parametrize("model", list(CALLS))
def test_tool_calls_have_openais_format(place: Place, model: str) -> None:
    """Unstreamed: the text before them is content, or null; each call has an id, a name and JSON arguments."""
    response = chat(place, model, tools=TOOLS)

    (choice,) = msgspec.json.decode(response.content, type=ChatCompletion).choices
    calls = choice.message.tool_calls
    assert isinstance(calls, list)
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("get_weather", PARIS),
        ("now", {}),
    ]
    assert len({call.id for call in calls}) == 2
    assert choice.message.content == ("Wait." if model == "hermes" else None)
    assert choice.finish_reason == "tool_calls"
    assert place.engines[model].prompts[-1].startswith(f"{MARKS[model]} {json.dumps(TOOLS[:1])[:-1]}")


@pytest.mark.parametrize("model", list(CALLS))
def test_joined_streamed_calls_equal_unstreamed_ones(place: Place, model: str) -> None:
    """The id and the name come first and once; then the arguments, in more than one piece."""
    chunks = deltas(chat(place, model, tools=TOOLS, stream=True))

    pieces = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    begun = [call for call in pieces if "id" in call]
    assert [(call["index"], call["type"], call["function"]["name"]) for call in begun] == [
        (0, "function", "get_weather"),
        (1, "function", "now"),
    ]
    joined = ["".join(p["function"]["arguments"] for p in pieces if p["index"] == index) for index in (0, 1)]
    assert [json.loads(text) for text in joined] == [PARIS, {}]
    assert len(pieces) > 6
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    assert content == ("Wait." if model == "hermes" else "")
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]


def test_without_tools_the_same_text_is_text(place: Place) -> None:
    """And with `tool_choice: none`, which hides the tools from the model."""
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        message = chat(place, "hermes", **fields).json()["choices"][0]
        assert message["message"] == {"role": "assistant", "content": CALLS["hermes"], "refusal": None}
        assert message["finish_reason"] == "stop"
        assert MARKS["hermes"] not in place.engines["hermes"].prompts[-1]


def test_without_parallel_calls_there_is_at_most_one_call(place: Place) -> None:
    """`parallel_tool_calls: false` keeps the first."""
    message = chat(place, "mistral", tools=TOOLS, parallel_tool_calls=False).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather"]


def test_the_calls_and_their_results_go_back_to_the_template(place: Place) -> None:
    """Arguments as objects, so that a template can write them in its own way."""
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": [1]}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]

    assert post(place, "/v1/chat/completions", model="llama3", messages=messages, tools=TOOLS).status_code == 200
    assert '\nassistant:  now({"a": [1]})\ntool: noon\nassistant:' in place.engines["llama3"].prompts[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "now", "get_weather"])
def test_a_forced_call_works_with_any_model(place: Place, choice: str, stream: bool) -> None:
    """A model of random weights: the guide alone makes it a call of the tools, whose arguments match their schema."""
    pytest.importorskip("llguidance")
    named: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}

    response = chat(place, "any", tools=TOOLS, tool_choice=named, stream=stream, seed=2, max_tokens=2000)

    if stream:
        chunks = deltas(response)
        pieces = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        names = [call["function"]["name"] for call in pieces if "id" in call]
        first = "".join(call["function"]["arguments"] for call in pieces if call["index"] == 0)
        finish = chunks[-1]["finish_reason"]
        assert all("content" not in chunk["delta"] or not chunk["delta"]["content"] for chunk in chunks)
    else:
        answer = response.json()["choices"][0]
        calls = answer["message"]["tool_calls"]
        names = [call["function"]["name"] for call in calls]
        first, finish = calls[0]["function"]["arguments"], answer["finish_reason"]
        assert answer["message"]["content"] is None
    assert set(names) <= ({"get_weather", "now"} if choice == "required" else {choice})
    if names[0] == "get_weather":
        assert "city" in json.loads(first)
    assert isinstance(json.loads(first), dict)
    assert finish == ("tool_calls" if choice == "required" else "stop")


REFUSALS: list[tuple[str, dict[str, Any], str | None, str, str]] = [
    ("echo", {"tools": TOOLS}, "tools_not_supported", "tools", "does not support tools"),
    ("echo", {"tools": TOOLS, "tool_choice": "required"}, "tools_not_supported", "tools", "does not support tools"),
    ("hermes", {"tool_choice": "required"}, None, "tool_choice", "tool_choice requires tools"),
    (
        "hermes",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        None,
        "tool_choice",
        "'x'",
    ),
    ("hermes", {"tools": [*TOOLS, TOOLS[0]]}, None, "tools", "'get_weather' is defined twice"),
    ("hermes", {"functions": [TOOLS[0]["function"]]}, "unsupported_parameter", "functions", "send tools"),
    ("hermes", {"function_call": "auto"}, "unsupported_parameter", "function_call", "send tool_choice"),
    ("hermes", {"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template", "templates are programs"),
    (
        "hermes",
        {"chat_template_kwargs": {"tokenize": False}},
        "chat_template_failed",
        "messages",
        "tokenize is not a variable",
    ),
    (
        "hermes",
        {"add_generation_prompt": True, "continue_final_message": True},
        None,
        "continue_final_message",
        "send one",
    ),
]


@pytest.mark.parametrize(("model", "fields", "code", "param", "says"), REFUSALS)
def test_an_impossible_request_is_rejected_with_a_reason(
    place: Place, model: str, fields: dict[str, Any], code: str | None, param: str, says: str
) -> None:
    """400 in OpenAI's format."""
    response = chat(place, model, **fields)

    error = msgspec.json.decode(response.content, type=ErrorAnswer).error
    assert (response.status_code, error.code, error.param) == (400, code, param)
    assert says in error.message


def test_a_model_whose_calls_cannot_be_parsed_rejects_tools(place: Place) -> None:
    """With `response_template: none`; a forced call needs no parser."""
    table_of = place.gateway.controller.table.models
    silenced = [
        msgspec.structs.replace(model, response_template="none") if model.name == "hermes" else model
        for model in table_of
    ]
    place.gateway.serve(*silenced)
    try:
        response = chat(place, "hermes", tools=TOOLS)
    finally:
        place.gateway.serve(*table_of)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "tools_not_supported", "tool_choice")
    assert "response_template" in error["message"]


# Aliases, /tokenize and /detokenize


def test_an_alias_is_a_name_of_the_model(place: Place) -> None:
    """Listed with the model as its root and parent, and answered under the name that was sent."""
    cards = {
        card.id: card for card in msgspec.json.decode(place.gateway.http.get("/v1/models").content, type=ModelList).data
    }
    assert [(cards[name].root, cards[name].parent) for name in ("echo", "gpt-4o", "org/model")] == [
        ("echo", None),
        ("echo", "echo"),
        ("echo", "echo"),
    ]
    for name in ("gpt-4o", "org/model"):
        assert place.gateway.http.get(f"/v1/models/{name}").json()["id"] == name
        answer = post(place, "/v1/completions", model=name, prompt="x", max_tokens=2)
        assert msgspec.json.decode(answer.content, type=TextCompletion).model == name


def test_a_prompt_is_tokenized_and_detokenized(place: Place) -> None:
    """In vLLM's format: the count, the model's length, the tokens, their texts if requested; and the text again."""
    answer = post(place, "/tokenize", model="hermes", prompt="Grüß Gott")
    tokens = msgspec.json.decode(answer.content, type=Tokenized)
    assert (tokens.count, tokens.max_model_len, tokens.token_strs) == (len(tokens.tokens), 4096, None)
    back = msgspec.json.decode(
        post(place, "/detokenize", model="hermes", tokens=tokens.tokens).content, type=Detokenized
    )
    assert back.prompt == "<|bos|>Grüß Gott"

    plain = post(
        place, "/tokenize", model="hermes", prompt="Hi", add_special_tokens=False, return_token_strs=True
    ).json()
    assert "".join(plain["token_strs"]) == "Hi"


def test_the_tokens_of_a_chat_are_those_of_its_prompt(place: Place) -> None:
    """With its tools, so that a client can count before it sends a request."""
    tokenized = post(place, "/tokenize", model="hermes", messages=HELLO, tools=TOOLS).json()
    text = post(place, "/detokenize", model="hermes", tokens=tokenized["tokens"]).json()["prompt"]

    answer = chat(place, "hermes", tools=TOOLS).json()

    assert answer["usage"]["prompt_tokens"] == tokenized["count"]
    assert place.engines["hermes"].prompts[-1] == text
    assert text.endswith("user: Hi\nassistant:")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "echo"}, "prompt"),
        ("/tokenize", {"model": "echo", "prompt": 3}, "prompt"),
        ("/tokenize", {"model": "echo", "messages": []}, "messages"),
        ("/tokenize", {"model": "echo", "messages": HELLO, "prompt": "x"}, "prompt"),
        ("/detokenize", {"model": "echo", "tokens": [257]}, "tokens"),
        ("/detokenize", {"model": "echo", "tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"model": "echo", "tokens": "x"}, "tokens"),
    ],
)
def test_an_invalid_tokenize_request_is_400_with_the_field(
    place: Place, path: str, body: dict[str, Any], param: str
) -> None:
    """In OpenAI's format; an unknown model is 404."""
    response = post(place, path, **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert post(place, path, **{**body, "model": "zzz"}).status_code in (400, 404)


# The OpenAPI document


def test_the_openapi_document_lists_exactly_the_routes(place: Place) -> None:
    """Each responds, and has no other method; an unlisted one does not exist."""
    document = place.gateway.http.get("/openapi.json").json()
    assert document == openapi(needs_key=False, routes=ROUTES)
    for path, methods in document["paths"].items():
        for method in ("GET", "POST", "DELETE"):
            response = place.gateway.http.request(method, path.replace("{model}", "echo"))
            assert (response.status_code != 405) == (method.lower() in methods), (method, path)
            assert response.status_code != 404
    assert place.gateway.http.get("/v1/frob").status_code == 404


# openai


def test_openai_reads_calls_and_sends_them_back(place: Place) -> None:
    """Whole and streamed by its own helper, and a second turn with the result."""
    from openai import OpenAI

    client = OpenAI(base_url=place.url, api_key="x", max_retries=0)
    request: Any = {"model": "hermes", "messages": HELLO, "tools": TOOLS}
    message = client.chat.completions.create(**request).choices[0].message
    assert message.tool_calls is not None
    with client.chat.completions.stream(**request) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert [call.function.arguments for call in streamed.message.tool_calls or ()] == [
        call.function.arguments for call in message.tool_calls
    ]
    turn: Any = [*HELLO, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    client.chat.completions.create(model="hermes", messages=turn, tools=TOOLS)  # type: ignore[arg-type]
    assert "tool: rain" in place.engines["hermes"].prompts[-1]


async def test_openais_async_client_streams(place: Place) -> None:
    """Text as it comes, with the usage at the end, and a chat of an alias."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=place.url, api_key="x", max_retries=0) as client:
        stream: Any = await client.chat.completions.create(  # type: ignore[call-overload]
            model="gpt-4o", messages=HELLO, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole: Any = await client.chat.completions.create(model="gpt-4o", messages=HELLO, max_tokens=9)  # type: ignore[arg-type]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 9
    assert [model.id async for model in AsyncOpenAI(base_url=place.url, api_key="x").models.list()]


def test_openai_raises_the_class_of_each_error(place: Place) -> None:
    """By the status; with our code and parameter."""
    import openai

    client = openai.OpenAI(base_url=place.url, api_key="x", max_retries=0)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="echo", prompt="x", temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="zzz", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="echo", prompt="x", max_tokens=5000)
    assert long.value.code == "context_length_exceeded"
    table_of = place.gateway.controller.table.models
    place.gateway.serve(*table_of, routes("idle"))
    try:
        with pytest.raises(openai.InternalServerError) as unready:
            client.completions.create(model="idle", prompt="x")
    finally:
        place.gateway.serve(*table_of)
    assert unready.value.status_code == 503
    assert unready.value.response.headers["retry-after"]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveGateway, dict[str, str]]]:
    """A gateway that wants keys: one for inference, and one for another model."""
    from orchestrator.access.keys import KeyFile
    from orchestrator.process.home import Home

    home = tmp_path_factory.mktemp("home")
    file = KeyFile(Home(home).keys)
    keys = {
        "good": file.create("good", scopes=("inference",))[1],
        "other": file.create("other", scopes=("inference",), models=("other",))[1],
    }
    gateway, replica = LiveGateway(home=home), Served()
    gateway.serve(routes("echo", replica))
    yield gateway, keys
    gateway.close()
    replica.close()


def test_openai_distinguishes_a_wrong_key_from_one_for_another_model(
    guarded: tuple[LiveGateway, dict[str, str]],
) -> None:
    """401 and 403 are separate classes."""
    import openai

    gateway, keys = guarded
    ask: Any = {"model": "echo", "prompt": "x", "max_tokens": 2}
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="cw-00000000-x").completions.create(**ask)
    with pytest.raises(openai.PermissionDeniedError):
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=keys["other"]).completions.create(**ask)
    assert openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=keys["good"]).completions.create(**ask).usage


# curl


def curl(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["curl", "--silent", "--show-error", "--max-time", "20", *arguments, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_gets_answers_streams_and_headers(place: Place) -> None:
    """As typed in a shell; the request id is returned, and so is the replica."""
    body = json.dumps({"model": "echo", "prompt": "x", "max_tokens": 4})
    json_type = ("-H", "content-type: application/json")
    output = curl(f"{place.url}/completions", "-i", "-H", "x-request-id: mine", *json_type, "-d", body)
    head, _, answer = (
        output.stdout.partition("\n\n") if "\r\n" not in output.stdout else output.stdout.partition("\r\n\r\n")
    )
    headers = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:])
    assert headers["x-request-id"] == "mine"
    assert headers["x-corewright-replica"] == "echo/0"
    assert 0 < float(headers["x-corewright-overhead-ms"]) < 1000
    assert json.loads(answer)["usage"]["completion_tokens"] == 4

    streamed = curl(f"{place.url}/completions", "--no-buffer", *json_type, "-d", body.replace("}", ', "stream": true}'))
    assert streamed.stdout.rstrip().endswith("data: [DONE]")
    waits = curl(f"{place.url}/completions", "-H", "expect: 100-continue", *json_type, "-d", body)
    assert json.loads(waits.stdout)["object"] == "text_completion"
    form = curl(f"{place.url}/completions", "-d", body)
    assert json.loads(form.stdout)["error"]["code"] == "unsupported_media_type"
    assert curl(f"{place.gateway.url}/health", "--fail").returncode == 0


# LangChain


@pytest.mark.slow  # its import takes seconds
def test_langchain_invokes_streams_and_binds_tools(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """ChatOpenAI as it comes."""
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    def model(name: str) -> Any:
        return ChatOpenAI(model=name, base_url=place.url, api_key="x", max_retries=0, max_tokens=200)

    whole = model("echo").invoke("Hi")
    assert "".join(chunk.content for chunk in model("echo").stream("Hi")) == whole.content
    assert whole.usage_metadata["output_tokens"] == 200

    for format in CALLS:
        bound = model(format).bind_tools(TOOLS)
        answer = bound.invoke("Hi")
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", PARIS), ("now", {})]
        joined: Any = None
        for chunk in bound.stream("Hi"):
            joined = chunk if joined is None else joined + chunk
        assert [(call["name"], call["args"]) for call in joined.tool_calls] == [("get_weather", PARIS), ("now", {})]
        assert joined.response_metadata["finish_reason"] == "tool_calls"
        results = [ToolMessage("rain", tool_call_id=call["id"]) for call in answer.tool_calls]
        bound.invoke([HumanMessage("Hi"), answer, *results])
        assert place.engines[format].prompts[-1].count("tool: rain") == 2


@pytest.mark.slow  # its import takes seconds
def test_langchain_gets_structured_output_by_a_forced_call(place: Place) -> None:
    """From a model of random weights."""
    pytest.importorskip("llguidance")
    from langchain_openai import ChatOpenAI

    model: Any = ChatOpenAI(model="any", base_url=place.url, api_key="x", max_tokens=2000, seed=3)
    weather = {**TOOLS[0]["function"]["parameters"], "title": "get_weather", "description": "x"}

    answer = model.with_structured_output(weather, method="function_calling").invoke("Hi")

    assert "city" in answer


# litellm, which needs an older openai, and so a Python environment of its own

LITELLM = """
import asyncio, json, sys
import litellm

litellm.suppress_debug_info = True
base, tools = sys.argv[1], json.loads(sys.argv[2])
ask = dict(api_base=base, api_key="x", messages=[{"role": "user", "content": "Hi"}], num_retries=0)
out = {}
whole = litellm.completion(model="openai/echo", max_tokens=9, **ask)
pieces = list(litellm.completion(model="openai/echo", max_tokens=9, stream=True, **ask))
out["whole"] = whole.choices[0].message.content
out["streamed"] = "".join(piece.choices[0].delta.content or "" for piece in pieces)
out["async"] = asyncio.run(litellm.acompletion(model="openai/echo", max_tokens=9, **ask)).choices[0].message.content
out["usage"] = whole.usage.completion_tokens
for model in ("hermes", "llama3", "mistral"):
    answer = litellm.completion(model="openai/" + model, tools=tools, **ask)
    chunks = list(litellm.completion(model="openai/" + model, tools=tools, stream=True, **ask))
    built = litellm.stream_chunk_builder(chunks)
    out[model] = [
        [[call.function.name, json.loads(call.function.arguments)] for call in one.choices[0].message.tool_calls]
        + [one.choices[0].finish_reason]
        for one in (answer, built)
    ]
out["errors"] = []
for model, fields in (("zzz", {}), ("echo", {"temperature": 3}), ("echo", {"max_tokens": 5000})):
    try:
        litellm.completion(model="openai/" + model, **ask, **fields)
    except Exception as error:
        out["errors"].append(type(error).__name__)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def litellm_python() -> Path:
    """The interpreter of an environment with litellm, which is made once and kept under build/.

    It wants an openai before version 3, and imports `mcp` for a request with tools without naming it as needed.
    """
    folder = Path(__file__).parents[3] / "build" / "litellm"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
        install = [str(python), "-m", "pip", "install", "--quiet", "litellm>=1.60", "mcp"]
        done = subprocess.run(install, capture_output=True, text=True, timeout=280, check=False)
        if done.returncode:
            pytest.skip(f"litellm cannot be installed: {done.stderr.strip()[-200:]}")
        (folder / "complete").touch()
    return python


@pytest.mark.slow  # it makes an environment, and its import takes seconds
@pytest.mark.timeout(500)
def test_litellm_completes_streams_and_calls(place: Place, litellm_python: Path) -> None:
    """Also async; its exceptions match the errors. It must not use the network."""
    environment = {
        "PATH": os.environ["PATH"],
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": "127.0.0.1",
        "HTTPS_PROXY": "http://127.0.0.1:9",  # where nothing listens
    }
    command = [str(litellm_python), "-c", LITELLM, place.url, json.dumps(TOOLS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environment)

    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["whole"] == results["streamed"] == results["async"]
    assert results["usage"] == 9
    for format in CALLS:
        assert results[format] == [[["get_weather", PARIS], ["now", {}], "tool_calls"]] * 2
    assert results["errors"] == ["NotFoundError", "BadRequestError", "ContextWindowExceededError"]
