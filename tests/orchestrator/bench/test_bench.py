"""`bench` against a server that is played, and against a gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.bench.arrivals import Load
from orchestrator.bench.lengths import Lengths
from orchestrator.bench.report import serving_data
from orchestrator.bench.serving import Serving, serve
from orchestrator.bench.sweep import Sweep, sweep
from orchestrator.bench.target import Target
from orchestrator.bench.timed_http import Client, Origin
from orchestrator.cli.main import run
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord, Home
from tests.orchestrator.certificates import Authority
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.played import Exchange, Play, PlayedServer, playing, prompt_tokens, whole
from tests.served import Served

GAPS = (0.03, 0.02, 0.05, 0.01)
SOON_S = 5.0


def quiet(line: str) -> None: ...


@asynccontextmanager
async def target_of(server: PlayedServer, **how: Any) -> AsyncIterator[Target]:
    client = Client(Origin.parse(server.url), how.pop("key", None))
    settings = {"model": None, "chat": False, "seed": 0, "timeout_s": SOON_S, "say": quiet, **how}
    try:
        yield await Target.find(client, settings.pop("model"), **settings)
    finally:
        client.close()


async def served(play: Play, load: Load, lengths: str = "8:4", **how: Any) -> tuple[Serving, PlayedServer]:
    """A run against a server that begins to play when the target is found."""
    async with playing() as server, target_of(server, **how) as target:
        server.play = play
        server.seen.clear()
        return await serve(target, load, Lengths.parse(lengths), None, quiet), server


def closed(requests: int, concurrency: int = 1) -> Load:
    return Load(None, concurrency, requests, None)


# What is measured is what the server did


async def test_times_match_those_of_the_server() -> None:
    """Each chunk is received after it was written and before the next one was: both sides share a clock and a loop."""

    async def play(exchange: Exchange) -> None:
        await whole(exchange, GAPS)

    async with playing() as server, target_of(server) as target:
        server.play = play
        answers = [await target.ask(target.body([40, 41], 4), due=0.0, prompt=2, output=4) for _ in range(3)]

    for answer, exchange in zip(answers, server.seen[-3:], strict=True):
        assert answer.ended is not None
        times = [t for pair in zip(exchange.wrote, answer.chunks, strict=True) for t in pair]
        assert times == sorted(times)
        assert answer.sent <= exchange.read_at
        assert answer.chunks[-1] <= answer.ended
        assert answer.ttft_s == pytest.approx(answer.chunks[0] - answer.sent)
        assert answer.ttft_s >= GAPS[0]  # type: ignore[operator]
        assert answer.e2e_s >= sum(GAPS)  # type: ignore[operator]


async def test_connections_are_reused() -> None:
    """There is one for each concurrent request, not one for each request."""
    result, server = await served(whole, closed(12, concurrency=3))
    assert all(request.ok for request in result.measured)
    assert server.connections <= 4  # one of the search for the target is used again


async def test_an_idle_connection_closed_by_the_server_costs_no_request() -> None:
    """It is opened again."""

    async def play(exchange: Exchange) -> None:
        await whole(exchange)
        exchange.writer.close()  # without a word of it in the head

    result, server = await served(play, closed(5))
    assert [request.error for request in result.measured] == [None] * 5
    assert server.connections >= 5


async def test_an_open_loop_sends_on_schedule_regardless_of_the_server() -> None:
    """All requests are in flight when the first is answered."""
    all_here = asyncio.Event()

    async def play(exchange: Exchange) -> None:
        under_way.append(exchange)
        if len(under_way) == 8:
            all_here.set()
        await all_here.wait()
        await whole(exchange)

    under_way: list[Exchange] = []
    load = Load(200.0, None, 8, None, seed=3)
    result, _ = await served(play, load)

    assert len(under_way) == 8
    assert sorted(request.due for request in result.measured) == pytest.approx(load.times())
    assert all(request.sent >= request.due - 0.002 for request in result.measured)


async def test_a_closed_loop_never_exceeds_its_concurrency() -> None:
    """And always reaches it while requests are left."""
    now, most = 0, 0

    async def play(exchange: Exchange) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await whole(exchange, (0.005,))
        now -= 1

    result, _ = await served(play, closed(20, concurrency=4))
    assert (most, len(result.measured)) == (4, 20)


async def test_a_duration_ends_a_load_after_the_running_requests() -> None:
    """No answer is discarded."""

    async def play(exchange: Exchange) -> None:
        await whole(exchange, (0.05,))

    result, server = await served(play, Load(None, 2, None, 0.2))
    assert len(result.measured) == len(server.seen) >= 2
    assert all(request.ok and request.due < result.measured[0].due + 0.2 for request in result.measured)


async def test_several_tokens_in_a_chunk_are_counted_by_the_server() -> None:
    """Two chunks, six tokens: usage decides."""

    async def play(exchange: Exchange) -> None:
        exchange.begin()
        await exchange.text("abc")
        await exchange.text("def", "length")
        await exchange.end(6)

    result, _ = await served(play, closed(1))
    data = serving_data(result)
    assert (data["output_tokens"], data["tokens_per_chunk"]) == (6, 3.0)
    assert data["itl_ms"]["count"] == 1


# What goes wrong


async def breaks(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.text("x")
    exchange.writer.transport.abort()


async def is_silent(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.text("x")
    await asyncio.Event().wait()


async def refuses(exchange: Exchange) -> None:
    await exchange.json({"error": {"message": "full"}}, 429)


async def stops_early(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.text("x")
    exchange.writer.write(b"0\r\n\r\n")


async def is_no_http(exchange: Exchange) -> None:
    exchange.writer.write(b"hello\r\n\r\n")
    exchange.writer.close()


async def dies(exchange: Exchange) -> None:
    exchange.begin()
    await exchange.text("x")
    await exchange.event({"error": {"message": "engine died"}})
    await exchange.end()


@pytest.mark.parametrize(
    ("play", "kind"),
    [
        (breaks, "broken"),
        (is_silent, "timeout"),
        (refuses, "http-429"),
        (stops_early, "cut-off"),
        (is_no_http, "malformed"),
        (dies, "stream-error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_failures_are_counted_and_the_other_requests_measured(play: Play, kind: str) -> None:
    """Every second request fails in a different way; none hangs, and the figures are those of the others."""

    async def half(exchange: Exchange) -> None:
        number = next(numbers)
        await (play(exchange) if number % 2 else whole(exchange))

    numbers = itertools.count()
    result, _ = await asyncio.wait_for(served(half, closed(6, concurrency=6), timeout_s=1.0), 4 * SOON_S)
    data = serving_data(result)
    assert (data["ok"], data["errors"]) == (3, {kind: 3})
    assert data["ttft_ms"]["count"] == 3


async def test_a_server_that_exits_is_counted_as_failures() -> None:
    """It exits between two requests."""
    async with playing() as server, target_of(server) as target:
        target.client.origin = Origin("127.0.0.1", 1, False, "")
        target.client.close()
        result = await serve(target, closed(3), Lengths.parse("8:4"), None, quiet)
    assert serving_data(result)["errors"] == {"connect": 3}


# What a server takes


def refusing(*names: str) -> Play:
    """A server that does not know these fields, and takes text only if "token_ids" is among them."""

    async def play(exchange: Exchange) -> None:
        fields = exchange.asked
        if exchange.path.endswith("/tokenize"):
            await exchange.json({"error": {"message": "no route"}}, 404)
        elif set(names) & fields.keys() or ("token_ids" in names and isinstance(fields.get("prompt"), list)):
            await exchange.json({"error": {"message": "unknown field"}}, 400)
        else:
            await whole(exchange)

    return play


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("min_tokens",),
        ("ignore_eos",),
        ("stream_options",),
        ("token_ids",),
        ("min_tokens", "ignore_eos"),
        ("ignore_eos", "token_ids"),
        ("min_tokens", "ignore_eos", "stream_options", "token_ids"),
    ],
    ids=",".join,
)
async def test_fields_that_a_server_rejects_are_omitted_and_reported(names: tuple[str, ...]) -> None:
    """Only the field that causes the rejection."""
    lines: list[str] = []
    async with playing(refusing(*names)) as server, target_of(server, say=lines.append) as target:
        result = await serve(target, closed(2), Lengths.parse("30:4"), None, quiet)
    assert all(request.ok for request in result.measured)
    words = {"stream_options": "stream_options", "token_ids": "token ids"}
    for name in names:
        assert any(line.startswith(f"the server refuses {words.get(name, name)}") for line in lines), lines
    assert len(result.refused) == len(lines) == len(names)


async def test_texts_have_the_requested_length_as_counted_by_the_server() -> None:
    """Without token ids: one token for each word here, and one for the start."""
    async with playing(refusing("token_ids")) as server, target_of(server) as target:
        prompt, tokens = await target.exact_prompt(0, 77)
        assert tokens == 77
        assert prompt_tokens({"prompt": prompt}) == 77
        await target.ask(target.body(target.prompt(1, 50), 2), due=0.0, prompt=50, output=2)
        assert prompt_tokens(server.seen[-1].asked) == 50


async def test_a_chat_has_the_requested_length_including_its_template() -> None:
    """By `/tokenize` if the server has it."""

    async def play(exchange: Exchange) -> None:
        if exchange.path == "/tokenize":
            await exchange.json({"count": prompt_tokens(exchange.asked)})
        else:
            await whole(exchange)

    async with playing(play) as server, target_of(server, chat=True) as target:
        prompt, tokens = await target.exact_prompt(0, 77)
    assert tokens == prompt_tokens({"messages": [{"content": prompt}]}) == 77
    assert [exchange.path for exchange in server.seen].count("/tokenize") >= 3


async def test_a_text_is_searched_for_if_words_differ_in_their_tokens() -> None:
    """Every seventh word beyond the hundredth has two tokens: a line through two measurements misses."""

    async def play(exchange: Exchange) -> None:
        words = prompt_tokens(exchange.asked)
        if exchange.path == "/tokenize":
            await exchange.json({"count": words + max(0, words - 100) // 7})
        else:
            await refusing("token_ids")(exchange)

    async with playing(play) as server, target_of(server) as target:
        for wanted in (50, 301, 998, 1003):
            prompt, tokens = await target.exact_prompt(0, wanted)
            words = prompt_tokens({"prompt": prompt})
            assert tokens == words + max(0, words - 100) // 7
            assert abs(tokens - wanted) <= 1


async def test_a_text_without_an_exact_length_is_close_and_reported() -> None:
    """Three tokens for each word."""

    async def play(exchange: Exchange) -> None:
        if exchange.path == "/tokenize":
            await exchange.json({"count": 3 * prompt_tokens(exchange.asked)})
        else:
            await refusing("token_ids")(exchange)

    async with playing(play) as server, target_of(server) as target:
        _, tokens = await target.exact_prompt(0, 100)
    assert tokens in (99, 102)


@pytest.mark.parametrize(
    ("models", "model", "id"),
    [([], None, "bench-model-unknown"), (["a", "b"], None, "bench-model-unknown"), (["a"], "b", "bench-model-unknown")],
)
async def test_an_ambiguous_model_is_reported_with_the_available_models(
    models: list[str], model: str | None, id: str
) -> None:
    async with playing(models=[{"id": name} for name in models]) as server:
        with pytest.raises(Failed) as failed:
            async with target_of(server, model=model):
                pass
    assert failed.value.problem.id == id


async def test_a_key_is_sent_as_a_bearer_token_and_its_rejection_reported() -> None:
    async def play(exchange: Exchange) -> None:
        if exchange.headers.get("authorization") == "Bearer right":
            await whole(exchange)
        else:
            await exchange.json({"error": {"message": "who are you"}}, 401)

    async with playing(play) as server:
        async with target_of(server, key="right"):
            pass
        with pytest.raises(Failed) as failed:
            async with target_of(server, key="wrong"):
                pass
    assert failed.value.problem.id == "bench-refused"
    assert "401: who are you" in failed.value.problem.what


async def test_a_servers_certificate_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authorities of SSL_CERT_FILE, if it is set."""
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    async with playing(tls=tls) as server:
        with pytest.raises(Failed) as failed:
            async with target_of(server):
                pass
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        async with target_of(server) as target:
            result = await serve(target, closed(4, concurrency=2), Lengths.parse("8:4"), None, quiet)
    assert failed.value.problem.id == "bench-unreachable"
    assert "certificate" in failed.value.problem.what
    assert [request.error for request in result.measured] == [None] * 4


