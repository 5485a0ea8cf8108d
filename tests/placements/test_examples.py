"""The specs in placements/examples, which the docs show, are good."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

import placements
from placements.facts.checkpoints import Checkpoint
from placements.facts.encoders import Kind
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.json_schema import json_schema
from placements.spec.parse import parse
from placements.spec.problems import has_errors
from tests.placements.fleets import LAPTOP, LLAMA_2_7B
from tests.published_configs import PARAMETERS, PUBLISHED

PADDED = {f"optimum-llama-2-{row}" for row in ("7b-latency", "13b-latency", "13b-throughput")}
PADDED |= {"llama-3.3-70b"}
"""32, 40 and 64 heads on 24 cores."""

LLAMA_2_13B = Checkpoint("llama", 40, 40, 40, 5120, 13824, 128, 32000, 4096, False, 13_015_864_320)
EXAMPLES = sorted((Path(placements.__path__[0]) / "examples").glob("*.yaml"))


def test_there_are_examples() -> None:
    """At least two."""
    assert len(EXAMPLES) >= 2


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_can_be_planned_as_a_whole(path: Path) -> None:
    """No problem but warnings of this machine's few CPUs, no opt-out, and nothing unplaced even
    at every max."""
    parsed = parse(path.read_bytes(), path.name, str(path.parent))
    assert parsed.spec is not None
    checkpoints = {}
    for model in parsed.spec.models:
        config = Path(model.source_path or "") / "config.json"
        if model.source_kind == "path" and not model.source.startswith("/"):  # elsewhere: of somebody's machine
            checkpoints[model.name] = Checkpoint.from_config(json.loads(config.read_text()))
        elif model.source in PUBLISHED:
            checkpoints[model.name] = Checkpoint.from_config(PUBLISHED[model.source], model.kind)
    hosts = hosts_for(parsed.spec, LAPTOP)
    problems = (*parsed.problems, *check(parsed.spec, hosts, checkpoints))
    drawn = plan(parsed.spec, hosts, checkpoints, wanted={m.name: m.replicas.max for m in parsed.spec.models})
    assert not has_errors(problems)
    assert {problem.id for problem in problems} <= {"threads-oversubscribed"}
    assert drawn.unplaced == ()
    padded = path.stem in PADDED
    assert all(m.allow_head_padding is padded for m in parsed.spec.models)
    assert not any(m.allow_degrees or m.hbm_overhead_gib for m in parsed.spec.models)


@pytest.mark.parametrize("source", PUBLISHED)
def test_a_published_shape_has_the_published_number_of_parameters(source: str) -> None:
    """So that the shapes are those of the models."""
    kind: Kind = "embedding" if PUBLISHED[source]["model_type"] == "bert" else "generate"
    assert Checkpoint.from_config(PUBLISHED[source], kind).parameters == PARAMETERS[source]


@pytest.mark.parametrize(
    ("row", "checkpoint", "ranges"),
    [
        ("7b-budget", LLAMA_2_7B, [f"{core}-{core + 1}" for core in range(0, 24, 2)]),
        ("7b-latency", LLAMA_2_7B, ["0-23"]),
        ("13b-latency", LLAMA_2_13B, ["0-23"]),
        ("13b-throughput", LLAMA_2_13B, ["0-23"]),
    ],
)
def test_the_rows_of_the_llama_page_fit_their_machine(row: str, checkpoint: Checkpoint, ranges: list[str]) -> None:
    """With the shapes of Llama 2: one model on all cores, or a replica on each device."""
    (path,) = [path for path in EXAMPLES if path.stem == f"optimum-llama-2-{row}"]
    parsed = parse(path.read_bytes(), path.name, str(path.parent))
    assert parsed.spec is not None
    (name,) = [model.name for model in parsed.spec.models]
    hosts = hosts_for(parsed.spec, LAPTOP)
    assert not has_errors(check(parsed.spec, hosts, {name: checkpoint}))
    drawn = plan(parsed.spec, hosts, {name: checkpoint})
    assert [str(placement.cores) for placement in drawn.placements] == ranges


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_agrees_with_the_json_schema(path: Path) -> None:
    """Editors do not underline it."""
    jsonschema.validate(yaml.safe_load(path.read_text()), json_schema())
