"""Who may import whom: the folders' direction, and what must not be loaded where."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from placements.engines.registry import ENGINES, NAMES

ROOT = Path(__file__).parent.parent
PACKAGES = ("placements", "workers", "orchestrator")  # each may import those before it
HEAVY = {"torch", "transformers", "numpy", "safetensors"}
CLIENTS = {"awscrt", "boto3", "botocore", "huggingface_hub", "obstore"}  # of sources elsewhere
NEURON = {"torch_neuronx", "transformers_neuronx", "neuronx_distributed", "neuronx_distributed_inference", "optimum"}
LIGHT = HEAVY | CLIENTS | {"ray"}  # not loaded by a command that answers at once
# Where the heavy libraries may be named, and then only inside functions.
HEAVY_ALLOWED = {
    "workers/batching/guidance.py",
    "workers/batching/logprobs.py",
    "workers/batching/penalties.py",
    "workers/batching/sampling.py",
    "workers/text/tokenizer.py",
    "workers/text/tokenizer_process.py",
}


@cache
def sources(package: str) -> list[Path]:
    files = [path for path in (ROOT / package).rglob("*.py") if "examples" not in path.parts]
    assert files
    return files


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, *, anywhere: bool = True) -> set[str]:
    """The top-level names that a file imports; not ``anywhere``: only what importing the file itself loads."""
    names: set[str] = set()
    queue: list[ast.AST] = [tree_of(path)]
    while queue:
        node = queue.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        lazy = not anywhere and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only)
        if not lazy and isinstance(node, ast.stmt | ast.excepthandler | ast.match_case | ast.Module):
            queue.extend(ast.iter_child_nodes(node))  # an expression has no import in it
    return names


# Which folders a folder may import, beside those of the packages below its own: placements <- workers <- orchestrator.
# `serving` has the process that compiles with an engine; `compiled` runs it, by its name.
LAYERS: dict[str, set[str]] = {
    "placements.facts": set(),
    "placements.engines": {"placements.facts"},
    "placements.spec": {"placements.engines", "placements.facts"},
    "placements.engines.memory": {"placements.engines", "placements.facts", "placements.spec"},
    "placements.resources": {
        "placements.engines",
        "placements.engines.memory",
        "placements.facts",
        "placements.spec",
    },
    "placements.planner": {
        "placements.engines",
        "placements.facts",
        "placements.resources",
        "placements.spec",
    },
    "placements.rules": {
        "placements.engines",
        "placements.engines.memory",
        "placements.facts",
        "placements.planner",
        "placements.resources",
        "placements.spec",
    },
    "placements.engines.rules": {
        "placements.engines",
        "placements.facts",
        "placements.rules",
        "placements.spec",
    },
    "placements.lmi": {
        "placements.engines",
        "placements.facts",
        "placements.rules",
        "placements.spec",
    },
    "placements.explain": {
        "placements.engines",
        "placements.facts",
        "placements.planner",
        "placements.resources",
        "placements.rules",
        "placements.spec",
    },
    "workers.messages": set(),
    "workers.host": {"workers.messages"},
    "workers.text": {"workers.host", "workers.messages"},
    "workers.artifacts": {"workers.host", "workers.messages"},
    "workers.batching": {"workers.messages", "workers.text"},
    "workers.compiled": {
        "workers.artifacts",
        "workers.host",
        "workers.messages",
    },
    "workers.engines": {
        "workers.artifacts",
        "workers.batching",
        "workers.host",
        "workers.messages",
        "workers.compiled",
        "workers.text",
    },
    "workers.serving": {
        "workers.artifacts",
        "workers.batching",
        "workers.engines",
        "workers.host",
        "workers.messages",
        "workers.compiled",
        "workers.text",
    },
    "orchestrator.process": set(),
    "orchestrator.dispatch": set(),
    "orchestrator.control.journal": set(),
    "orchestrator.bench": {"orchestrator.process"},
    "orchestrator.messages": {"orchestrator.process"},
    "orchestrator.access": {"orchestrator.messages", "orchestrator.process"},
    "orchestrator.scaling": {"orchestrator.messages"},
    "orchestrator.control.decisions": {
        "orchestrator.control.journal",
        "orchestrator.messages",
        "orchestrator.process",
    },
    "orchestrator.gateway": {
        "orchestrator.access",
        "orchestrator.dispatch",
        "orchestrator.messages",
        "orchestrator.process",
        "orchestrator.scaling",
    },
    "orchestrator.control.resolve": {
        "orchestrator.access",
        "orchestrator.control.decisions",
        "orchestrator.control.journal",
        "orchestrator.messages",
        "orchestrator.process",
    },
    "orchestrator.console": {
        "orchestrator.gateway",
        "orchestrator.messages",
        "orchestrator.process",
    },
    "orchestrator.sagemaker": {"orchestrator.control.resolve", "orchestrator.process"},
    "orchestrator.simulate": {
        "orchestrator.control.decisions",
        "orchestrator.control.resolve",
        "orchestrator.dispatch",
        "orchestrator.process",
        "orchestrator.scaling",
    },
    "orchestrator.compiling": {"orchestrator.control.resolve", "orchestrator.process"},
    "orchestrator.control": {
        "orchestrator.control.decisions",
        "orchestrator.control.journal",
        "orchestrator.control.resolve",
        "orchestrator.messages",
        "orchestrator.process",
        "orchestrator.scaling",
    },
    "orchestrator.advise": {
        "orchestrator.control.resolve",
        "orchestrator.process",
        "orchestrator.simulate",
    },
    "orchestrator.verify": {
        "orchestrator.control.resolve",
        "orchestrator.process",
    },
    "orchestrator.api": {
        "orchestrator.access",
        "orchestrator.console",
        "orchestrator.control",
        "orchestrator.control.decisions",
        "orchestrator.control.journal",
        "orchestrator.control.resolve",
        "orchestrator.gateway",
        "orchestrator.messages",
        "orchestrator.process",
        "orchestrator.sagemaker",
        "orchestrator.scaling",
    },
    "orchestrator.cluster": {
        "orchestrator.access",
        "orchestrator.api",
        "orchestrator.console",
        "orchestrator.control",
        "orchestrator.control.decisions",
        "orchestrator.control.journal",
        "orchestrator.gateway",
        "orchestrator.messages",
        "orchestrator.process",
        "orchestrator.scaling",
    },
    "orchestrator.cli": {
        "orchestrator.access",
        "orchestrator.advise",
        "orchestrator.bench",
        "orchestrator.cluster",
        "orchestrator.compiling",
        "orchestrator.console",
        "orchestrator.control.decisions",
        "orchestrator.control.resolve",
        "orchestrator.messages",
        "orchestrator.process",
        "orchestrator.sagemaker",
        "orchestrator.simulate",
        "orchestrator.verify",
    },
}
# The modules of one name in the folders of engines, which are a room together.
PARTS_OF_ENGINES = {"placements.engines.memory", "placements.engines.rules"}
# Settings that `up` writes and every gateway reads: values below the gateway's own modules.
SHARED = {"orchestrator.gateway.settings"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The room of a module: a folder of a package, or one within it that has a row of its own; or a part of engines."""
    parts = module.split(".")
    inner, part = ".".join(parts[:3]), ".".join((*parts[:2], parts[-1]))
    if part in PARTS_OF_ENGINES:
        return part
    return inner if inner in LAYERS else ".".join(parts[:2])


