"""The documents say what is true: their examples run, and their lists are complete."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import msgspec
import pytest
from annotated_types import Ge, Gt, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.main import get_command

from orchestrator.access.audit_log import Audit
from orchestrator.access.keys import KeyFile
from orchestrator.api.routes import ROUTES
from orchestrator.cli import main as cli
from orchestrator.cli.client import AdminClient
from orchestrator.daemon.settings import SETTINGS
from orchestrator.fleet.controller_settings import ADMIN_PATH
from orchestrator.fleet.replica_states import TRANSITIONS, ModelState, State
from orchestrator.gateway.app import OPEN
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.openai.openapi import ROUTES as GATEWAY_ROUTES
from orchestrator.gateway.openai.protocol import ChatRequest, CompletionRequest
from orchestrator.process.home import FleetRecord, Home
from orchestrator.records.journal import Journal
from orchestrator.revisions.spec_file import SpecFile, examine, load, start_problems
from orchestrator.rollout.changes import Tag, tag_of
from orchestrator.scaling.demand_report import DemandReport, DemandWindow
from placements.explain.core_map import core_map
from placements.facts.checkpoints import FAMILIES
from placements.facts.engines import DTYPES, ENGINE_OPTIONS, ENGINES, Engine
from placements.planner.plan import plan
from placements.planner.spec_hosts import Machine
from placements.spec.problems import Problem, has_errors, render
from placements.spec.schema import (
    GROUP_QUERY_ATTENTIONS,
    STRATEGIES,
    Buckets,
    Compiler,
    Deadlines,
    Draft,
    EngineSettings,
    HostsSpec,
    ModelSpec,
    Objectives,
    Replicas,
    Reserve,
    Scaling,
    Schedule,
    Spec,
    Spread,
    Update,
)
from tests.orchestrator.fakefleet import PLAN, LiveAdmin
from tests.orchestrator.fakefleet import SPEC as SHOWN_SPEC
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.orchestrator.gateways import LiveGateway, routes
from tests.served import Served
from tests.spec_reference import TABLES, renewed
from tests.stubs import stub_checkpoint
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Listing, RemoteFile
from workers.artifacts.sources.open_source import SourceQuery
from workers.artifacts.sources.source_metadata import SourceMetadata
from workers.host.core_claims import CoreClaim
from workers.host.facts.machine import ONLOOKERS
from workers.messages.requests import GenerateRequest
from workers.neff_cache.candidates import keep_of
from workers.neff_cache.compiled_artifacts import entry

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "placements" / "examples"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs" / f"{n}.md" for n in ("cli", "errors", "glossary"))]
PAGES.append(ROOT / "docs" / "spec.md")
PAGES += [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "api",
        "security",
        "ray-dashboard",
        "on-inf2",
        "engines",
        "from-vllm-and-lmi",
        "failures",
        "bench",
        "metrics",
        "runbooks",
        "simulate",
        "neff-cache",
        "architecture",
        "benchmarks",
    )
]
README, CLI, ERRORS, SPEC = ROOT / "README.md", PAGES[2], PAGES[3], PAGES[5]
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
API = ROOT / "docs" / "api.md"
SECURITY = ROOT / "docs" / "security.md"
SIMULATE = ROOT / "docs" / "simulate.md"
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
        found = re.search(rf"^# {mark}: (.+)$", self.text, re.MULTILINE)
        return set(found[1].split()) if found else set()

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """The fenced blocks of a page, in order."""
    found, section, start, language, lines = [], "", 0, "", list[str]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if start and line == "```":
            found.append(Block(page, start, language, "\n".join(lines) + "\n", section))
            start, lines = 0, []
        elif start:
            lines.append(line)
        elif line.startswith("```"):
            start, language = number, line[3:]
        elif line.startswith("#"):
            section = line.lstrip("#").strip().replace("`", "")
    assert not start, f"{page.name}:{start}: a block that does not end"
    return tuple(found)


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


# Specs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the examples' relative sources begin: the checkpoints that docs/errors.md names, and the demo's."""
    path = tmp_path_factory.mktemp("docs")
    llama = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    }
    gpt2_xl = {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "vocab_size": 50257}
    configs: dict[str, dict[str, Any]] = {
        "llama-2-7b": llama,
        "gpt2-xl": {**gpt2_xl, "n_positions": 1024},
        "mixtral": {**llama, "model_type": "mixtral", "num_key_value_heads": 8, "num_local_experts": 8},
        "mistral-v0.1": {**llama, "model_type": "mistral", "num_key_value_heads": 8, "sliding_window": 2048},
        "llama-3": {**llama, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        "pythia": {**llama, "model_type": "gpt_neox", "hidden_act": "gelu"},
        "bert": {"model_type": "bert"},
        "compiled": {**llama, "neuron": {"task": "text-generation"}},
        "own-code": {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}},
        "broken": {key: value for key, value in llama.items() if key != "hidden_size"},
        "tiny": json.loads((EXAMPLES / "models" / "tiny" / "config.json").read_text()),
    }
    for name, config in configs.items():
        stub_checkpoint(path / "models" / name, config)
    for block in blocks(CLI):
        if block.language == "yaml":
            (path / named(block)).write_text(block.text.partition("\n")[2])
    return path


