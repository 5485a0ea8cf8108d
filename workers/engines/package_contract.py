"""The contract with the Neuron packages: the recorded API that adapters use, and an installed package's drift from it.

The record is surface.json in the engine's folder. Nothing here uses a device: the packages reserve cores with their
first operation, not at import. Needs only the standard library, so that any interpreter can run it; this prints a drift
as JSON: ``python -c "import runpy; runpy.run_path('.../package_contract.py', run_name='__main__')" ENGINE``.
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
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Drift:
    """The differences of an installed package from the nearest recorded version. All empty: none."""

    engine: str
    package: str  # its import name
    installed: str | None  # its version; None: it is not installed
    recorded: str | None = None  # the version that it was compared with
    known: bool = True  # whether that version is of the same release series
    removed: tuple[str, ...] = ()  # names that are gone, options as "NeuronConfig: name"
    added: tuple[str, ...] = ()  # options that it has beyond the recorded ones
    changed: tuple[tuple[str, str], ...] = ()  # functions with another signature, and the difference in words
    problem: str | None = None  # why it cannot be imported

    @property
    def none(self) -> bool:
        """Returns whether there is nothing to report: not installed, or as recorded."""
        return self.known and not (self.removed or self.added or self.changed or self.problem)

    def lines(self) -> list[str]:
        """Returns one log line for each difference."""
        lines = []
        if self.problem:
            lines.append(f"{self.package} {self.installed} cannot be imported: {self.problem}")
        if not self.known:
            lines.append(f"{self.package} {self.installed} was not recorded; compared with {self.recorded}")
        lines += [f"{name} is gone (recorded in {self.recorded})" for name in self.removed]
        lines += [f"{name} {how} (recorded in {self.recorded})" for name, how in self.changed]
        return [*lines, *(f"{name} is new (not in {self.recorded})" for name in self.added)]


@cache
def surface(engine: str) -> Mapping[str, Any]:
    """Returns the record: ``package``, its import name, and ``versions`` -> signatures, classes, options."""
    folder = Path(__file__).with_name(engine.replace("-", "_"))
    record: Mapping[str, Any] = json.loads((folder / "surface.json").read_text())
    return record


def drift(engine: str) -> Drift:
    """Compare the installed package, importing it if present. Raises OSError for an engine without a contract."""
    package = str(surface(engine)["package"])
    installed = installed_version(package)
    if installed is None:
        return Drift(engine, package, None)
    versions: Mapping[str, Any] = surface(engine)["versions"]
    series = {name: _series(record["package_version"]) for name, record in versions.items()}
    try:
        module = importlib.import_module(package)
        installed = str(getattr(module, "__version__", None) or installed_version(package))
        nearest = _nearest(_series(installed), set(series.values()))
        drifts = [
            _compare(engine, installed, name, versions[name]) for name, value in series.items() if value == nearest
        ]
    except Exception as error:  # noqa: BLE001 - report whatever its import raises
        return Drift(engine, package, installed, problem=f"{type(error).__name__}: {error}")
    best = min(drifts, key=lambda candidate: len(candidate.removed + candidate.added) + len(candidate.changed))
    return replace(best, known=nearest == _series(installed))


def log_drift(engine: str, log: logging.Logger) -> None:
    """Log how the installed package differs from the recorded API."""
    for line in drift(engine).lines():
        log.warning("%s: %s", engine, line)


def installed_version(package: str) -> str | None:
    """Returns a package's version by its import name; "unknown" without metadata, None where it is missing."""
    try:
        if importlib.util.find_spec(package) is None:
            return None
    except (ImportError, ValueError):  # a parent that fails, or a module without a spec
        return None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(re.sub("[_.]", "-", package))
    return "unknown"


_STARS: Mapping[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def parameters(signature: inspect.Signature) -> list[str]:
    """Returns one text for each parameter, without annotations: "self", "debug=False", "*", "**kwargs"."""
    texts: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in texts):
            texts.append("*")
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        texts.append(f"{stars}{parameter.name}{default}")
    return texts


