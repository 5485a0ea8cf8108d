"""parse never raises, and says something whenever it cannot give a good spec."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import placements
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Machine
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.json_schema import json_schema
from placements.spec.parse import parse
from placements.spec.problems import has_errors, render
from placements.spec.schema import HostsSpec, ModelSpec
from tests.searches import search

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

SEVERAL = """\
version: 1
hosts:
  - {instance: inf2.48xlarge, count: 3, reserve: {vcpus: 8, cores: [22, "23"], memory_gib: 32.5}}
  - {instance: trn1.32xlarge, count: 2}
  - instance: trn2.48xlarge
    lnc: 1
defaults:
  engine: transformers-neuronx
  quantize: int8
  group_query_attention: shard-over-batch
  spread: {host: 2}
  update: {strategy: hold, max_swap_s: 12.5, rollback: false}
models:
  wide: {source: org/wide, tp_degree: 32, spread: host, replicas: 2, priority: 7, host_memory_gib: 120}
  pinned:
    source: ./pinned
    tp_degree: 8
    max_batch: 16
    cores: ["trn1.32xlarge/1:8-15", "0-7"]
    replicas: {min: 2, max: 3}
  odd: {source: s3://bucket/odd, tp_degree: 12, max_batch: 24, allow_degrees: [6, 12], threads: 3, dtype: fp16}
  played: {engine: echo, quantize: null, group_query_attention: null, engine_options: {step_ms: 1.5}, max_queue: 0}
  drafted:
    source: ~/drafted
    engine: cpu
    quantize:
    group_query_attention:
    draft: {source: ./draft, k: 3}
    deadlines: {start_s: 60, step_s: 5, drain_s: 0}
"""

NEURON = """\
hosts: {instance: inf2.48xlarge}
engines:
  transformers-neuronx: {python: ~/envs/tnx/bin/python}
  nxd-inference: {python: ../nxdi/bin/python}
defaults: {tp_degree: 8, max_len: 2048, buckets: {prefill: [128, 512], decode: [512, 2048]}, compiler: {optlevel: 1}}
models:
  fused:
    source: ./fused
    engine: nxd-inference
    quantize_kv: fp8
    sampling: device
    fuse_qkv: true
    engine_options: {qkv_kernel_enabled: true, on_device_sampling_config: {global_topk: 64}, medusa_tree: null}
  old:
    source: s3://bucket/old
    engine: transformers-neuronx
    compiler: {flags: --enable-saturate-infinity, workers: 4}
    neff_cache: s3://neffs/old
    engine_options: {attention_layout: BSH, sparse_attn: {causal: false}, mlp_in_weight_tiling_permute_order: [1, 2]}
  either: {source: ./either, draft: {source: ./draft}, quantize: fp8, buckets: {}}
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
        "allow_head_padding allow_degrees hbm_overhead_gib allow_pickle tp name min max spread host_memory_gib "
        "quantize group_query_attention draft update deadlines engine_options load_in_8bit max_per_host "
        "quantize_kv buckets sampling fuse_qkv compiler context_length_estimate neuron_cc_flags",
    )
)
HOSTS = st.dictionaries(
    st.sampled_from(["instance", "emulate", "count", "reserve", "lnc"]),
    VALUES | st.sampled_from(["inf2.xlarge", "trn1.2xlarge", "trn2.3xlarge"]),
)
SPECS = st.fixed_dictionaries(
    {"models": st.dictionaries(st.sampled_from(["a", "b", "c d"]), st.dictionaries(FIELDS, VALUES, max_size=5))},
    optional={
        "version": VALUES,
        "name": VALUES,
        "hosts": HOSTS | st.lists(HOSTS, max_size=3),
        "defaults": st.dictionaries(FIELDS, VALUES, max_size=3),
        "engines": VALUES | st.dictionaries(st.sampled_from(["cpu", "nxd-inference", "tnx"]), VALUES, max_size=2),
    },
)

PLACE = re.compile(r"f\.yaml:[1-9][0-9]*:[1-9][0-9]*")


KNOWN = [
    Checkpoint("llama", 32, 8, 32, 4096, 14336, 128, 128256, 8192, False, 8_030_261_248),
    Checkpoint("mixtral", 32, 8, 32, 4096, 14336, 128, 32000, 32768, False, 46_702_792_704, 8),
    Checkpoint("gpt2", 25, 25, 48, 1600, 6400, 64, 50257, 1024, True, 1_557_611_200),
]


