"""The pure parts of `bench`: arrivals, lengths, statistics, goodput, events, tables and plots."""

from __future__ import annotations

import json
import math
import os
import re
import statistics as reference
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.bench.arrivals import Load, poisson
from orchestrator.bench.client_lag import ClientLoad
from orchestrator.bench.dialect import Dialect
from orchestrator.bench.goodput import Slo
from orchestrator.bench.lengths import Lengths
from orchestrator.bench.measurement import Measured, kinds
from orchestrator.bench.page import page, rates
from orchestrator.bench.plots import bars, distribution, scatter, ticks
from orchestrator.bench.prompts import FIRST_ID, LAST_ID, Prompts, Scale
from orchestrator.bench.report import latency_text, serving_data, serving_text, throughput_text
from orchestrator.bench.response_reader import measured
from orchestrator.bench.serving import Serving
from orchestrator.bench.sse import EventReader
from orchestrator.bench.statistics import Summary, percentile
from orchestrator.bench.sweep import Cell, Round, Sweep
from orchestrator.bench.timed_http import Answer, Origin

GOLDEN = Path(__file__).parents[2] / "golden" / "cli"
numbers = st.floats(min_value=-1e9, max_value=1e9)


def golden(name: str, actual: str) -> str:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(actual)
    return file.read_text()


# Arrivals


def test_arrivals_are_the_seeds() -> None:
    """The same seed gives the same times; another one others; twice the rate halves each."""
    assert poisson(2.0, 50, None, 3) == poisson(2.0, 50, None, 3)
    assert poisson(2.0, 50, None, 3) != poisson(2.0, 50, None, 4)
    assert [2 * at for at in poisson(4.0, 50, None, 3)] == pytest.approx(poisson(2.0, 50, None, 3))


@settings(deadline=None)
@given(rate=st.floats(0.1, 1000), requests=st.integers(1, 200), duration=st.floats(0.01, 20), seed=st.integers(0, 99))
def test_arrivals_respect_both_bounds(rate: float, requests: int, duration: float, seed: int) -> None:
    """In order, from 0 on, as many as requested unless the time is over."""
    times = poisson(rate, requests, duration, seed)
    assert times[0] == 0.0
    assert list(times) == sorted(times)
    assert len(times) <= requests
    assert times[-1] < duration
    unbounded = poisson(rate, requests, None, seed)
    assert len(unbounded) == requests
    assert unbounded[: len(times)] == times


