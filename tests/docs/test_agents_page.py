"""docs/agents.md: the agents' settings agree with its spec. `make clients` runs its commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, blocks, loaded

PAGE = blocks(DOCS / "agents.md")
SPEC = next(block for block in PAGE if block.language == "yaml")
LENGTHS = {"Claude Code": "CLAUDE_CODE_MAX_CONTEXT_TOKENS={}\n", "Codex": "model_context_window = {}\n"}


@pytest.mark.parametrize("agent", LENGTHS)
def test_an_agents_settings_name_the_model_and_its_length(agent: str, folder: Path) -> None:
    """The length is the model's `max_len`."""
    file = loaded(SPEC, folder)
    assert file.spec is not None
    (model,) = file.spec.models
    settings = "".join(block.text for block in PAGE if block.section == agent)

    assert LENGTHS[agent].format(model.max_len) in settings
    assert re.search(rf'= ?"?{model.name}"?\n', settings)
