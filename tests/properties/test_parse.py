"""parse never raises, and says something whenever it cannot give a good spec. EXAMPLES=3000 searches longer."""

from __future__ import annotations

import json
import os
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from placements.checks import check
from placements.hosts import Machine, hosts_for
from placements.parse import parse
from placements.plan import plan
from placements.problems import has_errors, render

GOOD = """\
version: 1
name: fleet
hosts: {instance: inf2.48xlarge, count: 2, reserve: {vcpus: 8, cores: [23]}}
defaults: &d {engine: auto, dtype: bf16, threads: lmi}
models:
  a:
    source: ./a
    tp_degree: 8
    cores: ["0-7", "inf2.48xlarge/1:8-15"]
    replicas: {min: 1, max: 2}
  b: {<<: *d, source: s3://bucket/b, max_len: 128, allow_degrees: [6]}
"""

WORDS = st.sampled_from(
    [
        *re.findall(r"[\w./:-]+|[^\w\s]", GOOD),
        *re.findall(r"\S+", "& * ! | > % @ ` ' \" ? --- ... << ~ null on off yes 010 1:30 0x1f .inf .nan 1e400"),
        "\n",
        "\n  ",
        "\n    ",
        "\t",
        " ",
        "\ufeff",
        "\x00",
        "\u2028",
        "é",
        "tp",
        "-1",
        "99999999999999999999999",
        "2001-01-01",
        "!!binary",
        "!!set",
        "!!int",
        "&x",
        "*x",
    ]
)

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["0-7", "5", "cpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    re.findall(
        r"\w+",
        "source engine dtype tp_degree max_batch max_len cores replicas neff_cache priority max_queue threads "
        "allow_head_padding allow_degrees hbm_overhead_gib allow_pickle tp name min max",
    )
)
SPECS = st.fixed_dictionaries(
    {"models": st.dictionaries(st.sampled_from(["a", "b", "c d"]), st.dictionaries(FIELDS, VALUES, max_size=5))},
    optional={
        "version": VALUES,
        "name": VALUES,
        "hosts": st.dictionaries(st.sampled_from(["instance", "emulate", "count", "reserve"]), VALUES),
        "defaults": st.dictionaries(FIELDS, VALUES, max_size=3),
    },
)

PLACE = re.compile(r"f\.yaml:[1-9][0-9]*:[1-9][0-9]*")


def holds(text: str | bytes) -> None:
    """What is promised of every text."""
    parsed = parse(text, "f.yaml")
    assert parsed.ok or has_errors(parsed.problems)
    assert all(PLACE.fullmatch(problem.where) and problem.what for problem in parsed.problems)
    assert render(parsed.problems).count("\n") >= len(parsed.problems)
    if parsed.spec is not None:
        hosts = hosts_for(parsed.spec, Machine((0, 1)))
        check(parsed.spec, hosts)
        if parsed.ok:
            plan(parsed.spec, hosts)


fuzzed = settings(max_examples=int(os.environ.get("EXAMPLES", "60")), deadline=None)


@fuzzed
@given(st.text(max_size=60))
@example("[" * 3000)
@example("=")
@example("!!float x")
@example("a: !!bool maybe")
@example("? ? a")
@example("%YAML 9.9\n---\na")
def test_parse_survives_any_text(text: str) -> None:
    """Problems with places, never an exception."""
    holds(text)


@fuzzed
@given(st.binary(max_size=60))
def test_parse_survives_any_bytes(text: bytes) -> None:
    """Also what is not UTF-8."""
    holds(text)


@fuzzed
@given(st.lists(WORDS, max_size=25).map("".join))
def test_parse_survives_pieces_of_yaml(text: str) -> None:
    """Text that is nearly YAML, and nearly a spec."""
    holds(text)


@fuzzed
@given(st.data())
def test_parse_survives_a_good_spec_with_a_piece_replaced(data: st.DataObject) -> None:
    """Cut out anything, put in anything."""
    first = data.draw(st.integers(0, len(GOOD)))
    last = data.draw(st.integers(first, min(len(GOOD), first + 12)))
    holds(GOOD[:first] + "".join(data.draw(st.lists(WORDS, max_size=3))) + GOOD[last:])


@fuzzed
@given(SPECS)
@example({"models": {"a": {"source": "\U0001f600"}}})
@example({"models": {"a": {"source": "\ud83d"}, "\ud83d": {}}})
def test_parse_survives_values_of_any_type(spec: dict[str, object]) -> None:
    """The right keys with the wrong values; JSON is YAML."""
    holds(json.dumps(spec))


def test_the_text_that_is_cut_up_is_good() -> None:
    """Otherwise the fuzzing would begin beside the point."""
    assert parse(GOOD).problems == ()
