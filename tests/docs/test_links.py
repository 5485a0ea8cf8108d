"""Links between pages resolve, commands in pages parse, and README, CI and CHANGELOG agree."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import COMMANDS, PAGES, README, ROOT, blocks, blocks_of, options, words


def joined(text: str) -> list[str]:
    """The lines of a shell, those that a backslash continues as one."""
    return text.replace("\\\n", " ").splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_in_a_page_is_one_that_can_be_given(page: Path) -> None:
    """Each `corewright ...` in a block or in backticks parses, and each make target exists."""
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shell = [line for b in blocks(page) if b.language in ("sh", "console") for line in joined(b.text)]
    given = [re.split("  #| > ", line.removeprefix("$ "))[0] for line in shell]
    lines = [shlex.split(line) if line.startswith("corewright ") else line.split() for line in given]
    lines += [
        text.split() for text in words(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    ]
    for line in lines:
        if line[:1] == ["make"] and len(line) > 1:
            assert line[1] in targets
        elif line[:1] == ["corewright"] and len(line) > 1 and not set("[]|") & set("".join(line)):
            typed = [word for word in line[1:] if word != "\\"]
            if typed[0] == "advise" and " ".join(typed[:2]) not in COMMANDS:
                typed.insert(1, "model")  # can be omitted
            name = next((name for name in (" ".join(typed[:2]), typed[0]) if name in COMMANDS), None)
            rest = typed[len(name.split()) :] if name else typed[1:]
            if name and rest:
                COMMANDS[name].make_context(name, rest)
            assert name or (typed[0] in {name.split()[0] for name in COMMANDS} and typed[1:2] in ([], ["--help"])), line


@pytest.mark.parametrize("name", ["architecture", "glossary", "metrics", "runbooks", "security"])
def test_an_option_in_a_page_is_one_of_a_command(name: str) -> None:
    """Each `--option` that stands in backticks without a command before it."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = {option for code in words(page) for option in re.findall(r"^--[a-z][a-z-]*", code)}
    assert named <= set().union(*map(options, COMMANDS.values()))


def test_every_json_block_parses() -> None:
    """Also those that no other test reads."""
    assert {type(json.loads(block.text)) for block in blocks_of("json")} == {dict}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_resolves(page: Path) -> None:
    """To a file, and to a heading in it."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_ci_runs_the_readmes_test_command() -> None:
    """`make test` with the live tests, then `make demo-check`."""
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-2:] == ["make test LIVE=1 PYTEST_ARGS=--durations=50", "make demo-check"]
    assert "CI runs `make test LIVE=1`, then `make demo-check`." in " ".join(README.read_text().split())


def test_the_changelogs_version_is_the_packages() -> None:
    """The topmost entry is what `corewright version` says."""
    completed = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli.main", "version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == completed.stdout.strip()
