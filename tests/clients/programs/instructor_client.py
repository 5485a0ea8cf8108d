"""Package instructor: prints what it reads of a gateway, as JSON. Argument: the gateway's address.

The model `any` generates any text that the schema allows."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a model of random weights would add names without end
    city: Annotated[str, Field(max_length=8)]
    days: Annotated[int, Field(ge=1, le=9)]


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="x", max_retries=0), mode=mode)


ask: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "Hi"}],
    "response_model": Weather,
    "max_retries": 0,
    "seed": 3,
    "max_tokens": 500,
}
read: dict[str, Any] = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    whole, raw = client(mode).create_with_completion(**ask)
    partial = list(client(mode).create_partial(**ask))[-1]
    read[mode.value] = [whole.model_dump(), partial.model_dump(), raw.usage.completion_tokens]
try:
    client(instructor.Mode.TOOLS).create(**{**ask, "model": "unknown"})
except Exception as error:  # noqa: BLE001 - its cause is what is tested
    causes = [error, error.__cause__, error.__context__]
    read["unknown_model"] = [type(cause).__name__ for cause in causes if cause is not None]
print(json.dumps(read))