def test_gaps_between_arrivals_are_exponential() -> None:
    """Mean and standard deviation of an exponential distribution are 1/rate; a share of 1/e is longer."""
    gaps = np.diff(poisson(5.0, 20001, None, 0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    assert (gaps > 0.2).mean() == pytest.approx(math.exp(-1), abs=0.02)


@pytest.mark.parametrize("wrong", [(None, None, 1, None), (1.0, 1, 1, None), (1.0, None, None, None)])
def test_an_invalid_load_is_rejected(wrong: tuple[float | None, int | None, int | None, float | None]) -> None:
    """Neither or both of rate and concurrency; a load without an end."""
    with pytest.raises(ValueError, match="a load needs"):
        Load(*wrong)


# Lengths and prompts


def test_the_chat_lengths_are_close_to_the_published_trace() -> None:
    """Splitwise reports medians of 1,020 prompt and 129 output tokens; the whole trace's means are 1,155 and 211."""
    pairs = Lengths.parse("chat").pairs
    prompts, outputs = [prompt for prompt, _ in pairs], [output for _, output in pairs]
    assert len(pairs) == 239
    assert reference.median(prompts) == pytest.approx(1020, rel=0.05)
    assert reference.mean(prompts) == pytest.approx(1155, rel=0.1)
    assert reference.median(outputs) == pytest.approx(129, rel=0.25)
    assert reference.mean(outputs) == pytest.approx(211, rel=0.1)


@settings(deadline=None)
@given(st.integers(2, 5000))
def test_lengths_are_cut_to_fit(max_len: int) -> None:
    """Prompt and answer together fit, and neither is empty; what fits already stays."""
    chat = Lengths.parse("chat")
    cut = chat.within(max_len)
    assert all(prompt > 0 and output > 0 and prompt + output <= max_len for prompt, output in cut.pairs)
    kept = [old == new for old, new in zip(chat.pairs, cut.pairs, strict=True)]
    assert kept == [sum(pair) <= max_len for pair in chat.pairs]
    assert cut.capped == kept.count(False)


def test_a_number_always_draws_the_same_pair() -> None:
    """And all pairs are drawn in the long run."""
    chat = Lengths.parse("chat")
    drawn = [chat.at(i, 5) for i in range(4000)]
    assert drawn == [chat.at(i, 5) for i in range(4000)]
    assert set(drawn) == set(chat.pairs)


@pytest.mark.parametrize("wrong", ["", "code", "12", "12:", ":5", "0:5", "5:0", "-1:5", "1.5:5", "1:99999999999"])
def test_invalid_lengths_are_rejected_with_the_valid_forms(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"PROMPT:OUTPUT|at least 1"):
        Lengths.parse(wrong)


@settings(deadline=None)
@given(index=st.integers(0, 10**6), tokens=st.integers(1, 300_000))
def test_a_prompt_has_exactly_the_requested_number_of_ids(index: int, tokens: int) -> None:
    """None of them are special tokens."""
    ids = PROMPTS.ids(index, tokens)
    assert len(ids) == tokens
    assert FIRST_ID <= min(ids) <= max(ids) <= LAST_ID


PROMPTS = Prompts(0)


def test_prompts_share_no_prefix() -> None:
    """A prefix cache would falsify the measurement."""
    assert len({tuple(PROMPTS.ids(i, 16)) for i in range(500)}) > 495
    assert len({PROMPTS.text(i, 16) for i in range(500)}) == 500
    assert PROMPTS.text(3, 16) == Prompts(0).text(3, 16)


def test_a_scale_is_the_line_through_two_measurements() -> None:
    """40 words are 43 tokens and 120 words 123: three for the template, one for each word."""
    scale = Scale.through((40, 43), (120, 123))
    assert scale == Scale(3.0, 1.0)
    assert scale.words(1000) == 997
    assert scale.words(1) == 1
    with pytest.raises(ValueError, match="40 words are 9 tokens, 120 words 9"):
        Scale.through((40, 9), (120, 9))


# Statistics


def test_percentiles_are_interpolated_linearly() -> None:
    """The 90th of 1 to 11 is 10, of 1 to 4 it is 3.7."""
    assert percentile(range(1, 12), 90) == 10
    assert percentile([4, 1, 3, 2], 90) == pytest.approx(3.7)
    assert percentile([7], 99) == 7
    assert Summary.of([1, 2, 3, 4]) == Summary(
        4,
        2.5,
        2.5,
        pytest.approx(3.7),  # type: ignore[arg-type]
        pytest.approx(3.85),  # type: ignore[arg-type]
        pytest.approx(3.97),  # type: ignore[arg-type]
    )
    assert Summary.of([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_equal_numpys(values: list[float], percent: float) -> None:
    """With its default method; never outside of the values."""
    value = percentile(values, percent)
    assert value == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-6)
    assert min(values) <= value <= max(values)


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=60))
def test_percentiles_grow(values: list[float]) -> None:
    """p50 <= p90 <= p95 <= p99, whatever the order of the values."""
    summary = Summary.of(values)
    assert summary is not None
    assert summary.p50 <= summary.p90 <= summary.p95 <= summary.p99
    assert summary == Summary.of(values[::-1])


# One request


def measured_request(chunks: tuple[float, ...], tokens: int | None = None, **more: object) -> Measured:
    fields = {"prompt_wanted": 8, "output_wanted": 4, "due": 10.0, "sent": 10.0, "ended": 12.0, **more}
    return Measured(chunks=chunks, output_tokens=len(chunks) if tokens is None else tokens, **fields)  # type: ignore[arg-type]


def test_the_figures_of_a_request_by_hand() -> None:
    """Sent at 10 s; chunks at 10.2, 10.3, 10.5 and 10.8."""
    request = measured_request((10.2, 10.3, 10.5, 10.8))
    assert request.ttft_s == pytest.approx(0.2)
    assert request.gaps_s == pytest.approx((0.1, 0.2, 0.3))
    assert request.tpot_s == pytest.approx(0.2)
    assert request.e2e_s == pytest.approx(0.8)
    assert request.since(10.0).chunks == pytest.approx((0.2, 0.3, 0.5, 0.8))


def test_several_tokens_in_a_chunk_shorten_the_mean_but_not_the_gaps() -> None:
    """Seven tokens in the same four chunks: 0.6 s for six tokens after the first."""
    request = measured_request((10.2, 10.3, 10.5, 10.8), tokens=7)
    assert request.tpot_s == pytest.approx(0.1)
    assert request.gaps_s == pytest.approx((0.1, 0.2, 0.3))


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    """Nor has an empty one."""
    assert measured_request((10.2,)).tpot_s is None
    assert measured_request((10.2,)).gaps_s == ()
    assert (measured_request(()).ttft_s, measured_request(()).e2e_s, measured_request(()).tpot_s) == (None, None, None)


def test_errors_are_counted_by_kind() -> None:
    """The most frequent first."""
    counts = kinds([measured_request((), error=error) for error in ("timeout", "http-429", None, "http-429")])
    assert list(counts.items()) == [("http-429", 2), ("timeout", 1)]


# Goodput


def test_an_objective_is_applied_to_every_figure() -> None:
    """TTFT 200 ms, TPOT 200 ms, E2E 800 ms of one answer, and a failed request."""
    measured = [measured_request((10.2, 10.3, 10.5, 10.8)), measured_request((10.2,), error="broken")]
    assert Slo.parse("ttft=201,itl=201,e2e=801").share(measured) == 0.5
    assert Slo.parse("ttft=199").share(measured) == 0.0
    assert Slo.parse("itl=199").share(measured) == 0.0
    assert Slo.parse("e2e=799").share(measured) == 0.0
    assert Slo.parse("tpot=201ms") == Slo.parse("itl=201")
    assert str(Slo.parse("e2e=900,ttft=5.5")) == "ttft <= 5.5 ms, e2e <= 900 ms"
    assert Slo().share([]) == 0.0


@pytest.mark.parametrize(
    "wrong", ["", "ttft", "ttft=", "ttft=x", "ttft=0", "ttft=-1", "ttft=inf", "p=1", "itl=1,tpot=2"]
)
def test_an_invalid_objective_is_rejected_with_the_valid_forms(wrong: str) -> None:
    with pytest.raises(ValueError, match="is not an objective"):
        Slo.parse(wrong)


# Events


EVENTS = b': hi\n\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata: lines\n\r\ndata: [DONE]\r\n\r\n'


@settings(deadline=None)
@given(st.lists(st.integers(0, len(EVENTS)), max_size=12))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    """Comments and other fields are passed over; lines may end with CR."""
    places = [0, *sorted(cuts), len(EVENTS)]
    reader = EventReader()
    events = [data for i in range(len(places) - 1) for data in reader.feed(EVENTS[places[i] : places[i + 1]])]
    assert events == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@pytest.mark.parametrize("rest", [b"data: x", b"data: x\n"])
def test_an_event_without_an_empty_line_is_not_complete(rest: bytes) -> None:
    """Neither half a line nor a line without the empty one after it."""
    assert EventReader().feed(rest) == []


def read(*events: str, status: int = 200, stream: bool = True, body: bytes = b"", error: str | None = None) -> Measured:
    """Sent at 1 s, an event each second from 2 s on."""
    received = [(2.0 + i, event.encode()) for i, event in enumerate(events)]
    return measured(Answer(1.0, status, stream, received, body, 9.0, error), due=1.0, prompt=3, output=2)


def test_an_answer_is_read() -> None:
    """A role, an empty text, the end and the usage bring no tokens."""
    request = read(
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a"}}]}',
        '{"choices": [{"delta": {"reasoning_content": "b"}}]}',
        '{"choices": [{"text": "c", "finish_reason": null}]}',
        '{"choices": [{"text": "", "finish_reason": "length"}]}',
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}}',
        "[DONE]",
    )
    assert request.ok
    assert request.chunks == (3.0, 4.0, 5.0)
    assert (request.prompt_tokens, request.output_tokens) == (3, 5)


