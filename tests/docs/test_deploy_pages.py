"""The pages that lead from machines to a served model: their specs are valid, and their commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from orchestrator.cli.app import app
from placements.spec.parse import parse
from placements.spec.problems import has_errors
from tests.docs.pages import ROOT, blocks

PAGES = [ROOT / "docs" / f"deploy-{way}.md" for way in ("ec2", "kuberay", "systemd")]
SPEC = ROOT / "deploy" / "kuberay" / "fleet.yaml"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_corewright_parses(page: Path) -> None:
    """Wherever it runs: in a shell, in a pod."""
    group = get_command(app)
    lines = [line for block in blocks(page) if block.language == "sh" for line in block.text.splitlines()]
    commands = [match[1] for line in lines if (match := re.search(r"(?:^| -- )(corewright .*)", line))]
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        found = group
        while hasattr(found, "commands"):
            found = found.commands[words.pop(0)]
        found.make_context("", words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_spec_is_valid(page: Path) -> None:
    """The page of KubeRay uses the file of its folder."""
    specs = [block.text.encode() for block in blocks(page) if block.language == "yaml"]
    for text in specs or [SPEC.read_bytes()]:
        assert not has_errors(parse(text, "fleet.yaml", "/").problems)
