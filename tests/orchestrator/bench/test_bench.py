"""`bench` measures the total latency and the tokens/s of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
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

from orchestrator.bench.server import MeasuredServer, TokenUsage, connected
from orchestrator.bench.sweep import Cell, Round, Sweep, sweep
from orchestrator.cli.main import run
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord, Home
from tests.orchestrator.certificates import Authority
from tests.orchestrator.fleet_records import fleet_record
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.played import Exchange, Play, PlayedServer, answer, playing, prompt_tokens, whole
from tests.served import Served

GOLDEN = Path(__file__).parents[2] / "golden" / "cli" / "bench.txt"
SIZING = 5  # requests that find the prompts of the three shares, before the first is measured
SOON_S = 5.0


def quiet(line: str) -> None: ...


@asynccontextmanager
async def found(server: PlayedServer, key: str | None = None, **how: Any) -> AsyncIterator[MeasuredServer]:
    settings = {"model": None, "chat": False, "timeout_s": SOON_S, **how}
    async with connected(server.url, key) as connection:
        yield await MeasuredServer.find(connection, settings.pop("model"), **settings)


async def swept(
    play: Play, length: int = 16, batches: tuple[int, ...] = (1, 3), **how: Any
) -> tuple[Sweep, list[Exchange]]:
    """The sweep of a server that is played, and the requests of its measurement."""
    async with playing() as server, found(server, **how) as target:
        server.seen.clear()

        async def sized(exchange: Exchange) -> None:
            await (whole if len(server.seen) <= SIZING else play)(exchange)

        server.play = sized
        return await sweep(target, length, batches, 2, quiet), server.seen[SIZING:]


# What is measured


@pytest.mark.parametrize("chat", [False, True])
async def test_a_sweep_sends_exactly_the_requested_lengths(chat: bool) -> None:
    """A quarter, a half, three quarters, each with the rest as output; a chat's template counts."""
    result, seen = await swept(whole, chat=chat)
    sent = [(prompt_tokens(exchange.asked), exchange.asked["max_tokens"]) for exchange in seen]
    assert sent == [pair for batch in (1, 3) for pair in [(4, 12), (8, 8), (12, 4)] for _ in range(2 * batch)]
    assert [(cell.batch, cell.percent, cell.good_rounds) for cell in result.cells] == [
        (batch, share, 2) for batch in (1, 3) for share in (25, 50, 75)
    ]
    assert [cell.counted_output_tokens for cell in result.cells] == [12, 8, 4, 12, 8, 4]


async def test_a_prompt_whose_words_have_several_tokens_is_close_and_the_output_fills_the_length() -> None:
    """Three tokens for each word."""

    async def play(exchange: Exchange) -> None:
        await answer(exchange, exchange.asked["max_tokens"], 3 * prompt_tokens(exchange.asked))

    async with playing(play) as server, found(server) as target:
        result = await sweep(target, 100, [1], 1, quiet)
    assert [(cell.prompt_tokens, cell.output_tokens) for cell in result.cells] == [(24, 76), (51, 49), (75, 25)]


async def test_prompts_have_no_common_prefix() -> None:
    """A prefix cache would falsify the measurement."""
    async with playing() as server, found(server) as target:
        for _ in range(100):
            await target.complete(16, 1)
    assert len({exchange.asked["prompt"] for exchange in server.seen[-100:]}) == 100


async def test_the_requests_of_a_batch_are_sent_together() -> None:
    """None is answered before all are there."""
    here, all_here = 0, asyncio.Event()

    async def play(exchange: Exchange) -> None:
        nonlocal here
        here += 1
        if here % 3 == 0:
            all_here.set()
        await all_here.wait()
        await whole(exchange)

    result, _ = await asyncio.wait_for(swept(play, batches=(3,)), SOON_S)
    assert [cell.good_rounds for cell in result.cells] == [2, 2, 2]


async def test_the_latency_of_a_batch_is_that_of_its_slowest_request() -> None:
    """From before the first request is read until after the last answer is written."""
    numbers: list[int] = []

    async def play(exchange: Exchange) -> None:
        numbers.append(1)
        await asyncio.sleep(0.04 if len(numbers) % 3 == 0 else 0.0)
        await whole(exchange)

    result, _ = await swept(play, batches=(3,))
    assert all(0.04 <= (cell.latency_s or 0.0) <= SOON_S / 10 for cell in result.cells)