def test_without_usage_chunks_are_counted_as_tokens() -> None:
    assert read('{"choices": [{"text": "a"}]}', '{"choices": [{"text": "b"}]}', "[DONE]").output_tokens == 2


@pytest.mark.parametrize(
    ("answer", "kind", "what"),
    [
        (read(status=429, stream=False, body=b'{"error": {"message": "full"}}'), "http-429", "full"),
        (read(status=502, stream=False, body=b"<html>"), "http-502", "<html>"),
        (read(status=400, stream=False, body=b'{"object": "error", "message": "no"}'), "http-400", "no"),
        (read(stream=False, body=b"{}"), "malformed", "not an event stream"),
        (read("{"), "malformed", "invalid event"),
        (read('{"choices": 3}'), "malformed", "invalid event"),
        (read('{"choices": [{"text": "a"}]}', '{"error": {"message": "died"}}'), "stream-error", "died"),
        (read('{"choices": [{"text": "a"}]}'), "cut-off", "without a finish reason"),
        (read("[DONE]"), "empty", "no text"),
        (read('{"choices": [{"text": "a"}]}', error="broken"), "broken", ""),
        (read(error="timeout"), "timeout", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_failure_has_its_kind_and_the_servers_message(answer: Measured, kind: str, what: str) -> None:
    assert answer.error == kind
    assert what in answer.what


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=40) | st.sampled_from([b'{"choices":[null]}', b'{"usage":{"a":"\xff"}}']), max_size=4)
)
def test_any_bytes_from_a_server_are_a_failure_and_not_an_exception(events: list[bytes]) -> None:
    """Also invalid JSON, invalid UTF-8 and wrong types."""
    answer = Answer(0.0, 200, True, [(1.0, data) for data in events], ended=2.0)
    assert not measured(answer, due=0.0, prompt=1, output=1).ok


