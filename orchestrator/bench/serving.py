"""The serving benchmark: a load, and what it measured."""

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

TELL_S = 5.0


@dataclass(frozen=True)
class Serving:
    """One run. Times of ``measured`` begin at 0."""

    url: str
    model: str
    load: Load
    lengths: Lengths
    slo: Slo | None
    refused: tuple[str, ...]  # what the server did not take, in words
    measured: tuple[Measured, ...]  # in the order of their ends
    duration_s: float  # from the first request to the end of the last
    client: ClientLoad


async def serve(target: Target, load: Load, lengths: Lengths, slo: Slo | None, say: Callable[[str], None]) -> Serving:
    """Send the load and wait for every answer; each has its deadline, so this ends."""
    done: list[Measured] = []
    with LagMeter() as meter:
        began = clock()

        async def one(index: int, due: float) -> None:
            prompt, output = lengths.at(index, load.seed)
            body = target.body(target.prompt(index, prompt), output)
            done.append(await target.ask(body, due=due, prompt=prompt, output=output))

        telling = asyncio.ensure_future(_tell(done, load, began, say))
        try:
            await (_open(load, began, one) if load.rate is not None else _closed(load, began, one))
        finally:
            telling.cancel()
        duration = clock() - began
        late = [max(0.0, found.sent - found.due) for found in done] if load.rate is not None else None
        used = meter.load(late)
    return Serving(
        url=target.client.origin.url,
        model=target.model,
        load=load,
        lengths=lengths,
        slo=slo,
        refused=target.dialect.refused,
        measured=tuple(found.since(began) for found in done),
        duration_s=duration,
        client=used,
    )


async def _open(load: Load, began: float, one: Callable[[int, float], Awaitable[None]]) -> None:
    """Each at its time, whatever the server does."""
    sending: list[asyncio.Future[None]] = []
    for index, at in enumerate(load.times()):
        wait = began + at - clock()
        if wait > 0:
            await asyncio.sleep(wait)
        sending.append(asyncio.ensure_future(one(index, began + at)))
    await asyncio.gather(*sending)


async def _closed(load: Load, began: float, one: Callable[[int, float], Awaitable[None]]) -> None:
    """Always so many under way: the next when one has ended."""
    assert load.concurrency is not None
    numbers = itertools.count() if load.requests is None else iter(range(load.requests))

    async def again() -> None:
        for index in numbers:
            now = clock()
            if load.duration_s is not None and now - began >= load.duration_s:
                return
            await one(index, now)

    await asyncio.gather(*(again() for _ in range(load.concurrency)))


async def _tell(done: list[Measured], load: Load, began: float, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(TELL_S)
        failed = sum(1 for one in done if not one.ok)
        of = "" if load.requests is None else f" of {load.requests}"
        say(f"{clock() - began:.0f} s: {len(done)}{of} requests ended, {failed} of them failed")
