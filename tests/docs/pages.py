"""Reads pages of the documentation: fenced blocks, sections, tables and words in backticks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.cli import main as cli
from orchestrator.control.resolve.spec_file import SpecFile, examine
from placements.facts.topology import Machine
from placements.planner.plan import plan
from placements.spec.problems import Problem, has_errors

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "placements" / "examples"
DOCS = ROOT / "docs"
README, CONTRIBUTING, CHANGELOG = ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"
API, ARCHITECTURE, CLI, ERRORS = DOCS / "api.md", DOCS / "architecture.md", DOCS / "cli.md", DOCS / "errors.md"
OVERVIEW = DOCS / "overview.md"
SECURITY, SIMULATE, SPEC = DOCS / "security.md", DOCS / "simulate.md", DOCS / "spec.md"
PAGES = [README, CHANGELOG, *sorted(DOCS.rglob("*.md"))]
LAPTOP = Machine(cpus=(0, 1))
LARGE = Machine(cpus=tuple(range(192)))  # enough CPUs that emulation oversubscribes none of them
KEBAB = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")
SOURCES = [path for package in ("placements", "workers", "orchestrator") for path in (ROOT / package).rglob("*.py")]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    section: str  # the heading above it, without its marks

    def marked(self, mark: str) -> set[str]:
        """The ids in a comment such as `# problems: pin-overlap`."""
        mark_line = re.search(rf"^# {mark}: (.+)$", self.text, re.MULTILINE)
        return set(mark_line[1].split()) if mark_line else set()

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a page, in order."""
    fenced, section, start, language, lines = [], "", 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if start and line == "```":
            fenced.append(Block(page, start, language, "\n".join(lines) + "\n", section))
            start, lines = 0, []
        elif start:
            lines.append(line)
        elif line.startswith("```"):
            start, language = number, line[3:]
        elif line.startswith("#"):
            section = line.lstrip("#").strip().replace("`", "")
    assert not start, f"{page.name}:{start}: a block that does not end"
    return tuple(fenced)


def blocks_of(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def section(page: Path, heading: str) -> str:
    """The text below a heading, down to the next one of its level or above."""
    text = page.read_text()
    start = re.search(rf"^(#+) `?{re.escape(heading)}`?$", text, re.MULTILINE)
    assert start is not None, f"{page.name} has no section {heading}"
    rest = text[start.end() :]
    end = re.search(rf"^#{{1,{len(start[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """The cells of a text's tables, headers and rules among them."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def words(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def named(block: Block) -> str:
    """The file name in the first line of an example."""
    header = re.match(r"# (\S+\.yaml)\n", block.text)
    assert header is not None, f"{block} does not begin with its file name"
    return header[1]


def loaded(block: Block, folder: Path) -> SpecFile:
    return examine(block.text, "spec.yaml", str(folder), LARGE, folders="plan")


def all_problems(file: SpecFile) -> list[Problem]:
    """What `plan` says, without a fleet."""
    problems = list(file.problems)
    if file.spec is not None and not has_errors(problems):
        drawn = plan(file.spec, file.hosts, file.checkpoints)
        problems += [problem for missing in drawn.unplaced for problem in missing.problems]
    return problems


def leaves(group: Any, above: str = "") -> dict[str, Any]:
    """The commands that do something, each with the words that it is called by."""
    commands: dict[str, Any] = {}
    for name, command in group.commands.items():
        commands |= leaves(command, f"{above}{name} ") if hasattr(command, "commands") else {above + name: command}
    return commands


COMMANDS = leaves(cli.application())


def options(command: Any) -> set[str]:
    names = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    return {option for option in names if option.startswith("-")} - {"--help"}


def shape(value: Any) -> Any:
    """The keys of a JSON value, at every depth; of a list the union of its items' keys."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        merged: dict[str, Any] = {}
        for item in (shape(item) for item in value):
            for key, part in (item or {}).items():
                merged[key] = part or merged.get(key)
        return merged or None
    return None


def example(page: Path, heading: str, number: int = 0) -> Any:
    return json.loads([b.text for b in blocks(page) if b.language == "json" and b.section == heading][number])
