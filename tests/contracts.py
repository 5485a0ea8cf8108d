"""The recorded signatures of the foreign packages (tests/contracts/*.json), for any version that was recorded.

``python -m tests.contracts --distil`` writes what workers/engines/package_contract.py compares an installed package
with.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "contracts"
ENGINES = Path(__file__).parent.parent / "workers" / "engines"
PACKAGES = {
    "transformers-neuronx": "transformers_neuronx",
    "nxd-inference": "neuronx_distributed_inference",
    "optimum-neuron": "optimum.neuron",
}


@dataclass(frozen=True)
class Source:
    """A default that is no literal, as the source has it: ``Layout.HSB``."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Contract:
    """What was recorded of one package."""

    engine: str  # as a spec names it
    data: Mapping[str, Any]

    @property
    def primary(self) -> str:
        """The version that the adapter is written for."""
        return str(self.data["primary"])

    @property
    def versions(self) -> tuple[str, ...]:
        """All that were recorded, the primary one first."""
        return tuple(dict.fromkeys((self.primary, *self.data["deltas"], *self.data["snapshots"])))

    def package_version(self, version: str) -> str:
        """What importlib.metadata says of a package of that version, as far as it was recorded: "0.8.0"."""
        known = self.data["snapshots"].get(version) or self.data["other_revisions"][version]
        return str(known["version"])

    @property
    def surface(self) -> tuple[str, ...]:
        """Dotted names that an adapter is expected to call, each in the versions that have it."""
        return tuple(name for _, name in self.named)

    @property
    def named(self) -> list[tuple[str, str]]:
        """A version that has it, and the name, for each of `surface`."""
        return [(version, name) for version, names in self.data["adapter_surface"].items() for name in names]

    def signature(self, dotted: str, version: str | None = None) -> inspect.Signature:
        """Of a function, of a method (with its ``self`` or ``cls``), or of a class: its ``__init__`` without ``self``.

        Raises LookupError where that version has no such thing.
        """
        version = version or self.primary
        record = self._lookup(dotted, version)
        if "methods" in record or "bases" in record:
            init = self.signature(f"{dotted}.__init__", version)
            return init.replace(parameters=list(init.parameters.values())[1:])
        return record["signature"] if "signature" in record else _from_params(record["params"])

    def has(self, dotted: str, version: str | None = None) -> bool:
        """Returns whether that version has it, itself or from a base."""
        try:
            self._lookup(dotted, version or self.primary)
        except LookupError:
            return False
        return True

    def role(self, dotted: str) -> str:
        """method | classmethod | staticmethod | property | function | class, in the primary version or the newest."""
        for version in (self.primary, *self.data["snapshots"]):
            if self.has(dotted, version):
                record = self._lookup(dotted, version)
                return "class" if "bases" in record else str(record.get("role", "function"))
        raise LookupError(f"{self.engine} has no {dotted}")

    def options(self, dotted: str, version: str | None = None) -> dict[str, str]:
        """What a class takes out of its ``**kwargs``, each with the source text of its default.

        From ``option_history`` where the class is in it, else {}: its ``__init__`` names all of them.
        """
        history = self.data["option_history"].get(dotted, {})
        return {
            name: defaults[version or self.primary]
            for name, defaults in history.items()
            if (version or self.primary) in defaults
        }

    def members(self, dotted: str) -> dict[str, Any]:
        """The members of an enumeration."""
        return dict(self._lookup(dotted, self.primary)["enum_members"])

    def resolved(self, dotted: str, version: str | None = None) -> str:
        """The name of what defines it: the base's, for a method that is inherited."""
        module, rest = self._split(dotted, self._snapshot(version or self.primary))
        modules = self.data["snapshots"][self._snapshot(version or self.primary)]["modules"]
        if len(rest) == 2:
            record = modules[module].get("classes", {}).get(rest[0], {})
            if rest[1] not in record.get("methods", {}) and rest[1] in record.get("inherited", {}):
                return f"{record['inherited'][rest[1]]}.{rest[1]}"
        return dotted

    def _bases(self, dotted: str, snapshot: str) -> list[str]:
        module, rest = self._split(dotted, snapshot)
        ancestors = self.data["snapshots"][snapshot]["modules"][module]["classes"][rest[0]].get("ancestors", [])
        return [base for base in ancestors if not base.startswith("ext:")]

    def _snapshot(self, version: str) -> str:
        if version not in self.versions:
            raise LookupError(f"{self.engine} {version} was not recorded; recorded: {', '.join(self.versions)}")
        return version if version in self.data["snapshots"] else self.primary

    def _split(self, dotted: str, snapshot: str) -> tuple[str, list[str]]:
        modules = self.data["snapshots"][snapshot]["modules"]
        parts = dotted.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:cut]) in modules:
                return ".".join(parts[:cut]), parts[cut:]
        raise LookupError(f"no module of {dotted} was recorded for {self.engine} {snapshot}")

    def _lookup(self, dotted: str, version: str) -> dict[str, Any]:
        """Its record, or {"signature": ...} where only a difference was recorded."""
        snapshot = self._snapshot(version)
        delta = self.data["deltas"].get(version, {"added": {}, "removed": [], "changed": {}})
        if snapshot == version:  # a snapshot of its own tells all
            delta = {"added": {}, "removed": [], "changed": {}}
        if dotted in delta["added"] and isinstance(delta["added"][dotted], str):
            return {"signature": parse_signature(delta["added"][dotted])}
        module, rest = self._split(dotted, snapshot)
        name = self.resolved(dotted, version)
        removed = set(delta["removed"])
        if {name, name.rpartition(".")[0], f"{module}.{rest[0]}"} & removed:
            bases = self._bases(f"{module}.{rest[0]}", snapshot) if len(rest) == 2 and name == dotted else []
            for base in bases if f"{module}.{rest[0]}" not in removed else []:
                if self.has(f"{base}.{rest[1]}", version):  # that version has its base's
                    return self._lookup(f"{base}.{rest[1]}", version)
            raise LookupError(f"{self.engine} {version} has no {dotted}")
        if name in delta["changed"]:
            return {"signature": parse_signature(delta["changed"][name]["here"])}
        module, rest = self._split(name, snapshot)
        record = self.data["snapshots"][snapshot]["modules"][module]
        if len(rest) == 1:
            member = record.get("functions", {}).get(rest[0]) or record.get("classes", {}).get(rest[0])
        else:
            member = record.get("classes", {}).get(rest[0], {}).get("methods", {}).get(rest[1])
        if member is None:
            raise LookupError(f"{self.engine} {version} has no {dotted}")
        return dict(member)


