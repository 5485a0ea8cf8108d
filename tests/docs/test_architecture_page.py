"""docs/architecture.md, CONTRIBUTING.md and the glossary name what exists."""

from __future__ import annotations

import ast
import os
import re

from orchestrator.messages.replica_states import TRANSITIONS, State
from tests.docs.pages import ARCHITECTURE, CONTRIBUTING, ROOT, SOURCES
from tests.test_architecture import LAYERS, PARTS_OF_ENGINES

MAX_PAGE_WORDS = 3500


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
    assert len(named) > 80
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in paths)} == set()


def test_the_rooms_of_the_page_have_the_first_sentences_of_their_docstrings() -> None:
    """One row for each room, in the order of LAYERS."""
    rows = re.findall(r"^\| `([a-z_/]+)/` \| (.+) \|$", ARCHITECTURE.read_text(), re.MULTILINE)
    assert rows == [(room.replace(".", "/"), _first_sentence(room)) for room in LAYERS if room not in PARTS_OF_ENGINES]


def _first_sentence(room: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text()))
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()), maxsplit=1)[0]


def test_the_page_can_be_read_in_one_go() -> None:
    """It explains; what users need is on pages of their own, and a module's details are in its docstring."""
    assert len(ARCHITECTURE.read_text().split()) <= MAX_PAGE_WORDS


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
