"""Package pydantic-ai: runs an agent with two tools and prints its streamed answer. Arguments: the gateway's address,
the model, and the API, `chat`, `responses` or `anthropic`."""

from __future__ import annotations

import asyncio
import json
import sys

from pydantic_ai import Agent

url, name, api = sys.argv[1:]


def model() -> object:
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="x"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))


agent = Agent(model(), instructions="Answer briefly.")


@agent.tool_plain
def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"fact-1-rain in {city} in {days} days"


@agent.tool_plain
def get_time(city: str) -> str:
    """The time in a city."""
    return f"fact-2-noon in {city}"


async def main() -> None:
    async with agent.run_stream("How is Paris?") as run:
        text = "".join([piece async for piece in run.stream_text(delta=True)])
        print(json.dumps({"answer": await run.get_output(), "streamed": text}))


asyncio.run(main())
