"""Package llama-index-llms-openai-like: prints what it reads of a gateway, as JSON. Argument: the gateway's address."""

from __future__ import annotations

import json
import sys
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(name: str) -> OpenAILike:
    return OpenAILike(
        model=name,
        api_base=f"{sys.argv[1]}/v1",
        api_key="x",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=100,
        temperature=0,
        max_retries=0,
    )


def get_weather(city: str) -> str:
    """The weather of a city."""
    return city


def call_of(response: Any, client: OpenAILike) -> list[Any]:
    (call,) = client.get_tool_calls_from_response(response)
    return [call.tool_name, call.tool_kwargs]


demo, caller = model("assistant"), model("caller")
question = [ChatMessage(role="user", content="What is a NeuronCore?")]
whole = demo.chat(question)
pieces = [piece.delta or "" for piece in demo.stream_chat(question)]
usage = whole.raw.usage
read: dict[str, Any] = {
    "whole": whole.message.content,
    "streamed": "".join(pieces),
    "usage": [usage.prompt_tokens, usage.completion_tokens],
}
tools = [FunctionTool.from_defaults(fn=get_weather)]
called = caller.chat_with_tools(tools, user_msg="Hi")
(call,) = caller.get_tool_calls_from_response(called)
result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": call.tool_id})
caller.chat([ChatMessage(role="user", content="Hi"), called.message, result])
*_, last = caller.stream_chat_with_tools(tools, user_msg="Hi")
read |= {"call": call_of(called, caller), "streamed_call": call_of(last, caller)}
try:
    model("unknown").chat(question)
except Exception as error:  # noqa: BLE001 - its class is what is tested
    read["unknown_model"] = [kind.__name__ for kind in type(error).__mro__]
print(json.dumps(read))
