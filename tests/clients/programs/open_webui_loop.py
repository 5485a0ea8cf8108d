"""The requests of Open WebUI with native function calling, as its backend builds them: the list of models, a chat whose
calls it runs, and the tasks for a title and tags. Prints the streamed answer. Arguments: the gateway's address and the
model."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

url, name = sys.argv[1:]
HEADERS = {
    "Authorization": "Bearer x",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Role": "user",
    "X-OpenWebUI-Chat-Id": "6d0b3a0e",
}
SPECS = [
    {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
    {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {"city": {}}}},
]


def send(path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(f"{url}/v1{path}", data, HEADERS))


def chat(messages: list[Any]) -> dict[str, Any]:
    """The message of a streamed answer as it goes back: content, and calls by their index; reasoning is only shown."""
    body = {
        "stream": True,
        "model": name,
        "messages": messages,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": spec} for spec in SPECS],
    }
    content, calls = "", dict[int, Any]()
    for line in send("/chat/completions", body):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            for piece in delta.get("tool_calls") or []:
                if piece["index"] in calls:
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
                else:
                    calls[piece["index"]] = piece
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls.values())} if calls else {})}


def run(function: dict[str, Any]) -> str:
    arguments = json.loads(function["arguments"])
    if function["name"] == "get_weather":
        return f"fact-1-rain in {arguments['city']} in {arguments['days']} days"
    return f"fact-2-noon in {arguments['city']}"


def task(**fields: Any) -> str:
    messages = [{"role": "user", "content": "### Task:\nGenerate a title or tags for the chat, as JSON."}]
    body = {"model": name, "messages": messages, "stream": False, **fields}
    return json.load(send("/chat/completions", body))["choices"][0]["message"]["content"]


assert name in [model["id"] for model in json.load(send("/models"))["data"]]
assert task(max_completion_tokens=1000) == task()
messages: list[Any] = [
    {"role": "system", "content": "User Context:\n\nAnswer briefly."},
    {"role": "user", "content": "How is Paris?"},
]
while (message := chat(messages)).get("tool_calls"):
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": run(call["function"])} for call in message["tool_calls"]
    ]
    messages += [message, *results]
print(json.dumps({"answer": message["content"], "streamed": message["content"]}))