async def test_answers_that_end_early_are_counted_with_their_actual_tokens() -> None:
    async def play(exchange: Exchange) -> None:
        await answer(exchange, 2)

    result, _ = await swept(play, batches=(1,))
    assert result.cells[0].counted_output_tokens == 2
    assert "batch of 1, 25 %: 2 of the 12 requested tokens were generated" in result.text()


def completed(prompt: int, output: int, latency_s: float, batch: int = 1, error: str | None = None) -> Round:
    return Round(latency_s, batch * prompt, batch * output, () if error is None else (error,) * batch)


@pytest.mark.parametrize(("output", "rate", "page_rate"), [(768, 115, 153), (67, 10, 48)])
def test_the_pages_rows_follow_from_its_definition(output: int, rate: float, page_rate: float) -> None:
    """Its "7B - latency": 6.7 s from 256 to 1024 tokens are 153 t/s there, and 115 output tokens/s. Of an answer that
    ends early, the actual tokens count."""
    cell = Cell.of(25, 256, 768, 1, [completed(256, output, 6.7)])
    assert cell.page_tokens_per_s == pytest.approx(page_rate, abs=0.5)
    assert cell.output_tokens_per_s == pytest.approx(rate, abs=0.5)


def test_the_table_has_medians_of_the_successful_rounds() -> None:
    """A batch's tokens add up; 48 tokens in 4.8 s are 10 tokens/s. What a reader must know stands below."""

    def cell(share: int, batch: int, latency_s: float, error: str | None = None) -> Cell:
        prompt = 64 * share // 100
        rounds = [completed(prompt, 64 - prompt, took, batch, error) for took in (latency_s, 9 * latency_s, latency_s)]
        return Cell.of(share, prompt, 64 - prompt, batch, rounds)

    result = Sweep(
        "http://h:1",
        "parrot",
        64,
        3,
        ("min_tokens",),
        (cell(25, 1, 4.8), cell(50, 1, 3.2), cell(25, 4, 6.0), cell(50, 4, 4.0, "http-500: engine died")),
    )
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(result.text() + "\n")
    assert result.text() + "\n" == GOLDEN.read_text()


# What goes wrong


async def breaks(exchange: Exchange) -> None:
    exchange.writer.transport.abort()


async def is_silent(exchange: Exchange) -> None:
    await asyncio.Event().wait()


async def refuses(exchange: Exchange) -> None:
    await exchange.json({"error": {"message": "full"}}, 429)


async def is_no_http(exchange: Exchange) -> None:
    exchange.writer.write(b"hello\r\n\r\n")
    exchange.writer.close()


async def counts_nothing(exchange: Exchange) -> None:
    await exchange.json({"choices": [{"text": "x"}]})


async def is_a_list(exchange: Exchange) -> None:
    await exchange.json([])


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (breaks, "connection: "),
        (is_silent, "timeout: no complete response within 0.3 s"),
        (refuses, "http-429: full"),
        (is_no_http, "connection: "),
        (counts_nothing, "malformed: `usage`"),
        (is_a_list, "malformed: the response is not a JSON object"),
    ],
)
async def test_a_failure_is_counted_and_the_other_rounds_are_measured(play: Play, error: str) -> None:
    """The first request of each cell fails; the second round is that of the figures."""
    numbers: list[int] = []

    async def first(exchange: Exchange) -> None:
        numbers.append(1)
        await (play if len(numbers) % 2 else whole)(exchange)

    result, _ = await asyncio.wait_for(swept(first, batches=(1,), timeout_s=0.3), SOON_S)
    assert [(cell.good_rounds, cell.counted_output_tokens) for cell in result.cells] == [(1, 12), (1, 8), (1, 4)]
    for cell in result.cells:
        ((message, count),) = cell.errors.items()
        assert message.startswith(error)
        assert count == 1


