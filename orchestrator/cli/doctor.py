"""The command `doctor`: reads this machine and prints the report of orchestrator/cli/diagnosis.py, or the steps of
orchestrator/cli/bootstrap.py."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

import orchestrator
from orchestrator.cli.app import FAILED, FormatOption, app, argument, option, switch
from orchestrator.cli.bootstrap import COLUMNS, Bootstrap, MachineSituation, ModelReading
from orchestrator.cli.bootstrap import bootstrap as plan_bootstrap
from orchestrator.cli.client import find_fleet
from orchestrator.cli.diagnosis import FleetReading, InterpreterReading, Readings, Report, interpreter_problems, report
from orchestrator.cli.output import Format, show
from orchestrator.control.resolve.engine_resolution import fleet_versions
from orchestrator.control.resolve.spec_file import SpecFile, load, start_problems
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import columns
from orchestrator.process.version import corewright_version
from placements.engines.evidence import ModelVariant
from placements.engines.registry import ENGINES, NAMES, candidates_of, capabilities, resolve
from placements.engines.vllm.capabilities import VllmNeuron
from placements.facts.core_range import runs
from placements.facts.known_failures import KNOWN_FAILURE
from placements.facts.neuron_releases import sdk_of
from placements.facts.plural import counted
from placements.rules.checks import check
from placements.spec.problems import Problem
from workers.compiled.neuron_cache import COMPILER
from workers.engines import package_contract
from workers.engines.package_contract import Drift
from workers.host.facts.reading import Places, read_host_facts
from workers.host.facts.tools import run_tool
from workers.host.host_facts import devices, host_root, instance_type
from workers.host.interpreter import Interpreter, probe

IMPORT_S = 120.0  # torch-neuronx, cold, from a network disk
EMULATED = (
    "Without Neuron devices, `hosts: {emulate: inf2.48xlarge}` in a spec emulates the cores of a machine;\n"
    "`corewright doctor --bootstrap` shows the steps to a machine with devices."
)
# Removes the current folder from the path, because it may shadow installed packages.
_DRIFT = "import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_path({path!r}, run_name='__main__')"


def examination(file: SpecFile | None) -> Report:
    """Returns the report on this machine. Takes seconds: runs tools and interpreters, each with a deadline."""
    places = Places.of_this_host()
    problems: list[Problem] = []
    interpreters = tuple(_interpreters(file))
    if file is not None:
        problems += (*_file_problems(file, interpreters), *start_problems(file))
    fleet = None
    try:
        fleet = _fleet()
    except Failed as failed:
        problems.append(failed.problem)
    return report(
        Readings(
            versions=fleet_versions(),
            package_folder=str(Path(orchestrator.__file__).parent.parent),
            dev=devices(places.dev),
            facts=read_host_facts(places),
            interpreters=interpreters,
            environments=image_environments(),
            fleet=fleet,
            spec=None if file is None else file.name,
            emulates=file is not None and any(host.emulated for host in file.hosts),
            problems=tuple(problems),
        )
    )


def _file_problems(file: SpecFile, interpreters: Sequence[InterpreterReading]) -> Iterator[Problem]:
    """Yields the problems of the file, with the known failures of the interpreters instead of the planned releases."""
    yield from (problem for problem in file.problems if problem.id != KNOWN_FAILURE)
    installed = {
        engine: reading.interpreter.packages
        for reading in interpreters
        if COMPILER in reading.interpreter.packages
        for name in reading.needed_for
        for engine in candidates_of(name)
    }
    judged = (
        () if file.spec is None else check(file.spec, file.hosts, file.checkpoints, installed=installed, room=False)
    )
    yield from (problem for problem in judged if problem.id == KNOWN_FAILURE)


def image_environments() -> tuple[Interpreter, ...]:
    """Returns the environments of AWS's image, if this machine has one. Runs each interpreter."""
    folders = sorted((host_root() / "opt").glob("aws_neuronx_venv_*"))
    return tuple(probe(str(folder / "bin" / "python")) for folder in folders if (folder / "bin" / "python").exists())