def named(block: Block) -> str:
    """The file name in the first line of an example."""
    found = re.match(r"# (\S+\.yaml)\n", block.text)
    assert found is not None, f"{block} does not begin with its file name"
    return found[1]


def loaded(block: Block, folder: Path) -> SpecFile:
    return examine(block.text, "spec.yaml", str(folder), LARGE, folders="plan")


def all_problems(file: SpecFile) -> list[Problem]:
    """What `plan` says, without a fleet."""
    problems = list(file.problems)
    if file.spec is not None and not has_errors(problems):
        drawn = plan(file.spec, file.hosts, file.checkpoints)
        problems += [problem for missing in drawn.unplaced for problem in missing.problems]
    return problems


@pytest.mark.parametrize("block", blocks_of("yaml"), ids=str)
def test_a_spec_gives_exactly_the_problems_that_it_names(block: Block, folder: Path) -> None:
    """Without a `# problems:` line a spec is valid and fits; only that its source is not at hand is no matter."""
    found = {problem.id for problem in all_problems(loaded(block, folder))}
    allowed = set() if block.marked("problems") else {"checkpoint-unreadable"}
    assert found - allowed == block.marked("problems")


@pytest.mark.parametrize("block", [block for block in blocks_of("yaml") if block.marked("up refuses")], ids=str)
def test_up_refuses_exactly_what_a_spec_names(block: Block, folder: Path) -> None:
    """On a machine without Neuron devices."""
    assert {problem.id for problem in start_problems(loaded(block, folder))} == block.marked("up refuses")


@pytest.mark.parametrize("block", [b for b in blocks(ERRORS) if b.language == "yaml"], ids=lambda block: block.section)
def test_an_entrys_example_gives_its_problem_with_its_severity(block: Block, folder: Path) -> None:
    """The first word of an entry is the severity of its problem."""
    file = loaded(block, folder)
    severities = {problem.id: problem.severity for problem in [*all_problems(file), *start_problems(file)]}
    assert section(ERRORS, block.section).split()[0].rstrip(".") == severities[block.section]


def test_the_readmes_core_map_is_the_demos(tmp_path: Path) -> None:
    """As it is printed on a machine with two CPUs."""
    file = examine((EXAMPLES / "demo.yaml").read_text(), "demo.yaml", str(EXAMPLES), LAPTOP)
    assert file.spec is not None
    drawn = core_map(plan(file.spec, file.hosts, file.checkpoints), file.hosts)
    assert drawn in blocks(README)[1].text


# The fields of a spec


def described(prefix: str, kind: type[BaseModel], skipped: tuple[str, ...] = ()) -> dict[str, FieldInfo]:
    fields = {name: field for name, field in kind.model_fields.items() if not field.exclude and name not in skipped}
    return {f"{prefix}{name}": field for name, field in fields.items()}


FIELDS = {
    **described("", Spec, ("models",)),
    **described("hosts.", HostsSpec),
    **described("hosts.reserve.", Reserve),
    **described("", ModelSpec, ("name",)),
    **described("replicas.", Replicas),
    **described("update.", Update),
    **described("deadlines.", Deadlines),
    **described("draft.", Draft),
    **described("spread.", Spread),
    **described("buckets.", Buckets),
    **described("compiler.", Compiler),
    **described("objectives.", Objectives),
    **described("scaling.", Scaling),
    **described("scaling.schedules.", Schedule),
    **described("engines.ENGINE.", EngineSettings),
}
BESIDE = {"defaults": ("a mapping", "unset"), "models": ("a mapping", "required")}  # no fields of the schema's classes


def default_of(field: FieldInfo) -> str:
    """A default as spec.md writes it."""
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "unset"
    if value == Replicas():
        return "1"
    if isinstance(value, float):
        return f"{value:g}"
    mappings = (Reserve(), Update(), Deadlines(), Buckets(), Compiler(), Objectives(), Scaling())
    empty = dict.fromkeys(("{}", *map(str, mappings)), "{}")
    return {**empty, "()": "[]", "": '""', "False": "false", "True": "true"}.get(str(value), str(value))


def field_rows() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows(SPEC.read_text()):
        if len(row) == 4 and row[0].startswith("`"):
            assert words(row[0])[0] not in found, f"{row[0]} is described twice"
            found[words(row[0])[0]] = row
    return found


def test_every_field_of_the_spec_is_described_once() -> None:
    """And nothing that is no field."""
    assert field_rows().keys() == FIELDS.keys() | BESIDE.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_the_default_and_the_bounds_that_are_described(name: str) -> None:
    """Defaults and bounds are those of placements.spec.schema."""
    field, row = FIELDS[name], field_rows()[name]
    assert row[2].strip("`") == ("unset" if name == "hosts" else default_of(field))
    lowest = next((mark.ge for mark in field.metadata if isinstance(mark, Ge)), None)
    highest = next((mark.le for mark in field.metadata if isinstance(mark, Le)), None)
    above = next((mark.gt for mark in field.metadata if isinstance(mark, Gt)), None)
    if lowest is not None:
        assert f"{lowest} to {highest}" in row[1]
    if above is not None:
        assert f"above {above}, at most {highest}" in row[1]


