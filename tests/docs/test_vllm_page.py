"""The specs of docs/vllm.md plan with real sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from placements.planner.plan import plan
from placements.rules.checks import check
from tests.docs.pages import DOCS, Block, blocks, loaded
from tests.placements.test_memory import LLAMA_31_8B

SPECS = [block for block in blocks(DOCS / "vllm.md") if block.language == "yaml" and "instance:" in block.text]


@pytest.mark.parametrize("block", SPECS, ids=lambda block: block.section)
def test_a_spec_for_neuron_devices_places_every_replica(block: Block, folder: Path) -> None:
    """With the memory of Llama 3.1 8B in place of every checkpoint, and no problem."""
    file = loaded(block, folder)
    assert file.spec is not None
    checkpoints = {model.name: LLAMA_31_8B for model in file.spec.models}
    assert check(file.spec, file.hosts, checkpoints) == ()
    assert plan(file.spec, file.hosts, checkpoints).unplaced == ()
