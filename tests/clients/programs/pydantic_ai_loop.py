"""Package pydantic-ai: runs an agent with two tools and prints its streamed answer. Arguments: the gateway's address,
the model, the API, `chat` or `responses`, and `typed` for an answer that is an object."""

from __future__ import annotations

import asyncio
import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name, api, *typed = sys.argv[1:]


class Weather(BaseModel):
    sky: str
    hour: int


kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
model = kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="x"))
agent = Agent(model, instructions="Answer briefly.", output_type=NativeOutput(Weather) if typed else str)


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
        if typed:
            parts = [part.model_dump_json() async for part in run.stream_output()]
            print(json.dumps({"answer": (await run.get_output()).model_dump_json(), "streamed": parts[-1]}))
        else:
            text = "".join([piece async for piece in run.stream_text(delta=True)])
            print(json.dumps({"answer": await run.get_output(), "streamed": text}))


asyncio.run(main())
