"""The commands of `bench`: measure any OpenAI-compatible server from the client side."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
import uvloop

from orchestrator.bench import report
from orchestrator.bench.arrivals import Load
from orchestrator.bench.encoding import ROUTES, Encoding, Texts, encode, encoding_data
from orchestrator.bench.goodput import Slo
from orchestrator.bench.lengths import Lengths
from orchestrator.bench.page import page
from orchestrator.bench.serving import Serving, serve
from orchestrator.bench.sweep import Sweep, sweep
from orchestrator.bench.target import Target, origin
from orchestrator.bench.timed_http import Client
from orchestrator.cli.app import FAILED, INTERRUPTED, FormatOption, HtmlOption, LengthsOption, bad_parameter, group
from orchestrator.cli.client import no_fleet, running_fleet
from orchestrator.cli.output import Format, say, show
from orchestrator.process.failure import Failed

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
RateOption = Annotated[
    float | None,
    typer.Option(min=0.001, max=100000, metavar="R", help="Requests/s (Poisson arrivals).", show_default="1"),
]
ConcurrencyOption = Annotated[
    int | None, typer.Option(min=1, max=100000, metavar="N", help="Keep N requests in flight, instead of --rate.")
]
RequestsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of requests.", show_default=f"{DEFAULT_REQUESTS}, or by --duration"),
]
DurationOption = Annotated[
    float | None,
    typer.Option(min=0.1, metavar="S", help="Seconds to send requests for; running requests then finish."),
]
MaxLenOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Maximum tokens of prompt and output together; longer requests are cut.",
        show_default="the model's maximum",
    ),
]
SloOption = Annotated[
    str | None,
    typer.Option(
        metavar="ttft=MS,itl=MS,e2e=MS", help="Latency objectives in milliseconds; requests that meet all are counted."
    ),
]
RouteOption = Annotated[
    str, typer.Option(metavar="NAME", help="Route to send to: embeddings, rerank, score or classify.")
]
InputsOption = Annotated[
    int, typer.Option(min=1, max=2048, metavar="N", help="Inputs of each request; documents of one query with rerank.")
]
WordsOption = Annotated[
    str, typer.Option(metavar="LEAST:MOST", help="Words of each input, drawn evenly; the server counts the tokens.")
]
RoundsOption = Annotated[
    int, typer.Option(min=1, max=1000, metavar="N", help="Number of rounds; the median is reported.")
]


def _sweep_command(name: str, doc: str) -> None:
    """Adds a command that sweeps batch sizes and shows the results with `report.<name>_text`."""

    def command(
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
        batches = [int(part) for part in batch.split(",") if part.isascii() and part.isdecimal() and 0 < len(part) < 5]
        if len(batches) != len(batch.split(",")) or 0 in batches:
            raise typer.BadParameter(f"{batch!r} is not a list of numbers such as 1,4", param_hint="--batch")

        async def measure(target: Target) -> Sweep:
            reach = length or min(1024, target.max_len or 1024)
            return await sweep(target, reach, list(dict.fromkeys(batches)), rounds, say)

        result = _measured(measure, url, api_key, model, chat=chat, seed=seed, timeout_s=timeout)
        text = {"latency": report.latency_text, "throughput": report.throughput_text}[name]
        show(result.as_dict(), output, text(result))
        raise typer.Exit(0 if any(cell.good for cell in result.cells) else FAILED)

    app.command(name, help=doc)(command)


_sweep_command("latency", "Measure the time to the first token and to N tokens, for prompts of 25, 50 and 75 % of N.")
_sweep_command("throughput", "Measure tokens/s of the same runs: output tokens, and prompt and output tokens together.")


@app.command()
def serving(
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: KeyOption = None,
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    requests: RequestsOption = None,
    duration: DurationOption = None,
    lengths: LengthsOption = "chat",
    max_len: MaxLenOption = None,
    slo: SloOption = None,
    html: HtmlOption = None,
    chat: ChatOption = False,
    seed: SeedOption = 0,
    timeout: RequestTimeoutOption = 600.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure latencies, throughput and goodput under a realistic load."""
    load = _load(rate, concurrency, requests, duration, seed)
    with bad_parameter("--lengths"):
        parsed_lengths = Lengths.parse(lengths)
    with bad_parameter("--slo"):
        objective = None if slo is None else Slo.parse(slo)

    async def measure(target: Target) -> Serving:
        limit = max_len or target.max_len
        capped = parsed_lengths if limit is None else parsed_lengths.within(limit)
        return await serve(target, load, capped, objective, say)

    result = _measured(measure, url, api_key, model, chat=chat, seed=seed, timeout_s=timeout)
    data = report.serving_data(result)
    show(data, output, report.serving_text(data))
    if html is not None:
        try:
            html.write_text(page(result, data), encoding="utf-8")
        except OSError as error:
            raise Failed("bench-page-unwritable", f"{html}: {error.strerror}", "pass another --html FILE") from None
        say(f"written to {html}")
    raise typer.Exit(0 if data["ok"] else FAILED)


@app.command()
def encoding(
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: KeyOption = None,
    route: RouteOption = "embeddings",
    rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    requests: RequestsOption = None,
    duration: DurationOption = None,
    inputs: InputsOption = 1,
    words: WordsOption = "8:128",
    seed: SeedOption = 0,
    timeout: RequestTimeoutOption = 600.0,
    output: FormatOption = Format.TABLE,
) -> None:
    """Measure items/s and latencies of embeddings, reranking or classification."""
    if route not in ROUTES:
        raise typer.BadParameter(f"{route!r} is not one of {', '.join(ROUTES)}", param_hint="--route")
    load = _load(rate, concurrency, requests, duration, seed)
    with bad_parameter("--words"):
        texts = Texts.parse(inputs, words)

    async def measure(client: Client) -> Encoding:
        return await encode(client, model, route, texts, load, timeout, say)

    data = encoding_data(_with_client(measure, url, api_key))
    show(data, output, report.encoding_text(data))
    raise typer.Exit(0 if data["ok"] else FAILED)


def _load(rate: float | None, concurrency: int | None, requests: int | None, duration: float | None, seed: int) -> Load:
    if rate is not None and concurrency is not None:
        raise typer.BadParameter("cannot be combined with --rate", param_hint="--concurrency")
    if rate is None and concurrency is None:
        rate = 1.0
    if requests is None and duration is None:
        requests = DEFAULT_REQUESTS
    return Load(rate, concurrency, requests, duration, seed)


def _measured(
    measure: Callable[[Target], Awaitable[T]], url: str | None, api_key: str | None, model: str | None, **how: Any
) -> T:
    """Returns the result of ``measure`` on the model at ``url``; exits after Ctrl-C."""

    async def found(client: Client) -> T:
        return await measure(await Target.find(client, model, say=say, **how))

    return _with_client(found, url, api_key)


def _with_client(measure: Callable[[Client], Awaitable[T]], url: str | None, api_key: str | None) -> T:
    """Returns the result of ``measure``; exits after Ctrl-C."""
    client = _client(url, api_key)

    async def run() -> T:
        try:
            return await measure(client)
        finally:
            client.close()

    try:
        return uvloop.run(run())
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _client(url: str | None, api_key: str | None) -> Client:
    key = api_key or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter("must have printable ASCII characters only", param_hint="--api-key")
    if url is not None:
        return Client(origin(url), key)
    record = running_fleet()
    if record is None:
        raise no_fleet("start one with `corewright up SPEC`, or pass --url URL")
    return Client(origin(record.url), key, record.nearby)