@cache
def own_imports(path: Path) -> set[str]:
    """The modules of this project that a file imports, wherever in it."""
    modules: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if "." not in node.module else {node.module}
            )
    return {module for module in modules if module.split(".")[0] in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_only_what_the_table_allows(package: str) -> None:
    """A folder imports the folders of its row in LAYERS, and every folder of the packages below its own."""
    lower = PACKAGES[: PACKAGES.index(package)]
    wrong: dict[str, set[str]] = {}
    for path in sources(package):
        module = module_of(path)
        folder = folder_of(module)
        for target in own_imports(path) - SHARED:
            other = folder_of(target)
            allowed = other in (folder, package) or other.split(".")[0] in lower or other in LAYERS.get(folder, set())
            if not allowed:
                wrong.setdefault(module, set()).add(target)
    assert wrong == {}


def test_every_row_of_the_table_is_used() -> None:
    used: dict[str, set[str]] = {folder: set() for folder in LAYERS}
    for package in PACKAGES:
        for path in sources(package):
            folder = folder_of(module_of(path))
            if folder in used:
                folders = {folder_of(target) for target in own_imports(path) - SHARED}
                used[folder] |= {other for other in folders if other.startswith(f"{package}.") and other != folder}
    assert used == LAYERS


def test_rooms_have_no_cycles() -> None:
    list(TopologicalSorter(LAYERS).static_order())


# Imports for types alone, without which no module of orchestrator/ imports itself through others.
TYPES_OF_CALLERS = {
    ("orchestrator.gateway.http.exchange", "orchestrator.gateway.http.connection"),
    ("orchestrator.gateway.http.http_server", "orchestrator.gateway.http.connection"),
    ("orchestrator.gateway.http.request_reader", "orchestrator.gateway.http.connection"),
    ("orchestrator.gateway.serving.ticket", "orchestrator.gateway.serving.replica_link"),
}


def test_modules_of_the_orchestrator_have_no_cycles() -> None:
    graph: dict[str, set[str]] = {module_of(path): set() for path in sources("orchestrator")}
    for path in sources("orchestrator"):
        module = module_of(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module] |= (names & graph.keys()) or ({node.module} & graph.keys() - {module})
    for module, target in TYPES_OF_CALLERS:
        graph[module].remove(target)
    list(TopologicalSorter(graph).static_order())


MAX_METHODS, MAX_PARAMETERS = 25, 7


def test_no_class_of_the_orchestrator_has_more_than_25_methods() -> None:
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    sizes = {
        f"{module_of(path)}.{node.name}": sum(isinstance(part, functions) for part in node.body)
        for path in sources("orchestrator")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: size for name, size in sizes.items() if size > MAX_METHODS} == {}


def test_no_function_of_the_orchestrator_takes_more_than_seven_values() -> None:
    """Except the commands, whose parameters are their options."""
    sizes: dict[str, int] = {}
    for path in sources("orchestrator"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "cli" not in path.parts:
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                sizes[f"{module_of(path)}:{node.lineno}"] = len(names) - (names[:1] in (["self"], ["cls"]))
    assert {name: size for name, size in sizes.items() if size > MAX_PARAMETERS} == {}


def test_no_class_name_occurs_twice() -> None:
    """A reader who searches for a name finds one class."""
    places: dict[str, list[str]] = {}
    for path in (path for package in PACKAGES for path in sources(package)):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_room_and_module_has_a_docstring() -> None:
    """Each folder and each file states its subject; docs/architecture.md shows those of the rooms."""
    files = [path for package in PACKAGES for path in sources(package)]
    rooms = {folder_of(module_of(path)) for path in files if path.name == "__init__.py"}
    assert rooms >= LAYERS.keys() - PARTS_OF_ENGINES
    assert [str(path.relative_to(ROOT)) for path in files if not ast.get_docstring(tree_of(path))] == []


def test_placements_names_neither_ray_nor_torch() -> None:
    heavy = {"ray"} | HEAVY | NEURON
    assert {path.name: imports(path) & heavy for path in sources("placements") if imports(path) & heavy} == {}


def test_ray_is_imported_in_two_places() -> None:
    """The engines, the batcher and the controller run, and are tested, without Ray."""
    files = [str(path.relative_to(ROOT)) for package in PACKAGES for path in sources(package) if "ray" in imports(path)]
    assert [name for name in files if not name.startswith("orchestrator/cluster/")] == ["workers/serving/replica.py"]


def test_torch_is_named_in_few_places_and_never_loaded_by_an_import() -> None:
    """A replica checks its environment before torch is imported, so no module may import it by being imported."""
    for path in sources("workers") + sources("orchestrator"):
        name = str(path.relative_to(ROOT))
        if not (name in HEAVY_ALLOWED or name.startswith("workers/engines/")):
            assert imports(path) & HEAVY == set(), name
        if not name.startswith("workers/engines/"):
            assert imports(path) & NEURON == set(), name
        assert imports(path, anywhere=False) & (HEAVY | NEURON) == set(), name


def test_files_are_locked_in_one_module() -> None:
    """It knows when a lock is released, and what a removed lock file means."""
    names = {"flock", "lockf", "LOCK_EX", "LOCK_SH"}
    locking = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sources(package)
        if any(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(tree_of(path)))
    ]
    assert locking == ["workers/host/file_lock.py"]


# Boundaries of tasks, where any error is logged and becomes a response, a failure or an event. Elsewhere a handler
# names the exceptions that it expects, raises again, or uses `workers.host.task_boundary`.
BOUNDARIES = (
    "orchestrator/api/server.py",
    "orchestrator/cluster/controller_actor.py",
    "orchestrator/cluster/gateways.py",
    "orchestrator/cluster/up.py",
    "orchestrator/control/",
    "orchestrator/gateway/generation.py",
    "orchestrator/gateway/http/connection.py",
    "orchestrator/gateway/serving/model_queue.py",
    "orchestrator/process/logs.py",
    "workers/engines/package_contract.py",
    "workers/host/task_boundary.py",
    "workers/serving/",
)


# Where an engine may be compared by its name: its own folder, the registry, what reads and imports specs, and the
# tables of AWS's images that `doctor --bootstrap` prints.
MAY_NAME_ENGINES = (
    *(f"{side}/engines/{engine.module}/" for engine in ENGINES.values() for side in ("placements", "workers")),
    *("placements/engines/registry.py", "placements/lmi/", "placements/spec/schema.py"),
)
TABLES_OF_RELEASES = {  # of AWS's images and of distributions, some of which have the name of their engine
    *(("orchestrator/cli/bootstrap.py", name) for name in ("PREFERRED", "NEURON")),
    *{("workers/engines/manifest_parts.py", "NXD_PACKAGES"), ("workers/host/interpreter.py", "_PROBED")},
}
WORDS = {"cpu", "echo", "server"}  # names that are also compared with other things


def decides_by_name(node: ast.AST) -> bool:
    """Returns whether a node compares with an engine's name, matches it, has it as a key, or lists it for a look-up."""
    if isinstance(node, ast.Compare):
        parts: list[ast.expr | None] = [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        parts = [each.value for case in node.cases for each in ast.walk(case) if isinstance(each, ast.MatchValue)]
    elif isinstance(node, ast.Dict):
        parts = list(node.keys)
    elif isinstance(node, ast.Set | ast.Tuple | ast.List):
        parts = list(node.elts)
    elif isinstance(node, ast.Subscript):
        parts = [node.slice]
    else:
        return False
    texts = {part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    named, of = texts & set(NAMES), ast.unparse(node.subject if isinstance(node, ast.Match) else node)
    if isinstance(node, ast.Compare | ast.Match):  # `runs_on` is not a name
        return bool(named - WORDS or (named and "engine" in of and "runs_on" not in of))
    return bool(named - WORDS or (len(named) > 1 and texts == named))


def targets_of(node: ast.AST) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize("package", PACKAGES)
def test_only_engines_decide_by_the_name_of_an_engine(package: str) -> None:
    """Other code reads what the engine can do: an engine is added by its folders and one line of the registry."""
    places = []
    for path in sources(package):
        name = str(path.relative_to(ROOT))
        if not name.startswith(MAY_NAME_ENGINES):
            tables = [
                node for node in tree_of(path).body if {(name, each) for each in targets_of(node)} & TABLES_OF_RELEASES
            ]
            allowed = {id(inner) for node in tables for inner in ast.walk(node)}
            nodes = (node for node in ast.walk(tree_of(path)) if id(node) not in allowed and decides_by_name(node))
            places += [f"{name}:{node.lineno}" for node in nodes if isinstance(node, ast.expr | ast.stmt)]
    assert places == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ('model.engine == "cpu"', True),
        ('routes.kind == "cpu"', False),
        ('engine in ("auto", "vllm")', True),
        ('engine == "auto"', False),
        ('engine.runs_on == "server"', False),
        ('{"nxd-inference": 1}', True),
        ('{"server": 1, "auto": 2}', False),
        ('OF = {"cpu", "echo"}', True),
        ('match engine:\n case "echo":\n  pass', True),
        ('works(engine="cpu")', False),
    ],
)
def test_names_of_engines_are_found_where_they_decide(code: str, expected: bool) -> None:
    """A word that is also an engine's name counts where an engine is compared, or engines are listed."""
    assert any(map(decides_by_name, ast.walk(ast.parse(code)))) == expected


def hides_errors(node: ast.AST) -> bool:
    broad = isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name) and node.type.id == "Exception"
    return broad and not any(isinstance(part, ast.Raise) for part in ast.walk(node))


