"""Collects problem ids and error codes from the syntax trees of the product."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from functools import cache

from tests.docs.pages import KEBAB, ROOT, SOURCES
from workers.host.facts.machine import ONLOOKERS

FAILURES = ("EngineLoadError", "CheckpointError", "SourceError", "StoreError", "_Unreadable")
CLASSES = (
    "Problem",
    "Finding",
    "Refusal",
    "PlacementRefusal",
    "PrefixCacheRefusal",
    "OperationRefused",
    "NoListener",
    "Failure",
    *FAILURES,
)

MANY = ("",) * 1000


@dataclass
class Function:
    """A function with what the search for ids reads of it, inner functions included."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    class_name: str  # "" outside classes
    calls: list[ast.Call] = field(default_factory=list)
    bindings: list[tuple[ast.AST, ast.expr]] = field(default_factory=list)  # target and value of = and for
    returned: list[ast.expr] = field(default_factory=list)

    @property
    def made(self) -> str:
        """The name that a caller writes."""
        return self.class_name if self.node.name == "__init__" else self.node.name


@dataclass
class Source:
    """One file: its functions, and the other nodes in which an id or a code may stand."""

    functions: list[Function] = field(default_factory=list)
    others: list[ast.AST] = field(default_factory=list)  # calls, f-strings, dicts, keywords and assignments

    def collect(self, node: ast.AST, around: tuple[Function, ...] = (), class_name: str = "") -> None:
        """Adds a node and all below it; ``around``: the functions that it is in."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.append(Function(node, class_name))
            around = (*around, self.functions[-1])
        for function in around:
            if isinstance(node, ast.Call):
                function.calls.append(node)
            elif isinstance(node, ast.Assign):
                function.bindings += [(target, node.value) for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.For):
                function.bindings.append((node.target, node.iter))
            elif isinstance(node, ast.Return) and node.value is not None:
                function.returned.append(node.value)
        if isinstance(node, ast.Call | ast.JoinedStr | ast.Dict | ast.keyword | ast.Assign):
            self.others.append(node)
        for child in ast.iter_child_nodes(node):
            self.collect(child, around, node.name if isinstance(node, ast.ClassDef) else "")


@cache
def sources() -> dict[str, Source]:
    """Each file of the product by its path."""
    collected = {str(path.relative_to(ROOT)): Source() for path in SOURCES}
    for path, source in collected.items():
        source.collect(ast.parse((ROOT / path).read_text()))
    return collected


@cache
def makers() -> dict[str, int]:
    """Returns what makes a problem, with the position of its id: classes, and functions that pass on their ``id``."""
    positions = dict.fromkeys(CLASSES, 0)
    size = 0
    while size != len(positions):
        size = len(positions)
        for function in (function for source in sources().values() for function in source.functions):
            signature = function.node.args
            by_position = [argument.arg for argument in signature.args if argument.arg != "self"]
            # after any number of others, so that only its name gives it
            parameters = [*by_position, *MANY, *(argument.arg for argument in signature.kwonlyargs)]
            for call in function.calls:
                id = id_of(call, positions)
                if isinstance(id, ast.Name) and id.id in parameters and "id" in id.id.split("_"):
                    positions.setdefault(function.made, parameters.index(id.id))
    return positions


def callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def id_of(call: ast.Call, positions: dict[str, int]) -> ast.expr | None:
    """The argument that is the id of a problem, if the call makes one."""
    position = positions.get(callee(call))
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


def names_in(node: ast.AST) -> set[str]:
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}


@cache
def constants() -> dict[str, set[str]]:
    """The ids that a constant of any module holds, by its name: `NEEDS_DEVICE = "compile-needs-device"`."""
    assigned = (node for source in sources().values() for node in source.others if isinstance(node, ast.Assign))
    return {
        target.id: kebabs(node.value)
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper() and isinstance(node.value, ast.Constant)
    }


def choices(id: ast.expr, function: Function) -> set[str]:
    """The ids that an expression can give: its own constants, those of a module, or the values of a mapping that it
    looks them up in."""
    names = names_in(id)
    bound = [kebabs(value) for target, value in function.bindings if names & names_in(target)]
    return kebabs(id).union(*bound, *(constants()[name] for name in names if name in constants()))


def ids_made_in(function: Function) -> set[str]:
    """Those of the problems that it makes, and the first of three texts (id, fact and remedy) that it returns."""
    ids = [id for call in function.calls if (id := id_of(call, makers())) is not None]
    if ast.unparse(function.node.returns or ast.Constant(None)) == "tuple[str, str, str]":
        ids += [value.elts[0] for value in function.returned if isinstance(value, ast.Tuple)]
    return set[str]().union(*(choices(id, function) for id in ids))


def ids_written_in(node: ast.AST) -> set[str]:
    """The row of a table of faults, the metadata of a field's type, or a cause that is written as f"id: ..."."""
    if isinstance(node, ast.Call) and callee(node) in ("Reported", "Fault"):
        return kebabs(id_of(node, {"Reported": len(node.args), "Fault": 0}) or ast.Constant(None))
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        cause = re.match(rf"({KEBAB.pattern}): ", str(node.values[0].value))
        return {cause[1]} if cause else set()
    return set()


@cache
def ids_in_source(within: str = "") -> frozenset[str]:
    """Every problem id of the product; a host fact's problem begins with the name of a tool instead. ``within``: only
    those of the files whose path begins so."""
    chosen = [source for path, source in sources().items() if path.startswith(within)]
    made = [ids_made_in(function) for source in chosen for function in source.functions]
    written = [ids_written_in(node) for source in chosen for node in source.others]
    return frozenset(set[str]().union(*made, *written) - ONLOOKERS)


@cache
def codes_in_source() -> frozenset[str]:
    """Every `code` of an HTTP error: given by name, chosen into a variable of that name, or written into a body."""
    values: list[ast.expr] = []
    files = [file for path, file in sources().items() if path.startswith("orchestrator/")]
    for node in (node for file in files for node in file.others):
        if isinstance(node, ast.Dict):
            values += [value for key, value in zip(node.keys, node.values, strict=True) if is_code(key)]
        elif (isinstance(node, ast.keyword) and node.arg == "code") or (
            isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["code"]
        ):
            values.append(node.value)
    return frozenset(set[str]().union(*map(texts, values)))


def is_code(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "code"


def texts(node: ast.expr) -> set[str]:
    if isinstance(node, ast.IfExp):
        return texts(node.body) | texts(node.orelse)
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
