"""Loads: those that are read, and those that are made up."""

from __future__ import annotations

import io
from itertools import pairwise
from statistics import mean, median, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.process.failure import Failed
from orchestrator.simulate.scenario import Arrival
from orchestrator.simulate.speeds import measured_speeds, parse_speeds
from orchestrator.simulate.trace_file import MAX_PROBLEMS, InvalidTrace, fit_lengths, read_trace
from orchestrator.simulate.workload import KINDS, Kind, Lengths, Workload
from placements.resources.calibration import calibrated
from tests.placements.fleets import host, model

MODELS = {"a": "a", "alias": "a", "b": "b"}
HEADER = "time,model,prompt_tokens,output_tokens,key\n"


def read(text: str) -> list[Arrival]:
    return list(read_trace(io.StringIO(text), "t.csv", MODELS))


def wrong(text: str) -> list[tuple[str, str]]:
    """(place, what) of all problems."""
    with pytest.raises(InvalidTrace) as raised:
        read(text)
    return [(problem.where, problem.what) for problem in raised.value.problems]


def test_csv_is_read_by_the_names_of_its_columns() -> None:
    """In any order, with more than is needed, and without keys."""
    text = "model,time,output_tokens,prompt_tokens,more\na,1.5,20,10,x\nalias,2,1,1,\n"
    assert read(text) == [Arrival(1.5, "a", 10, 20), Arrival(2.0, "a", 1, 1)]


def test_json_lines_are_read() -> None:
    """An object on each line."""
    text = '{"time": 1, "model": "b", "prompt_tokens": 3, "output_tokens": 4, "key": "k"}\n\n'
    assert read(text) == [Arrival(1.0, "b", 3, 4, "k")]


def test_dates_start_at_zero() -> None:
    """ISO 8601, with a zone or as UTC."""
    text = HEADER + "2024-05-10T00:00:10Z,a,1,1,\n2024-05-10T02:00:12.5+02:00,a,1,1,\n"
    assert [arrival.at for arrival in read(text)] == [0.0, 2.5]


def test_lines_may_be_in_any_order() -> None:
    """For merged requests of several gateways."""
    assert [arrival.at for arrival in read(HEADER + "3,a,1,1,\n1,a,1,1,\n2,a,1,1,\n")] == [1.0, 2.0, 3.0]


def test_every_bad_line_is_reported_with_its_place() -> None:
    lines = ["1,a,0,1,", "x,a,1,1,", "x,c,1,1,", "1,a,1.5,1,", "1,a,1", "-1,a,1,1,", "1,a,,1,", "1,a,1,1,"]
    assert wrong(HEADER + "\n".join(lines)) == [
        ("t.csv:2", "prompt_tokens must be an integer >= 1, not '0'"),
        ("t.csv:3", "time is neither a number of seconds nor an ISO 8601 time: 'x'"),
        ("t.csv:4", "time is neither a number of seconds nor an ISO 8601 time: 'x'"),
        ("t.csv:5", "prompt_tokens is not an integer: '1.5'"),
        ("t.csv:6", "the line has 3 fields, the header has 5"),
        ("t.csv:7", "time must be >= 0 seconds, not '-1'"),
        ("t.csv:8", "prompt_tokens is missing"),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("t.csv:1", "the trace is empty")),
        ("time,model\n", ("t.csv:1", "the header has no prompt_tokens and no output_tokens column")),
        ('{"time": 1}\n', ("t.csv:1", "model is missing")),
        ('{"time": 1,\n', ("t.csv:1", "invalid JSON")),
        ("{}\n[1]\n", ("t.csv:2", "not a JSON object")),
    ],
)
def test_a_file_that_is_not_a_trace_is_reported(text: str, expected: tuple[str, str]) -> None:
    """At its first line, or at the first error."""
    place, what = wrong(text)[-1]
    assert (place, what.startswith(expected[1])) == (expected[0], True)


def test_a_file_of_nonsense_does_not_fill_the_terminal() -> None:
    """The first problems only, and how many more there are."""
    with pytest.raises(InvalidTrace) as raised:
        read(HEADER + "x\n" * 1000)
    assert (len(raised.value.problems), raised.value.more) == (MAX_PROBLEMS, 1000 - MAX_PROBLEMS)


def test_requests_of_other_models_are_counted() -> None:
    """A fleet's recordings hold what earlier specs served, too."""
    trace = read_trace(io.StringIO(HEADER + "1,a,1,1,\n2,old,1,1,\n3,old,1,1,\n"), "t.csv", MODELS)
    assert (len(trace), trace.unknown) == (1, {"old": 2})


def test_a_trace_of_other_models_only_is_rejected() -> None:
    """With its models, those with most requests first."""
    lines = "".join(f"1,m{i},1,1,\n" for i in range(7)) + "1,m6,1,1,\n"
    what = (
        "no request is for a model in the spec; the requests are for m6 (2), m0 (1), m1 (1), m2 (1), m3 (1) and 2 more"
    )
    assert wrong(HEADER + lines) == [("t.csv:1", what)]


