"""How a server wants to be asked: what of a benchmark's request it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

Prompt = str | list[int]
WHAT = {  # in the order in which they are given up
    "min_tokens": "min_tokens: an answer may end early",
    "ignore_eos": "ignore_eos: an answer may end early",
    "usage": "stream_options: tokens are counted as chunks",
    "token_ids": "token ids as a prompt: text is sent, and its tokens counted by the server",
}


@dataclass(frozen=True)
class Dialect:
    """What the server takes; all of it, until it refuses."""

    chat: bool = False
    token_ids: bool = True  # prompts as lists of token ids, which have exactly the wanted length
    ignore_eos: bool = True
    min_tokens: bool = True
    usage: bool = True  # stream_options.include_usage

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    @property
    def refused(self) -> tuple[str, ...]:
        """What the server does not take, in words. A chat never takes token ids."""
        return tuple(WHAT[name] for name in WHAT if not getattr(self, name) and not (self.chat and name == "token_ids"))

    def without(self, name: str) -> Dialect:
        return replace(self, **{name: False})

    def body(self, model: str, prompt: Prompt, output: int, *, stream: bool = True) -> bytes:
        """A request for ``output`` tokens, greedy."""
        asked: dict[str, Any] = {"model": model, "max_tokens": output, "temperature": 0, "stream": stream}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.min_tokens:
            asked["min_tokens"] = output
        if self.usage and stream:
            asked["stream_options"] = {"include_usage": True}
        return msgspec.json.encode(asked)