# Requests


def test_a_request_has_the_fields_that_the_server_accepts() -> None:
    """Initially all of them."""
    full = json.loads(Dialect().body("m", [1, 2], 5))
    assert full == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "min_tokens": 5,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    few = Dialect(chat=True, token_ids=False).without("ignore_eos").without("min_tokens").without("usage")
    fields = json.loads(few.body("m", "hi", 5))
    assert fields.keys() == {"model", "messages", "max_tokens", "temperature", "stream"}
    assert [what.partition(":")[0] for what in few.refused] == ["min_tokens", "ignore_eos", "stream_options"]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8080/v1/", "http://h:8080"),
        ("https://h/openai/v1", "https://h/openai"),
        ("http://[::1]:80", "http://[::1]"),
    ],
)
def test_an_address_works_with_or_without_its_version(url: str, expected: str) -> None:
    """A path before it is kept."""
    assert Origin.parse(url).url == expected


@pytest.mark.parametrize("url", ["h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h\r\nx: y/"])
def test_an_invalid_address_is_rejected(url: str) -> None:
    """No part of it gets into a header."""
    with pytest.raises(ValueError):
        Origin.parse(url)


# Tables and plots


def run_of(*measured: Measured, client: ClientLoad | None = None) -> Serving:
    return Serving(
        url="http://h:1",
        model="parrot",
        load=Load(2.0, None, len(measured), None, 7),
        lengths=replace(Lengths.parse("8:4"), capped=1),
        slo=Slo.parse("ttft=250,e2e=900"),
        refused=("min_tokens: answers may end early",),
        measured=tuple(request.since(10.0) for request in measured),
        duration_s=4.0,
        client=client or ClientLoad(0.02, 0.0004, 0.0011),
    )


RUN = run_of(
    measured_request((10.2, 10.3, 10.5, 10.8), prompt_tokens=8),
    measured_request((10.4, 10.5, 10.7), tokens=4, prompt_tokens=8, output_wanted=5),
    measured_request((), error="http-429", what="full"),
    measured_request((10.9,), error="timeout", what="no complete response within 1 s"),
)


def test_the_data_of_a_run_by_hand() -> None:
    """Two answers of four tokens in 4 s; one keeps both bounds."""
    data = serving_data(RUN)
    assert (data["sent"], data["ok"], data["errors"]) == (4, 2, {"http-429": 1, "timeout": 1})
    assert (data["output_tokens"], data["output_tokens_per_s"], data["requests_per_s"]) == (8, 2.0, 0.5)
    assert (data["prompt_tokens"], data["prompt_tokens_per_s"]) == (16, 4.0)
    assert data["short_answers"] == 1
    assert data["tokens_per_chunk"] == round(8 / 7, 3)
    assert data["ttft_ms"]["mean"] == pytest.approx(300)
    assert data["itl_ms"]["count"] == 5
    assert data["tpot_ms"]["p50"] == pytest.approx(150)
    assert data["e2e_ms"]["p50"] == pytest.approx(750)
    assert data["goodput"] == {
        "slo": {"ttft_ms": 250.0, "itl_ms": None, "e2e_ms": 900.0},
        "good": 1,
        "share": 0.25,
        "requests_per_s": 0.25,
    }
    assert json.loads(json.dumps(data)) == data


def test_the_table_of_a_run() -> None:
    """Figures first, then what a reader must know of them."""
    text = serving_text(serving_data(RUN)) + "\n"
    assert text == golden("bench-serving", text)


def test_a_client_that_was_too_slow_is_reported() -> None:
    """The figures are then its own, not the server's."""
    slow = ClientLoad(0.97, 0.030, 0.2)
    text = serving_text(serving_data(run_of(measured_request((10.2,)), client=slow)))
    assert "the client, not the server, may have been the bottleneck: it used 97% of a CPU; its event loop" in text
    assert "may have been" not in serving_text(serving_data(RUN))


def test_a_run_with_failures_only_has_a_table_and_a_page() -> None:
    """Without figures."""
    run = run_of(measured_request((), error="connect", what="refused"))
    data = serving_data(run)
    assert "0 answered, 1 failed (connect: 1)" in serving_text(data)
    assert "no data" in page(run, data)


