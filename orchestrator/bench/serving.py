"""The serving benchmark: sends a load to a server and measures the responses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from orchestrator.bench.arrivals import Load
from orchestrator.bench.client_lag import ClientLoad, LagMeter
from orchestrator.bench.goodput import Slo
from orchestrator.bench.lengths import Lengths
from orchestrator.bench.measurement import Measured
from orchestrator.bench.target import Target
from orchestrator.bench.timed_http import clock

REPORT_S = 5.0


@dataclass(frozen=True)
class Serving:
    """The result of one run. Times of ``measured`` are relative to its start."""

    url: str
    model: str
    load: Load
    lengths: Lengths
    slo: Slo | None
    refused: tuple[str, ...]  # descriptions of unsupported features
    measured: tuple[Measured, ...]  # in the order in which they ended
    duration_s: float  # from the first request to the end of the last
    client: ClientLoad


@dataclass(frozen=True)
class Run:
    """The measured requests of a load, in the order in which they ended, with times relative to its start."""

    measured: tuple[Measured, ...]
    duration_s: float  # from the first request to the end of the last
    client: ClientLoad


async def serve(target: Target, load: Load, lengths: Lengths, slo: Slo | None, say: Callable[[str], None]) -> Serving:
    """Sends the load and waits for every response; each has a deadline."""

    async def ask(index: int, due: float) -> Measured:
        prompt, output = lengths.at(index, load.seed)
        body = target.body(target.prompt(index, prompt), output)
        return await target.ask(body, due=due, prompt=prompt, output=output)

    run = await run_load(load, ask, say)
    return Serving(
        url=target.client.origin.url,
        model=target.model,
        load=load,
        lengths=lengths,
        slo=slo,
        refused=target.dialect.refused,
        measured=run.measured,
        duration_s=run.duration_s,
        client=run.client,
    )


async def run_load(load: Load, ask: Callable[[int, float], Awaitable[Measured]], say: Callable[[str], None]) -> Run:
    """Calls ``ask`` with the number of each request and the time at which it is due, and waits for every response."""
    done: list[Measured] = []
    with LagMeter() as meter:
        began = clock()

        async def send(index: int, due: float) -> None:
            done.append(await ask(index, due))

        progress = asyncio.ensure_future(_report_progress(done, load, began, say))
        try:
            await (_open(load, began, send) if load.rate is not None else _closed(load, began, send))
        finally:
            progress.cancel()
        duration = clock() - began
        late = [max(0.0, request.sent - request.due) for request in done] if load.rate is not None else None
        used = meter.load(late)
    return Run(tuple(request.since(began) for request in done), duration, used)


async def _open(load: Load, began: float, send: Callable[[int, float], Awaitable[None]]) -> None:
    """Sends each request at its time, independent of responses."""
    sending: list[asyncio.Future[None]] = []
    for index, at in enumerate(load.times()):
        wait = began + at - clock()
        if wait > 0:
            await asyncio.sleep(wait)
        sending.append(asyncio.ensure_future(send(index, began + at)))
    await asyncio.gather(*sending)


async def _closed(load: Load, began: float, send: Callable[[int, float], Awaitable[None]]) -> None:
    """Keeps ``load.concurrency`` requests in flight."""
    assert load.concurrency is not None
    numbers = itertools.count() if load.requests is None else iter(range(load.requests))

    async def worker() -> None:
        for index in numbers:
            now = clock()
            if load.duration_s is not None and now - began >= load.duration_s:
                return
            await send(index, now)

    await asyncio.gather(*(worker() for _ in range(load.concurrency)))


async def _report_progress(done: list[Measured], load: Load, began: float, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        failed = sum(1 for request in done if not request.ok)
        of = "" if load.requests is None else f" of {load.requests}"
        say(f"{clock() - began:.0f} s: {len(done)}{of} requests done, {failed} failed")