async def test_a_server_that_counts_no_tokens_is_an_error() -> None:
    """The length of a text is unknown then."""

    async def play(exchange: Exchange) -> None:
        if exchange.asked.get("stream"):
            await refusing("token_ids")(exchange)
        else:
            await exchange.json({"choices": []}, 200)

    async with playing(play) as server:
        with pytest.raises(Failed) as failed:
            async with target_of(server):
                pass
    assert failed.value.problem.id == "bench-refused"


# The table of the page


async def swept(play: Play, length: int = 16, batches: tuple[int, ...] = (1, 3)) -> tuple[Sweep, PlayedServer]:
    async with playing() as server, target_of(server) as target:
        server.play = play
        server.seen.clear()
        return await sweep(target, length, batches, 2, quiet), server


async def test_a_sweep_sends_exactly_the_requested_lengths() -> None:
    """A quarter, a half, three quarters, each with the rest as output."""
    result, server = await swept(whole)
    sent = [(len(exchange.asked["prompt"]), exchange.asked["max_tokens"]) for exchange in server.seen]
    assert sent == [pair for batch in (1, 3) for pair in [(4, 12), (8, 8), (12, 4)] for _ in range(2 * batch)]
    assert [(cell.batch, cell.share, len(cell.good)) for cell in result.cells] == [
        (batch, share, 2) for batch in (1, 3) for share in (25, 50, 75)
    ]
    assert [cell.output_tokens for cell in result.cells] == [12, 8, 4, 12, 8, 4]


