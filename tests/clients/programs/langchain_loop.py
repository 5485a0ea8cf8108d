"""Packages langchain and langchain-openai: runs an agent with two tools and prints its streamed answer. Arguments: the
gateway's address, the model, and `typed` for an answer that is an object."""

from __future__ import annotations

import json
import sys

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url, name, *typed = sys.argv[1:]


class Weather(BaseModel):
    sky: str
    hour: int


def get_weather(city: str, days: int) -> str:
    """The weather of a city."""
    return f"fact-1-rain in {city} in {days} days"


def get_time(city: str) -> str:
    """The time in a city."""
    return f"fact-2-noon in {city}"


model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="x", max_retries=0, stream_usage=True)
form = ProviderStrategy(Weather) if typed else None
agent = create_agent(model, tools=[get_weather, get_time], system_prompt="Answer briefly.", response_format=form)
question = {"messages": [{"role": "user", "content": "How is Paris?"}]}
answer, text = "", ""
for mode, piece in agent.stream(question, stream_mode=["messages", "values"]):
    if mode == "messages" and piece[1]["langgraph_node"] == "model":
        text += piece[0].text
    elif mode == "values":
        last, structured = piece["messages"][-1], piece.get("structured_response")
        answer = structured.model_dump_json() if structured else last.text
        text = text if last.type == "ai" else ""  # that of a call
print(json.dumps({"answer": answer, "streamed": text}))
