"""What the adapters call of the Neuron packages, as it was recorded, and how an installed package differs from it.

The recorded part is workers/engines/surfaces/<package>.json. Nothing here touches a device: the packages reserve cores
with their first operation, not when they are imported. Needs only the standard library, so that any interpreter can run
it: ``python -c "import runpy; runpy.run_path('.../contract.py', run_name='__main__')" ENGINE`` prints a drift as JSON.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

SURFACES = Path(__file__).parent / "surfaces"
# As in placements.facts.engines, which another interpreter need not have.
PACKAGES: Mapping[str, str] = {
    "transformers-neuronx": "transformers_neuronx",
    "nxd-inference": "neuronx_distributed_inference",
}


@dataclass(frozen=True)
class Change:
    """A function that is called otherwise than it was recorded."""

    name: str
    recorded: str  # "(self, directory)"
    installed: str
    how: str = "is called otherwise"  # the difference in words


@dataclass(frozen=True)
class Drift:
    """How an installed package differs from the recorded version that is nearest to it. All empty: not at all."""

    engine: str
    package: str  # its import name
    installed: str | None  # its version; None: it is not installed
    recorded: str | None = None  # the version that it was compared with, as the contract names it
    known: bool = True  # that version is of the same release series; else another release had to do
    removed: tuple[str, ...] = ()  # names that are gone, options as "NeuronConfig: name"
    added: tuple[str, ...] = ()  # options that it has beyond the recorded ones
    changed: tuple[Change, ...] = ()
    problem: str | None = None  # why it cannot be imported

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Drift:
        """From what ``main`` has printed, read as JSON."""
        lists = {name: tuple(told[name]) for name in ("removed", "added")}
        changed = tuple(Change(**one) for one in told["changed"])
        return cls(**{**told, **lists, "changed": changed})

    @property
    def none(self) -> bool:
        """Whether nothing is to be said of it: not installed, or as recorded."""
        return self.known and not (self.removed or self.added or self.changed or self.problem)

    def lines(self) -> list[str]:
        """One line for each difference, for a log."""
        found = []
        if self.problem:
            found.append(f"{self.package} {self.installed} cannot be imported: {self.problem}")
        if not self.known:
            found.append(f"{self.package} {self.installed} was not recorded; compared with {self.recorded}")
        found += [f"{name} is gone (recorded in {self.recorded})" for name in self.removed]
        found += [f"{one.name} {one.how} (recorded in {self.recorded})" for one in self.changed]
        return [*found, *(f"{name} is new (not in {self.recorded})" for name in self.added)]


@cache
def surface(engine: str) -> Mapping[str, Any]:
    """What was recorded: ``versions`` -> signatures, classes, options. Raises KeyError for an engine without one."""
    found: Mapping[str, Any] = json.loads((SURFACES / f"{PACKAGES[engine]}.json").read_text())
    return found


def drift(engine: str) -> Drift:
    """Compare the installed package. Imports it if it is there; raises KeyError for an engine without a contract."""
    package = PACKAGES[engine]
    installed = installed_version(package)
    if installed is None:
        return Drift(engine, package, None)
    versions: Mapping[str, Any] = surface(engine)["versions"]
    series = {name: _series(told["package_version"]) for name, told in versions.items()}
    try:
        module = importlib.import_module(package)
        installed = str(getattr(module, "__version__", None) or installed_version(package))
        nearest = _nearest(_series(installed), set(series.values()))
        found = [_compare(engine, installed, name, versions[name]) for name, one in series.items() if one == nearest]
    except Exception as error:  # noqa: BLE001 - whatever an import of theirs raises is what there is to tell
        return Drift(engine, package, installed, problem=f"{type(error).__name__}: {error}")
    best = min(found, key=lambda one: len(one.removed) + len(one.changed) + len(one.added))
    return best if nearest == _series(installed) else Drift(**{**vars(best), "known": False})


def log_drift(engine: str, log: logging.Logger) -> None:
    """Say how the installed package differs from what the adapter was written against."""
    for line in drift(engine).lines():
        log.warning("%s: %s", engine, line)


def installed_version(package: str) -> str | None:
    """The version of a package by its import name; "unknown" where it has no metadata, None where it is missing."""
    try:
        if importlib.util.find_spec(package) is None:
            return None
    except (ImportError, ValueError):  # a parent that fails, or a module without a spec
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package.replace("_", "-"))
    return "unknown"


def parameters(signature: inspect.Signature) -> list[str]:
    """One text for each parameter, without annotations: "self", "debug=False", "*", "**kwargs"."""
    found: list[str] = []
    for one in signature.parameters.values():
        if one.kind is one.KEYWORD_ONLY and not any(text.startswith("*") for text in found):
            found.append("*")
        stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        default = "" if one.default is one.empty else f"={one.default!r}"
        found.append(f"{stars}{one.name}{default}")
    return found


def _compare(engine: str, installed: str, version: str, recorded: Mapping[str, Any]) -> Drift:
    removed, changed, added = [], [], []
    for name, wished in recorded["signatures"].items():
        if wished is None:
            continue
        found = _function(name)
        if found is None:
            removed.append(name)
            continue
        with contextlib.suppress(ValueError, TypeError):  # builtins and some wrappers have no signature
            there = parameters(inspect.signature(found))
            if not _alike(wished, there):
                how = _difference(wished, there)
                changed.append(Change(name, f"({', '.join(wished)})", f"({', '.join(there)})", how))
    removed += [name for name in recorded["classes"] if _attribute(name) is None]
    for name, options in recorded["options"].items():
        there_too = _options(_attribute(name))
        short = name.rpartition(".")[2]
        if len(there_too & set(options)) > len(options) / 2:  # else they are not read by name, and cannot be told
            removed += [f"{short}: {option}" for option in options if option not in there_too]
            added += [f"{short}: {option}" for option in sorted(there_too - set(options))]
    return Drift(
        engine,
        PACKAGES[engine],
        installed,
        version,
        removed=tuple(removed),
        added=tuple(added),
        changed=tuple(changed),
    )


def _difference(wished: Sequence[str], there: Sequence[str]) -> str:
    """In words, how two lists of parameters that are not alike differ."""
    before, after = (dict(text.partition("=")[::2] for text in texts) for texts in (wished, there))
    kept = [name for name in before if name in after]
    told = {
        "takes no": [name for name in before if name not in after and name != "*"],
        "takes besides": [name for name in after if name not in before and name != "*"],
        "has another default of": [name for name in kept if not _same(name, before, after)],
    }
    words = [f"{what} {_few(names)}" for what, names in told.items() if names]
    return "; ".join(words) or "takes its arguments in another way"


def _same(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether a parameter of both has the same default, or none in both."""
    one, other = (f"{name}={defaults[name]}" if defaults[name] else name for defaults in (before, after))
    return _alike([one], [other])