def holds(text: str | bytes) -> None:
    """What is promised of every text."""
    parsed = parse(text, "f.yaml")
    assert parsed.ok or has_errors(parsed.problems)
    assert all(PLACE.fullmatch(problem.where) and problem.what for problem in parsed.problems)
    assert render(parsed.problems).count("\n") >= len(parsed.problems)
    if parsed.spec is not None:
        hosts = hosts_for(parsed.spec, Machine((0, 1)))
        checkpoints = {model.name: KNOWN[i % len(KNOWN)] for i, model in enumerate(parsed.spec.models)}
        assert all(problem.what for problem in check(parsed.spec, hosts, checkpoints, checkpoints))
        if parsed.ok:
            plan(parsed.spec, hosts, checkpoints)
            plan(parsed.spec, hosts)


fuzzed = search(40)


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


EXAMPLES = [path.read_text() for path in sorted((Path(placements.__path__[0]) / "examples").glob("*.yaml"))]
ODD = [
    *re.findall(
        r"\S+", "{} [] [[]] {a: b} null ~ on off yes 0 1 2 -1 3 8 64 128 1e400 .inf .nan 010 1:30 0x1f host 2.5"
    ),
    *re.findall(
        r"\S+", "inf2.48xlarge inf2.xlarge trn1.32xlarge trn2.48xlarge inf1.xlarge int8 s8 cpu echo auto lmi surge"
    ),
    *re.findall(
        r"\S+", '"" "0-7" 0-7 7-0 "x:0-7" s3:// ../x a b !!int !x &a *a *d << ? - | > % @ ` # , : \ufeff \x00 é \u2028'
    ),
    "4096",
    "99999999999999999999",
    "'",
    '"',
]


def mutated(text: str, chance: random.Random) -> str:
    """The text with one to four edits: tokens replaced, lines moved, indented or doubled, pieces cut out."""
    for _ in range(chance.randint(1, 4)):
        tokens = [(token.start(), token.end()) for token in re.finditer(r"[\w./-]+|\S", text)] or [(0, 0)]
        lines = text.splitlines(keepends=True) or [""]
        first, last = chance.choice(tokens)
        line, other = chance.randrange(len(lines)), chance.randrange(len(lines))
        kind = chance.randrange(8)
        if kind <= 2:
            text = text[:first] + chance.choice(ODD) + text[last:]
        elif kind == 3:
            another = chance.choice(tokens)
            text = text[:first] + text[another[0] : another[1]] + text[last:]
        elif kind == 4:
            text = text[:first] + text[chance.randint(first, min(len(text), first + 30)) :]
        elif kind == 5:
            text = "".join([*lines[:line], chance.choice(["  ", " ", "- ", "\t"]) + lines[line], *lines[line + 1 :]])
        elif kind == 6:
            text = "".join([*lines[:line], lines[other], *lines[line:]])
        else:
            text = "".join([*lines[:line], lines[line].lstrip(), *lines[line + 1 :]])
    return text


STRANGE: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        6,
        8,
        12,
        16,
        24,
        32,
        64,
        128,
        129,
        1000,
        1024,
        4096,
        4097,
        -1,
        10**30,
        2.5,
        1e400,
    ),
    *(
        [],
        {},
        [[]],
        [0],
        ["0-7"],
        ["trn1.32xlarge/0:0-7", "8"],
        {"a": 1},
        {"host": 2},
        {"min": 3, "max": 2},
        {"vcpus": 9},
    ),
    *("", "host", "int8", "cpu", "echo", "auto", "0-7", "5", "s3://b/x", "./x", "x y", "inf2.xlarge", "trn2.48xlarge"),
    *(
        "transformers-neuronx",
        "nxd-inference",
        "shard-over-heads",
        "all-gather-heads",
        "lmi",
        "fp32",
        "\x00",
        "é",
        "a" * 99,
    ),
    *({"instance": "trn2.3xlarge", "lnc": 1}, [{"emulate": "trn1.32xlarge"}, {"emulate": "inf2.24xlarge", "count": 3}]),
]
KEYS = [
    *ModelSpec.model_fields,
    *HostsSpec.model_fields,
    "cores",
    "memory_gib",
    "host",
    "min",
    "max",
    "k",
    "tp",
    "gqa",
    "a b",
]