async def test_the_latency_of_a_batch_is_that_of_its_slowest_request() -> None:
    """From before the first request is read until after the last answer is written."""

    async def play(exchange: Exchange) -> None:
        await whole(exchange, (0.04 if len(server_seen) % 3 == 0 else 0.0,))

    server_seen: list[int] = []

    async def numbered(exchange: Exchange) -> None:
        server_seen.append(1)
        await play(exchange)

    result, server = await swept(numbered, batches=(3,))
    for cell, begun in zip(result.cells, range(0, 18, 6), strict=True):
        for number, each in enumerate(cell.rounds):
            three = server.seen[begun + 3 * number : begun + 3 * number + 3]
            took = max(request.wrote[-1] for request in three) - min(request.read_at for request in three)
            assert max(took, 0.04) <= each.latency_s <= took + SOON_S / 10


async def test_answers_that_end_early_are_counted_with_their_actual_tokens() -> None:
    """The rate is that of the received tokens."""

    async def play(exchange: Exchange) -> None:
        exchange.begin()
        await exchange.text("a")
        await exchange.text("b", "stop")
        await exchange.end(2)

    result, _ = await swept(play, batches=(1,))
    assert [cell.output_tokens for cell in result.cells] == [2, 2, 2]
    cell = result.cells[0]
    assert cell.throughput == pytest.approx(sum(2 / each.latency_s for each in cell.rounds) / 2)


