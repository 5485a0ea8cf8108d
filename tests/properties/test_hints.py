"""A hint that names a value is right: following it gives no new error, and ends the problem."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path as File
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from placements.engines.registry import NAMES
from placements.facts.checkpoints import Checkpoint
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.problems import Path, Problem
from placements.spec.schema import ModelSpec, Spec
from tests.placements.fleets import GPT2_XL, LAPTOP, LLAMA_2_7B

Tree = dict[str, Any]
GOLDEN = sorted((File(__file__).parents[1] / "golden" / "problems").glob("*.yaml"))
GATED = Checkpoint("llama", 32, 8, 32, 4096, 14336, 128, 128256, 8192, False, 8_030_261_248)
SHAPES = {"./llama-2-7b": LLAMA_2_7B, "./gpt2-xl": GPT2_XL, "./gated": GATED}


class Plain(yaml.SafeDumper):
    """Writes equal values twice, instead of an alias."""

    def ignore_aliases(self, data: object) -> bool:
        return True


class Judged:
    """The problems of a spec, each with the path of its position."""

    def __init__(self, tree: Tree) -> None:
        parsed = parse(yaml.dump(tree, Dumper=Plain, sort_keys=False, width=100_000), "f.yaml")
        self.problems: list[tuple[Path, Problem]] = []
        if parsed.spec is None:
            return
        shapes = {model.name: SHAPES[model.source] for model in parsed.spec.models if model.source in SHAPES}
        self.unread = set(parsed.problems)
        paths: dict[str, Path] = {}
        for path, place in parsed.spec.places.positions.items():
            if at(tree, path) is not MISSING:
                where = f"f.yaml:{place.line}:{place.column}"
                paths[where] = max(path, paths.get(where, ()), key=len)
        problems = (*parsed.problems, *check(parsed.spec, hosts_for(parsed.spec, LAPTOP), shapes))
        self.problems = [(paths.get(problem.where, ()), problem) for problem in problems]

    def errors(self) -> Counter[tuple[str, Path]]:
        """The number of errors by id and model: a hint may change the places of others."""
        return Counter((problem.id, owner(path)) for path, problem in self.problems if problem.severity == "error")


def owner(path: Path) -> Path:
    """The path of the model, or of the defaults, that a path is in; () if it is in neither."""
    return path[:2] if path[:1] == ("models",) else path[:1] if path[:1] == ("defaults",) else ()


MISSING = object()


def at(tree: Any, path: Path) -> Any:
    """What a tree has at a path, or MISSING."""
    for key in path:
        if not (key in tree if isinstance(tree, dict) else isinstance(tree, list) and int(key) < len(tree)):
            return MISSING
        tree = tree[key]
    return tree


# What a hint says to do

ALTERNATIVES = re.compile(r"; (?:or )?|, or (?=[a-z])|, (?=(?:raise|set|remove) )| or (?=lower )")
SUFFIX = r"(?: if you .*| or less|, which .*| in quotes| silences this)?"
ENGINES = "|".join(NAMES)
GRAMMAR = tuple(
    (re.compile(pattern + SUFFIX), place)
    for pattern, place in (
        (r'(?:write|pin to) (?P<value>"[^"]+")', "it"),
        (r"write (?P<value>\[.*\])", "list"),
        (r"(?:end with|set it to|raise it to) (?P<value>\d+)", "it"),
        (r"add (?P<value>\d+)", "item"),
        (rf"use (?P<value>(?:{ENGINES})(?:(?:, | or )(?:{ENGINES}))*)", "engine"),
        (r"use (?P<value>\d[\d, andor]*)", "it"),
        (r"(?:set|raise|lower) (?P<name>[\w.]+) to (?P<value>\d+)", ""),
        (r"(?P<name>tp_degree) (?P<value>\d+) needs .*", ""),
        (r"(?P<name>quantize): (?P<value>int8) needs .*", ""),
        (r"one length needs .*: (?P<name>buckets): (?P<value>\{.*\})", ""),
        (r"(?:(?:to .*, )?(?:set|add|use|write) )?(?P<name>[a-z_][\w.]*): (?P<value>\S.*?)", ""),
    )
)
EXAMPLES = re.compile(
    r".*(?: like |\.\.\.|s are |s can |can be |the one |a multiple |schedule's|at most|of type| for an engine "
    r"|write it into|write a range|the interpreter|without |free cores|\bNAME\b|source: \./path|\.md|`corewright|--).*"
    r"|(?:the nearest|its options|options of|indent|reserve|it is an option|use an engine of|use one of the)\b.*"
    r"|[\d, ]+ on .*"
)
"""Hints whose values are examples, facts, or for the author to choose."""


def values(text: str) -> Iterator[Any]:
    """A value as it is written, or several to choose from."""
    for word in [text] if text.startswith(("[", "{")) else re.split(r", (?:or )?| and | or ", text):
        yield yaml.safe_load(word)


def with_value(tree: Tree, path: Path, value: Any) -> Tree:
    """The tree with a value at a path. Mappings above it are added, and short notations are written out."""
    result = copy.deepcopy(tree)
    inner: Any = result
    for key, following in pairwise(path):
        if isinstance(inner, dict) and isinstance(following, str) and not isinstance(inner.get(key), dict):
            short = inner.get(key)
            inner[key] = {"min": short, "max": short} if key == "replicas" and short is not None else {}
        inner = inner[key]
    inner[path[-1]] = value
    return result


def renamed(tree: Tree, path: Path, name: str) -> Tree:
    """The tree with another key at a path."""
    result = copy.deepcopy(tree)
    above = at(result, path[:-1])
    value = above.pop(path[-1])
    above.setdefault(name, value)
    return result


def place_of(name: str, path: Path, tree: Tree) -> Path:
    """The path that a hint means by a field: from the top, from the model, in the mapping of the problem, or beside
    its key."""
    keys = tuple(name.split("."))
    if keys[0] in Spec.model_fields and not (path[:1] == ("models",) and keys[0] in ModelSpec.model_fields):
        return keys
    if owner(path) and keys[0] in ModelSpec.model_fields:
        return (*owner(path), *keys)
    return (*path, *keys) if isinstance(at(tree, path), dict) else (*path[:-1], *keys)


def followed(tree: Tree, path: Path, problem: Problem) -> Iterator[tuple[str, Path, Tree]]:
    """Each alternative of a hint that names a value, the path that it changes, and the tree after it."""
    is_renamed = problem.id in ("unknown-key", "unknown-engine-option")
    for part in ALTERNATIVES.split(problem.hint):
        if match := re.fullmatch(r'did you mean "?([^"]+?)"?\?', part):
            target = (*path[:-1], match[1]) if is_renamed else path
            yield part, target, renamed(tree, path, match[1]) if is_renamed else with_value(tree, path, match[1])
            continue
        match, place = next(((match, place) for each, place in GRAMMAR if (match := each.fullmatch(part))), (None, ""))
        if match is None or EXAMPLES.fullmatch(part):
            assert match or EXAMPLES.fullmatch(part) or not re.search(r'\d|"|\w: ', part), f"not understood: {part}"
            continue
        for value in values(match["value"]):
            if place == "" and is_renamed:
                yield part, (*path[:-1], match["name"]), renamed(with_value(tree, path, value), path, match["name"])
            elif place == "item":
                yield part, path[:-1], with_value(tree, path[:-1], [*at(tree, path[:-1]), value])
            else:
                places = {"it": path, "list": path[:-1], "engine": (*owner(path), "engine")}
                target = places.get(place) or place_of(match["name"], path, tree)
                yield part, target, with_value(tree, target, value)


VALUE_ERRORS = frozenset({"wrong-type", "unknown-value", "unknown-key", "bad-range", "bad-name", "out-of-range"})


def faults(tree: Tree) -> Iterator[tuple[Problem, str, object]]:
    """Each alternative of a hint that gives a new error: the problem, its words, and the new errors.

    A value that could not be read hides other errors, so after its hint only errors of the value itself count.
    """
    before = Judged(tree)
    unread = {owner(path) for path, problem in before.problems if problem in before.unread}
    for path, problem in before.problems:
        if not path or path[0] == "defaults" or (isinstance(path[-1], int) and unread & {(), owner(path)}):
            continue  # the place of the value is not known
        for part, target, after in followed(tree, path, problem):
            judged = Judged(after)
            if problem in before.unread:
                own = {each.id for place, each in judged.problems if place[: len(target)] == target}
                new = own & VALUE_ERRORS - {id for id, _ in before.errors()}
            else:
                new = {id for id, _ in judged.errors() - before.errors()}
            if new:
                yield problem, part, [each for _, each in judged.problems if each.id in new]


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_the_hints_of_the_golden_problems_are_right(file: File) -> None:
    """None makes a new error."""
    try:
        tree = yaml.safe_load(file.read_text())
    except yaml.YAMLError:
        return
    assert list(faults(tree)) == []


def cores() -> st.SearchStrategy[Any]:
    """Pins in the notation of a spec, and in others."""
    first = st.integers(0, 26)
    item = st.one_of(
        first,
        st.builds("{}-{}".format, first, first),
        st.builds(
            "{}:{}".format, st.sampled_from(["inf2.48xlarge/0", "none", "0"]), st.sampled_from(["0-7", "3", "8-9"])
        ),
        st.sampled_from(["0..7", "4,5", [0, 1]]),
    )
    singles = st.builds(lambda start, count: list(range(start, start + count)), first, st.sampled_from([2, 4, 8, 9]))
    return st.lists(item, min_size=1, max_size=3) | singles | item


COUNT = st.sampled_from([0, 1, 2, 3, 4, 9])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "engine": st.sampled_from([*NAMES, "auto", "tnx", "nxdi", True]),
    "kind": st.sampled_from(["generate", "embedding", "rerank", "embeddings"]),
    "tp_degree": st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 40, 64, 0, "8"]),
    "tensor_parallel_size": st.sampled_from([2, 3, 8]),
    "allow_degrees": st.sampled_from([[3], [6], [12]]),
    "allow_head_padding": st.booleans(),
    "cores": cores(),
    "replicas": st.one_of(COUNT, st.fixed_dictionaries({}, optional={"min": COUNT, "max": COUNT, "mim": COUNT})),
    "spread": st.sampled_from(["host", {"host": 1}, {"host": 2}]),
    "max_per_host": st.sampled_from([1, 2]),
    "max_batch": st.sampled_from([1, 2, 16, 600]),
    "max_len": st.sampled_from([1, 128, 512, 4096, 5000, 100_000]),
    "dtype": st.sampled_from(["bf16", "fp16", "bfloat16", "fp8"]),
    "quantize": st.sampled_from(["int8", "fp8", "static_int8"]),
    "load_in_8bit": st.booleans(),
    "quantize_kv": st.sampled_from(["int8", "fp8"]),
    "buckets": st.fixed_dictionaries(
        {},
        optional={
            "prefill": st.lists(st.sampled_from([128, 512, 4096])),
            "decode": st.lists(st.sampled_from([128, 512])),
        },
    ),
    "sampling": st.sampled_from(["device", "host"]),
    "fuse_qkv": st.booleans(),
    "group_query_attention": st.sampled_from(["shard-over-heads", "shard_over_batch", "replicated-heads"]),
    "draft": st.sampled_from([{"source": "./d"}, {"source": "./d", "k": 900}, {"source": "./d", "method": "eagle"}]),
    "threads": st.sampled_from([1, 400, "lmi"]),
    "adapters": st.just({"x": "./lora"}),
    "compiler": st.sampled_from([{"optlevel": 1}, {"optlevel": 9}, {"workers": 4}]),
    "engine_options": st.dictionaries(
        st.sampled_from(["prefix_cache", "fused_mlp", "max_num_seq", "max_logprob", "step_ms", "block_size", "unrol"]),
        st.sampled_from([True, 1, "x"]),
        max_size=2,
    ),
    "scaling": st.sampled_from(
        [{"schedules": [{"start": "0 8 * * *", "end": "0 9 * * *", "min": 3, "max": 1}]}, {"idle": 5}, {"idle_s": -1}]
    ),
    "objectives": st.sampled_from([{"tpot_ms": 5}, {"items_per_second": 5}]),
}
FEW = st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: FIELDS[name] for name in names})
)
HOSTS = st.builds(
    lambda kind, instance, more: {kind: instance, **more},
    st.sampled_from(["instance", "emulate"]),
    st.sampled_from(["inf2.xlarge", "inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge", "inf2.48xl"]),
    st.sampled_from(
        [{}, {}, {"count": 2}, {"reserve": {"cores": [3]}}, {"reserve": {"vcpus": 900}}, {"min": 3, "max": 2}]
    ),
)
SPECS = st.builds(
    lambda hosts, models: {**({} if hosts is None else {"hosts": hosts}), "models": models},
    st.none() | HOSTS | st.lists(HOSTS, min_size=1, max_size=2),
    st.dictionaries(
        st.sampled_from(["a", "b"]),
        st.builds(lambda source, few: {"source": source, **few}, st.sampled_from([*SHAPES, "org/unknown"]), FEW),
        min_size=1,
    ),
)


@given(SPECS)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_following_a_hint_makes_no_new_error(tree: Tree) -> None:
    """For any spec, and each alternative that a hint names with its value."""
    assert list(faults(yaml.safe_load(yaml.dump(tree, Dumper=Plain)))) == []