def _compare(engine: str, installed: str, version: str, recorded: Mapping[str, Any]) -> Drift:
    removed, changed, added = [], [], []
    for name, expected in recorded["signatures"].items():
        if expected is None:
            continue
        function = _function(name)
        if function is None:
            removed.append(name)
            continue
        with contextlib.suppress(ValueError, TypeError):  # builtins and some wrappers have no signature
            installed_parameters = parameters(inspect.signature(function))
            if not _alike(expected, installed_parameters):
                changed.append((name, _difference(expected, installed_parameters)))
    removed += [name for name in recorded["classes"] if _attribute(name) is None]
    for name, options in recorded["options"].items():
        installed_options = _options(_attribute(name))
        short = name.rpartition(".")[2]
        if (
            len(installed_options & set(options)) > len(options) / 2
        ):  # else options are not read by name, and are unknown
            removed += [f"{short}: {option}" for option in options if option not in installed_options]
            added += [f"{short}: {option}" for option in sorted(installed_options - set(options))]
    return Drift(
        engine, str(surface(engine)["package"]), installed, version, True, tuple(removed), tuple(added), tuple(changed)
    )


def _difference(expected: Sequence[str], installed: Sequence[str]) -> str:
    """Describe how two different lists of parameters differ."""
    before, after = (dict(text.partition("=")[::2] for text in texts) for texts in (expected, installed))
    common = [name for name in before if name in after]
    differences = {
        "does not take": [name for name in before if name not in after and name != "*"],
        "also takes": [name for name in after if name not in before and name != "*"],
        "has another default for": [name for name in common if not _same(name, before, after)],
    }
    words = [f"{phrase} {_few(names)}" for phrase, names in differences.items() if names]
    return "; ".join(words) or "has another order or kind of parameters"


def _same(name: str, before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Returns whether a parameter of both has the same default, or none in both."""
    first, second = (f"{name}={defaults[name]}" if defaults[name] else name for defaults in (before, after))
    return _alike([first], [second])


def _few(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _alike(expected: Sequence[str], installed: Sequence[str]) -> bool:
    """Returns whether calls of one signature mean the same for the other. Only literal defaults are compared."""
    if [text.partition("=")[0] for text in expected] != [text.partition("=")[0] for text in installed]:
        return False
    for old, new in zip(expected, installed, strict=True):
        if ("=" in old) != ("=" in new):
            return False
        try:
            literal = ast.literal_eval(old.partition("=")[2]) if "=" in old else None
        except (ValueError, SyntaxError):
            continue  # "Layout.HSB": its value shows only in the source
        if "=" in old and repr(literal) != new.partition("=")[2]:
            return False
    return True


def _attribute(dotted: str) -> Any:
    """Returns the object at a dotted name, or None."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        except ImportError:
            return None
        for part in parts[cut:]:
            value = getattr(value, part, None)
        return value
    return None


def _function(dotted: str) -> Any:
    """Returns the function at a dotted name, with its ``self`` or ``cls``."""
    holder, _, name = dotted.rpartition(".")
    owner = _attribute(holder) if "." in holder else None
    function = inspect.getattr_static(owner, name, None) if inspect.isclass(owner) else _attribute(dotted)
    return getattr(function, "__func__", function)


def _options(configured: Any) -> set[str]:
    """Returns the names that a class reads from ``**kwargs``: pop, get, a subscript or ``in``. Read from its source,
    since the package only logs unknown options; empty where the source shows none."""
    names: set[str] = set()
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
                names.add(key.value)
    return names


def _is_kwargs(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "kwargs"


def _series(version: str) -> tuple[int, int]:
    """Major and minor: (0, 13) of "0.13.x" or "0.13.798+abc"."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _nearest(installed: tuple[int, int], recorded: set[tuple[int, int]]) -> tuple[int, int]:
    """Returns that series, else the newest older one, else the oldest."""
    return max((series for series in recorded if series <= installed), default=min(recorded))


def main(engine: str) -> None:
    """Print the drift as JSON on standard output; output of the package's import goes to standard error."""
    with contextlib.redirect_stdout(sys.stderr):
        record = asdict(drift(engine))
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