# The commands


@contextmanager
def in_background(play: Play = whole, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """A played server in a thread of its own; gives its URL."""
    ready, over = threading.Event(), threading.Event()
    url: list[str] = []

    async def live() -> None:
        async with playing(play, tls) as server:
            url.append(server.url)
            ready.set()
            await asyncio.to_thread(over.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(10)
    try:
        yield url[0]
    finally:
        over.set()
        thread.join(10)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_API_KEY", "COREWRIGHT_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_serving_prints_data_on_stdout_and_progress_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON as documented, a page beside it."""
    with in_background() as url:
        arguments = ["--concurrency", "4", "--requests", "8", "--lengths", "8:4", "--slo", "ttft=5000"]
        page = tmp_path / "page.html"
        assert run(["bench", "serving", "--url", f"{url}/v1", *arguments, "--html", str(page), "-o", "json"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert (data["ok"], data["output_tokens"], data["goodput"]["share"]) == (8, 32, 1.0)
    assert printed.err.endswith(f"written to {page}\n")
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_a_sweep_has_a_table_and_yaml(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same data in both."""
    with in_background() as url:
        arguments = ["bench", command, "--url", url, "--length", "16", "--rounds", "1", "--batch", "1,2"]
        assert run(arguments) == 0
        table = capsys.readouterr().out
        assert run([*arguments, "-o", "yaml"]) == 0
    data = yaml.safe_load(capsys.readouterr().out)
    assert "BATCH  25 % (4 tokens)" in table
    assert ("with prompt tokens" in table) == (command == "throughput")
    assert [(cell["batch"], cell["counted_output_tokens"]) for cell in data["cells"]] == [
        (batch, tokens) for batch in (1, 2) for tokens in (12.0, 8.0, 4.0)
    ]


def test_a_run_with_failures_only_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are still printed to stdout."""
    numbers = itertools.count()

    async def play(exchange: Exchange) -> None:
        await (whole(exchange) if next(numbers) == 0 else refuses(exchange))

    with in_background(play) as url:
        assert run(["bench", "serving", "--url", url, "--concurrency", "1", "--requests", "3", "--lengths", "8:4"]) == 1
    assert "3 failed (http-429: 3)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["latency"], 1, "no-fleet"),
        (["latency", "--url", "localhost"], 1, "bench-url-wrong"),
        (["latency", "--url", "http://127.0.0.1:1"], 1, "bench-unreachable"),
        (["serving", "--url", "http://h", "--rate", "1", "--concurrency", "1"], 64, "--concurrency"),
        (["serving", "--url", "http://h", "--lengths", "x"], 64, "--lengths"),
        (["serving", "--url", "http://h", "--slo", "x"], 64, "--slo"),
        (["latency", "--url", "http://h", "--batch", "1,x"], 64, "--batch"),
        (["latency", "--url", "http://h", "--api-key", "a\nb"], 64, "--api-key"),
    ],
)
def test_an_impossible_measurement_is_reported(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is sent."""
    assert run(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


def test_an_unwritable_page_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder does not exist."""
    with in_background() as url:
        arguments = ["--url", url, "--concurrency", "1", "--requests", "1", "--lengths", "8:4"]
        assert run(["bench", "serving", *arguments, "--html", str(tmp_path / "no" / "p.html")]) == 1
    assert "bench-page-unwritable" in capsys.readouterr().err


def test_the_client_imports_nothing_heavy() -> None:
    """It measures from its start on: no Ray, no torch and no web server."""
    script = (
        "import sys, orchestrator.cli.main as m\n"
        "m.run(['bench', 'serving', '--url', 'http://127.0.0.1:1'])\n"
        "print(*sorted({'ray', 'torch', 'numpy', 'starlette', 'transformers', 'httpx'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "bench-unreachable" in done.stderr
    assert done.stdout == "\n"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPENAI_API_KEY before COREWRIGHT_API_KEY, the option before both."""
    keys: list[str | None] = []

    async def play(exchange: Exchange) -> None:
        keys.append(exchange.headers.get("authorization"))
        await whole(exchange)

    with in_background(play) as url:
        arguments = ["bench", "latency", "--url", url, "--length", "8", "--rounds", "1"]
        monkeypatch.setenv("COREWRIGHT_API_KEY", "ours")
        run(arguments)
        monkeypatch.setenv("OPENAI_API_KEY", "theirs")
        run(arguments)
        run([*arguments, "--api-key", "given"])
    assert list(dict.fromkeys(keys)) == ["Bearer ours", "Bearer theirs", "Bearer given"]


def test_a_gateway_accepts_every_field_and_returns_complete_answers(
    gateway: LiveGateway, replica: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    """The running fleet's address is the default; token ids, ignore_eos, min_tokens and usage are all accepted."""
    gateway.serve(routes("parrot", replica(slots=4)))
    arguments = ["--url", gateway.url, "--concurrency", "6", "--requests", "20", "--max-len", "200"]
    assert run(["bench", "serving", *arguments, "-o", "json"]) == 0
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert (data["ok"], data["refused"], data["short_answers"]) == (20, [], 0)
    assert data["lengths"]["capped"] > 0
    assert "refuses" not in printed.err


def record_of(url: str, **more: Any) -> FleetRecord:
    return FleetRecord(
        fleet="f",
        name="n",
        url=url,
        admin_url="",
        token="",
        dashboard_url=None,
        ray_address="",
        pid=1,
        started=0.0,
        version="",
        **more,
    )


@contextmanager
def running(record: FleetRecord, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if an `up` had written it down."""
    home = Home.from_environment()
    home.path.mkdir(parents=True)
    home.write_record(record)
    monkeypatch.setattr("orchestrator.cli.client.daemon_alive", lambda record: True)
    yield


def test_the_fleets_own_address_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As written by `up`."""
    with in_background() as url, running(record_of(url), monkeypatch):
        assert run(["bench", "latency", "--length", "8", "--rounds", "1"]) == 0


def test_a_fleet_on_all_addresses_is_reached_by_the_name_of_its_certificate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On loopback: here that name may resolve to another address, or to none."""
    authority = Authority(tmp_path)
    pair = authority.sign("server", hosts=["fleet.example"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with in_background(tls=tls) as url:
        record = record_of(url.replace("127.0.0.1", "fleet.example"), listens="0.0.0.0")
        with running(record, monkeypatch):
            assert run(["bench", "latency", "--length", "8", "--rounds", "1"]) == 0
