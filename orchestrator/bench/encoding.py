"""The encoding benchmark: sends texts to be embedded, ranked or classified, and measures the responses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from orchestrator.bench.arrivals import Load
from orchestrator.bench.client_lag import ClientLoad
from orchestrator.bench.measurement import Measured, error_messages, kinds
from orchestrator.bench.prompts import Prompts
from orchestrator.bench.response_reader import LONGEST_MESSAGE, error_message
from orchestrator.bench.serving import run_load
from orchestrator.bench.statistics import Summary
from orchestrator.bench.target import model_of
from orchestrator.bench.timed_http import Answer, Client
from orchestrator.process.failure import Failed

ROUTES = {"embeddings": "/v1/embeddings", "rerank": "/v1/rerank", "score": "/score", "classify": "/classify"}
QUERY = -2  # index of the text that documents are ranked by


@dataclass(frozen=True)
class Texts:
    """The inputs of each request: their number, and the least and the most words of each."""

    inputs: int
    least: int
    most: int

    @classmethod
    def parse(cls, inputs: int, words: str) -> Texts:
        """Parses ``LEAST:MOST`` words, or one number. Raises ValueError."""
        least, colon, most = words.partition(":")
        numbers = [part for part in (least, most if colon else least) if part.isascii() and part.isdecimal()]
        if len(numbers) < 2 or not 0 < int(numbers[0]) <= int(numbers[1]) < 10**6:
            raise ValueError(f"{words!r} is not LEAST:MOST words, like 8:128")
        return cls(inputs, int(numbers[0]), int(numbers[1]))

    def of(self, index: int, prompts: Prompts, seed: int) -> list[str]:
        """Returns the texts of the request number ``index``; no two requests have the same."""
        draw = random.Random(f"words {seed} {index}")
        return [
            prompts.text(index * self.inputs + place, draw.randint(self.least, self.most))
            for place in range(self.inputs)
        ]


@dataclass(frozen=True)
class Encoding:
    """The result of one run."""

    url: str
    model: str
    route: str
    texts: Texts
    load: Load
    measured: tuple[Measured, ...]  # in the order in which they ended
    duration_s: float  # from the first request to the end of the last
    client: ClientLoad


async def encode(
    client: Client,
    model: str | None,
    route: str,
    texts: Texts,
    load: Load,
    timeout_s: float,
    say: Callable[[str], None],
) -> Encoding:
    """Sends the load and waits for every response. Raises Failed if the server refuses the first request, which is not
    measured."""
    name, _ = await model_of(client, model)
    prompts = Prompts(load.seed)

    async def ask(index: int, due: float) -> Measured:
        body = _body(route, name, prompts, texts.of(index, prompts, load.seed))
        answer = await client.ask("POST", ROUTES[route], body, timeout_s)
        return _measured(answer, due, texts.inputs)

    first = await ask(-1, 0.0)
    if not first.ok:
        what = f"{ROUTES[route]} of {client.origin.url}: {first.error}: {first.what}"
        raise Failed("bench-refused", what, "choose another --route or --model, or see the server's log")
    run = await run_load(load, ask, say)
    return Encoding(client.origin.url, name, route, texts, load, run.measured, run.duration_s, run.client)


def _body(route: str, model: str, prompts: Prompts, texts: list[str]) -> bytes:
    fields: dict[str, Any]
    if route == "rerank":
        fields = {"query": prompts.text(QUERY, 8), "documents": texts}
    elif route == "score":
        fields = {"text_1": prompts.text(QUERY, 8), "text_2": texts}
    else:
        fields = {"input": texts}
    return msgspec.json.encode({"model": model, **fields})


def _measured(answer: Answer, due: float, inputs: int) -> Measured:
    """Returns the measurement of a request; its only chunk is the end of the answer."""
    error, what, tokens = answer.error, answer.what, None
    if error is None and answer.status != 200:
        error, what = f"http-{answer.status}", error_message(answer.body)
    elif error is None:
        try:
            fields = msgspec.json.decode(answer.body)
            rows = len(fields.get("data") or fields.get("results") or ())
            usage = fields.get("usage") or {}
            tokens = usage.get("prompt_tokens") or usage.get("total_tokens")
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, TypeError) as wrong:
            error, what = "malformed", f"the response is not a JSON object with a list: {wrong}"
        else:
            if rows != inputs:
                error, what = "incomplete", f"the response has {rows} results for {inputs} inputs"
    ended = () if error is not None or answer.ended is None else (answer.ended,)
    return Measured(0, 0, due, answer.sent, ended, answer.ended, tokens, 0, error, what[:LONGEST_MESSAGE])


def encoding_data(run: Encoding) -> dict[str, Any]:
    """Returns the JSON of `bench encoding -o json`."""
    answered = [request for request in run.measured if request.ok]
    latencies = Summary.of([request.e2e_s * 1000 for request in answered if request.e2e_s is not None])
    tokens = sum(request.prompt_tokens or 0 for request in answered)
    return {
        "url": run.url,
        "model": run.model,
        "route": ROUTES[run.route],
        "texts": asdict(run.texts),
        "load": asdict(run.load),
        "sent": len(run.measured),
        "ok": len(answered),
        "errors": kinds(run.measured),
        "said": error_messages(run.measured),
        "duration_s": round(run.duration_s, 3),
        "requests_per_s": round(len(answered) / run.duration_s, 4),
        "items_per_s": round(len(answered) * run.texts.inputs / run.duration_s, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / run.duration_s, 3),
        "latency_ms": None if latencies is None else latencies.as_dict(),
        "client": run.client.as_dict(),
    }
