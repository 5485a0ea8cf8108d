"""Joins the server-sent events of an API as its clients do."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.gateway.openai.toolcalls.json_scanner import completed_object


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


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}
