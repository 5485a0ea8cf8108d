"""Package litellm: a loop with two tools, joined from its chunks; prints the streamed answer. Arguments: the gateway's
address, the model, and the provider whose API litellm is to use, `openai` or `anthropic`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

url, name, provider = sys.argv[1:]
CITY: dict[str, Any] = {"city": {"type": "string"}}
DAYS: dict[str, Any] = {"days": {"type": "integer"}}


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def run(name: str, arguments: dict[str, Any]) -> str:
    if name == "get_weather":
        return f"fact-1-rain in {arguments['city']} in {arguments['days']} days"
    return f"fact-2-noon in {arguments['city']}"


messages: list[Any] = [{"role": "user", "content": "How is Paris?"}]
while True:
    chunks = list(
        litellm.completion(
            model=f"{provider}/{name}",
            api_base=f"{url}/v1" if provider == "openai" else url,
            api_key="x",
            max_retries=0,
            stream=True,
            tools=[tool("get_weather", CITY | DAYS), tool("get_time", CITY)],
            messages=messages,
        )
    )
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    messages.append(message.model_dump())
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        result = run(call.function.name, json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
print(json.dumps({"answer": message.content, "streamed": text}))
