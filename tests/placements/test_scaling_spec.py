"""What a spec says of the demand: objectives, the queue's bounds, schedules, prices."""

from __future__ import annotations

import pytest
import yaml
from jsonschema import Draft202012Validator

from placements.planner.spec_hosts import hosts_for, prices
from placements.spec.json_schema import json_schema
from placements.spec.parse import parse
from placements.spec.sections import Objectives, Scaling, Schedule
from tests.placements.fleets import LAPTOP, brief, problems_of
from tests.placements.test_checks import one_model

DAY = 'start: "0 8 * * *", end: "0 18 * * *"'


def ids(fields: str) -> list[str]:
    return brief(problems_of(one_model(fields), None, LAPTOP))


def whats(fields: str) -> list[str]:
    return [problem.what for problem in problems_of(one_model(fields), None, LAPTOP)]


def test_all_of_it_can_be_read_and_has_a_default() -> None:
    """As the tables of docs/spec.md have them."""
    text = one_model(
        "objectives: {ttft_ms: 800, tpot_ms: 40.5, queue_ms: 100}\n    max_wait_s: 30\n    max_queue_bytes: 1000\n"
        "    queue_order: deadline\n    replicas: {min: 1, max: 3}\n    scaling: {auto: false, idle_s: 60, hold_s: 10, "
        f"schedules: [{{{DAY}, timezone: Europe/Berlin, min: 2, max: 3}}], worth_per_1000: 0.5}}"
    )
    parsed = parse(text)
    assert parsed.ok, parsed.problems
    assert parsed.spec is not None
    model = parsed.spec.models[0]
    assert model.objectives == Objectives(ttft_ms=800, tpot_ms=40.5, queue_ms=100)
    assert (model.max_wait_s, model.max_queue_bytes, model.queue_order) == (30, 1000, "deadline")
    schedule = Schedule(start="0 8 * * *", end="0 18 * * *", timezone="Europe/Berlin", min=2, max=3)
    assert model.scaling == Scaling(auto=False, idle_s=60, hold_s=10, schedules=(schedule,), worth_per_1000=0.5)
    plain = parse(one_model("priority: 0")).spec
    assert plain is not None
    assert (plain.models[0].scaling, plain.models[0].objectives) == (Scaling(), Objectives())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (f"scaling: {{schedules: [{{{DAY}, min: 1}}]}}", []),
        (f"scaling: {{schedules: [{{{DAY}, min: 2}}]}}", ["schedule-exceeds-max 4:67"]),
        (f"scaling: {{schedules: [{{{DAY}, max: 0}}]}}", ["min-exceeds-max 4:67"]),
        (f"scaling: {{schedules: [{{{DAY}, min: 0, max: 0}}]}}", []),
        (f"scaling: {{schedules: [{{{DAY}}}]}}", ["schedule-without-effect 4:27"]),
        ('scaling: {schedules: [{start: "0 8 * *", end: "0 18 * * *", min: 1}]}', ["bad-cron 4:28"]),
        ('scaling: {schedules: [{start: "0 8 * * *", end: "61 18 * * *", min: 1}]}', ["bad-cron 4:48"]),
        ('scaling: {schedules: [{start: "0 0 31 2 *", end: "0 1 * * *", min: 1}]}', ["bad-cron 4:28"]),
        ("scaling: {schedules: [{start: 8, end: '0 18 * * *', min: 1}]}", ["wrong-type 4:28"]),
        (f"scaling: {{schedules: [{{{DAY}, timezone: Mars/Olympus, min: 1}}]}}", ["unknown-timezone 4:67"]),
        (f"scaling: {{schedules: [{{{DAY}, timezone: ../../etc/passwd, min: 1}}]}}", ["unknown-timezone 4:67"]),
        ("scaling: {schedules: [{start: '0 8 * * *', min: 1}]}", ["wrong-type 4:27"]),
        (f"scaling: {{schedule: [{{{DAY}, minimum: 1}}]}}", ["unknown-key 4:15", "unknown-key 4:66"]),
        ("autoscaling: {idle: 5}", ["unknown-key 4:5", "unknown-key 4:19"]),
        ("slo: {ttft: 5}", ["unknown-key 4:5", "unknown-key 4:11"]),
        ("objectives: {ttft_ms: 0}", ["out-of-range 4:18"]),
        ("objectives: {ttft_ms: fast}", ["wrong-type 4:18"]),
        ("queue_order: fifo", ["unknown-value 4:5"]),
        ("max_wait_s: 0", ["out-of-range 4:5"]),
        ("scaling: {schedules: 5}", ["wrong-type 4:15"]),
    ],
)
def test_each_error_is_reported_at_its_place(fields: str, expected: list[str]) -> None:
    """One problem for each error."""
    assert ids(fields) == expected


