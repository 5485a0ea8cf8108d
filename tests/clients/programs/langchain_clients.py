"""Packages langchain-openai and langchain-anthropic: prints what one of them reads of a gateway, as JSON.

Arguments: the gateway's address, and the package."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import HumanMessage, ToolMessage

url, package = sys.argv[1:]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "get_weather", "description": "The weather of a city.", "parameters": schema}
tools = [{"type": "function", "function": function}]


def model(name: str) -> Any:
    if package == "langchain-anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=name, base_url=url, api_key="x", max_retries=0, max_tokens=100)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="x", max_retries=0, max_tokens=100, stream_usage=True)


def joined(stream: Any) -> Any:
    whole: Any = None
    for piece in stream:
        whole = piece if whole is None else whole + piece
    return whole


def call_of(message: Any) -> list[Any]:
    (call,) = message.tool_calls
    return [call["name"], call["args"]]


def usage_of(message: Any) -> list[int]:
    return [message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"]]


demo, question = model("claude-demo"), "What is a NeuronCore?"
whole, streamed = demo.invoke(question), joined(demo.stream(question))
read: dict[str, Any] = {
    "whole": whole.text,
    "streamed": streamed.text,
    "usage": usage_of(whole),
    "streamed_usage": usage_of(streamed),
}
bound = model("caller").bind_tools(tools)
called = bound.invoke("Hi")
result = ToolMessage("rain", tool_call_id=called.tool_calls[0]["id"])
bound.invoke([HumanMessage("Hi"), called, result])
read |= {"call": call_of(called), "streamed_call": call_of(joined(bound.stream("Hi")))}
try:
    model("unknown").invoke(question)
except Exception as error:  # noqa: BLE001 - its class is what is tested
    read["unknown_model"] = [kind.__name__ for kind in type(error).__mro__]
print(json.dumps(read))
