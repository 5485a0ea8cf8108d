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
    """Instructions come first; calls belong to the assistant's message before them, reasoning to that behind it."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]},
        {"type": "function_call", "call_id": "c1", "name": "now", "arguments": '{"a": [1]}'},
        {"type": "function_call_output", "call_id": "c1", "output": "noon"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Again?"}], "content": None},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "one"},
    ]

    assert ask(place, input=items, instructions="Be brief.").status_code == 200
    turns = 'system: Be brief.\nuser: Hi\nassistant: <Hm.> Wait. now({"a": [1]})\ntool: noon\n'
    turns += "assistant: <Again?>  now({})\ntool: one\nassistant:"
    assert place.engine.prompts[-1].removeprefix("<|bos|>") == turns


def test_what_only_other_servers_run_does_not_reach_the_model(place: Place) -> None:
    """Neither their tools nor their items, as Codex sends them; a call whose input is text is read as a call."""
    custom = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+x", "status": "completed"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "x", "stderr": "", "outcome": {}}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        custom,
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": '{"a": [1], "b'},
    ]
    tools = [{"type": "namespace", "name": "group", "tools": []}, {"type": "web_search"}, {"type": "local_shell"}]

    answer = ask(place, input=items, tools=tools, tool_choice="auto", client_metadata={"turn": "1"})

    assert (answer.status_code, answer.json()["tools"]) == (200, [])
    assert answer.headers["x-corewright-ignored-tools"] == "group, web_search, local_shell"
    turns = (
        'system: Hi\nassistant: <Hm.> No. patch({"input": "+x"})\ntool: done\nassistant:  now({"a": [1]})\nassistant:'
    )
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
        ({"tools": [*TOOLS, {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
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