def first_steps(file: SpecFile | None, sdk: str | None) -> Bootstrap:
    """Returns the steps to a fleet on such a machine, or on one for the spec, with a release of the Neuron SDK."""
    spec = None if file is None else file.spec
    models = (
        []
        if file is None or spec is None
        else [
            ModelReading(
                model.name,
                model.engine,
                model.kind,
                None if (checkpoint := file.checkpoints.get(model.name)) is None else ModelVariant.of(checkpoint),
                spec.where("models", model.name),
                model.tp_degree,
            )
            for model in spec.models
        ]
    )
    topologies = [host.topology.instance for host in (() if file is None else file.hosts) if host.topology]
    steps = plan_bootstrap(
        MachineSituation(
            corewright=corewright_version(),
            here=instance_type(),
            installed={
                f"/opt/{Path(item.python).parents[1].name}": series
                for item in image_environments()
                if (series := sdk_of(item.packages)) is not None
            },
            sdk=sdk,
            spec=None if file is None else file.name,
            instance=topologies[0] if topologies else None,
            models=tuple(models),
        )
    )
    problems = () if file is None else tuple(problem for problem in file.problems if problem.severity == "error")
    return dataclasses.replace(steps, problems=(*problems, *steps.problems))


def _fleet() -> FleetReading | None:
    """Returns the running fleet, or None. Raises Failed if it does not answer."""
    client = find_fleet()
    if client is None:
        return None
    status = client.status()
    return FleetReading(
        name=status.name,
        url=client.url if client.record is None else client.record.url,
        emulated=any(host.emulated for host in status.hosts),
        replicas=tuple(status.replicas),
    )


def engine_problems(file: SpecFile) -> list[Problem]:
    """Returns why engines of a spec without errors cannot run in their interpreters here. Runs each interpreter."""
    readings = [
        InterpreterReading(probe(python or sys.executable), engines, where, _release(file))
        for python, engines, where in _needed(file)
        if engines
    ]
    return interpreter_problems(readings, fleet_versions())


def _interpreters(file: SpecFile | None) -> list[InterpreterReading]:
    """Returns this command's interpreter, which the fleet runs in, and those of the spec, with their engines' drift."""
    return [
        _reading(probe(python or sys.executable), engines, where, _release(file))
        for python, engines, where in _needed(file)
    ]


def _release(file: SpecFile | None) -> VllmNeuron | None:
    """Returns the release of vLLM's plugin that the spec's first host has."""
    return None if file is None or file.spec is None or not file.hosts else file.spec.vllm_release_on(file.hosts[0])


def _needed(file: SpecFile | None) -> list[tuple[str | None, tuple[str, ...], str]]:
    """Returns each interpreter (None: this command's own, which is first), the engines that the spec runs in it, and
    its place in the spec."""
    engines_of: dict[str | None, list[str]] = {None: []}
    where: dict[str | None, str] = {}
    if file is not None and file.spec is not None and file.hosts:
        spec = file.spec
        for engine in NAMES:
            python = spec.python_for(engine)
            if python is not None:
                engines_of.setdefault(_place(python), [])
                if ENGINES[engine].launches:  # the interpreter of a server needs no Ray, whether a model uses it or not
                    engines_of[_place(python)].append(engine)
                where.setdefault(_place(python), spec.where("engines", engine, "python"))
        models = {resolve(model.engine, file.hosts[0], model.kind): model.name for model in reversed(spec.models)}
        for engine in sorted(models):
            launches = capabilities(engine).launches and spec.python_for(engine) is None
            if engine == "auto" or capabilities(engine).requires or launches:
                pythons = (spec.python_for(candidate) for candidate in candidates_of(engine))
                for place in {_place(python) for python in pythons if python is not None} or {_place(None)}:
                    engines_of[place].append(engine)
                    where.setdefault(place, spec.where("models", models[engine], "engine"))
    return [(python, tuple(engines), where.get(python, "")) for python, engines in engines_of.items()]


def _place(python: str | None) -> str | None:
    """Returns None for this command's own. Links are not resolved: all venvs of one Python link to the same file."""
    return None if python == sys.executable else python