def test_every_engine_dtype_strategy_and_thread_policy_is_described() -> None:
    """In the order of the code."""
    found = field_rows()
    assert tuple(words(found["group_query_attention"][1])) == GROUP_QUERY_ATTENTIONS
    assert tuple(words(found["engine"][1])) == ENGINES
    assert tuple(words(found["dtype"][1])) == DTYPES
    assert tuple(words(found["update.strategy"][1])) == STRATEGIES
    policies = next(kind for kind in get_args(ModelSpec.model_fields["threads"].annotation) if get_args(kind))
    assert tuple(words(found["threads"][1])) == get_args(policies)


def test_every_family_and_engine_option_is_described() -> None:
    """Those that the planner knows."""
    assert tuple(words(section(SPEC, "Families").partition(". ")[0]))[2:] == FAMILIES
    options = {name for known in ENGINE_OPTIONS.values() for name in known}
    assert set(words(field_rows()["engine_options"][3])) == options | ENGINE_OPTIONS.keys()


def test_the_tables_of_the_spec_are_those_of_the_schema_and_the_topology() -> None:
    """Generated from them: UPDATE_GOLDEN=1 writes them anew."""
    page = SPEC.read_text()
    if os.environ.get("UPDATE_GOLDEN"):
        SPEC.write_text(renewed(page))
        page = SPEC.read_text()
    assert re.findall(r"<!-- generated from the \w+: (\w+) -->", page) == list(TABLES)
    assert page == renewed(page)


def update_table(header: str) -> dict[str, list[str]]:
    """The rows of a table of "Updates", by their first word."""
    table = section(SPEC, "Updates").partition(f"| {header} |")[2].partition("\n\n")[0]
    return {words(row[0])[0]: row for row in rows(table) if words(row[0])}


@pytest.mark.parametrize(
    ("engine", "of_a_graph"), [("cpu", "restart"), ("echo", "restart"), ("nxd-inference", "recompile")]
)
def test_every_field_of_a_model_has_the_tag_that_is_described(engine: Engine, of_a_graph: str) -> None:
    """Once, in the table of tags; what a graph is compiled for is a restart where nothing is compiled."""
    table = {tag: words(row[2]) for tag, row in update_table("tag").items()}
    told = [(name, of_a_graph if tag == "recompile" else tag) for tag, names in table.items() for name in names]
    fields = [name for name, field in ModelSpec.model_fields.items() if not field.exclude and name != "name"]
    assert list(table) == [tag.value for tag in Tag]
    assert sorted(told) == sorted((name, tag_of(name, engine).value) for name in fields)


def test_every_strategy_is_described() -> None:
    """Each but auto, which chooses among them."""
    assert sorted(update_table("strategy")) == sorted(set(STRATEGIES) - {"auto"})


# Problem ids


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@cache
def source_trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in SOURCES}


@cache
def makers() -> dict[str, int]:
    """Returns what makes a problem, with the position of its id: classes, and functions that pass on their ``id``."""
    found = {"Problem": 0, "Refusal": 0, "Refused": 0, "Failure": 0, "EngineLoadError": 0, "CheckpointError": 0}
    found |= {"SourceError": 0, "StoreError": 0}
    size = 0
    calls = [
        (owner, function, [call for call in ast.walk(function) if isinstance(call, ast.Call)])
        for owner, function in functions([*source_trees().values()])
    ]
    while size != len(found):
        size = len(found)
        for owner, function, made in calls:
            names = [argument.arg for argument in function.args.args if argument.arg != "self"]
            for call in made:
                given = id_of(call, found)
                if isinstance(given, ast.Name) and given.id in names and "id" in given.id.split("_"):
                    name = owner if function.name == "__init__" else function.name
                    found.setdefault(name, names.index(given.id))
    return found


