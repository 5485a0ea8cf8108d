"""Package openai-agents: runs an agent with two tools and prints its streamed answer. Arguments: the gateway's address,
the model, the API, `chat` or `responses`, and `typed` for an answer that is an object."""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name, api, *typed = sys.argv[1:]
set_tracing_disabled(True)  # traces go to OpenAI
client = AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)


class Weather(BaseModel):
    sky: str
    hour: int


@function_tool
def get_weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: The city's name.
        days: How many days from today.
    """
    return f"fact-1-rain in {city} in {days} days"


@function_tool
def get_time(city: str) -> str:
    """The time in a city."""
    return f"fact-2-noon in {city}"


async def main() -> None:
    model = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[api](name, client)
    tools = [get_weather, get_time]
    agent = Agent("Guide", instructions="Be brief.", tools=tools, model=model, output_type=Weather if typed else None)
    run, text = Runner.run_streamed(agent, "How is Paris?"), ""
    async for event in run.stream_events():
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
            text += event.data.delta
    answer = run.final_output.model_dump_json() if typed else run.final_output
    print(json.dumps({"answer": answer, "streamed": text}))


asyncio.run(main())
