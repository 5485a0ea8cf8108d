"""Joins the server-sent events of an API as its clients do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from orchestrator.gateway.reading.call_text import completed_object


def read_events(text: str) -> list[dict[str, Any]]:
    """The data of all events; each names its type twice."""
    read = []
    for block in text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        read.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {read[-1]['type']}"
    return read


def joined_message(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of Anthropic's API; a call that was cut off has its complete members, as in Anthropic's client."""
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in stream:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(completed_object(text))
    return message


def joined_response(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The last response of a stream of the Responses API, whose events are checked to be in their order: each item is
    added, filled by deltas and done before the next one begins, and all of them are in the last response."""
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    assert [event["type"] for event in stream[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["output"] == [] for event in stream[:2])
    *between, last = stream[2:]
    rest = iter(between)
    items = [_joined_item(first, place, rest) for place, first in enumerate(rest)]
    response: dict[str, Any] = last["response"]
    assert last["type"] == f"response.{response['status']}"
    assert response["output"] == items
    return response


def _joined_item(first: dict[str, Any], place: int, rest: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The item that ``first`` adds; takes its events from ``rest``."""
    assert (first["type"], first["output_index"]) == ("response.output_item.added", place)
    begun, deltas, events = first["item"], "", [first]
    while events[-1]["type"] != "response.output_item.done":
        events.append(next(rest))
        deltas += events[-1].get("delta", "")
    kinds = [event["type"].removeprefix("response.") for event in events if "delta" not in event]
    about = [event for event in events if "item" not in event]
    done: dict[str, Any] = events[-1]["item"]
    assert {(event["item_id"], event["output_index"]) for event in about} == {(begun["id"], place)}
    assert begun["status"] == "in_progress"
    if done["type"] == "message":
        assert kinds[1:-1] == ["content_part.added", "output_text.done", "content_part.done"]
        assert about[-1]["part"] == done["content"][0]
        assert begun == {**done, "status": "in_progress", "content": []}
        texts = about[-2]["text"], done["content"][0]["text"]
    else:
        assert kinds[1:-1] == ["function_call_arguments.done"]
        assert begun == {**done, "status": "in_progress", "arguments": ""}
        texts = about[-1]["arguments"], done["arguments"]
    assert texts == (deltas, deltas)
    return done


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}