def functions(trees: list[ast.Module]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function, with the name of its class."""
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield from ((node.name, item) for item in node.body if isinstance(item, ast.FunctionDef))
        yield from (("", item) for item in ast.walk(tree) if isinstance(item, ast.FunctionDef))


def id_of(call: ast.Call, makers: dict[str, int]) -> ast.expr | None:
    position = makers.get(called(call))
    if position is None:
        return None
    named = next((keyword.value for keyword in call.keywords if keyword.arg == "id"), None)
    return named or (call.args[position] if position < len(call.args) else None)


def kebabs(node: ast.AST) -> set[str]:
    """The text constants below a node that look like ids."""
    constants = {
        item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    return {text for text in constants if KEBAB.fullmatch(text)}


def choices(node: ast.expr, function: ast.AST) -> set[str]:
    """The ids that an expression can give: its own constants, or the values of a mapping that it looks them up in."""
    names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
    found = kebabs(node)
    for item in ast.walk(function):
        if isinstance(item, ast.Assign) and names & {getattr(target, "id", "") for target in item.targets}:
            found |= kebabs(item.value)
        if isinstance(item, ast.For) and names & {
            part.id for part in ast.walk(item.target) if isinstance(part, ast.Name)
        }:
            found |= kebabs(item.iter)
    return found


def told(function: ast.AST) -> Iterator[ast.expr]:
    """The ids that a function returns as the first of three texts: id, fact and remedy."""
    if ast.unparse(getattr(function, "returns", None) or ast.Constant(None)) == "tuple[str, str, str]":
        for item in ast.walk(function):
            if isinstance(item, ast.Return) and isinstance(item.value, ast.Tuple):
                yield item.value.elts[0]


@cache
def ids_in_source(within: str = "") -> frozenset[str]:
    """Every problem id, and every cause that is written as f"id: ..."; a host fact's problem begins with the name of a
    tool instead. ``within``: only those of the files whose path begins so."""
    known = makers()
    found: set[str] = set()
    for tree in [tree for path, tree in source_trees().items() if str(path.relative_to(ROOT)).startswith(within)]:
        for function in [item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]:
            for call in ast.walk(function):
                given = id_of(call, known) if isinstance(call, ast.Call) else None
                if given is not None:
                    found |= choices(given, function)
            for given in told(function):
                found |= choices(given, function)
        for item in ast.walk(tree):
            if isinstance(item, ast.Call) and called(item) in ("Reported", "Fault"):  # rows and types of a module
                found |= kebabs(id_of(item, {"Reported": len(item.args), "Fault": 0}) or ast.Constant(None))
            if isinstance(item, ast.JoinedStr) and isinstance(item.values[0], ast.Constant):
                cause = re.match(rf"({KEBAB.pattern}): ", str(item.values[0].value))
                found |= {cause[1]} if cause else set()
    return frozenset(found - ONLOOKERS)


@cache
def codes_in_source() -> frozenset[str]:
    """Every `code` of an HTTP error: given by name, chosen into a variable of that name, or written into a body."""
    found: set[str] = set()
    for path in (ROOT / "orchestrator").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found |= {text for key, value in pairs if getattr(key, "value", "") == "code" for text in texts(value)}
            given = isinstance(node, ast.keyword) and node.arg == "code"
            chosen = isinstance(node, ast.Assign) and [getattr(t, "id", "") for t in node.targets] == ["code"]
            if isinstance(node, ast.keyword | ast.Assign) and (given or chosen):
                found |= texts(node.value)
    return frozenset(found)


def texts(node: ast.expr) -> set[str]:
    if isinstance(node, ast.IfExp):
        return texts(node.body) | texts(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def entries() -> list[str]:
    return re.findall(r"^### `(.+)`$", ERRORS.read_text(), re.MULTILINE)


def test_every_problem_id_has_an_entry() -> None:
    """Problems, causes of a failed replica, and codes of HTTP errors."""
    assert sorted((ids_in_source() | codes_in_source()) - set(entries())) == []


def test_every_entry_is_of_an_id_that_exists() -> None:
    """Once, and nothing that is gone from the code."""
    assert sorted(set(entries()) - ids_in_source() - codes_in_source()) == []
    assert len(entries()) == len(set(entries()))


def unreadable(folder: Path) -> list[Problem]:
    return list(load(str(folder / "no-such.yaml")).problems)


def pin_in_quarantine(folder: Path) -> list[Problem]:
    file = examine("models: {chat: {engine: echo, cores: ['5']}}\n", "spec.yaml", str(folder), LARGE)
    assert file.spec is not None
    drawn = plan(file.spec, file.hosts, blocked={file.hosts[0].name: frozenset({5})})
    return [problem for missing in drawn.unplaced for problem in missing.problems]


def only_host_of_a_type_lost(folder: Path) -> list[Problem]:
    text = (
        "hosts: [{emulate: inf2.48xlarge}, {emulate: trn1.32xlarge}]\nmodels: {chat: {engine: echo, tp_degree: 16}}\n"
    )
    file = examine(text, "spec.yaml", str(folder), LARGE)
    assert file.spec is not None
    assert not has_errors(file.problems)
    drawn = plan(file.spec, file.hosts[:1])
    return [problem for missing in drawn.unplaced for problem in missing.problems]


def source_away(folder: Path) -> list[Problem]:
    config = (folder / "models" / "tiny" / "config.json").read_bytes()
    listing = Listing(source="org/model", files=(RemoteFile(name="config.json", size=len(config), tag=""),))
    with patch.dict(os.environ, {"COREWRIGHT_HOME": str(folder / "home")}):
        heads = SourceMetadata(folder / "home" / "store" / "heads", lambda *_: KnownRemote(listing, config))
        heads.refresh(SourceQuery(source="org/model"))
        return list(examine("models: {chat: {source: org/model}}\n", "spec.yaml", str(folder), LARGE).problems)


class KnownRemote(NamedTuple):
    known: Listing
    config: bytes

    def listing(self) -> Listing:
        return self.known

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: Event) -> None:
        (folder / "config.json").write_bytes(self.config)


BESIDE_A_SPEC: dict[str, Callable[[Path], list[Problem]]] = {  # what no text alone can give
    "spec-unreadable": unreadable,
    "pin-taken": pin_in_quarantine,
    "source-away": source_away,
    "no-suitable-host": only_host_of_a_type_lost,
}


@pytest.mark.parametrize("id", BESIDE_A_SPEC)
def test_what_no_example_can_show_happens_too(id: str, folder: Path) -> None:
    """As the entry shows it, to the letter."""
    (problem,) = BESIDE_A_SPEC[id](folder)
    (shown,) = [block.text for block in blocks(ERRORS) if block.section == id]
    assert render([problem]).replace(f"{folder}/", "") == shown
    assert (problem.id, problem.severity) == (id, section(ERRORS, id).split()[0].rstrip("."))


def test_every_problem_of_a_spec_or_a_plan_is_produced() -> None:
    """By the example of an entry, which another test runs, or by the functions above."""
    shown = {id for block in blocks(ERRORS) if block.language == "yaml" for id in block.marked("problems")}
    shown |= {id for block in blocks(ERRORS) if block.language == "yaml" for id in block.marked("up refuses")}
    made = (
        ids_in_source("placements/")
        | ids_in_source("orchestrator/revisions/spec_file.py")
        | ids_in_source("orchestrator/revisions/checkpoint_reader.py")
    )
    assert sorted(made - shown - BESIDE_A_SPEC.keys()) == []
    assert len(made) > 60


def test_an_entry_of_a_spec_or_a_plan_has_an_example_of_its_own() -> None:
    """In its section, and it gives the entry's problem."""
    own = {block.section for block in blocks(ERRORS) if block.section in block.marked("problems")}
    own |= {block.section for block in blocks(ERRORS) if block.section in block.marked("up refuses")}
    made = ids_in_source("placements/") | ids_in_source("orchestrator/revisions/spec_file.py")
    assert sorted(made - own - BESIDE_A_SPEC.keys()) == []


def test_no_id_goes_without_a_test() -> None:
    """Each is given by an example of errors.md, or named by a test that expects it."""
    shown = {id for block in blocks(ERRORS) for mark in ("problems", "up refuses") for id in block.marked(mark)}
    here = Path(__file__)
    tests = "\n".join(path.read_text() for path in here.parent.rglob("*.py") if path != here)
    tests += "\n".join(path.read_text() for path in (here.parent / "golden").rglob("*.txt"))
    others = sorted(set(entries()) - shown - BESIDE_A_SPEC.keys())
    assert [id for id in others if not re.search(rf"(?<![\w-]){re.escape(id)}(?![\w-])", tests)] == []


def test_the_collection_finds_ids_of_every_kind() -> None:
    """Made by a class, by a helper, looked up in a mapping, written into a text; and codes."""
    assert ids_in_source() >= {"max-never-fits", "pin-length", "no-room", "bad-range", "no-fleet", "start-deadline"}
    assert ids_in_source() >= {"vcpus-short", "spread-blocks", "host-memory-exceeded"}
    assert codes_in_source() >= {"model_loading", "queue_full", "invalid_json", "invalid_token"}


def test_each_codes_status_is_that_of_its_entry() -> None:
    """The table of statuses in api.md agrees with the entries of errors.md."""
    table = {code: row[0] for row in rows(section(API, "Errors")) if row[0].isdigit() for code in words(row[2])}
    assert table.keys() == codes_in_source() - {"invalid_token", "invalid_request"}
    assert {code: section(ERRORS, code).split()[0].rstrip(".") for code in table} == table


# The command line


def leaves(group: Any, above: str = "") -> dict[str, Any]:
    """The commands that do something, each with the words that it is called by."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        found |= leaves(command, f"{above}{name} ") if hasattr(command, "commands") else {above + name: command}
    return found


COMMANDS = leaves(get_command(cli.app))


def options(command: Any) -> set[str]:
    names = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]}
    return {option for option in names if option.startswith("-")} - {"--help"}


def test_every_command_and_option_is_described() -> None:
    """In a section of its first word, with a synopsis of its own, and no option that does not exist."""
    names = {name.split()[0] for name in COMMANDS}
    assert names == set(re.findall(r"^### `corewright (\w+)`$", CLI.read_text(), re.MULTILINE))
    for name, command in COMMANDS.items():
        lines = section(CLI, f"corewright {name.split()[0]}").splitlines()
        (synopsis,) = [line for line in lines if re.match(rf"`corewright {name}( .*)?`$", line)]
        shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", synopsis))
        assert shown - {"-o"} == options(command) - {"--output", "-o"}, name
        assert ("-o" in shown) == ("-o" in options(command)), name
    assert "`-o` (`--output`)" in CLI.read_text()


def test_every_option_is_explained() -> None:
    """Beside its synopsis, in the section of its command."""
    for name, command in COMMANDS.items():
        text = section(CLI, f"corewright {name.split()[0]}")
        for option in options(command) - {"--output", "-o"}:
            assert text.count(option) > 1, (name, option)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_in_a_page_is_one_that_can_be_given(page: Path) -> None:
    """Each `corewright ...` in a block or in backticks parses, and each make target exists."""
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    shell = [line for b in blocks(page) if b.language in ("sh", "console") for line in b.text.splitlines()]
    given = [line.removeprefix("$ ").split("  #")[0] for line in shell]
    lines = [shlex.split(line) if line.startswith("corewright ") else line.split() for line in given]
    lines += [
        text.split() for text in words(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    ]
    for line in lines:
        if line[:1] == ["make"] and len(line) > 1:
            assert line[1] in targets
        elif line[:1] == ["corewright"] and len(line) > 1 and not set("[]|") & set("".join(line)):
            told = [word for word in line[1:] if word != "\\"]
            name = next((name for name in (" ".join(told[:2]), told[0]) if name in COMMANDS), None)
            rest = told[len(name.split()) :] if name else told[1:]
            if name and rest:
                COMMANDS[name].make_context(name, rest)
            assert name or (told[0] in {name.split()[0] for name in COMMANDS} and told[1:2] in ([], ["--help"])), line


@pytest.mark.parametrize("name", ["architecture", "glossary", "metrics", "runbooks", "security"])
def test_an_option_in_a_page_is_one_of_a_command(name: str) -> None:
    """Each `--option` that stands in backticks without a command before it."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    named = {option for code in words(page) for option in re.findall(r"^--[a-z][a-z-]*", code)}
    assert named <= set().union(*map(options, COMMANDS.values()))


def first_line(value: object) -> str:
    return str(value).partition("\n")[0]


ALONE = [*(f"corewright {name}" for name in ("validate", "plan", "explain", "generate", "version"))]
ALONE.append("A window of cores")


def sessions(alone: bool) -> list[tuple[str, str, int]]:
    """Each command of a console block with what it prints, and its exit code where the block asks for it. ``alone``:
    those without a fleet."""
    found: list[tuple[str, str, int]] = []
    for block in blocks(CLI):
        if block.language == "console" and block.section != "corewright status" and (block.section in ALONE) == alone:
            for part in block.text.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                if command == "echo $?":
                    found[-1] = (*found[-1][:2], int(output))
                else:
                    found.append((command, output, -1))
    return found


@pytest.mark.parametrize(("command", "output", "code"), sessions(alone=True), ids=first_line)
def test_a_session_is_what_happens(
    command: str,
    output: str,
    code: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Output to the letter (stderr first, as a terminal shows it), and the exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COREWRIGHT_HOME", str(folder / "home"))
    monkeypatch.delenv("COREWRIGHT_URL", raising=False)
    found = cli.run(command.split()[1:])
    printed = capsys.readouterr()
    assert printed.err + printed.out == output
    assert code in (found, -1)


def test_the_simulators_first_run_is_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the letter, with the two files that the page shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    config, spec, shown = (block for block in blocks(SIMULATE) if block.section == "A first run")
    assert (config.language, shown.language) == ("json", "console")
    checkpoint = tmp_path / "models" / "llama-2-7b"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(config.text)
    (tmp_path / named(spec)).write_text(spec.text)
    command, _, output = shown.text.removeprefix("$ ").partition("\n")
    assert cli.run(command.split()[1:]) == 0
    printed = capsys.readouterr()
    assert printed.err + printed.out == output


@pytest.mark.parametrize(("command", "output", "code"), sessions(alone=False), ids=first_line)
def test_a_session_with_a_fleet_is_what_happens(
    command: str,
    output: str,
    code: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the letter, of a fleet that is played behind the real admin API."""
    monkeypatch.chdir(folder)
    for setting in SETTINGS:
        monkeypatch.delenv(setting.env, raising=False)
    admin = LiveAdmin()
    environment = {"HOME": "/home/ada", "TZ": "UTC", "COREWRIGHT_URL": admin.url, "COREWRIGHT_TOKEN": "secret"}
    environment["COREWRIGHT_HOME"] = "/home/ada/.corewright"
    try:
        with monkeypatch.context() as changed:
            for name, value in environment.items():
                changed.setenv(name, value)
            time.tzset()
            found = cli.run(command.split()[1:])
    finally:
        admin.close()
        time.tzset()
    printed = capsys.readouterr()
    assert printed.err + printed.out == output
    assert code in (found, -1)


def test_the_shown_spec_is_the_played_fleets() -> None:
    """But for the length that its text names."""
    (block,) = [block for block in blocks(CLI) if block.language == "yaml" and named(block) == "new.yaml"]
    assert block.text.partition("\n")[2] == SHOWN_SPEC.replace("512", "1024")


def test_every_setting_is_described() -> None:
    """With its variable, its default and its values."""
    table = [row for row in rows(section(CLI, "Settings")) if words(row[0])]
    told = [(words(row[0])[0], words(row[1])[0], words(row[2])[0]) for row in table]
    switches = {"True": "true", "False": "false", "None": "unset", "()": "none"}
    assert told == [(one.name, one.env, switches.get(str(one.default), str(one.default))) for one in SETTINGS]
    assert all(row[3].startswith(one.kind.rule) for row, one in zip(table, SETTINGS, strict=True))


def test_every_environment_variable_is_described() -> None:
    """Every COREWRIGHT_... of the sources."""
    used = {name for path in SOURCES for name in re.findall(r"COREWRIGHT_[A-Z]+(?:_[A-Z]+)*", path.read_text())}
    used |= {setting.env for setting in SETTINGS}
    assert used <= set(words(section(CLI, "Environment variables")))


# JSON


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


def shown_status() -> Any:
    return json.loads(status_block("corewright status -o json"))


def status_block(command: str) -> str:
    block = next(b for b in blocks(CLI) if b.language == "console" and b.section == "corewright status")
    return next(p.partition("\n")[2] for p in block.text.split("$ ") if p.startswith(f"{command}\n"))


def told_by_a_controller(tmp_path: Path) -> dict[str, Any]:
    """The status of a fleet with a replica that runs, a core that somebody else holds, and a gateway that tells."""
    text = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: echo}}\n"

    async def play() -> dict[str, Any]:
        cluster = FakeCluster()
        cluster.held = {1: 99}
        async with Played(tmp_path, cluster, text) as played:
            await played.settled()
            report = DemandReport(gateway="g", number=1, seconds=1.0, models=[DemandWindow(model="a")])
            await played.controller.demand(report)
            return played.controller.status()

    return virtually(play)


def test_the_shown_status_has_the_controllers_keys(tmp_path: Path) -> None:
    """Fleet, models, replicas, hosts and leases."""
    told = shape(told_by_a_controller(tmp_path))
    assert told["hosts"].pop("quarantine") == dict.fromkeys(("core", "pid", "command", "cause"))
    shown = shape(shown_status())
    assert shown["hosts"].pop("quarantine") is None  # an empty list
    assert shown == told


def test_every_key_of_the_status_is_described(tmp_path: Path) -> None:
    """Those that do not say themselves what they are."""
    plain = {"name", "models", "hosts", "replicas", "id", "host", "cores", "model", "instance", "emulated", "message"}
    plain |= {"leases", "type", "free", "state", "since", "log_file"}
    plain |= {"strategy", "updated", "old", "replica"}  # of `rollout status`

    def names(value: Any) -> set[str]:
        return set().union(*({key} | names(item) for key, item in (value or {}).items())) if value else set()

    text = section(CLI, "corewright status").split("```")[-1]
    assert names(shape(told_by_a_controller(tmp_path))) - plain - set(words(text)) == set()


def test_the_shown_plan_of_a_model_has_its_keys() -> None:
    """Those of the played fleet, which another test compares with a real one; and each is described."""
    shown = example(CLI, "corewright plan")
    assert shape(shown) == shape(PLAN["models"][0])
    described = {word for row in rows(section(CLI, "corewright plan")) for word in words(row[0])}
    assert shown.keys() - {"model", "replicas"} <= described


def test_the_shown_status_table_is_that_of_the_shown_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status` prints it so."""
    monkeypatch.setattr(AdminClient, "get", lambda self, path, query=None: shown_status())
    monkeypatch.setattr(cli, "the_fleet", lambda: AdminClient("", "", None))
    assert cli.run(["status"]) == 0
    assert capsys.readouterr().out == status_block("corewright status")


@pytest.mark.parametrize(("kind", "number"), [(State, 0), (ModelState, 1)])
def test_every_state_is_described(kind: type[State] | type[ModelState], number: int) -> None:
    """Of replicas and of models, in the order of the code."""
    tables = re.split(r"^\| state of ", section(CLI, "corewright status"), flags=re.MULTILINE)[1:]
    assert [words(row[0])[0] for row in rows(tables[number]) if words(row[0])] == [state.value for state in kind]


def test_the_shown_record_has_the_keys_of_fleet_json() -> None:
    """And their types."""
    shown = example(CLI, "Files")
    assert list(shown) == [field.name for field in msgspec.structs.fields(FleetRecord)]
    msgspec.convert(shown, FleetRecord)


def test_every_file_of_the_home_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that is made there: at the top by what makes it, under logs/ by its name in the sources."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set below goes with this test
        monkeypatch.delenv(name)
    home = Home(tmp_path / "home")
    home.prepare()
    lock = home.lock()
    home.secure_ray()
    home.write_record(msgspec.convert(example(CLI, "Files"), FleetRecord))
    home.journal.write_text("{")
    Journal(home.journal).close()
    KeyFile(home.keys).create("ci")
    Audit(home.audit).begin("command", "keys create")
    home.traces.mkdir()
    keep_of(home.compiled).mkdir()
    home.store.mkdir()
    CoreClaim(home.claims(0), [0]).release()
    with entry(home.compiled, {}):
        pass
    made = {path.name for path in home.path.iterdir()}
    parts = [path.read_text() for path in SOURCES if path.is_relative_to(ROOT / "orchestrator")]
    used = {name for text in parts for name in re.findall(r'"([a-z]+\.log)"', text)}
    assert lock is not None
    os.close(lock)

    told = [word for row in rows(section(CLI, "Files")) for word in words(row[0]) if not word.startswith("$")]

    told = [word for word in told if not re.fullmatch(r"audit\.log\.\d", word)]
    assert {word.partition("/")[0] for word in told} == made | {"config.yaml"}
    logs = {word.removeprefix("logs/") for word in told if word.startswith("logs/")}
    compiled = {"compile-MODEL.log", "compile-MODEL-TARGET.log"}
    assert logs == {home.log("MODEL", 0).name.replace("0", "N"), "generate-MODEL.log"} | compiled | (used - made)


def test_every_file_says_when_it_may_be_deleted() -> None:
    """None is left open."""
    assert all(len(row) == 3 and row[2] for row in rows(section(CLI, "Files")))


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, Any]]:
    """What a gateway answers with an echo replica behind it."""
    gateway, replica = LiveGateway(), Served(max_len=64)
    try:
        gateway.serve(routes("m", replica, max_len=64))
        text, chat = {"model": "m", "prompt": "x"}, {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        yield {
            "completion": gateway.http.post("/v1/completions", json=text).json(),
            "chat": gateway.http.post("/v1/chat/completions", json=chat).json(),
            "error": gateway.http.post("/v1/completions", json={**text, "max_tokens": 600}).json(),
            "model": gateway.http.get("/v1/models/m").json(),
        }
    finally:
        gateway.close()
        replica.close()


@pytest.mark.parametrize(
    ("name", "page", "heading", "number"),
    [
        ("chat", README, "Quick start", 0),
        ("model", API, "Routes", 0),
        ("completion", API, "Answers", 0),
        ("error", API, "Errors", 0),
    ],
)
def test_a_shown_answer_has_the_gateways_keys(
    name: str, page: Path, heading: str, number: int, answers: dict[str, Any]
) -> None:
    """At every depth."""
    assert shape(example(page, heading, number)) == shape(answers[name])
    if name == "error":
        shown, real = example(page, heading, number)["error"], answers[name]["error"]
        assert {key: shown[key] for key in ("type", "param", "code")} == {k: real[k] for k in ("type", "param", "code")}


def test_every_json_block_parses() -> None:
    """Also those that no other test reads."""
    for block in blocks_of("json"):
        json.loads(block.text)


def routes_of(page: str) -> set[tuple[str, str]]:
    return {(m, p) for row in rows(page) for text in words(row[0]) for m, _, p in [text.partition(" ")] if p[:1] == "/"}


def test_every_route_is_described() -> None:
    """Of the gateway and of the admin API."""
    assert {(route.method, route.path) for route in GATEWAY_ROUTES} == routes_of(section(API, "Routes"))
    assert {(route.method, f"{ADMIN_PATH}{route.path}") for route in ROUTES} == routes_of(section(CLI, "The admin API"))


def test_the_routes_that_need_no_key_are_those_that_security_names() -> None:
    """In each row about somebody without a key that names routes; api.md has them in its last two rows."""
    table = [row for row in rows(section(SECURITY, "Who can do what")) if "/livez" in row[1]]
    assert [{word for word in words(row[1]) if word.startswith("/")} for row in table] == [OPEN, OPEN]
    last_rows = rows(section(API, "Routes"))[-2:]
    assert {path for row in last_rows for word in words(row[0]) for path in word.split()[1:]} == OPEN


def test_every_field_of_an_admin_route_is_described() -> None:
    """Those that may be left out with a question mark; the answer as the OpenAPI document has it."""
    for row, route in zip([row for row in rows(section(CLI, "The admin API")) if words(row[0])], ROUTES, strict=True):
        fields = [field for field in msgspec.structs.fields(route.schema) if f"{{{field.name}}}" not in route.path]
        assert row[1] == ", ".join(f"`{field.name}`" + ("" if field.required else "?") for field in fields)
        assert row[2] == route.response


# Request fields


def request_fields() -> set[str]:
    return {field.name for kind in (ChatRequest, CompletionRequest) for field in msgspec.structs.fields(kind)}


def listed(beginning: str) -> set[str]:
    """The fields in the paragraph of that beginning; none when there is no such paragraph."""
    paragraphs = section(API, "Request fields").split("\n\n")
    return {word for text in paragraphs if text.startswith(beginning) for word in words(text)} - {
        "unsupported_parameter"
    }


def test_every_request_field_is_described() -> None:
    """As served, ignored or refused, and nothing else is."""
    served = {word for row in rows(section(API, "Request fields")) for word in words(row[0])}
    assert served | listed("Fields that") == request_fields()
    assert served & (listed("Fields that are ignored") | listed("Fields that are rejected")) == set()


def test_the_fields_that_change_nothing_yet_are_those_that_no_replica_reads() -> None:
    """A parameter that reaches the replica and is not read there must not look as if it were served."""
    read = {
        node.attr
        for path in (ROOT / "workers").rglob("*.py")
        if path.name != "requests.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    unread = {field.name for field in msgspec.structs.fields(GenerateRequest)} - read
    names: dict[str, set[str]] = {"guide": {"response_format"}, "logprobs": {"logprobs", "top_logprobs"}}
    assert listed("Fields that are checked") == {name for field in unread for name in names.get(field, {field})}


def test_the_refused_fields_are_refused() -> None:
    """With the code that the page names."""
    from orchestrator.gateway.openai import body_reader

    chat = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    for name in listed("Fields that are rejected"):
        body: dict[str, Any] = {"model": "m", "prompt": "x", name: "x"} if name == "suffix" else {**chat, name: [{}]}
        read = body_reader.read_completion if "prompt" in body else body_reader.read_chat
        with pytest.raises(ApiError) as refused:
            read(json.dumps(body).encode())
        assert (refused.value.code, refused.value.param) == ("unsupported_parameter", name)


# The architecture


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


def test_every_path_in_contributing_exists() -> None:
    paths = re.findall(r"`((?:orchestrator|workers|placements|tests|docs)/[a-z_0-9/.]*)`", CONTRIBUTING.read_text())
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


# Links


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_resolves(page: Path) -> None:
    """To a file, and to a heading in it."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_the_glossary_is_in_alphabetical_order() -> None:
    """Each word once, and none is marked as a part that is not built."""
    terms = re.findall(r"^\*\*(.+?)\*\* ", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 40
    assert not [term for term in terms if "*" in term]
    assert terms == sorted(set(terms), key=lambda term: term.lower().replace("_", " "))


def test_ci_runs_the_readmes_test_command() -> None:
    """`make test` with the live tests, then `make demo-check`."""
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-2:] == ["make test LIVE=1 PYTEST_ARGS=--durations=50", "make demo-check"]
    assert "CI runs `make test LIVE=1`, then `make demo-check`." in " ".join(README.read_text().split())


def test_the_changelogs_version_is_the_packages() -> None:
    """The topmost entry is what `corewright version` says."""
    found = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli.main", "version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == found.stdout.strip()
