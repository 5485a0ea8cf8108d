"""Who may import whom: the folders' direction, and what must not be loaded where."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "transformers", "numpy", "safetensors"}
CLIENTS = {"awscrt", "boto3", "botocore", "huggingface_hub", "obstore"}  # of sources elsewhere
NEURON = {"torch_neuronx", "transformers_neuronx", "neuronx_distributed", "neuronx_distributed_inference", "optimum"}
LIGHT = HEAVY | CLIENTS | {"ray"}  # not loaded by a command that answers at once
# Where the heavy libraries may be named, and then only inside functions.
HEAVY_ALLOWED = {
    "workers/guidance.py",
    "workers/logprobs.py",
    "workers/penalties.py",
    "workers/sampling.py",
    "workers/tokenizer.py",
    "workers/tokenizer_process.py",
}


def sources(package: str) -> list[Path]:
    found = [path for path in (ROOT / package).rglob("*.py") if "examples" not in path.parts]
    assert found
    return found


def imports(path: Path, *, anywhere: bool = True) -> set[str]:
    """The top-level names that a file imports; not ``anywhere``: only what importing the file itself loads."""
    tree = ast.parse(path.read_text())
    names: set[str] = set()
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        lazy = not anywhere and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only)
        if not lazy:
            queue.extend(ast.iter_child_nodes(node))
    return names


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [("placements", {"workers", "orchestrator", "ray"} | HEAVY | NEURON), ("workers", {"orchestrator"})],
)
def test_imports_go_one_way(package: str, forbidden: set[str]) -> None:
    """placements <- workers <- orchestrator, never back; placements knows neither Ray nor torch."""
    assert {path.name: imports(path) & forbidden for path in sources(package) if imports(path) & forbidden} == {}


# They start gateways and tell them what to do; the admin API speaks HTTP as gateways do.
STARTS_GATEWAYS = {"actors.py", "admin.py", "daemon.py", "settings.py"}
PARTS = {"gateway", "simulate", "bench", "cli"}


def parts_imported(path: Path) -> set[str]:
    """The folders of orchestrator/ that a file imports from, wherever in it."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    return {str(node.module).split(".")[1] for node in nodes if str(node.module).startswith("orchestrator.")} & PARTS


def test_the_parts_of_the_orchestrator_import_one_way() -> None:
    """core <- gateway, bench <- simulate <- cli. Of the core only what starts gateways knows the gateway."""
    allowed = {"": set[str](), "gateway": set[str](), "bench": set[str](), "simulate": {"bench"}, "cli": PARTS}
    wrong: dict[str, set[str]] = {}
    for path in sources("orchestrator"):
        part, *rest = path.relative_to(ROOT / "orchestrator").parts
        own = part if rest else ""
        starts = {"gateway"} if part in STARTS_GATEWAYS else set()
        found = parts_imported(path) - allowed.get(own, PARTS) - {own} - starts
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert wrong == {}


def test_in_workers_only_the_replica_knows_ray() -> None:
    """The engines and the batcher run, and are tested, without Ray."""
    assert [path.name for path in sources("workers") if "ray" in imports(path)] == ["replica.py"]


def test_torch_is_named_in_few_places_and_never_loaded_by_an_import() -> None:
    """A replica checks its environment before torch is imported, so no module may import it by being imported."""
    for path in sources("workers") + sources("orchestrator"):
        name = str(path.relative_to(ROOT))
        if not (name in HEAVY_ALLOWED or name.startswith("workers/engines/")):
            assert imports(path) & HEAVY == set(), name
        if not name.startswith("workers/engines/"):
            assert imports(path) & NEURON == set(), name
        assert imports(path, anywhere=False) & (HEAVY | NEURON) == set(), name


LOADED = """
import sys
{do}
print(*sorted({{name.split(".")[0] for name in sys.modules}} & {unwanted!r}))
"""


@pytest.mark.parametrize(
    ("do", "unwanted"),
    [
        ("import orchestrator.cli.main as m; m.run(['version'])", HEAVY | {"ray", "starlette", "uvicorn"}),
        ("import orchestrator.cli.main as m; m.run(['validate', 'placements/examples/demo.yaml'])", LIGHT),
        ("import orchestrator.cli.main as m; m.run(['plan', 'placements/examples/demo.yaml'])", LIGHT),
        (
            "import orchestrator.cli.main as m; m.run(['explain', 'assistant', 'placements/examples/demo.yaml'])",
            HEAVY | {"ray", "starlette", "uvicorn"},
        ),
        (
            "import orchestrator.cli.main as m; m.run(['plan', '--defrag', '4', 'placements/examples/demo.yaml'])",
            HEAVY | {"ray", "starlette", "uvicorn"},
        ),
        ("import orchestrator.cli.main as m; m.run(['status'])", HEAVY | {"ray"}),
        ("import orchestrator.cli.main as m; m.run(['apply', 'x'])", HEAVY | {"ray", "starlette", "uvicorn"}),
        ("import orchestrator.cli.main as m; m.run(['config', 'view'])", HEAVY | {"ray", "starlette", "uvicorn"}),
        ("import orchestrator.cli.main as m; m.run(['doctor'])", HEAVY | {"ray", "starlette", "uvicorn"}),
        (
            "import orchestrator.cli.main as m\n"
            "m.run(['generate', 'placements/examples/demo.yaml', 'nobody', '--prompt', 'x'])",
            HEAVY | {"ray", "starlette", "uvicorn"},
        ),
        ("import orchestrator.controller", LIGHT),
        ("import workers.replica", HEAVY | CLIENTS),
        (
            "from workers.engines.echo import EchoEngine; from workers.batcher import Batcher\n"
            "from workers.tokenizer import load_tokenizer\n"
            "from workers.requests import GenerateRequest\n"
            "engine = EchoEngine(slots=2, max_len=64); engine.load()\n"
            "batcher = Batcher(engine, load_tokenizer('echo', None), lambda events: None)\n"
            "batcher.submit(GenerateRequest(id='r', prompt_ids=[65], max_tokens=3))\n"
            "while batcher.step(): pass",
            HEAVY | {"ray"},
        ),
    ],
    ids=[
        "version",
        "validate",
        "plan",
        "explain",
        "defrag",
        "status",
        "apply",
        "config",
        "doctor",
        "generate",
        "controller",
        "replica",
        "echo",
    ],
)
def test_nothing_heavy_is_loaded(do: str, unwanted: set[str], tmp_path: Path) -> None:
    """Commands answer at once, and an echo replica runs without torch: seen in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", LOADED.format(do=do, unwanted=unwanted)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "COREWRIGHT_HOME": str(tmp_path)},
        check=True,
    )

    assert result.stdout.splitlines()[-1] == ""
