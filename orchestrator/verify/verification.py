"""Runs the parts of `corewright verify` on the free cores of a machine, and predicts their time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.control.resolve.spec_file import SpecFile, examine, start_problems, this_machine
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.speed_record import SpeedRecord, record_of
from orchestrator.verify import answers, parts
from orchestrator.verify.claims import CLAIMS, Part, Verdict, not_run
from orchestrator.verify.stand import Stand, busy_cores
from orchestrator.verify.trials import Extent, TinyTrial, is_here, settings_of, trials_for
from placements.engines.registry import Engine, capabilities, resolve
from placements.facts.plural import counted
from placements.facts.topology import Host
from placements.resources.estimate import HOST_LOAD_S, LOAD_S
from placements.spec.problems import Problem
from workers.host import file_lock
from workers.host.facts.machine import HostFacts
from workers.host.host_facts import devices

WORKSPACE = "corewright-verify-"  # begins the names of the temporary folders
COMPILE_S = 60.0
"""For one tiny model on Neuron, a guess: a Mistral-7B took 3.4 minutes on SDK 2.24 (helixml/helix#2728)."""
STARTS: Mapping[Part, int] = {"engines": 4, "compiler": 4, "memory": 1, "faults": 1, "pinning": 2, "runtime": 8}
"""Processes that a part starts beside those of families and degrees."""


@dataclass(frozen=True)
class VerifiedMachine:
    """The machine to verify, with its engine and the user's spec."""

    host: Host
    engine: Engine
    free: tuple[int, ...]  # cores that no process holds
    busy: Mapping[int, str]  # the other cores, with the process that holds them
    facts: HostFacts
    problems: tuple[Problem, ...]  # of `doctor`
    file: SpecFile | None  # the user's spec
    versions: Mapping[str, str]  # of packages, driver and runtime


def host_of(file: SpecFile | None) -> Host:
    """Returns the first host of the user's spec that is here; without a spec this machine, or an emulated
    inf2.48xlarge. Raises Failed for a spec with errors, or for other machines."""
    if file is None:
        hosts, _ = settings_of(None, bool(devices()))
        text = json.dumps({"version": 1, "hosts": hosts, "models": {"m": {"engine": "echo"}}})
        file = examine(text, "verify", ".", this_machine())
    error = next((problem for problem in file.problems if problem.severity == "error"), None)
    if error is not None or not file.hosts:
        raise (
            Failed.of(error) if error else Failed("verify-refused", f"{file.name} has no hosts", "name one in `hosts`")
        )
    host = next((host for host in file.hosts if is_here(host, file.machine)), None)
    if host is None:
        raise Failed.of(next(problem for problem in start_problems(file) if problem.id == "host-differs"))
    return host


def engine_of(file: SpecFile | None, host: Host, name: str | None) -> Engine:
    """Returns the engine to verify: the named one, else that of the spec's first model that generates, else the first
    candidate of `auto` there. Raises Failed for one that loads no checkpoints of transformers."""
    named = [model.engine for model in (file.spec.models if file and file.spec else ()) if model.kind == "generate"]
    engine = resolve(name or next(iter(named), "auto"), host, "generate")
    if engine == "auto":
        engine = "nxd-inference"
    ability = capabilities(engine)
    if "hf" not in ability.loads or ability.forwards or "generate" not in ability.kinds:
        raise Failed("verify-refused", f"the engine {engine} loads no checkpoints to compare", "name one with --engine")
    return engine


def machine_of(
    file: SpecFile | None,
    engine: str | None,
    home: Home,
    facts: HostFacts,
    problems: Sequence[Problem],
    versions: Mapping[str, str],
) -> VerifiedMachine:
    """Returns the machine with its free cores. Raises Failed."""
    host = host_of(file)
    busy = busy_cores(host, home, facts)
    free = tuple(core for core in range(host.cores) if core not in busy and core not in host.reserved_cores)
    return VerifiedMachine(host, engine_of(file, host, engine), free, busy, facts, tuple(problems), file, versions)


def trials_of(machine: VerifiedMachine, extent: Extent, chosen: Collection[Part]) -> list[TinyTrial]:
    """Returns the tiny models that the chosen parts load."""
    if set(chosen) == {"facts"}:
        return []
    made = trials_for(machine.engine, machine.host, machine.free, extent)
    own: dict[Part, str] = {"engines": "family-", "runtime": "degree-", "faults": "too-large"}
    others = tuple(name for part, name in own.items() if part not in chosen)
    return [trial for trial in made if not trial.name.startswith(others)]


def predicted_s(machine: VerifiedMachine, trials: Sequence[TinyTrial], chosen: Collection[Part]) -> float:
    """Returns the expected duration of the parts, in seconds."""
    loaded = sum(trial.name.startswith(("family-", "degree-")) for trial in trials)
    starts = loaded + sum(STARTS.get(part, 0) for part in chosen)
    on_neuron = capabilities(machine.engine).runs_on == "neuron" and not machine.host.emulated
    models = 0 if machine.file is None or machine.file.spec is None else len(machine.file.spec.models)
    own = models * LOAD_S if "speeds" in chosen else 0.0
    return own + (starts * LOAD_S + len(trials) * COMPILE_S if on_neuron else starts * HOST_LOAD_S)


def verify(
    machine: VerifiedMachine,
    extent: Extent,
    chosen: Collection[Part],
    home: Home,
    records: bool,
    say: Callable[[str], None],
) -> Iterator[Verdict]:
    """Yields the verdicts of the chosen parts, in their order. With ``records``, the values that plans read are written
    to the home's file of measurements, which no fleet may be writing. Raises Failed."""
    record = record_of(home)
    for verdict in _verdicts(machine, extent, chosen, home, record, say):
        yield verdict
        if records and record.changed:
            record.write(record.content(time.time()))


def _verdicts(
    machine: VerifiedMachine,
    extent: Extent,
    chosen: Collection[Part],
    home: Home,
    record: SpeedRecord,
    say: Callable[[str], None],
) -> Iterator[Verdict]:
    trials = trials_of(machine, extent, chosen)
    hosts, engines = settings_of(None if machine.file is None else machine.file.text, bool(devices()), machine.host)
    with workspace() as folder:
        if "facts" in chosen:
            yield from _measured("facts", parts.facts(machine.problems, machine.facts, machine.host, home.path, record))
        if not trials:
            missing = [claim for claim in CLAIMS.values() if claim.part in chosen and claim.part != "facts"]
            held = ", ".join(f"{core} by {owner}" for core, owner in machine.busy.items())
            yield from (not_run(claim.id, f"no free cores: {held}") for claim in missing)
            return
        say(f"making {counted(len({trial.folder for trial in trials}), 'tiny model')}")
        stand = Stand(home, folder, machine.engine, trials, hosts, engines)
        steps: dict[Part, Callable[[], Iterator[Verdict]]] = {
            "runtime": lambda: parts.runtime(stand, extent),
            "engines": lambda: answers.engines(stand, extent),
            "compiler": lambda: parts.compiler(stand),
            "memory": lambda: parts.memory(stand, record),
            "pinning": lambda: parts.pinning(stand, extent),
            "faults": lambda: parts.faults(stand),
            "speeds": lambda: _speeds(machine, stand, record),
        }
        for part, step in steps.items():
            if part in chosen:
                say(f"verifying {part}")
                yield from _measured(part, step())


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """Yields a temporary folder that this process has locked. Removes those of processes that were killed, whose locks
    the kernel has released. An empty folder stays: it may be about to be locked."""
    for left in Path(tempfile.gettempdir()).glob(f"{WORKSPACE}*"):
        with contextlib.suppress(OSError), _opened(left) as descriptor:
            own = os.fstat(descriptor).st_uid == os.getuid()
            if own and file_lock.try_lock(descriptor) and any(left.iterdir()):
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=WORKSPACE) as name, _opened(Path(name)) as descriptor:
        file_lock.lock(descriptor)
        yield Path(name)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _measured(part: Part, verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
    """Yields the verdicts of a part. If an error prevents a measurement, the verdict is "not run"."""
    claims = {claim.id for claim in CLAIMS.values() if claim.part == part}
    try:
        for verdict in verdicts:
            claims.discard(verdict.claim)
            yield verdict
    except (Failed, OSError) as error:
        yield from (not_run(claim, str(error)) for claim in CLAIMS if claim in claims)


def _speeds(machine: VerifiedMachine, stand: Stand, record: SpeedRecord) -> Iterator[Verdict]:
    if machine.file is None:
        yield not_run("speeds", "there is no spec: corewright verify SPEC")
        return
    yield from parts.speeds(stand, machine.file, record, time.time())