@pytest.mark.parametrize("names", [(), ("min_tokens",), ("ignore_eos",), ("min_tokens", "ignore_eos")], ids=",".join)
async def test_fields_that_a_server_rejects_are_omitted_and_reported(names: tuple[str, ...]) -> None:
    async def play(exchange: Exchange) -> None:
        if exchange.asked.keys() & set(names):
            await exchange.json({"error": {"message": "unknown field"}}, 400)
        else:
            await whole(exchange)

    async with playing(play) as server, found(server) as target:
        result = await sweep(target, 16, [1], 1, quiet)
    assert [cell.good_rounds for cell in result.cells] == [1, 1, 1]
    assert set(result.refused) == set(names)
    assert all(f"the server refuses {name}: answers may end early" in result.text() for name in names)


@pytest.mark.parametrize(("models", "model"), [([], None), (["a", "b"], None), (["a"], "b")])
async def test_an_ambiguous_model_is_reported_with_the_available_models(models: list[str], model: str | None) -> None:
    async with playing(models=[{"id": name} for name in models]) as server:
        with pytest.raises(Failed) as failed:
            async with found(server, model=model):
                pass
    assert failed.value.problem.id == "bench-model-unknown"
    assert all(name in failed.value.problem.what for name in models)


async def test_a_key_is_sent_as_a_bearer_token_and_its_rejection_reported() -> None:
    async def play(exchange: Exchange) -> None:
        if exchange.headers.get("authorization") == "Bearer right":
            await whole(exchange)
        else:
            await exchange.json({"error": {"message": "who are you"}}, 401)

    async with playing(play) as server:
        async with found(server, key="right"):
            pass
        with pytest.raises(Failed) as failed:
            async with found(server, key="wrong"):
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
            async with found(server):
                pass
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
        async with found(server) as target:
            answered = await target.complete(1, 2)
    assert failed.value.problem.id == "bench-unreachable"
    assert "certificate" in failed.value.problem.what.lower()
    assert answered == TokenUsage(2, 2)


@pytest.mark.parametrize("tokens", [None, 5])
async def test_a_server_that_counts_no_tokens_is_an_error(tokens: int | None) -> None:
    """Neither without `usage`, nor with the same number for any text: the length of a text is unknown then."""

    async def play(exchange: Exchange) -> None:
        await (counts_nothing(exchange) if tokens is None else answer(exchange, exchange.asked["max_tokens"], tokens))

    async with playing(play) as server:
        with pytest.raises(Failed) as failed:
            async with found(server) as target:
                await sweep(target, 16, [1], 1, quiet)
    assert failed.value.problem.id == "bench-refused"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8080/v1/", "http://h:8080"),
        ("https://h/openai/v1", "https://h/openai"),
        ("http://user:word@[::1]:80", "http://[::1]:80"),
    ],
)
async def test_an_address_works_with_or_without_its_version(url: str, expected: str) -> None:
    """A path before it is kept."""
    async with connected(url) as connection:
        assert connection.url == expected


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h\r\nx: y/"])
async def test_an_invalid_address_is_rejected(url: str) -> None:
    """No part of it gets into a header."""
    with pytest.raises(Failed) as failed:
        async with connected(url):
            pass
    assert failed.value.problem.id == "bench-url-wrong"


# The command


@contextmanager
def in_background(
    play: Play = whole, tls: ssl.SSLContext | None = None, max_model_len: int = 4096
) -> Iterator[PlayedServer]:
    """A played server in a thread of its own."""
    ready, over = threading.Event(), threading.Event()
    servers: list[PlayedServer] = []

    async def live() -> None:
        async with playing(play, tls, models=[{"id": "parrot", "max_model_len": max_model_len}]) as server:
            servers.append(server)
            ready.set()
            await asyncio.to_thread(over.wait, 60)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    assert ready.wait(10)
    try:
        yield servers[0]
    finally:
        over.set()
        thread.join(10)


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_API_KEY", "COREWRIGHT_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def test_the_command_prints_a_table_or_yaml_on_stdout_and_progress_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with in_background() as server:
        arguments = ["bench", "--url", f"{server.url}/v1", "--length", "16", "--rounds", "1", "--batch", "1,2"]
        assert run(arguments) == 0
        table = capsys.readouterr()
        assert run([*arguments, "-o", "yaml"]) == 0
    data = yaml.safe_load(capsys.readouterr().out)
    assert "BATCH  PROMPT     OUTPUT  LATENCY  OUTPUT TOKENS/S  ALL TOKENS/S\n1      4 (25 %)   12 " in table.out
    assert table.err.startswith("batch of 1, prompt of 4, 12 output tokens: ")
    assert [(cell["batch"], cell["counted_output_tokens"]) for cell in data["cells"]] == [
        (batch, tokens) for batch in (1, 2) for tokens in (12.0, 8.0, 4.0)
    ]


