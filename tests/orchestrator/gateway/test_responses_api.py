"""OpenAI's Responses API of the gateway: its requests reach the model as chats, and its answers have its shape."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from orchestrator.gateway.responses.answers import Response
from tests.fleet import until
from tests.orchestrator.gateway.event_streams import joined_response, read_events
from tests.orchestrator.gateway.test_messages import CALLS, Place
from tests.orchestrator.gateway.test_messages import slow as slow
from tests.orchestrator.gateways import LiveGateway
from tests.served import Served

TOOLS = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("get_weather", "now")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    built = Place(tmp_path_factory.mktemp("model"))
    yield built
    built.close()


def ask(place: Place, says: str = "Hello.", **fields: Any) -> Any:
    body = {"messages": None, "max_tokens": None, "input": "Hi", **fields}
    return place.ask(says, path="/v1/responses", **body)


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    output = [{**item, "id": "", "call_id": ""} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "output": output}


@pytest.mark.parametrize("says", ["Hello.", "", CALLS])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("most", [None, 3])
def test_the_last_event_has_the_answer_that_is_not_streamed(place: Place, says: str, tools: Any, most: Any) -> None:
    """Its deltas join to the texts and arguments, and the events are numbered from 0."""
    fields = {"tools": tools, "max_output_tokens": most}
    whole = ask(place, says, **fields).json()
    stream = read_events(ask(place, says, stream=True, **fields).text)

    msgspec.convert(whole, Response)
    assert without_ids(stream[-1]["response"]) == without_ids(whole)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    for index, item in enumerate(whole["output"]):
        deltas = "".join(e["delta"] for e in stream if "delta" in e and e["output_index"] == index)
        assert deltas == (item["content"][0]["text"] if item["type"] == "message" else item["arguments"])


def test_a_streamed_text_has_the_documented_sequence_of_events(place: Place) -> None:
    kinds = [event["type"].removeprefix("response.") for event in read_events(ask(place, "Hey", stream=True).text)]

    assert [kind for kind in kinds if not kind.endswith("delta")] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


def test_calls_and_outputs_go_back_to_the_model(place: Place) -> None:
    """Instructions come first; calls belong to the assistant's message before them."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"a": [1]}'},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
    ]

    assert ask(place, input=items, instructions="Be brief.").status_code == 200
    turns = 'system: Be brief.\nuser: Hi\nassistant: Wait. now({"a": [1]})\ntool: noon\nassistant:'
    assert place.engine.prompts[-1].removeprefix("<|bos|>") == turns


def test_a_choice_that_demands_no_call_needs_no_tools(place: Place) -> None:
    """Codex sends it when it compacts a history."""
    assert ask(place, tools=[], tool_choice="auto").json()["status"] == "completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": [{"role": "user", "content": "Hi"}] * 5000}, "input"),
        ({"input": []}, "input"),
    ],
)
def test_an_unsupported_field_is_named_in_the_error(place: Place, fields: dict[str, Any], param: str) -> None:
    """By its name in this API; `store: true` and nulls are accepted."""
    response = ask(place, **fields)

    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert not re.search(r"response_format|^messages", error["message"])
    assert ask(place, store=True).json()["store"] is False


# Streams that end early

ASKS: dict[str, Any] = {"model": "m", "input": "Hi", "stream": True}


def test_a_client_that_disconnects_cancels_its_response(slow: tuple[LiveGateway, Served]) -> None:
    """The slot is free again."""
    gateway, _ = slow
    with gateway.http.stream("POST", "/v1/responses", json=ASKS) as response:
        assert next(response.iter_lines()) == "event: response.created"

    until(lambda: gateway.queue("m").links.live == 0, 10, "the request is cancelled")


def test_a_lost_replica_ends_a_begun_response_as_failed(slow: tuple[LiveGateway, Served]) -> None:
    """With the text so far, the cause, and nothing behind it."""
    gateway, replica = slow
    with gateway.http.stream("POST", "/v1/responses", json=ASKS) as response:
        pieces = response.iter_text()
        text = next(pieces)
        while "output_text.delta" not in text:
            text += next(pieces)
        replica.kill()
        text += "".join(pieces)

    failed = joined_response(read_events(text))
    assert failed["status"] == "failed"
    assert "m" in failed["error"]["message"]
    assert failed["output"][0]["content"][0]["text"]


def test_a_response_that_fails_before_it_has_begun_is_an_error_event(slow: tuple[LiveGateway, Served]) -> None:
    """Its stream has had comments only."""
    gateway, replica = slow
    with (
        gateway.http.stream("POST", "/v1/responses", json=ASKS),
        gateway.http.stream("POST", "/v1/responses", json=ASKS) as response,
    ):
        pieces = response.iter_text()
        assert next(pieces).startswith(": waiting")
        gateway.controller.set(ready=True)
        (event,) = read_events("".join(pieces).rpartition(": waiting\n\n")[2])
        replica.kill()

    assert (event["type"], event["sequence_number"], event["code"]) == ("error", 0, "model_unavailable")
