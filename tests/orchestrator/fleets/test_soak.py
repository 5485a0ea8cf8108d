"""Twenty thousand requests of all kinds through the demo fleet: every answer checked, no process grows."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fleet import LiveFleet

DEMO = Path(__file__).parents[3] / "placements" / "examples" / "demo.yaml"
MODELS = ("assistant", "helpdesk", "storyteller")
TOTAL = 20_000
AT_ONCE = 24
SAMPLE_EVERY = 500  # requests
SETTLED_AFTER = 1_000  # requests
MOST_GROWTH = 1.0  # KB a request: 19 MB over the run, where an answer kept by mistake has more
QUESTIONS = ("What is a replica?", "What is 2 + 3?", "Hello!", "List the days of the week.", "Why is the sky blue?")


def kinds() -> list[dict[str, Any]]:
    """Distinct requests; each is deterministic, so that its answer under load can be compared with the one alone."""
    bodies: list[dict[str, Any]] = []
    for model, question in itertools.product(MODELS, QUESTIONS):
        chat = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 24}
        bodies.append({**chat, "temperature": 0})
        bodies.append({**chat, "temperature": 0, "stream": True})
        bodies.append({**chat, "temperature": 0.9, "top_p": 0.9, "seed": 7})
        bodies.append({**chat, "temperature": 1.2, "seed": 11, "n": 2, "max_tokens": 12})
        bodies.append({**chat, "temperature": 0, "stop": [" a", "."]})
        text = {"model": model, "prompt": question, "max_tokens": 8, "temperature": 0}
        bodies.append({**text, "logprobs": 2, "repetition_penalty": 1.2})
        bodies.append({**text, "prompt": [[5, 6, 7], [8, 9]], "ignore_eos": True, "return_token_ids": True})
    bodies.append({"model": "nobody", "prompt": "x"})
    bodies.append({"model": "assistant", "prompt": "x", "temperature": 9})
    bodies.append({"model": "assistant", "prompt": [9] * 600})
    return bodies


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and what matters of the answer: all but its id and time."""
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    response = await client.post(route, json=body)
    if body.get("stream") and response.status_code == 200:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        chunks = [json.loads(line)["choices"][0] for line in lines]
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        return 200, [text, chunks[-1]["finish_reason"]]
    answer = response.json()
    return response.status_code, answer.get("error") or [_without_floats(answer["choices"]), answer["usage"]]


def _without_floats(value: Any) -> Any:
    """Log probabilities differ in their last digits with what else is in the batch; the tokens do not."""
    if isinstance(value, dict):
        return {key: _without_floats(item) for key, item in value.items() if key != "top_logprobs"}
    if isinstance(value, list):
        return [_without_floats(item) for item in value]
    return None if isinstance(value, float) else value


async def hang_up(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Begin a stream and leave it."""
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        async for _ in response.aiter_lines():
            return


def memory(processes: list[psutil.Process]) -> dict[int, int]:
    """Private memory of each process in KB: what it alone holds."""
    return {process.pid: process.memory_full_info().uss // 1024 for process in processes}


def slope(points: list[tuple[int, int]]) -> float:
    """Of the least-squares line, KB a request."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(DEMO) as live:
        yield live.wait_ready()


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_twenty_thousand_requests_are_answered_as_alone_and_memory_stays_flat(fleet: LiveFleet) -> None:
    """Plain, streamed, seeded, several at once, with logprobs, invalid ones and disconnects, mixed by a fixed seed."""
    bodies = kinds()
    processes = [psutil.Process(pid) for pid in fleet.processes()]
    samples: list[tuple[int, dict[int, int]]] = []

    async def run() -> list[str]:
        limits = httpx.Limits(max_connections=AT_ONCE * 2)
        async with httpx.AsyncClient(base_url=fleet.url, timeout=120, limits=limits) as client:
            alone = [await ask(client, body) for body in bodies]
            rng = random.Random(3)
            order = iter([rng.randrange(-1, len(bodies)) for _ in range(TOTAL)])
            done = itertools.count(1)
            wrong: list[str] = []

            async def work() -> None:
                for index in order:
                    if index < 0:
                        await hang_up(client, bodies[0])
                    elif (answer := await ask(client, bodies[index])) != alone[index]:
                        wrong.append(f"{bodies[index]}: {answer} instead of {alone[index]}")
                    number = next(done)
                    if number % SAMPLE_EVERY == 0:
                        samples.append((number, memory(processes)))

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            return wrong

    wrong = asyncio.run(run())

    assert wrong == []
    assert len(samples) == TOTAL // SAMPLE_EVERY
    settled = [(number, sizes) for number, sizes in samples if number > SETTLED_AFTER]
    growth = {
        " ".join(process.cmdline())[:60]: slope([(number, sizes[process.pid]) for number, sizes in settled])
        for process in processes
    }
    assert {name: round(by, 2) for name, by in growth.items() if by > MOST_GROWTH} == {}
    assert all(replica["restarts"] == 0 for model in fleet.status()["models"] for replica in model["replicas"])
