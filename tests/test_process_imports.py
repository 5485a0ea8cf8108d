"""Each kind of process imports only the packages that it needs: the time of its start is mostly imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """\
import sys
{base}
before = set(sys.modules)
{statement}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before if "." not in name}}))
"""
OURS = {"orchestrator", "placements", "workers"}
MESSAGES = {"msgspec", "psutil", "typing_extensions"}
MODEL = {"annotated_types", "cronsim", "pydantic", "pydantic_core", "typing_inspection"}  # a model of a spec
KINDS = {  # by kind of process: what Ray has imported there, what we import, and the packages which that may import
    "replica": ("import ray", "import workers.serving.replica", MESSAGES | MODEL | {"uvloop"}),
    "cpu engine before it loads": ("", "import workers.engines.cpu.engine", MESSAGES | MODEL),
    "tokenizer": ("", "import workers.text.tokenizer_process", MESSAGES),
    "gateway": ("", "import orchestrator.gateway.server", MESSAGES | {"httptools", "regex", "uvloop"}),
    "command line": (
        "import typer",
        "from orchestrator.cli.main import application; application('status')",
        MESSAGES,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_imports_only_these_packages(kind: str) -> None:
    """Beside the standard library and the package's own dependencies without a name here, such as C modules."""
    base, statement, allowed = KINDS[kind]
    code = COUNT.format(base=base, statement=statement)
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    imported = {name for name in printed.stdout.split() if not name.startswith("_")} - {"cython_runtime"}
    assert imported - OURS - sys.stdlib_module_names <= allowed


def test_a_heavy_import_would_be_seen() -> None:
    """The count includes modules that are imported indirectly."""
    code = COUNT.format(base="", statement="import placements.spec.schema")
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert "pydantic" in printed.stdout.split()
