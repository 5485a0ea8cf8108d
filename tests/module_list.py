"""The list of rooms and modules in docs/architecture.md, made from docstrings: ``python -m tests.module_list`` writes
it."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: made by `python -m tests.module_list` -->", "<!-- end of modules -->"
PACKAGES = ("placements", "workers", "orchestrator")


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line. Raises ValueError where there is none."""
    source = path.read_text()
    end = source.find('"""', 3) + 3 if source.startswith('"""') else None  # a docstring alone is parsed in no time
    text = ast.get_docstring(ast.parse(source[:end]))
    if not text:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring")
    return re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0].rstrip(".:")


def listing() -> str:
    """One heading for each package, a line for each room, an item for each module below it."""
    lines: list[str] = []
    for package in PACKAGES:
        for folder in sorted({path.parent for path in (ROOT / package).rglob("*.py") if "examples" not in path.parts}):
            name = f"{folder.relative_to(ROOT)}/"
            lines += ["", f"### {name}" if folder.name == package else f"**{name}**", ""]
            lines += [f"{first_sentence(folder / '__init__.py')}.", ""]
            modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            items = [f"- `{path.name}`: {first_sentence(path)}" for path in modules]
            lines += [textwrap.fill(item, 120, subsequent_indent="  ", break_on_hyphens=False) for item in items]
    return "\n".join(lines[1:]).replace("\n\n\n", "\n\n")


def with_listing(page: str) -> str:
    """``page`` with the list between its two marks. Raises ValueError where it does not have them."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n\n{listing()}\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(with_listing(PAGE.read_text()))