def test_any_error_is_handled_only_at_the_boundaries_of_tasks() -> None:
    paths = [path for package in PACKAGES for path in sources(package)]
    broad = [str(path.relative_to(ROOT)) for path in paths if any(map(hides_errors, ast.walk(tree_of(path))))]
    assert [name for name in broad if not name.startswith(BOUNDARIES)] == []


LOADED = """
import sys
{do}
print(*sorted(sys.modules.keys() & {unwanted!r}))
"""


DEMO = "placements/examples/demo.yaml"
COMMANDS = (
    *("version", f"explain assistant {DEMO}", f"plan --defrag 4 {DEMO}", "apply x", "config view", "doctor"),
    f"generate {DEMO} missing --prompt x",
)


def run(*commands: str) -> str:
    return "import orchestrator.cli.main as m\n" + "\n".join(f"m.run({command.split()})" for command in commands)


@pytest.mark.parametrize(
    ("do", "unwanted"),
    [
        (run(*COMMANDS), HEAVY | {"ray", "starlette", "uvicorn"}),
        (run(f"validate {DEMO}"), LIGHT),
        (run(f"plan {DEMO}"), LIGHT),
        (run("status"), HEAVY | {"ray"}),
        ("import orchestrator.control.controller", LIGHT),
        # a killed controller must be back soon, and a gateway, too
        ("import orchestrator.cluster.controller_actor", {"fastapi", "orchestrator.gateway.app", "ray.serve"}),
        ("import orchestrator.cluster.gateways", {"orchestrator.control.controller"}),
        ("import workers.serving.replica", HEAVY | CLIENTS),
        (
            "from workers.engines.echo.engine import EchoEngine; from workers.batching.batcher import Batcher\n"
            "from workers.text.tokenizer import load_tokenizer\n"
            "from workers.messages.requests import GenerateRequest\n"
            "engine = EchoEngine(slots=2, max_len=64); engine.load()\n"
            "batcher = Batcher(engine, load_tokenizer('echo', None), lambda events: None)\n"
            "batcher.submit(GenerateRequest(id='r', prompt_ids=[65], max_tokens=3))\n"
            "while batcher.step(): pass",
            HEAVY | {"ray"},
        ),
    ],
    ids=[
        *("commands", "validate", "plan", "status"),
        *("controller", "controller actor", "gateway", "replica", "echo"),
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
