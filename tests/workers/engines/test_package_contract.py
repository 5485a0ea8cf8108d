"""An installed package is compared with its recorded API."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from placements.engines.registry import ENGINES as REGISTRY
from tests.contracts import PACKAGES, contract, surfaces
from workers.engines import package_contract as workers_contract
from workers.engines.package_contract import Drift

CONTRACT = Path(workers_contract.__file__)
RUN = f"import runpy; runpy.run_path({str(CONTRACT)!r}, run_name='__main__')"
ENGINES = list(PACKAGES)
COMPILE = "neuronx_distributed_inference.models.application_base.NeuronApplicationBase.compile"


def test_the_engines_with_a_package_have_its_surface() -> None:
    """The module stands alone, so that any interpreter can run it: a package's name is in its record, too."""
    packages = {name: engine.package for name, engine in REGISTRY.items() if engine.package is not None}
    assert {engine: workers_contract.surface(engine)["package"] for engine in packages} == packages


def install(
    folder: Path, engine: str, version: str, package_version: str, edit: Callable[[str], str] = lambda text: text
) -> None:
    """A package in ``folder`` that has the adapter's surface as recorded, and nothing in it. ``edit``: each file."""
    recorded = contract(engine)
    modules: dict[str, dict[str, list[str]]] = {}
    for name in recorded.surface:
        if not recorded.has(name, version):
            continue
        module, holder, function = name.rpartition(".")[0], "", name.rpartition(".")[2]
        if recorded.role(name) == "class":
            holder, function = function, ""
        elif module.rpartition(".")[2][0].isupper():
            module, _, holder = module.rpartition(".")
        lines = modules.setdefault(module, {}).setdefault(holder, [])
        if function:
            lines.append("@classmethod\n" * (recorded.role(name) == "classmethod"))
            reads = [f"kwargs.pop({option!r}, None)" for option in recorded.options(f"{module}.{holder}", version)]
            body = "; ".join(reads if function == "__init__" and reads else ["pass"])
            lines.append(f"def {function}{recorded.signature(name, version)}: {body}\n")
    for module, holders in modules.items():
        text = "class Layout: HSB = SBH = BSH = 'x'\nclass torch: bfloat16 = 'x'\n"
        for holder, lines in holders.items():
            inner = "".join(lines) or "pass\n"
            indented = "".join(f"    {line}\n" for line in inner.splitlines())
            text += f"class {holder}:\n{indented}" if holder else inner
        path = folder / (module.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(edit(text))
    (folder / PACKAGES[engine].replace(".", "/") / "__init__.py").touch()
    distribution = PACKAGES[engine].replace(".", "_")
    metadata = folder / f"{distribution}-{package_version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {package_version}\n")


def seen(folder: Path, engine: str) -> Drift:
    """The drift as another interpreter reports it."""
    result = subprocess.run(
        [sys.executable, "-c", RUN, engine],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)},
    )
    return msgspec.json.decode(result.stdout, type=Drift)


def test_the_surfaces_are_those_of_the_contracts() -> None:
    """Each surface.json is what `python -m tests.contracts --distil` writes."""
    assert {path: path.read_text() for path, _ in surfaces()} == dict(surfaces())


@pytest.mark.parametrize(
    ("engine", "version"), [(engine, version) for engine in ENGINES for version in contract(engine).versions]
)
def test_a_recorded_version_has_no_drift(tmp_path: Path, engine: str, version: str) -> None:
    """The nearest recorded version is the version itself."""
    installed = contract(engine).package_version(version).replace("x", "12")
    install(tmp_path, engine, version, installed)

    drift = seen(tmp_path, engine)

    assert (drift.none, drift.lines(), drift.installed, drift.recorded) == (True, [], installed, version)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_package_is_no_drift(tmp_path: Path, engine: str) -> None:
    """A package that is not installed has nothing to compare."""
    assert seen(tmp_path, engine) == Drift(engine, PACKAGES[engine], None)


def test_a_removed_function_is_reported(tmp_path: Path) -> None:
    """With the version that had it."""
    install(tmp_path, "nxd-inference", "0.8", "0.8.1", lambda text: text.replace("def compile(", "def compile_model("))

    drift = seen(tmp_path, "nxd-inference")

    assert drift.removed == (COMPILE,)
    assert drift.lines() == [f"{COMPILE} is gone (recorded in 0.8)"]


@pytest.mark.parametrize(
    ("was", "now", "how"),
    [
        ("debug=False", "verbose=False", "does not take debug; also takes verbose"),
        ("debug=False", "debug=True", "has another default for debug"),
        ("debug=False", "*, debug=False", "has another order or kind of parameters"),
        ("compiled_model_path, debug=False", "compiled_model_path, where, debug=False", "also takes where"),
    ],
    ids=["name", "default", "kind", "more"],
)
def test_a_changed_signature_is_reported(tmp_path: Path, was: str, now: str, how: str) -> None:
    """In words: another name, default or kind of a parameter, or one more."""
    install(tmp_path, "nxd-inference", "0.8", "0.8.1", lambda text: text.replace(was, now))

    drift = seen(tmp_path, "nxd-inference")

    assert drift.lines() == [f"{COMPILE} {how} (recorded in 0.8)"]


def test_added_and_removed_options_are_reported(tmp_path: Path) -> None:
    """NxD Inference only logs what it does not know, so a renamed option would do nothing, silently."""
    install(
        tmp_path,
        "nxd-inference",
        "0.8",
        "0.8.1",
        lambda text: text.replace("kwargs.pop('seq_len', None)", "kwargs.pop('sequence_length', None)"),
    )

    drift = seen(tmp_path, "nxd-inference")

    assert (drift.removed, drift.added) == (("NeuronConfig: seq_len",), ("NeuronConfig: sequence_length",))


def test_a_release_that_was_not_recorded_is_compared_with_the_one_before(tmp_path: Path) -> None:
    """The difference in version is reported even where nothing else differs."""
    install(tmp_path, "nxd-inference", "0.9", "0.10.3")

    drift = seen(tmp_path, "nxd-inference")

    assert drift.lines() == ["neuronx_distributed_inference 0.10.3 was not recorded; compared with 0.9"]


@pytest.mark.parametrize(
    ("module", "code", "problem"),
    [
        (
            "__init__.py",
            "print('hello')\nimport libneuron_missing\n",
            "ModuleNotFoundError: No module named 'libneuron_missing'",
        ),
        ("models/config.py", "raise OSError('libnrt.so.1: not found')\n", "OSError: libnrt.so.1: not found"),
    ],
)
def test_a_module_that_cannot_be_imported_is_reported_with_its_error(
    module: str, code: str, problem: str, tmp_path: Path
) -> None:
    """A broken installation, or a library that does not load, is a reported problem, not an exception."""
    install(tmp_path, "nxd-inference", "0.8", "0.8.0")
    (tmp_path / "neuronx_distributed_inference" / module).write_text(code)
    assert seen(tmp_path, "nxd-inference").problem == problem
