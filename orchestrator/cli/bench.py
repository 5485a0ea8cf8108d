"""The commands of `bench`: measure any OpenAI-compatible server from the client side."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrator.cli.app import FAILED, INTERRUPTED, FormatOption, group
from orchestrator.cli.output import Format, say, show
from orchestrator.process.failure import Failed

if TYPE_CHECKING:
    from orchestrator.bench.sweep import Sweep
    from orchestrator.bench.timed_http import Client
    from orchestrator.process.home import FleetRecord

T = TypeVar("T")
KEYS = ("OPENAI_API_KEY", "COREWRIGHT_API_KEY")
DEFAULT_REQUESTS = 100

app = group("bench", help="Measure any OpenAI-compatible server from the client side.")

UrlOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="URL of the server, with or without /v1.", show_default="the running fleet"),
]
ModelOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Name of the model.", show_default="the only model served")
]
KeyOption = Annotated[
    str | None, typer.Option(metavar="KEY", help="API key, sent as a bearer token.", show_default=" or ".join(KEYS))
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions instead of /v1/completions.")]
RequestTimeoutOption = Annotated[
    float, typer.Option("--timeout", min=0.1, max=86400, metavar="S", help="Timeout of each request, in seconds.")
]
SeedOption = Annotated[int, typer.Option(min=0, metavar="N", help="Random seed of arrivals, lengths and prompts.")]
LengthOption = Annotated[
    int | None,
    typer.Option(
        min=8, metavar="N", help="Total tokens of prompt and output.", show_default="1024, or the model's maximum"
    ),
]
BatchOption = Annotated[
    str, typer.Option(metavar="N,...", help="Number of concurrent requests; several values with commas.")
]
RoundsOption = Annotated[
    int, typer.Option(min=1, max=1000, metavar="N", help="Number of rounds; the median is reported.")
]


@app.command()
def latency(
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: KeyOption = None,
    length: LengthOption = None,
    batch: BatchOption = "1",
    rounds: RoundsOption = 3,
    chat: ChatOption = False,
    seed: SeedOption = 0,
    timeout: RequestTimeoutOption = 600.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure the time to the first token and to N tokens, for prompts of 25, 50 and 75 % of N."""
    from orchestrator.bench.report import latency_text

    result = _sweep(url, model, api_key, length, batch, rounds, chat, seed, timeout)
    show(result.as_dict(), output, latency_text(result))
    raise typer.Exit(_exit_code(result))


@app.command()
def throughput(
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: KeyOption = None,
    length: LengthOption = None,
    batch: BatchOption = "1",
    rounds: RoundsOption = 3,
    chat: ChatOption = False,
    seed: SeedOption = 0,
    timeout: RequestTimeoutOption = 600.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure tokens/s of the same runs: output tokens, and prompt and output tokens together."""
    from orchestrator.bench.report import throughput_text

    result = _sweep(url, model, api_key, length, batch, rounds, chat, seed, timeout)
    show(result.as_dict(), output, throughput_text(result))
    raise typer.Exit(_exit_code(result))


@app.command()
def serving(
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: KeyOption = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=100000, metavar="R", help="Requests/s (Poisson arrivals).", show_default="1"),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=100000, metavar="N", help="Keep N requests in flight, instead of --rate."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Number of requests.", show_default=f"{DEFAULT_REQUESTS}, or by --duration"
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="S", help="Seconds to send requests for; running requests then finish."),
    ] = None,
    lengths: Annotated[
        str,
        typer.Option(
            metavar="NAME|PROMPT:OUTPUT",
            help="Token lengths: chat (sampled from the Azure trace of 2023), or fixed, such as 512:128.",
        ),
    ] = "chat",
    max_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="Maximum tokens of prompt and output together; longer requests are cut.",
            show_default="the model's maximum",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=MS,itl=MS,e2e=MS",
            help="Latency objectives in milliseconds; requests that meet all are counted.",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML report with plots to FILE.")] = None,
    chat: ChatOption = False,
    seed: SeedOption = 0,
    timeout: RequestTimeoutOption = 600.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure latencies, throughput and goodput under a realistic load."""
    from orchestrator.bench.arrivals import Load
    from orchestrator.bench.goodput import Slo
    from orchestrator.bench.lengths import Lengths
    from orchestrator.bench.page import page
    from orchestrator.bench.report import serving_data, serving_text
    from orchestrator.bench.serving import Serving, serve
    from orchestrator.bench.target import Target

    if rate is not None and concurrency is not None:
        raise typer.BadParameter("cannot be combined with --rate", param_hint="--concurrency")
    if rate is None and concurrency is None:
        rate = 1.0
    if requests is None and duration is None:
        requests = DEFAULT_REQUESTS
    try:
        parsed_lengths = Lengths.parse(lengths)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lengths") from None
    try:
        objective = None if slo is None else Slo.parse(slo)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--slo") from None
    load = Load(rate, concurrency, requests, duration, seed)
    client = _client(url, api_key)

    async def run() -> Serving:
        target = await Target.find(client, model, chat=chat, seed=seed, timeout_s=timeout, say=say)
        limit = max_len or target.max_len
        capped = parsed_lengths if limit is None else parsed_lengths.within(limit)
        return await serve(target, load, capped, objective, say)

    result = _run(client, run())
    data = serving_data(result)
    show(data, output, serving_text(data))
    if html is not None:
        try:
            html.write_text(page(result, data), encoding="utf-8")
        except OSError as error:
            raise Failed("bench-page-unwritable", f"{html}: {error.strerror}", "pass another --html FILE") from None
        say(f"written to {html}")
    raise typer.Exit(0 if data["ok"] else FAILED)


def _sweep(
    url: str | None,
    model: str | None,
    api_key: str | None,
    length: int | None,
    batch: str,
    rounds: int,
    chat: bool,
    seed: int,
    timeout: float,
) -> Sweep:
    from orchestrator.bench.sweep import sweep
    from orchestrator.bench.target import Target

    batches = [int(part) for part in batch.split(",") if part.isascii() and part.isdecimal() and 0 < len(part) < 5]
    if len(batches) != len(batch.split(",")) or 0 in batches:
        raise typer.BadParameter(f"{batch!r} is not a list of numbers such as 1,4", param_hint="--batch")
    client = _client(url, api_key)

    async def run() -> Sweep:
        target = await Target.find(client, model, chat=chat, seed=seed, timeout_s=timeout, say=say)
        reach = length or min(1024, target.max_len or 1024)
        return await sweep(target, reach, list(dict.fromkeys(batches)), rounds, say)

    return _run(client, run())


def _client(url: str | None, api_key: str | None) -> Client:
    from orchestrator.bench.target import origin
    from orchestrator.bench.timed_http import Client

    key = api_key or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("must have printable ASCII characters only", param_hint="--api-key")
    if url is not None:
        return Client(origin(url), key)
    record = _fleet_record()
    return Client(origin(record.url), key, record.nearby)


def _fleet_record() -> FleetRecord:
    from orchestrator.process.home import Home, daemon_alive

    home = Home.from_environment()
    record = home.read_record()
    if record is None or not daemon_alive(record):
        message = f"no fleet is running ({home.record_file} is missing or stale)"
        raise Failed("no-fleet", message, "start one with `corewright up SPEC`, or pass --url URL")
    return record


def _run(client: Client, work: Coroutine[Any, Any, T]) -> T:
    import uvloop

    async def closing() -> T:
        try:
            return await work
        finally:
            client.close()

    try:
        return uvloop.run(closing())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _exit_code(sweep: Sweep) -> int:
    return 0 if any(cell.good for cell in sweep.cells) else FAILED
