"""Prints the code lines of the product by room, against their budgets: `python tools/lines.py`.

A code line is not blank, not a comment and not in a docstring. A room is a folder or a module of a package.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("placements", "workers", "orchestrator")
MAX_CODE_LINES = 54_500
MAX_MODULES = 540
MAX_TEST_CODE_LINES = 70_000


@dataclass(frozen=True)
class Budget:
    """The most code lines of some rooms together."""

    rooms: tuple[str, ...]
    max_code_lines: int


BUDGETS = (
    Budget(("placements/facts", "placements/spec", "placements/lmi", "placements/resources"), 3_800),
    Budget(("placements/planner",), 2_300),
    Budget(("placements/rules", "placements/explain"), 2_000),
    Budget(("placements/engines",), 1_400),
    Budget(("workers/compiled", "orchestrator/compiling"), 1_800),
    Budget(("workers/artifacts",), 2_200),
    Budget(
        (
            "workers/engines",
            "workers/host",
            "workers/batching",
            "workers/text",
            "workers/serving",
            "workers/messages",
        ),
        9_700,
    ),
    Budget(
        (
            "orchestrator/control",
            "orchestrator/messages",
        ),
        4_600,
    ),
    Budget(("orchestrator/scaling", "orchestrator/dispatch"), 1_600),
    Budget(("orchestrator/cluster",), 2_200),
    Budget(("orchestrator/gateway", "orchestrator/access"), 7_500),
    Budget(("orchestrator/cli", "orchestrator/api", "orchestrator/console"), 4_200),
    Budget(
        (
            "orchestrator/simulate",
            "orchestrator/advise",
            "orchestrator/bench",
            "orchestrator/sagemaker",
            "orchestrator/process",
        ),
        2_700,
    ),
)


def code_lines(path: Path) -> int:
    """Returns the number of code lines of a module."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings
        for number, line in enumerate(text.splitlines(), 1)
    )


def rooms(folder: str) -> tuple[Counter[str], Counter[str]]:
    """Returns the code lines and the modules of each room of a package or folder."""
    lines, modules = Counter[str](), Counter[str]()
    for path in sorted((ROOT / folder).rglob("*.py")):
        room = "/".join(path.relative_to(ROOT).parts[:2]).removesuffix(".py")
        lines[room] += code_lines(path)
        modules[room] += 1
    return lines, modules


def main() -> int:
    """Prints the table; exit code 1 if the whole product or the tests exceed their limits."""
    lines, modules = Counter[str](), Counter[str]()
    for package in PACKAGES:
        own_lines, own_modules = rooms(package)
        lines += own_lines
        modules += own_modules
    print(f"{'rooms':72} {'modules':>8} {'lines':>7} {'budget':>7}")
    for budget in BUDGETS:
        present = [room for room in budget.rooms if lines[room]]
        total = sum(lines[room] for room in present)
        mark = " !" if total > budget.max_code_lines else ""
        names = ", ".join(present) or ", ".join(budget.rooms)
        count = sum(modules[room] for room in present)
        print(f"{names[:72]:72} {count:8} {total:7} {budget.max_code_lines:7}{mark}")
    tests = sum(rooms("tests")[0].values())
    totals = (
        ("product: code lines", lines.total(), MAX_CODE_LINES),
        ("product: modules", modules.total(), MAX_MODULES),
        ("tests: code lines", tests, MAX_TEST_CODE_LINES),
    )
    for name, value, most in totals:
        print(f"{name:81} {value:7} {most:7}{' !' if value > most else ''}")
    return int(any(value > most for _, value, most in totals))


if __name__ == "__main__":
    sys.exit(main())