def _few(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _alike(wished: Sequence[str], there: Sequence[str]) -> bool:
    """Whether a call that the one takes has the same meaning for the other. Defaults count where they are literals."""
    if [text.partition("=")[0] for text in wished] != [text.partition("=")[0] for text in there]:
        return False
    for one, other in zip(wished, there, strict=True):
        if ("=" in one) != ("=" in other):
            return False
        try:
            literal = ast.literal_eval(one.partition("=")[2]) if "=" in one else None
        except (ValueError, SyntaxError):
            continue  # "Layout.HSB": its value shows only in the source
        if "=" in one and repr(literal) != other.partition("=")[2]:
            return False
    return True


def _attribute(dotted: str) -> Any:
    """What stands at a dotted name, or None."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        except ImportError:
            return None
        for part in parts[cut:]:
            found = getattr(found, part, None)
        return found
    return None


def _function(dotted: str) -> Any:
    """The function behind a name, with its ``self`` or ``cls``."""
    holder, _, name = dotted.rpartition(".")
    owner = _attribute(holder) if "." in holder else None
    found = inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else _attribute(dotted)
    return getattr(found, "__func__", found)


def _options(configured: Any) -> set[str]:
    """What a class takes out of its ``**kwargs`` by name: pop, get, a subscript or ``in``. Read from its source, since
    unknown options are only logged there; empty where the source tells none."""
    found: set[str] = set()
    with contextlib.suppress(OSError, TypeError, SyntaxError):
        tree = ast.parse(textwrap.dedent(inspect.getsource(configured)))
        for node in ast.walk(tree):
            key: ast.expr | None = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                if node.func.attr in ("pop", "get") and _is_kwargs(node.func.value):
                    key = node.args[0]
            elif isinstance(node, ast.Subscript) and _is_kwargs(node.value):
                key = node.slice
            elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and _is_kwargs(node.comparators[0]):
                key = node.left
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.add(key.value)
    return found


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "kwargs"


def _series(version: str) -> tuple[int, int]:
    """Major and minor: (0, 13) of "0.13.x" or "0.13.798+abc"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _nearest(installed: tuple[int, int], recorded: set[tuple[int, int]]) -> tuple[int, int]:
    """That very one, else the newest that is older, else the oldest."""
    return max((one for one in recorded if one <= installed), default=min(recorded))


def main(engine: str) -> None:
    """Print the drift as JSON on standard output; what the package prints at its import goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        told = asdict(drift(engine))
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
