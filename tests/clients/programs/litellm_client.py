"""Package litellm: prints what it reads of a gateway, as JSON. Arguments: the gateway's address, and the provider whose
API litellm is to use, `openai` or `anthropic`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

url, provider = sys.argv[1:]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
ask: dict[str, Any] = {
    "api_base": f"{url}/v1" if provider == "openai" else url,
    "api_key": "x",
    "max_retries": 0,
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "What is a NeuronCore?"}],
}


def complete(model: str, **fields: Any) -> Any:
    return litellm.completion(model=f"{provider}/{model}", **{**ask, **fields})


def streamed(model: str, **fields: Any) -> tuple[list[Any], Any]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(complete(model, **options, **fields))
    return chunks, litellm.stream_chunk_builder(chunks)


def call_of(answer: Any) -> list[Any]:
    (call,) = answer.choices[0].message.tool_calls
    return [call.function.name, json.loads(call.function.arguments)]


whole = complete("claude-demo")
chunks, built = streamed("claude-demo")
read: dict[str, Any] = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "streamed_usage": [built.usage.prompt_tokens, built.usage.completion_tokens],
}
called = complete("caller", tools=tools)
message = called.choices[0].message
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
complete("caller", tools=tools, messages=[*ask["messages"], message.model_dump(), result])
read |= {"call": call_of(called), "streamed_call": call_of(streamed("caller", tools=tools)[1])}
try:
    complete("unknown")
except Exception as error:  # noqa: BLE001 - its class is what is tested
    read["unknown_model"] = [kind.__name__ for kind in type(error).__mro__]
print(json.dumps(read))