def test_requests_that_are_too_long_are_cut() -> None:
    """To prompt and answer of the slot."""
    trace = read_trace(io.StringIO(HEADER + "1,a,900,300,\n2,a,10,10,\n"), "t.csv", MODELS)
    assert fit_lengths(trace, {"a": 1000}) == {"a": 1}
    assert [(request.prompt_tokens, request.output_tokens) for request in trace] == [(700, 300), (10, 10)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_load_has_its_rate_and_its_order(kind: Kind) -> None:
    """On average, over ten periods."""
    load = Workload(kind, tuple("abcd"), 4.0, 20_000.0, 3, period_s=2000.0)
    times = [arrival.at for arrival in load]
    assert all(a <= b for a, b in pairwise(times))
    assert times[0] >= 0
    assert times[-1] < 20_000
    assert len(times) / 20_000 == pytest.approx(4.0, rel=0.15)


def test_the_same_seed_gives_the_same_load_and_another_seed_another() -> None:
    """For the arrivals and the lengths."""
    first, same, other = (list(Workload("mixed", ("a", "b"), 2.0, 300.0, seed)) for seed in (1, 1, 2))
    assert first == same != other


def test_the_load_of_a_model_does_not_depend_on_other_models() -> None:
    """Each model has separate draws."""
    alone = list(Workload("poisson", ("a",), 1.0, 300.0))
    beside = [arrival for arrival in Workload("poisson", ("a", "b"), 2.0, 300.0) if arrival.model == "a"]
    assert alone == beside


@pytest.mark.parametrize(
    ("kind", "cv", "expected"), [("poisson", None, 1.0), ("gamma", None, 4.0), ("gamma", 2.0, 2.0)]
)
def test_gaps_vary_as_they_should(kind: Kind, cv: float | None, expected: float) -> None:
    """The coefficient of variation."""
    times = [arrival.at for arrival in Workload(kind, ("a",), 10.0, 6000.0, 5, cv)]
    gaps = [b - a for a, b in pairwise(times)]
    assert pstdev(gaps) / mean(gaps) == pytest.approx(expected, rel=0.1)


def test_shares_divide_the_rate() -> None:
    """Three to one, and nothing for 0."""
    load = Workload("poisson", ("a", "b", "c"), 4.0, 5000.0, shares={"a": 3.0, "c": 0.0})
    counts = {name: sum(1 for arrival in load if arrival.model == name) for name in "abc"}
    assert (counts["a"] / counts["b"], counts["c"]) == (pytest.approx(3.0, rel=0.1), 0)


def test_lengths_are_those_of_the_model() -> None:
    """Each is one of the given pairs."""
    load = Workload("poisson", ("a",), 1.0, 60.0, lengths=Lengths.parse("7:9"))
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in load} == {(7, 9)}


def test_the_chat_lengths_are_close_to_the_published_trace() -> None:
    """Splitwise reports medians of 1,020 prompt and 129 output tokens; the whole trace's means are 1,155 and 211."""
    pairs = Lengths.parse("chat").pairs
    prompts, outputs = [prompt for prompt, _ in pairs], [output for _, output in pairs]
    assert len(pairs) == 239
    assert median(prompts) == pytest.approx(1020, rel=0.05)
    assert mean(prompts) == pytest.approx(1155, rel=0.1)
    assert median(outputs) == pytest.approx(129, rel=0.25)
    assert mean(outputs) == pytest.approx(211, rel=0.1)


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


@pytest.mark.parametrize("wrong", ["", "code", "12", "12:", ":5", "0:5", "5:0", "-1:5", "1.5:5", "1:99999999999"])
def test_invalid_lengths_are_rejected_with_the_valid_forms(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"PROMPT:OUTPUT|at least 1"):
        Lengths.parse(wrong)


# Speeds


def test_speeds_are_measured_from_records() -> None:
    """Undisturbed requests count, not those that waited for a prefill of another."""
    requests = [
        {
            "model": "a",
            "prompt_tokens": 10 + i,
            "output_tokens": 21,
            "first_ms": 5.0 + 0.5 * (10 + i) + (40.0 if i % 2 else 0.0),
            "decode_ms": 20 * 30.0 + (200.0 if i % 3 == 0 else 0.0),
        }
        for i in range(200)
    ]
    speeds = measured_speeds(requests)["a"]
    assert speeds["step_ms"] == pytest.approx(30.0, rel=0.025), "times are counted by classes"
    assert speeds["prefill_token_ms"] == pytest.approx(0.5, rel=0.1)
    assert speeds["prefill_base_ms"] == pytest.approx(5.0, abs=2.0)


def test_prompts_of_one_length_give_no_prefill_speed() -> None:
    """The cost of a prompt and of each token cannot be separated; nor if longer prompts took no longer."""
    request = {"model": "a", "prompt_tokens": 9, "output_tokens": 21, "first_ms": 24.0, "decode_ms": 60.0}
    assert measured_speeds([request] * 50) == {"a": {"step_ms": pytest.approx(3.0, rel=0.025), "requests": 50}}
    falling = [{**request, "prompt_tokens": 10 + i, "first_ms": 90.0 - i} for i in range(50)]
    assert measured_speeds(falling) == {"a": {"step_ms": pytest.approx(3.0, rel=0.025), "requests": 50}}


def test_few_requests_give_no_speed() -> None:
    """An estimate is used instead."""
    request = {"model": "a", "prompt_tokens": 10, "output_tokens": 21, "first_ms": 5.0, "decode_ms": 9.0}
    assert measured_speeds([request] * 5) == {}


def test_speeds_replace_estimates() -> None:
    """In seconds, and only the given ones."""
    own = parse_speeds('{"a": {"step_ms": 20, "load_s": 9}, "gone": {}}', "s.json")
    before = calibrated(model("a", 8), None, "nxd-inference", [host()], [])
    after = calibrated(model("a", 8), None, "nxd-inference", [host()], own)
    assert (after.step_s, after.load_s, after.prefill_base_s) == (0.02, 9.0, before.prefill_base_s)


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        '{"a": 1}',
        '{"a": {"step_ms": "1"}}',
        '{"a": {"step_ms": 0}}',
        '{"a": {"load_s": -1}}',
        '{"a": {"step_m": 3}}',
        '{"a": {"shape": 3}}',
    ],
)
def test_invalid_speeds_are_rejected(text: str) -> None:
    """With the name of the file."""
    with pytest.raises(Failed, match=r"s\.json"):
        parse_speeds(text, "s.json")
