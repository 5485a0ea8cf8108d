"""Routing and scaling as a client meets them: a real fleet, echo and CPU engines, real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fleet import LiveFleet, until
from workers.engines.echo.engine import echo_tokens

pytestmark = pytest.mark.soak

EXAMPLES = Path(__file__).parents[3] / "placements" / "examples"
SPEC = f"""
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: echo, max_len: 1024}}
models:
  asleep: {{source: unused, replicas: {{min: 0, max: 3}}, max_batch: 4, engine_options: {{step_ms: 5}}}}
  tiny:
    source: {EXAMPLES}/models/tiny
    engine: cpu
    max_len: 128
    replicas: {{min: 0, max: 1}}
    scaling: {{idle_s: 5}}
  shared: {{source: unused, max_batch: 4, engine_options: {{step_ms: 5}}}}
  urgent: {{source: unused, max_batch: 16, engine_options: {{step_ms: 25}}}}
  even: {{source: unused, max_batch: 4, replicas: 2, engine_options: {{step_ms: 60}}}}
"""


@pytest.fixture(scope="module")
def fleet() -> Iterator[LiveFleet]:
    with LiveFleet(SPEC) as live:
        live.wait_ready()
        yield live
        live.stop()


@pytest.fixture(scope="module")
def keys(fleet: LiveFleet) -> dict[str, dict[str, str]]:
    """Headers of API keys, by name: `plain`, `one`, and `three` of three times its weight."""
    made = {}
    for name, options in (("plain", ("--priority", "-10")), ("one", ()), ("three", ("--weight", "3"))):
        created = fleet.corewright("keys", "create", name, *options, "-o", "json")
        assert created.returncode == 0, created.stderr
        made[name] = {"authorization": f"Bearer {json.loads(created.stdout)['key']}"}

    def known() -> bool:
        return all(fleet.http.get("/v1/models", headers=headers).status_code == 200 for headers in made.values())

    until(known, 10, "the gateway knows the keys")
    return made


async def stream(
    client: httpx.AsyncClient, headers: dict[str, str], body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Each event's time (monotonic) and content; the first comes with the first token."""
    request = {"stream": True, "return_token_ids": True, **body}
    async with client.stream("POST", "/v1/completions", json=request, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield time.monotonic(), json.loads(line[6:])


def client_of(fleet: LiveFleet) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=fleet.url, timeout=60, limits=limits)


def replicas_of(fleet: LiveFleet, model: str) -> list[Any]:
    """As the status tells them."""
    return next(list(entry["replicas"]) for entry in fleet.status()["models"] if entry["name"] == model)


@pytest.mark.parametrize("model", ["asleep", "tiny"])
def test_a_burst_onto_a_model_at_zero_is_answered_completely(
    fleet: LiveFleet, keys: dict[str, dict[str, str]], model: str
) -> None:
    """Every request of the burst is held while the first replica loads, and none is rejected."""
    assert not replicas_of(fleet, model)
    prompts = [f"burst {i}" for i in range(60)]

    async def ask() -> list[httpx.Response]:
        async with client_of(fleet) as client:
            body = {"model": model, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
            asks = [client.post("/v1/completions", json={**body, "prompt": p}, headers=keys["plain"]) for p in prompts]
            return await asyncio.gather(*asks)

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200] * len(prompts)
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {12}
    if model == "asleep":
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.json()["choices"][0]["text"] == bytes(echo_tokens(list(prompt.encode()), 12)).decode()
    events = json.loads(fleet.corewright("events", "--since", "0", "--model", model, "-o", "json").stdout)
    assert "Woken" in {event["reason"] for event in events["events"]}


