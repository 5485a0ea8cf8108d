"""Clients of a running fleet, and what its echo replicas must answer."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from tests.fleet import LiveFleet
from workers.engines.echo import echo_tokens


def echo_text(prompt: str, count: int) -> str:
    return bytes(echo_tokens(list(prompt.encode()), count)).decode()


class Streamed:
    """A streamed completion that is read in the background."""

    def __init__(self, fleet: LiveFleet, model: str, prompt: str, max_tokens: int) -> None:
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.broken: httpx.TransportError | None = None  # the connection ended without the end of the answer
        self.done = threading.Event()
        self.begun = threading.Event()
        self._body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        self._thread = threading.Thread(target=self._read, args=(fleet.url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            self._read_events(url)
        except httpx.TransportError as error:
            self.broken = error
        finally:
            self.done.set()

    def _read_events(self, url: str) -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=self._body, timeout=60) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.error = event.get("error", self.error)
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                    self.begun.set()


def complete(fleet: LiveFleet, model: str, prompt: str = "hello", **fields: Any) -> httpx.Response:
    return fleet.http.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})
