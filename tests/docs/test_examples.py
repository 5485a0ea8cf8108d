"""The specs that the pages show give the problems that they name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from orchestrator.cli.init import spec_for
from orchestrator.control.resolve.spec_file import examine, start_problems
from placements.explain.core_map import core_map
from placements.facts.checkpoints import FAMILIES
from placements.facts.encoders import ENCODERS
from placements.planner.plan import plan
from tests.docs.pages import ERRORS, EXAMPLES, LAPTOP, README, Block, all_problems, blocks, blocks_of, loaded, section


@pytest.mark.parametrize("block", blocks_of("yaml"), ids=str)
def test_a_spec_gives_exactly_the_problems_that_it_names(block: Block, folder: Path) -> None:
    """Without a `# problems:` line a spec is valid and fits; only that its source is not at hand is no matter."""
    ids = {problem.id for problem in all_problems(loaded(block, folder))}
    allowed = set() if block.marked("problems") else {"checkpoint-unreadable"}
    assert ids - allowed == block.marked("problems")


@pytest.mark.parametrize("block", [block for block in blocks_of("yaml") if block.marked("up refuses")], ids=str)
def test_up_refuses_exactly_what_a_spec_names(block: Block, folder: Path) -> None:
    """On a machine without Neuron devices."""
    assert {problem.id for problem in start_problems(loaded(block, folder))} == block.marked("up refuses")


@pytest.mark.parametrize("block", [b for b in blocks(ERRORS) if b.language == "yaml"], ids=lambda block: block.section)
def test_an_entrys_example_gives_its_problem_with_its_severity(block: Block, folder: Path) -> None:
    """The first word of an entry is the severity of its problem."""
    file = loaded(block, folder)
    severities = {problem.id: problem.severity for problem in [*all_problems(file), *start_problems(file)]}
    assert section(ERRORS, block.section).split()[0].rstrip(".") == severities[block.section]


def test_the_readmes_core_map_is_the_demos(tmp_path: Path) -> None:
    """As it is printed on a machine with two CPUs."""
    file = examine((EXAMPLES / "demo.yaml").read_text(), "demo.yaml", str(EXAMPLES), LAPTOP)
    assert file.spec is not None
    drawn = core_map(plan(file.spec, file.hosts, file.checkpoints), file.hosts, spec=file.spec)
    assert drawn in blocks(README)[1].text


def test_the_readmes_spec_is_what_init_writes() -> None:
    """Except for the path of the models."""
    (shown,) = [block for block in blocks(README) if block.language == "yaml"]
    written = spec_for(None, "fleet.yaml").replace(str(EXAMPLES), ".")
    assert yaml.safe_load(shown.text) == yaml.safe_load(written)


def test_the_readme_counts_the_families() -> None:
    """Of decoders and of encoders."""
    assert f"| {len(FAMILIES)} families of decoders, {len(ENCODERS)} of encoders;" in README.read_text()
