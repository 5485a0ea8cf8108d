"""`corewright doctor`: reads this machine, and prints what orchestrator/cli/diagnosis.py makes of it."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import orchestrator
from orchestrator.cli.client import find_fleet
from orchestrator.cli.diagnosis import (
    FleetSeen,
    InterpreterSeen,
    Readings,
    ReplicaSeen,
    Report,
    interpreter_problems,
    report,
)
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import columns
from orchestrator.process.version import corewright_version
from orchestrator.revisions.spec_file import SpecFile, start_problems
from placements.facts.core_range import runs
from placements.facts.engines import AUTO_ENGINES, NAMED_ENGINES, resolve
from placements.spec.problems import Problem
from workers.engines import package_contract
from workers.engines.package_contract import Drift
from workers.host.facts.reading import Places, read_host_facts
from workers.host.facts.tools import run_tool
from workers.host.interpreter import NEEDS, Interpreter, probe

IMPORT_S = 120.0  # torch-neuronx, cold, from a network disk
# Without the current folder on the path: what lies there is not what is installed.
_DRIFT = "import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_path({path!r}, run_name='__main__')"


def examination(file: SpecFile | None) -> Report:
    """Read all, judge it. Takes seconds: tools and interpreters are run, each with a deadline."""
    places = Places.of_this_host()
    problems: list[Problem] = []
    if file is not None:
        problems += (*file.problems, *start_problems(file))
    fleet = None
    try:
        fleet = _fleet()
    except Failed as failed:
        problems.append(failed.problem)
    return report(
        Readings(
            corewright=corewright_version(),
            python=platform.python_version(),
            ray=importlib.metadata.version("ray"),
            package_folder=str(Path(orchestrator.__file__).parent.parent),
            dev=_devices(places.dev),
            facts=read_host_facts(places),
            interpreters=tuple(_interpreters(file)),
            fleet=fleet,
            spec=None if file is None else file.name,
            emulates=file is not None and any(host.emulated for host in file.hosts),
            problems=tuple(problems),
        )
    )


def _devices(dev: Path) -> tuple[int, ...]:
    found = (re.fullmatch(r"neuron(\d+)", path.name) for path in dev.glob("neuron*"))
    return tuple(sorted(int(match[1]) for match in found if match))


def _fleet() -> FleetSeen | None:
    """Raises Failed for one that does not answer."""
    client = find_fleet()
    if client is None:
        return None
    told: dict[str, Any] = client.get("status")
    return FleetSeen(
        name=told["name"],
        url=client.url if client.record is None else client.record.url,
        emulated=any(host["emulated"] for host in told["hosts"]),
        replicas=tuple(
            ReplicaSeen(one["id"], one["pid"], one["cores"], one["state"], one.get("engine"))
            for model in told["models"]
            for one in model["replicas"]
        ),
    )


def engine_problems(file: SpecFile) -> list[Problem]:
    """What keeps the engines of a spec without errors from running in their interpreters here. Runs each of these."""
    seen = [
        InterpreterSeen(probe(python or sys.executable), engines, where)
        for python, engines, where in _needed(file)
        if engines
    ]
    return interpreter_problems(
        seen, platform.python_version(), importlib.metadata.version("ray"), corewright_version()
    )


def _interpreters(file: SpecFile | None) -> list[InterpreterSeen]:
    """This command's own, which the fleet runs in, and those that the spec names; each with its engines' drift."""
    return [_seen(probe(python or sys.executable), engines, where) for python, engines, where in _needed(file)]


def _needed(file: SpecFile | None) -> list[tuple[str | None, tuple[str, ...], str]]:
    """Each interpreter, None for this command's own, which is first; the engines that the spec needs it for; and its
    place in the spec."""
    asked: dict[str | None, list[str]] = {None: []}
    where: dict[str | None, str] = {}
    if file is not None and file.spec is not None and file.hosts:
        spec = file.spec
        for engine in NAMED_ENGINES:
            python = spec.python_for(engine)
            if python is not None:
                asked.setdefault(_place(python), [])
                where.setdefault(_place(python), spec.where("engines", engine, "python"))
        models = {resolve(model.engine, file.hosts[0]): model.name for model in reversed(spec.models)}
        for engine in sorted(models):
            if engine == "auto" or engine in NEEDS:
                candidates = AUTO_ENGINES if engine == "auto" else (engine,)
                named = {_place(python) for one in candidates if (python := spec.python_for(one)) is not None}
                for place in named or {_place(None)}:
                    asked[place].append(engine)
                    where.setdefault(place, spec.where("models", models[engine], "engine"))
    return [(python, tuple(engines), where.get(python, "")) for python, engines in asked.items()]


def _place(python: str | None) -> str | None:
    """None for this command's own. Not by what a link leads to: all venvs of one Python lead to the same file."""
    return None if python == sys.executable else python


def _seen(found: Interpreter, needed_for: tuple[str, ...], where: str) -> InterpreterSeen:
    drifts = tuple(_drift(found.python, engine, version) for engine, version in found.engines.items())
    return InterpreterSeen(found, needed_for, where, drifts)


def _drift(python: str, engine: str, installed: str) -> Drift:
    """In that interpreter, which imports the package."""
    code = _DRIFT.format(path=str(Path(package_contract.__file__)))
    output = run_tool([python, "-c", code, engine], IMPORT_S)
    try:
        return Drift.of(json.loads(output.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        return Drift(engine, package_contract.PACKAGES[engine], installed, problem=output.problem or "it told nothing")


def text(found: Report) -> str:
    """For a person."""
    seen, facts = found.readings, found.readings.facts
    versions = facts.versions
    machine = "no Neuron devices"
    if seen.dev or facts.devices:
        sizes = f"{len(seen.dev)} devices, {len(facts.cores)} cores"
        machine = f"{facts.instance_type or 'of an unknown type'}: {sizes}"
    lines = [
        f"corewright   {seen.corewright}",
        f"Python       {seen.python}",
        f"Ray          {seen.ray}",
        *(f"{name:<13}{folder or '-'}" for name, folder in seen.interpreters[0].found.folders.items()),
        f"machine      {machine}",
        f"driver       {versions.driver or '-'}   runtime {versions.runtime or '-'}   tools {versions.tools or '-'}",
        f"fleet        {'none runs' if seen.fleet is None else f'{seen.fleet.name} at {seen.fleet.url}'}",
        "",
        columns(("INTERPRETER", "PYTHON", "RAY", "ENGINES"), [_row(one) for one in seen.interpreters]),
    ]
    if found.held:
        ours = {replica.pid: replica.id for replica in (seen.fleet.replicas if seen.fleet else ())}
        rows = [(cores, owner.pid, ours.get(owner.pid), owner.command) for cores, owner in runs(found.held)]
        lines += ["", columns(("CORES", "PID", "REPLICA", "COMMAND"), rows)]
    count = len(found.problems)
    return "\n".join([*lines, "", "nothing is wrong" if not count else f"{count} finding{'s' if count > 1 else ''}"])


def _row(one: InterpreterSeen) -> tuple[object, ...]:
    engines = ", ".join(f"{drift.engine} {drift.installed}" for drift in one.drifts)
    return one.found.python, one.found.version or None, one.found.ray, engines or None
