"""Package openai: prints what it reads of a gateway, as JSON. Argument: the gateway's address."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

# Answers are checked as the types that the package declares.
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="x", max_retries=0, _strict_response_validation=True)
messages = [{"role": "user", "content": "What is a NeuronCore?"}]
ask: dict[str, Any] = {"model": "assistant", "temperature": 0, "messages": messages}
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "get_weather", "description": "The weather of a city.", "parameters": schema}
tools = [{"type": "function", "function": function}]


def call_of(message: Any) -> list[Any]:
    (call,) = message.tool_calls
    return [call.function.name, json.loads(call.function.arguments)]


whole = client.chat.completions.create(**ask)
with client.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
    pieces = [event.delta for event in stream if event.type == "content.delta"]
    joined = stream.get_final_completion()
read: dict[str, Any] = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(pieces),
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "streamed_usage": [joined.usage.prompt_tokens, joined.usage.completion_tokens],
    "ends": [whole.choices[0].finish_reason, joined.choices[0].finish_reason],
    "models": [model.id for model in client.models.list()],
    "model": client.models.retrieve("assistant").id,
}
calling = {**ask, "model": "caller", "tools": tools}
message = client.chat.completions.create(**calling).choices[0].message
with client.chat.completions.stream(**calling) as stream:
    streamed_call = stream.get_final_completion().choices[0].message
turns = [*messages, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
client.chat.completions.create(**{**calling, "messages": turns})
read |= {"call": call_of(message), "streamed_call": call_of(streamed_call)}
try:
    client.chat.completions.create(**{**ask, "model": "unknown"})
except openai.NotFoundError as error:
    read["unknown_model"] = [type(error).__name__]
try:
    client.chat.completions.create(**{**ask, "temperature": 3})
except openai.BadRequestError as error:
    read["wrong_value"] = [type(error).__name__, error.param]
print(json.dumps(read))