def altered(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts, at any depth, replaced, renamed, added or taken away."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.1:
        return chance.choice(STRANGE)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], *chance.choice([[altered(value[at], chance)], [], [value[at]] * 2]), *value[at + 1 :]]
    key = chance.choice([*value])
    kind = chance.randrange(8)
    if kind == 0:
        return {name: part for name, part in value.items() if name != key}
    if kind == 1:
        return {(chance.choice(KEYS) if name == key else name): part for name, part in value.items()}
    if kind == 2:
        return {**value, chance.choice(KEYS): chance.choice(STRANGE)}
    return {**value, key: altered(value[key], chance)}


def damaged(chance: random.Random) -> str:
    """A good spec with its text or its values damaged."""
    text = chance.choice([GOOD, SEVERAL, NEURON, *EXAMPLES])
    if chance.random() < 0.3:
        return mutated(text, chance)
    value = yaml.safe_load(text)
    for _ in range(chance.choice([1, 1, 2, 3])):
        value = altered(value, chance)
    return json.dumps(value) if chance.random() < 0.5 else yaml.safe_dump(value, sort_keys=False)


def fuzz(documents: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(documents):
        text = damaged(chance)
        try:
            holds(text)
        except BaseException:
            print(text)  # noqa: T201
            raise


def test_some_damaged_specs_give_no_traceback() -> None:
    """Parsed, judged and planned; the ten thousand of the long run begin with others."""
    fuzz(500, seed=1)


@pytest.mark.slow
def test_ten_thousand_damaged_specs_give_no_traceback() -> None:
    """Parsed, judged and planned."""
    fuzz(10_000, seed=2)


def test_what_the_parser_takes_the_schema_takes_too() -> None:
    """An editor must not underline what is good. The documents are JSON, which both read alike."""
    schema, chance = jsonschema.Draft202012Validator(json_schema()), random.Random(3)
    good = 0
    for _ in range(500):
        value = yaml.safe_load(chance.choice([GOOD, SEVERAL, NEURON, *EXAMPLES]))
        text = json.dumps(altered(value, chance))
        if "Infinity" not in text and parse(text, "f.yaml").ok:  # no JSON: YAML takes the word for text
            good += 1
            assert [error.message for error in schema.iter_errors(json.loads(text))] == []
    assert good > 50


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "content",
    [
        LAUGHS,
        LAUGHS.replace("[", "{<<: [").replace("]", "]}").replace("x, x, x, x, x, x, x, x, x", "{k: v}"),
        lambda: b"models: {a: {source: ./" + b"a" * 50_000_000 + b"}}",
        lambda: "models:\n" + "  m: {source: ./a}\n" * 2_000_000,
        "[" * 200_000,
        "{a: " * 60_000,
        "- " * 100_000,
        "\n".join(" " * i + f"a{i}:" for i in range(700)),
        "models: &a {a: *a}",
    ],
    ids=["laughs", "merged laughs", "50 MB", "50 MB of models", "brackets", "braces", "dashes", "indents", "self"],
)
def test_what_would_take_for_ever_is_refused_quickly(content: str | Callable[[], str | bytes]) -> None:
    """Within seconds of CPU time on a slow machine, and with one plain problem."""
    text = content if isinstance(content, str) else content()
    begun = time.process_time()
    problems = parse(text, "f.yaml").problems
    assert time.process_time() - begun < 5
    assert {problem.id for problem in problems} <= {"yaml-too-large", "yaml-syntax"}
    assert problems


def test_the_largest_specs_are_judged_in_seconds() -> None:
    """4096 hosts of two types, and hundreds of models."""
    hosts = "hosts: [{instance: inf2.48xlarge, count: 4000}, {instance: trn1.32xlarge, count: 96}]\n"
    text = hosts + "models:\n" + "".join(f"  m{i}: {{source: ./a, tp_degree: 8, replicas: 9}}\n" for i in range(300))
    begun = time.process_time()
    parsed = parse(text, "f.yaml")
    assert parsed.spec is not None
    check(parsed.spec, hosts_for(parsed.spec, Machine((0, 1))))
    assert time.process_time() - begun < 20


@pytest.mark.parametrize("text", [GOOD, SEVERAL, NEURON, *EXAMPLES])
def test_the_text_that_is_damaged_is_good(text: str) -> None:
    """Otherwise the fuzzing would begin beside the point."""
    assert parse(text).problems == ()
