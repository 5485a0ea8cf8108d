"""Package anthropic: prints what it reads of a gateway, as JSON. Argument: the gateway's address."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

# Answers are checked as the types that the package declares.
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="x", max_retries=0, _strict_response_validation=True)
ask: dict[str, Any] = {
    "model": "claude-demo",  # an alias with a temperature, which this package does not send
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What is a NeuronCore?"}],
}
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "get_weather", "description": "The weather of a city.", "input_schema": schema}]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def call_of(message: Any) -> list[Any]:
    (block,) = [block for block in message.content if block.type == "tool_use"]
    return [block.name, block.input]


whole = client.messages.create(**ask)
with client.messages.stream(**ask) as stream:
    pieces = list(stream.text_stream)
    joined = stream.get_final_message()
read: dict[str, Any] = {
    "whole": text_of(whole),
    "streamed": "".join(pieces),
    "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
    "streamed_usage": [joined.usage.input_tokens, joined.usage.output_tokens],
    "ends": [whole.stop_reason, joined.stop_reason],
    "counted": client.messages.count_tokens(model="assistant", messages=ask["messages"]).input_tokens,
    "models": [model.id for model in client.models.list()],
    "model": client.models.retrieve("assistant").display_name,
}
calling = {**ask, "model": "caller", "tools": tools}
called = client.messages.create(**calling)
with client.messages.stream(**calling) as stream:
    streamed_call = stream.get_final_message()
result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": "rain"}
turns = [*ask["messages"], {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
client.messages.create(**{**calling, "messages": turns})
read |= {"call": call_of(called), "streamed_call": call_of(streamed_call)}
try:
    client.messages.create(**{**ask, "model": "unknown"})
except anthropic.NotFoundError as error:
    read["unknown_model"] = [type(error).__name__]
try:
    client.messages.create(**{**ask, "max_tokens": 0})
except anthropic.BadRequestError as error:
    read["wrong_value"] = [type(error).__name__, error.body["error"]["type"]]
print(json.dumps(read))
