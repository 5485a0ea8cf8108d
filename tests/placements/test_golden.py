"""Golden files: a spec -> the exact rendered problems, or the exact plan.

A spec under tests/golden/problems/ is compared with its .txt, one under tests/golden/plans/ with its .json and its core
map, .map. UPDATE_GOLDEN=1 writes them anew; read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from placements.explain.core_map import core_map
from placements.facts.adapters import Adapter
from placements.facts.checkpoints import Checkpoint
from placements.planner.host_choice import plan_on_cluster
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.problems import in_order, render
from tests.placements.fleets import GPT2_XL, LAPTOP, LLAMA_2_7B
from tests.placements.test_encoder_checkpoints import BERT

GOLDEN = Path(__file__).parent.parent / "golden"
ADAPTERS = {
    "./lora/small": Adapter(rank=8, modules=("q_proj", "v_proj")),
    "./lora/large": Adapter(rank=64),
    "./lora/huge": Adapter(rank=1024),
    "./lora/dora": Adapter(rank=8, unsupported="use_dora"),
    "./lora/of-gpt2": Adapter(rank=8, modules=("c_attn",)),
    "org/of-another": Adapter(rank=8, base="meta-llama/Llama-2-13b-hf"),
    "org/of-a-copy": Adapter(rank=8, base="mirror/llama-2-7b-HF"),
}
QWEN3_EMBEDDING = Checkpoint("qwen3", 16, 8, 28, 1024, 3072, 128, 151_669, 32_768, False, 595_776_512)
CHECKPOINTS = {"./llama-2-7b": LLAMA_2_7B, "./gpt2-xl": GPT2_XL, "./qwen3-embedding": QWEN3_EMBEDDING}
CHECKPOINTS["./bge"] = Checkpoint.from_config(BERT, "embedding")


def specs(folder: str) -> list[Path]:
    return sorted((GOLDEN / folder).glob("*.yaml"))


def expected(path: Path, actual: str) -> str:
    """The golden text, which is ``actual`` itself while UPDATE_GOLDEN is set."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(actual)
    return path.read_text()


def checkpoints(text: str) -> dict[str, Checkpoint]:
    spec = parse(text).spec
    models = spec.models if spec else ()
    return {model.name: CHECKPOINTS[model.source] for model in models if model.source in CHECKPOINTS}


@pytest.mark.parametrize("path", specs("problems"), ids=lambda path: path.stem)
def test_a_bad_spec_gives_exactly_these_problems(path: Path) -> None:
    """Every problem of the file, with place, fact and remedy."""
    text = path.read_text()
    parsed = parse(text, path.name)
    problems = parsed.problems
    if parsed.spec is not None:
        adapters = {
            model.name: {name: ADAPTERS[source] for name, source in model.adapters.items() if source in ADAPTERS}
            for model in parsed.spec.models
        }
        hosts = hosts_for(parsed.spec, LAPTOP)
        problems = in_order((*problems, *check(parsed.spec, hosts, checkpoints(text), {}, adapters)))
    assert render(problems) == expected(path.with_suffix(".txt"), render(problems))


@pytest.mark.parametrize("path", specs("plans"), ids=lambda path: path.stem)
def test_a_spec_gives_exactly_this_plan(path: Path) -> None:
    """The JSON of `plan`, on fixed CPUs, and its core map."""
    parsed = parse(path.read_text(), path.name)
    assert parsed.spec is not None
    hosts = hosts_for(parsed.spec, LAPTOP)
    choice = plan_on_cluster(parsed.spec, hosts, {})
    drawn = choice.plan.with_problems((*parsed.problems, *check(parsed.spec, hosts, {})))
    added = {"hosts_to_add": [host.as_dict() for host in choice.added()]} if choice.hosts else {}
    actual = json.dumps({**drawn.as_dict(), **added}, indent=2) + "\n"
    assert actual == expected(path.with_suffix(".json"), actual)
    picture = core_map(drawn, choice.all_hosts, spec=parsed.spec)
    assert picture == expected(path.with_suffix(".map"), picture)


@pytest.mark.parametrize("folder", ["problems", "plans"])
def test_there_are_golden_specs(folder: str) -> None:
    """A test that collects no file proves nothing."""
    assert len(specs(folder)) >= 3