def _reading(
    interpreter: Interpreter, needed_for: tuple[str, ...], where: str, release: VllmNeuron | None
) -> InterpreterReading:
    drifts = tuple(_drift(interpreter.python, engine, version) for engine, version in interpreter.engines.items())
    return InterpreterReading(interpreter, needed_for, where, release, drifts)


def _drift(python: str, engine: str, installed: str) -> Drift:
    """Returns the drift of an engine's package, which is imported in that interpreter."""
    code = _DRIFT.format(path=str(Path(package_contract.__file__)))
    output = run_tool([python, "-c", code, engine], IMPORT_S)
    try:
        return msgspec.json.decode(output.stdout.splitlines()[-1], type=Drift)
    except (ValueError, IndexError):
        return Drift(engine, ENGINES[engine].package or "", installed, problem=output.problem or "it printed nothing")


def text(report: Report) -> str:
    """Returns the report as text."""
    readings, facts = report.readings, report.readings.facts
    versions = facts.versions
    machine = "no Neuron devices"
    if readings.dev or facts.devices:
        sizes = f"{len(readings.dev)} devices, {len(facts.cores)} cores"
        machine = f"{facts.instance_type or 'unknown instance type'}: {sizes}"
    lines = [
        f"corewright   {readings.versions.corewright}",
        f"Python       {readings.versions.python}",
        f"Ray          {readings.versions.ray}",
        *(f"{name:<13}{folder or '-'}" for name, folder in readings.interpreters[0].interpreter.folders.items()),
        f"machine      {machine}",
        f"driver       {versions.driver or '-'}   runtime {versions.runtime or '-'}   tools {versions.tools or '-'}",
        f"Neuron SDK   {', '.join(report.sdks) or '-'}",
        f"fleet        {'not running' if readings.fleet is None else f'{readings.fleet.name} at {readings.fleet.url}'}",
        "",
        columns(("INTERPRETER", "PYTHON", "RAY", "ENGINES"), [_row(reading) for reading in readings.interpreters]),
    ]
    if readings.environments:
        environments = [(item.python, item.version or None, sdk_of(item.packages)) for item in readings.environments]
        lines += ["", columns(("ENVIRONMENT", "PYTHON", "SDK"), environments)]
    if report.engines:
        lines += ["", columns(COLUMNS, [entry.row for entry in report.engines])]
    if report.held:
        replica_of = {replica.pid: replica.id for replica in (readings.fleet.replicas if readings.fleet else ())}
        rows = [(cores, owner.pid, replica_of.get(owner.pid), owner.command) for cores, owner in runs(report.held)]
        lines += ["", columns(("CORES", "PID", "REPLICA", "COMMAND"), rows)]
    if not readings.dev:
        lines += ["", EMULATED]
    count = len(report.problems)
    return "\n".join([*lines, "", counted(count, "problem") if count else "no problems"])


def _row(reading: InterpreterReading) -> tuple[object, ...]:
    vllm = [f"{name} {version}" for name, version in reading.interpreter.packages.items() if name.startswith("vllm")]
    engines = ", ".join([*map(" ".join, reading.interpreter.engines.items()), *vllm])
    return reading.interpreter.python, reading.interpreter.version or None, reading.interpreter.ray, engines or None


@app.command()
def doctor(
    spec: Annotated[str | None, argument("SPEC", "Spec whose hosts, engines and interpreters to check too.")] = None,
    bootstrap: Annotated[
        bool, switch("--bootstrap", "Print the steps from an AWS image to a running fleet, without checks.")
    ] = False,
    sdk: Annotated[
        str | None,
        option(
            "VERSION",
            "Release of the Neuron SDK for --bootstrap, such as 2.28.",
            default="the one with the best reports of the models",
        ),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Check this machine: versions, Neuron devices and engines."""
    if sdk is not None and not bootstrap:
        raise typer.BadParameter("--sdk needs --bootstrap")
    if bootstrap:
        steps = first_steps(None if spec is None else load(spec, folders="ignore"), sdk)
        show(steps.as_dict(), output, steps.text, steps.problems)
        raise typer.Exit(FAILED if steps.problems else 0)
    result = examination(None if spec is None else load(spec))
    show(result.as_dict(), output, text(result), result.problems)
    raise typer.Exit(FAILED if result.problems else 0)