@cache
def contract(engine: str) -> Contract:
    """By the engine's name in a spec, or the top level of its package."""
    by_package = {package.split(".")[0]: name for name, package in PACKAGES.items()}
    engine = by_package.get(engine, engine)
    return Contract(engine, json.loads((FOLDER / _file(PACKAGES[engine])).read_text()))


def _file(package: str) -> str:
    return f"{package.replace('.', '_')}.json"


def parse_signature(text: str) -> inspect.Signature:
    """``(self, a, b=1, *, c=Layout.HSB, **kwargs)`` as the signature that it was. Annotations are dropped."""
    arguments = ast.parse(f"def f{text}: pass").body[0]
    assert isinstance(arguments, ast.FunctionDef)
    spec = arguments.args
    kinds = inspect.Parameter
    positional: list[tuple[ast.arg, Any]] = [(arg, kinds.POSITIONAL_ONLY) for arg in spec.posonlyargs]
    positional += [(arg, kinds.POSITIONAL_OR_KEYWORD) for arg in spec.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(spec.defaults))
    parameters = [
        kinds(argument.arg, kind, default=_default(default))
        for (argument, kind), default in zip(positional, [*missing, *spec.defaults], strict=True)
    ]
    if spec.vararg:
        parameters.append(kinds(spec.vararg.arg, kinds.VAR_POSITIONAL))
    for keyword, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        parameters.append(kinds(keyword.arg, kinds.KEYWORD_ONLY, default=_default(default)))
    if spec.kwarg:
        parameters.append(kinds(spec.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _from_params(params: list[dict[str, str]]) -> inspect.Signature:
    parameters = []
    for param in params:
        default = ast.parse(param["default"], mode="eval").body if "default" in param else None
        kind = getattr(inspect.Parameter, param["kind"])
        parameters.append(inspect.Parameter(param["name"], kind, default=_default(default)))
    return inspect.Signature(parameters)


def _default(node: ast.expr | None) -> Any:
    if node is None:
        return inspect.Parameter.empty
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Source(ast.unparse(node))


def distilled(engine: str) -> dict[str, Any]:
    """Just the adapter's surface in every version, as surface.json in its folder holds it.

    A signature is the texts of its parameters, without annotations; null is what a version does not have.
    """
    from workers.engines.package_contract import (
        parameters,  # not above: the stand-ins load this file where that may be missing
    )

    recorded = contract(engine)
    functions = [name for name in recorded.surface if recorded.role(name) != "class"]
    classes = [name for name in recorded.surface if recorded.role(name) == "class"]
    configured = list(recorded.data["option_history"])
    return {
        "package": PACKAGES[engine],
        "primary": recorded.primary,
        "versions": {
            version: {
                "package_version": recorded.package_version(version),
                "signatures": {
                    name: parameters(recorded.signature(name, version)) if recorded.has(name, version) else None
                    for name in functions
                },
                "classes": [name for name in classes if recorded.has(name, version)],
                "options": {name: sorted(recorded.options(name, version)) for name in configured},
            }
            for version in recorded.versions
        },
    }


def surfaces() -> Iterator[tuple[Path, str]]:
    """The surface.json of each engine, and what must stand in it."""
    for engine in PACKAGES:
        yield ENGINES / engine.replace("-", "_") / "surface.json", json.dumps(distilled(engine), indent=1) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--distil"]:
        sys.exit("usage: python -m tests.contracts --distil")
    for path, text in surfaces():
        path.write_text(text)
