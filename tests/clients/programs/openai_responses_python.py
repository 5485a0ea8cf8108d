"""The Responses API of package openai: prints what it reads of a gateway, as JSON. Argument: the gateway's address."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

# Answers are checked as the types that the package declares.
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="x", max_retries=0, _strict_response_validation=True)
ask: dict[str, Any] = {"model": "assistant", "temperature": 0, "input": "What is a NeuronCore?"}
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "name": "get_weather", "parameters": schema, "strict": False}]


def call_of(response: Any) -> list[Any]:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return [call.name, json.loads(call.arguments)]


def streamed(**fields: Any) -> tuple[str, Any]:
    """The joined text, and the response of the last event."""
    with client.responses.stream(**{**ask, **fields}) as stream:
        events = list(stream)  # the helper's final response exists only of answers that are complete
    return "".join(event.delta for event in events if event.type == "response.output_text.delta"), events[-1].response


whole = client.responses.create(**ask)
text, joined = streamed()
cut_text, cut = streamed(max_output_tokens=5)
read: dict[str, Any] = {
    "whole": whole.output_text,
    "streamed": text,
    "joined": joined.output_text,
    "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
    "streamed_usage": [joined.usage.input_tokens, joined.usage.output_tokens],
    "ends": [whole.status, joined.status],
    "cut": [cut.status, cut.incomplete_details.reason, cut.output_text == cut_text],
}
calling = {"model": "caller", "tools": tools}
called = client.responses.create(**{**ask, **calling})
output = {"type": "function_call_output", "call_id": called.output[-1].call_id, "output": "rain"}
turns = [{"role": "user", "content": "Hi"}, *called.output, output]
client.responses.create(**{**ask, **calling, "input": turns})
read |= {"call": call_of(called), "streamed_call": call_of(streamed(**calling)[1])}
try:
    client.responses.create(**{**ask, "model": "unknown"})
except openai.NotFoundError as error:
    read["unknown_model"] = [type(error).__name__]
try:
    client.responses.create(**{**ask, "temperature": 3})
except openai.BadRequestError as error:
    read["wrong_value"] = [type(error).__name__, error.param]
print(json.dumps(read))
