"""A chat request and a streamed chunk, as msgspec and pydantic have them, for ``benchmarks.choices``."""

from __future__ import annotations

from typing import Literal

import msgspec
import pydantic


class Part(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Options(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class Chat(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    messages: list[Part]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: Options | None = None
    seed: int | None = None
    user: str | None = None


class PydanticPart(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class PydanticOptions(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    include_usage: bool = False


class PydanticChat(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    model: str
    messages: list[PydanticPart]
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: PydanticOptions | None = None
    seed: int | None = None
    user: str | None = None


class Delta(msgspec.Struct):
    content: str


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]
