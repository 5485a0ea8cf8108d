"""The command `bench`: measures total latency and tokens/s of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from orchestrator.cli.app import FAILED, INTERRUPTED, FormatOption, app, option, switch
from orchestrator.cli.client import no_fleet, running_fleet
from orchestrator.cli.output import Format, say, show

KEYS = ("OPENAI_API_KEY", "COREWRIGHT_API_KEY")
DEFAULT_LENGTH = 1024


@app.command()
def bench(
    url: Annotated[
        str | None, option("URL", "URL of the server, with or without /v1.", default="the running fleet")
    ] = None,
    model: Annotated[str | None, option("NAME", "Name of the model.", default="the only model served")] = None,
    api_key: Annotated[str | None, option("KEY", "API key, sent as a bearer token.", default=" or ".join(KEYS))] = None,
    length: Annotated[
        int | None,
        option("N", "Total tokens of prompt and output.", default=f"{DEFAULT_LENGTH}, or the model's maximum", min=8),
    ] = None,
    batch: Annotated[str, option("N,...", "Number of concurrent requests; several values with commas.")] = "1",
    rounds: Annotated[int, option("N", "Number of rounds; the median is reported.", min=1, max=1000)] = 3,
    chat: Annotated[bool, switch("--chat", "Use /v1/chat/completions instead of /v1/completions.")] = False,
    timeout: Annotated[
        float, option("S", "Timeout of each request, in seconds.", "--timeout", min=0.1, max=86400)
    ] = 600.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure latency and tokens/s of any OpenAI-compatible server, for prompts of 25, 50 and 75 % of a length."""
    from orchestrator.bench.server import MeasuredServer, connected  # they import aiohttp, which `--help` does not need
    from orchestrator.bench.sweep import Sweep, sweep

    batches = [int(part) for part in batch.split(",") if part.isascii() and part.isdecimal() and 0 < len(part) < 5]
    if len(batches) != len(batch.split(",")) or 0 in batches:
        raise typer.BadParameter(f"{batch!r} is not a list of numbers such as 1,4", param_hint="--batch")
    key = api_key or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("must have printable ASCII characters only", param_hint="--api-key")
    target, address = _fleet() if url is None else (url, None)

    async def measure() -> Sweep:
        async with connected(target, key, address) as connection:
            server = await MeasuredServer.find(connection, model, chat=chat, timeout_s=timeout)
            total = length or min(DEFAULT_LENGTH, server.max_len or DEFAULT_LENGTH)
            return await sweep(server, total, list(dict.fromkeys(batches)), rounds, say)

    try:
        result = asyncio.run(measure())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    show(result, output, result.text())
    raise typer.Exit(0 if any(cell.good_rounds for cell in result.cells) else FAILED)


def _fleet() -> tuple[str, str | None]:
    """Returns the URL of the running fleet, and the address that replaces its host. Raises Failed."""
    record = running_fleet()
    if record is None:
        raise no_fleet("start one with `corewright up SPEC`, or pass --url URL")
    return record.url, record.nearby