def test_an_invalid_cron_expression_is_rejected_with_the_wrong_part() -> None:
    """And the valid format."""
    (problem,) = problems_of(
        one_model('scaling: {schedules: [{start: "0 25 * * *", end: "0 1 * * *", min: 1}]}'), None, LAPTOP
    )
    assert problem.what == 'scaling.schedules[0].start: "0 25 * * *" is not a cron expression: bad hour'
    assert problem.hint == 'write it like "0 8 * * MON-FRI"'


def test_the_json_schema_accepts_what_the_parser_accepts() -> None:
    """Editors know the new fields."""
    schedule = {"start": "0 8 * * *", "end": "0 18 * * *", "min": 2, "max": None}
    model = {"source": "./a", "scaling": {"schedules": [schedule], "auto": False}, "objectives": {"ttft_ms": 5}}
    spec = {"hosts": {"instance": "inf2.48xlarge", "price_per_core_hour": 0.5}, "models": {"a": model}}
    assert list(Draft202012Validator(json_schema()).iter_errors(spec)) == []
    model["scaling"] = {"schedules": [{"start": "0 8 * * *"}]}
    assert len(list(Draft202012Validator(json_schema()).iter_errors(spec))) == 1


def test_each_host_has_the_price_of_its_entry() -> None:
    """The hosts of an entry have one price; a fleet without hosts in its spec costs nothing."""
    text = "hosts:\n  - {instance: inf2.48xlarge, count: 2, price_per_core_hour: 0.5}\n  - {instance: trn1.32xlarge}\n"
    parsed = parse(text + "models: {a: {source: ./a}}")
    assert parsed.spec is not None
    hosts = hosts_for(parsed.spec, LAPTOP)
    assert prices(parsed.spec, hosts) == {"inf2.48xlarge/0": 0.5, "inf2.48xlarge/1": 0.5, "trn1.32xlarge/0": 0.0}
    bare = parse("models: {a: {source: ./a}}").spec
    assert bare is not None
    assert set(prices(bare, hosts_for(bare, LAPTOP)).values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10m", 600), ("30s", 30), ("1h30m", 5400), ("1d", 86400), ("1.5h", 5400), ("1m0.5s", 60.5), ("90", 90)],
)
def test_a_duration_has_units_or_is_in_seconds(text: str, seconds: float) -> None:
    """In each field whose name ends in _s, in JSON Schema too."""
    fields = "max_wait_s: X, scaling: {idle_s: X}, update: {progress_deadline_s: X}, deadlines: {fetch_s: X}"
    document = f"models: {{a: {{engine: echo, {fields.replace('X', text)}}}}}"
    parsed = parse(document)
    assert parsed.problems == ()
    assert parsed.spec is not None
    (a,) = parsed.spec.models
    assert {a.max_wait_s, a.scaling.idle_s, a.update.progress_deadline_s, a.deadlines.fetch_s} == {seconds}
    assert list(Draft202012Validator(json_schema()).iter_errors(yaml.safe_load(document))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10", []),
        *[(text, ["wrong-type"]) for text in ("10 m", "30m1h", "10ms", "s", "'600'", "-1m")],
        *[(text, ["out-of-range"]) for text in ("400d", "999999999d")],
    ],
)
def test_a_wrong_duration_is_rejected(text: str, expected: list[str]) -> None:
    """Bounds are those of the seconds."""
    problems = parse(f"models: {{a: {{engine: echo, scaling: {{idle_s: {text}}}}}}}").problems
    assert [problem.id for problem in problems] == expected
