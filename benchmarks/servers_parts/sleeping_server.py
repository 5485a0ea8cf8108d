"""A server of OpenAI's completions whose steps only sleep, for measuring routers.

    python -m benchmarks.servers_parts.sleeping_server --uds PATH | --port N  --slots 4 --step-ms 20

A request waits for one of the slots, first come, first served. Each token takes one step, the first one two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from aiohttp import web

MODEL = "sleeper"
MAX_LEN = 4096


class Sleeper:
    """The routes of one server."""

    def __init__(self, slots: int, step_s: float) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._step_s = step_s

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
            ]
        )
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": MAX_LEN}]}
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        count = body.get("max_tokens", 16)
        async with self._slots:
            await asyncio.sleep(self._step_s)
            if not body.get("stream"):
                await asyncio.sleep(count * self._step_s)
                return web.json_response(_event(body, "x " * count, "length") | {"usage": _usage(body, count)})
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for index in range(count):
                await asyncio.sleep(self._step_s)
                await _send(response, _event(body, "x ", "length" if index == count - 1 else None))
        if (body.get("stream_options") or {}).get("include_usage"):
            await _send(response, {**_event(body, "", None), "choices": [], "usage": _usage(body, count)})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _event(body: dict[str, Any], text: str, finish: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    return {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice]}


def _usage(body: dict[str, Any], count: int) -> dict[str, int]:
    prompt = len(body["prompt"])
    return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    options = parser.parse_args()
    app = Sleeper(options.slots, options.step_ms / 1000).app()
    sys.stdout = sys.stderr
    host = None if options.uds else "127.0.0.1"
    web.run_app(app, path=options.uds, host=host, port=options.port, access_log=None, print=lambda text: None)


if __name__ == "__main__":
    main()