def cell(share: int, batch: int, latency: float, *, tokens: int = 0, error: str | None = None) -> Cell:
    prompt = 64 * share // 100
    chunks = tuple(10.1 + i / 100 for i in range(tokens or 64 - prompt))
    each = measured_request(
        chunks, prompt_tokens=prompt, prompt_wanted=prompt, error=error, what="" if error is None else "why"
    )
    return Cell(
        share,
        prompt,
        64 - prompt,
        batch,
        tuple(Round((each,) * batch, took) for took in (latency, 9 * latency, latency)),
    )


SWEEP = Sweep(
    "http://h:1",
    "parrot",
    64,
    3,
    ("min_tokens: answers may end early",),
    (
        *(cell(25, 1, 4.8), cell(50, 1, 3.2), cell(75, 1, 1.6, tokens=10)),
        *(cell(25, 4, 6.0), cell(50, 4, 4.0), cell(75, 4, 2.0, error="http-500")),
    ),
)


def test_the_cells_of_a_sweep_by_hand() -> None:
    """48 tokens in 4.8 s are 10 tokens/s; the page counts all 64 and finds 13.3. A batch's tokens add up."""
    single, batch = SWEEP.cells[0], SWEEP.cells[3]
    assert (single.latency_s, single.throughput) == (4.8, pytest.approx(10.0))
    assert single.page_throughput == pytest.approx(64 / 4.8)
    assert batch.throughput == pytest.approx(4 * 48 / 6.0)
    assert single.ttft_s == pytest.approx(0.1)
    assert SWEEP.cells[5].latency_s is None


def test_the_pages_rows_follow_from_its_definition() -> None:
    """Its "7B - latency": 6.7 s from 256 to 1024 tokens are 153 t/s there, and 115 output tokens/s."""
    each = measured_request(tuple(10.1 + i / 1000 for i in range(768)), prompt_tokens=256)
    cell = Cell(25, 256, 768, 1, (Round((each,), 6.7),))
    assert cell.page_throughput == pytest.approx(153, abs=0.5)
    assert cell.throughput == pytest.approx(115, abs=0.5)


@pytest.mark.parametrize(("name", "table"), [("bench-latency", latency_text), ("bench-throughput", throughput_text)])
def test_the_tables_of_a_sweep(name: str, table: object) -> None:
    """With the received tokens if they differ from the requested ones."""
    text = table(SWEEP) + "\n"  # type: ignore[operator]
    assert text == golden(name, text)


def test_the_page_is_well_formed_and_loads_nothing() -> None:
    """Plots for light and dark, no script, no address except the server's own in its text."""
    text = page(RUN, serving_data(RUN))
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 6
    for plot in plots:
        ElementTree.fromstring(plot)
    assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", text)
    assert "prefers-color-scheme: dark" in text
    assert text.count('class="cross"') == 2


def test_the_page_escapes_text_from_the_server() -> None:
    """Its messages and its model's name are not HTML."""
    run = replace(run_of(measured_request((), error="http-500", what="<script>x</script>")), model="<b>")
    text = page(run, serving_data(run))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>&lt;" not in text


@example([5e-324], None)
@settings(deadline=None)
@given(st.lists(st.floats(0, 1e7), max_size=300), st.none() | st.floats(0.001, 1e6))
def test_every_plot_stays_within_its_frame(values: list[float], bound: float | None) -> None:
    """For any data."""
    measured = [measured_request((10.0 + value / 1e3,)).since(10.0) for value in values]
    points = [(value / 1e7, value) for value in values]
    for plot in (distribution(values, bound), scatter(points, [0.5], 1.0, bound), bars(*rates(measured, 1.0))):
        ElementTree.fromstring(plot)
        for point in re.findall(r'points="([^"]*)"', plot):
            for pair in point.split():
                x, y = (float(part) for part in pair.split(","))
                assert 0 <= x <= 460
                assert 0 <= y <= 240


def test_rates_count_every_token_once() -> None:
    """Seven tokens in four chunks are spread over them."""
    values, width = rates([measured_request((10.2, 10.3, 10.5, 10.8), tokens=7).since(10.0)], 1.0)
    assert width == 0.25
    assert [value * width for value in values] == pytest.approx([1.75, 1.75, 1.75, 1.75])


@settings(deadline=None)
@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_and_within_the_range(top: float) -> None:
    """From 0 on."""
    values = ticks(top)
    assert values[0] == 0
    assert values[-1] <= top * 1.0001
    assert 4 <= len(values) <= 11