def test_a_model_without_requests_returns_to_zero(fleet: LiveFleet, keys: dict[str, dict[str, str]]) -> None:
    """After `scaling.idle_s`; the event has the reason, and the next request starts it again."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2}
    assert fleet.http.post("/v1/completions", json=body, headers=keys["plain"]).status_code == 200

    until(lambda: not replicas_of(fleet, "tiny"), 60, "it has no replica")
    events = json.loads(fleet.corewright("events", "--since", "0", "--model", "tiny", "-o", "json").stdout)["events"]
    assert [event["reason"] for event in events].count("ScaledToZero") >= 1
    assert fleet.http.post("/v1/completions", json=body, headers=keys["plain"]).status_code == 200


def test_two_tenants_get_tokens_by_their_weights(fleet: LiveFleet, keys: dict[str, dict[str, str]]) -> None:
    """Weights 1 and 3 under saturation: tokens 1:3 within 5 %, whatever the lengths of prompts and answers."""
    tokens: Counter[str] = Counter()

    async def ask_while(client: httpx.AsyncClient, name: str, draw: random.Random, begin: float, end: float) -> None:
        while time.monotonic() < end:
            body = {"model": "shared", "prompt": "p" * draw.randint(1, 9), "max_tokens": draw.randint(4, 40)}
            async for at, event in stream(client, keys[name], body):
                if begin <= at < end:
                    tokens[name] += len(event["choices"][0]["token_ids"])

    async def saturate() -> None:
        begin = time.monotonic() + 2
        draw = random.Random(0)
        async with client_of(fleet) as client:
            names = ["one", "three"] * 24  # so that requests of both always wait
            await asyncio.gather(
                *[ask_while(client, name, random.Random(draw.random()), begin, begin + 20) for name in names]
            )

    asyncio.run(saturate())
    assert tokens["one"] > 1000
    assert tokens["three"] / tokens["one"] == pytest.approx(3.0, rel=0.05)


def test_a_flood_of_low_priority_hardly_delays_urgent_requests(
    fleet: LiveFleet, keys: dict[str, dict[str, str]]
) -> None:
    """The p99 of an urgent stream's time to first token moves by less than a factor of two."""

    async def urgent(client: httpx.AsyncClient, seconds: float, waits: list[float]) -> None:
        draw, end = random.Random(1), time.monotonic() + seconds
        asks: set[asyncio.Task[None]] = set()

        async def ask() -> None:
            began = time.monotonic()
            first = 0.0
            async for at, _ in stream(client, keys["plain"], {**body, "priority": -5, "max_tokens": 12}):
                first = first or at
            waits.append(first - began)

        while time.monotonic() < end:
            asks.add(asyncio.create_task(ask()))
            await asyncio.sleep(draw.expovariate(6.0))
        await asyncio.gather(*asks)

    async def flood(client: httpx.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            answer = await client.post(
                "/v1/completions", json={**body, "priority": 5, "max_tokens": 40}, headers=keys["plain"]
            )
            assert answer.status_code == 200

    async def measure() -> tuple[list[float], list[float]]:
        alone: list[float] = []
        beside: list[float] = []
        over = asyncio.Event()
        async with client_of(fleet) as client:
            await urgent(client, 15, alone)
            floods = [asyncio.create_task(flood(client, over)) for _ in range(40)]
            await urgent(client, 3, [])  # until the flood has filled all that it may have
            await urgent(client, 15, beside)
            over.set()
            await asyncio.gather(*floods)
        return alone, beside

    body = {"model": "urgent", "prompt": "hello"}
    alone, beside = asyncio.run(measure())  # seconds
    assert np.percentile(beside, 99) < 2 * np.percentile(alone, 99)


def test_the_simulator_predicts_a_live_run(fleet: LiveFleet, keys: dict[str, dict[str, str]], tmp_path: Path) -> None:
    """On the exported trace: latency and time to first token within 10 % at p50 and 20 % at p99."""
    firsts: list[float] = []
    wholes: list[float] = []

    async def load() -> None:
        draw = random.Random(3)
        asks: set[asyncio.Task[None]] = set()

        async def ask(prompt: str, tokens: int) -> None:
            began = time.monotonic()
            first = last = 0.0
            body = {"model": "even", "prompt": prompt, "max_tokens": tokens}
            async for at, _ in stream(client, keys["plain"], body):
                first, last = first or at, at
            firsts.append(first - began)
            wholes.append(last - began)

        async with client_of(fleet) as client:
            end = time.monotonic() + 40
            while time.monotonic() < end:
                asks.add(asyncio.create_task(ask("p" * draw.randint(1, 50), draw.randint(3, 25))))
                await asyncio.sleep(draw.expovariate(5.0))
            await asyncio.gather(*asks)

    asyncio.run(load())
    trace, spec = tmp_path / "trace.csv", tmp_path / "spec.yaml"

    def exported() -> bool:
        """All of this test's requests are in the trace, and of others none."""
        completed = fleet.corewright("trace", "export")
        assert completed.returncode == 0, completed.stderr
        head, *lines = completed.stdout.splitlines()
        own = [line for line in lines if ",even," in line]
        trace.write_text("\n".join([head, *own]))
        return len(own) == len(wholes)

    until(exported, 15, "every request is in the trace")
    spec.write_text(fleet.spec.read_text())
    simulated = fleet.corewright("simulate", str(spec), "--trace", str(trace), "-o", "json")
    assert simulated.returncode == 0, simulated.stderr
    (run,) = json.loads(simulated.stdout)["runs"]
    model = next(entry for entry in run["models"] if entry["model"] == "even")
    assert model["answered"] == len(wholes)
    for name, measured in (("ttft_ms", firsts), ("latency_ms", wholes)):
        for percent, within in ((50, 0.10), (99, 0.20)):
            assert model[name][f"p{percent}"] == pytest.approx(1000 * np.percentile(measured, percent), rel=within)