def test_the_default_length_fits_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    with in_background(max_model_len=64) as server:
        assert run(["bench", "--url", server.url, "--rounds", "1", "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["length"] == 64


def test_a_run_with_failures_only_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The failures are still printed to stdout."""
    requests: list[int] = []

    async def play(exchange: Exchange) -> None:
        requests.append(1)
        await (whole if len(requests) <= 1 + SIZING else refuses)(exchange)

    with in_background(play) as server:
        assert run(["bench", "--url", server.url, "--length", "16"]) == 1
    assert "batch of 1, 25 %: 3 of 3 rounds failed\n  http-429: full (3 times)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 1, "no-fleet"),
        (["--url", "localhost"], 1, "bench-url-wrong"),
        (["--url", "http://127.0.0.1:1"], 1, "bench-unreachable"),
        (["--url", "http://h", "--batch", "1,x"], 64, "--batch"),
        (["--url", "http://h", "--api-key", "a\nb"], 64, "--api-key"),
    ],
)
def test_an_impossible_measurement_is_reported(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == code
    assert message in capsys.readouterr().err


def test_the_client_imports_nothing_heavy() -> None:
    """No Ray, no torch and no web server; and aiohttp only when it measures."""
    script = (
        "import sys, orchestrator.cli.main as m\n"
        "m.application('bench')\n"
        "early = 'aiohttp' in sys.modules\n"
        "m.run(['bench', '--url', 'http://127.0.0.1:1'])\n"
        "print(early, *sorted({'ray', 'torch', 'numpy', 'starlette', 'transformers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "bench-unreachable" in done.stderr
    assert done.stdout == "False\n"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """OPENAI_API_KEY before COREWRIGHT_API_KEY, the option before both."""
    with in_background() as server:
        arguments = ["bench", "--url", server.url, "--length", "8", "--rounds", "1"]
        monkeypatch.setenv("COREWRIGHT_API_KEY", "ours")
        run(arguments)
        monkeypatch.setenv("OPENAI_API_KEY", "theirs")
        run(arguments)
        run([*arguments, "--api-key", "given"])
    keys = [exchange.headers.get("authorization") for exchange in server.seen]
    assert list(dict.fromkeys(keys)) == ["Bearer ours", "Bearer theirs", "Bearer given"]


@pytest.mark.parametrize("chat", [[], ["--chat"]], ids=["completions", "chat"])
def test_a_gateway_accepts_every_field_and_returns_complete_answers(
    chat: list[str], gateway: LiveGateway, replica: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its answers have all requested tokens."""
    gateway.serve(routes("parrot", replica(slots=4)))
    arguments = ["--url", gateway.url, "--length", "100", "--batch", "1,6", "--rounds", "1", *chat]
    assert run(["bench", *arguments, "-o", "yaml"]) == 0
    data = yaml.safe_load(capsys.readouterr().out)
    assert data["refused"] == []
    for cell in data["cells"]:
        assert (cell["good_rounds"], cell["errors"]) == (1, {})
        assert cell["counted_prompt_tokens"] + cell["counted_output_tokens"] == 100


def record_of(url: str, **more: Any) -> FleetRecord:
    return fleet_record(url=url, **more)


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
    with in_background() as server, running(record_of(server.url), monkeypatch):
        assert run(["bench", "--length", "8", "--rounds", "1"]) == 0


def test_a_fleet_on_all_addresses_is_reached_by_the_name_of_its_certificate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On loopback: here that name may resolve to another address, or to none."""
    authority = Authority(tmp_path)
    pair = authority.sign("server", hosts=["fleet.example"])
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.cert, pair.key)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.file))
    with in_background(tls=tls) as server:
        url = server.url.replace("127.0.0.1", "fleet.example")
        with running(record_of(url, listens="0.0.0.0"), monkeypatch):
            assert run(["bench", "--length", "8", "--rounds", "1"]) == 0
    assert {exchange.headers["host"] for exchange in server.seen} == {url.removeprefix("https://")}
