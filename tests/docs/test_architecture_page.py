"""docs/architecture.md, CONTRIBUTING.md and the glossary name what exists."""

from __future__ import annotations

import os
import re

from orchestrator.messages.replica_states import TRANSITIONS, State
from tests.docs.pages import ARCHITECTURE, CONTRIBUTING, ROOT, SOURCES
from tests.module_list import with_listing


def _life_cycle() -> str:
    """Returns the table as a Mermaid state diagram, with an arrow for each pair of states."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (before, signal), after in TRANSITIONS.items():
        arrows.setdefault((before, after), []).append(signal.value)
    lines = [f"    {before.value} --> {after.value} : {', '.join(names)}" for (before, after), names in arrows.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {State.PENDING.value}", *lines]) + "\n"


def test_the_drawn_life_cycle_is_the_transition_table() -> None:
    """Generated from it: UPDATE_GOLDEN=1 writes it anew."""
    begin, end = "<!-- lifecycle: generated -->\n", "<!-- end of lifecycle -->"
    before, _, rest = ARCHITECTURE.read_text().partition(begin)
    drawn, _, after = rest.partition(end)
    wanted = f"```mermaid\n{_life_cycle()}```\n"
    if os.environ.get("UPDATE_GOLDEN"):
        ARCHITECTURE.write_text(before + begin + wanted + end + after)
        drawn = wanted
    assert drawn == wanted


def test_every_module_of_the_architecture_exists() -> None:
    """Each `name.py` that the page names, in the folder that it is named with if there is one."""
    named = set(re.findall(r"[a-z_0-9/]+\.py\b", ARCHITECTURE.read_text()))
    paths = [f"/{path.relative_to(ROOT)}" for path in SOURCES]
    assert len(named) > 100
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in paths)} == set()


def test_the_list_of_modules_is_made_from_their_docstrings() -> None:
    """`python -m tests.module_list` writes it anew."""
    page = ARCHITECTURE.read_text()
    assert page == with_listing(page)


def test_every_path_in_contributing_exists() -> None:
    paths = re.findall(r"`((?:orchestrator|workers|placements|tests|docs)/[a-z_0-9/.]*)`", CONTRIBUTING.read_text())
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_glossary_is_in_alphabetical_order() -> None:
    """Each word once, and none is marked as a part that is not built."""
    terms = re.findall(r"^\*\*(.+?)\*\* ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 40
    assert not [term for term in terms if "*" in term]
    assert terms == sorted(set(terms), key=lambda term: term.lower().replace("_", " "))
