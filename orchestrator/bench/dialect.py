"""The request dialect of a server: the optional fields of a benchmark request that it supports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

Prompt = str | list[int]
FEATURES = {  # in the order in which they are dropped
    "min_tokens": "min_tokens: answers may end early",
    "ignore_eos": "ignore_eos: answers may end early",
    "usage": "stream_options: tokens are counted as chunks",
    "token_ids": "token ids as a prompt: text is sent, and the server counts its tokens",
}


@dataclass(frozen=True)
class Dialect:
    """The features that the server supports; all of them until it refuses."""

    chat: bool = False
    token_ids: bool = True  # prompts as lists of token ids, with an exact length
    ignore_eos: bool = True
    min_tokens: bool = True
    usage: bool = True  # stream_options.include_usage

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def refused(self) -> tuple[str, ...]:
        """Descriptions of the features that the server does not support. A chat never takes token ids."""
        return tuple(
            FEATURES[name] for name in FEATURES if not getattr(self, name) and not (self.chat and name == "token_ids")
        )

    def without(self, name: str) -> Dialect:
        return replace(self, **{name: False})

    def body(self, model: str, prompt: Prompt, output: int, *, stream: bool = True) -> bytes:
        """Returns a greedy request for ``output`` tokens."""
        body: dict[str, Any] = {"model": model, "max_tokens": output, "temperature": 0, "stream": stream}
        if self.chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.min_tokens:
            body["min_tokens"] = output
        if self.usage and stream:
            body["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(body)
