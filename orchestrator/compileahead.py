"""Compiling all models of a spec before anything starts: what is compiled in which order, and how it went.

Every set of artifacts is compiled in a process of its own, in the interpreter of its engine (`workers.build`).
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import msgspec

from orchestrator.buildorder import Job, startable
from orchestrator.generation import read_generation
from orchestrator.home import Home
from orchestrator.journal import Revision
from orchestrator.replica_config import replica_config
from orchestrator.specfile import SpecFile
from orchestrator.starting import prepared
from placements.cores import CoreRange
from placements.engines import Engine, needs_neuron
from placements.memory import PROCESS_GIB, host_memory
from placements.placement import Placement
from placements.plan import plan
from placements.spec import ModelSpec
from placements.threads import threads
from workers import ahead, neuron_target
from workers import host as this_host
from workers.artifacts.bringing import Bringing, wanted_by, with_folders
from workers.artifacts.keeping import StoreSettings
from workers.artifacts.listing import SourceError, Stopped
from workers.artifacts.progress import Progress
from workers.build import Built, Predicted, Trouble, Working
from workers.config import ReplicaConfig
from workers.interpreter import Interpreter, Interpreters
from workers.status import Failure

NEEDS_DEVICE = "compile-needs-device"
PREDICT_S = 600.0  # to import an engine's package, from a network disk

Result = Literal["compiled", "pulled", "there", "nothing", "needs-device", "failed"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one model, or of several that share what is compiled."""

    models: tuple[str, ...]
    engine: str
    result: Result
    keys: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    seconds: float = 0.0
    pushed: tuple[str, ...] = ()  # keys that went to the model's neff_cache
    failure: Failure | None = None

    def as_dict(self) -> dict[str, object]:
        told = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        failure = self.failure
        told["failure"] = None if failure is None else {"id": failure.id, "what": failure.what, "hint": failure.hint}
        return told


@dataclass(frozen=True)
class Step:
    """How far one of them is, for whoever looks on."""

    models: tuple[str, ...]
    phase: str  # predicting, fetching, queued, waiting, looking, compiling, sending, done, failed
    done: int = 0  # graphs, or bytes while it is fetched
    total: int = 0  # 0: nobody knows


Watch = Callable[[Step], None]


@dataclass(frozen=True)
class Prepared:
    """What is known of a spec's models before anything is compiled."""

    jobs: tuple[Job, ...]
    outcomes: tuple[Outcome, ...] = ()  # of models that compile nothing, or cannot be


class CompileAhead:
    """Of one spec, on this machine. Blocks; its threads wait for processes."""

    def __init__(
        self,
        file: SpecFile,
        home: Home,
        store: StoreSettings,
        watch: Watch,
        *,
        names: Collection[str] = (),
        push: bool = False,
    ) -> None:
        """``names``: of the models; none: all. ``push``: bring what is complete to each model's ``neff_cache``."""
        assert file.spec is not None
        self._file, self._home, self._store, self._watch, self._push = file, home, store, watch, push
        self._spec = file.spec
        self._models = [model for model in file.spec.models if not names or model.name in names]
        self._generation = read_generation(_revision(file), file.machine)
        self._stop = threading.Event()

    def prepare(self) -> Prepared:
        """Fetch what the models are, and ask what each would compile. One after another: an engine's package takes
        seconds to import, and a fetch uses all of the network."""
        jobs: dict[object, Job] = {}
        outcomes = []
        for model in self._models:
            self._watch(Step((model.name,), "predicting"))
            found = self._job(model)
            if isinstance(found, Outcome):
                outcomes.append(found)
                self._watch(Step(found.models, "failed" if found.result == "failed" else "done"))
                continue
            key: object = found.keys or ahead.build_key(found.config)
            same = jobs.get((key, found.config.neff_cache))
            jobs[key, found.config.neff_cache] = (
                found if same is None else replace(same, models=(*same.models, model.name))
            )
        return Prepared(tuple(jobs.values()), tuple(outcomes))

    def run(self, jobs: Sequence[Job], *, memory_gib: float, most: int) -> Generator[Outcome, None, None]:
        """Compile, as many at once as fit; each outcome as it comes. Closed early, it ends the compilers."""
        waiting, running = list(jobs), list[Job]()
        ended: queue.SimpleQueue[tuple[Job, Outcome]] = queue.SimpleQueue()
        try:
            while waiting or running:
                for job in startable(waiting, running, memory_gib=memory_gib, jobs=most):
                    waiting.remove(job)
                    running.append(job)
                    threading.Thread(target=self._work, args=(job, ended), name="compile", daemon=True).start()
                for job in waiting:
                    self._watch(Step(job.models, "queued"))
                job, outcome = ended.get()
                running.remove(job)
                yield outcome
        finally:
            self._stop.set()
            while running:
                running.remove(ended.get()[0])

    def _job(self, model: ModelSpec) -> Job | Outcome:
        engine: Engine = self._generation.engines[model.name]
        config = replica_config(self._generation, self._placement(model, engine), self._home)
        config = msgspec.structs.replace(config, log=str(self._home.logs / f"compile-{model.name}.log"))
        chosen = asyncio.run(prepared(config, self._generation, _ThisMachine()))
        if isinstance(chosen, Failure):
            return Outcome(models=(model.name,), engine=config.engine, result="failed", failure=chosen)
        config = _for_the_target(chosen, self._file)
        if not ahead.compiles(config):
            return Outcome(models=(model.name,), engine=config.engine, result="nothing")
        fetched = self._fetched(config)
        if isinstance(fetched, Failure):
            return Outcome(models=(model.name,), engine=config.engine, result="failed", failure=fetched)
        told = self._predicted(fetched)
        if isinstance(told, Failure):
            return Outcome(models=(model.name,), engine=config.engine, result="failed", failure=told)
        if not all(one.ahead for one in told.wanted):
            return Outcome(models=(model.name,), engine=config.engine, result="needs-device")
        return Job(
            models=(model.name,),
            config=fetched,
            keys=tuple(one.key for one in told.wanted if one.key),
            need_gib=self._need_gib(model, config.engine),
            complete=all(one.complete for one in told.wanted),
        )

    def _placement(self, model: ModelSpec, engine: Engine) -> Placement:
        """Where the plan has its first replica, else a place on the first host: to be compiled it needs none."""
        found = plan(self._spec, self._file.hosts, self._file.checkpoints)
        for placement in found.placements:
            if placement.model == model.name:
                return placement
        host = self._file.hosts[0]
        cores = CoreRange(0, model.tp_degree - 1) if needs_neuron(engine) or host.emulated else None
        count = threads(model.threads, model.tp_degree, host)
        return Placement(model.name, 0, host.name, cores, count, machine=host, spec=model)

    def _fetched(self, config: ReplicaConfig) -> ReplicaConfig | Failure:
        wanted = wanted_by(config)
        if wanted == (None, None):
            return config
        bringing = Bringing(self._store.open())
        landed = []
        try:
            for one in wanted:
                progress = _Fetching(one.source if one else "", (config.model,), self._watch)
                landed.append(None if one is None else bringing(one, progress, self._stop))
        except SourceError as error:
            return Failure(error.id, error.what, error.hint)
        return with_folders(config, wanted, (landed[0], landed[1]))

    def _predicted(self, config: ReplicaConfig) -> Predicted | Failure:
        for told in ahead.answers("predict", config, self._stop, PREDICT_S):
            if isinstance(told, Predicted):
                return told
            if isinstance(told, Trouble):
                return told.failure
        return _died("predicted what is compiled of", config)

    def _need_gib(self, model: ModelSpec, engine: str) -> float:
        """The estimate of the plan: reading the checkpoint, and one compiler."""
        checkpoint = self._file.checkpoints.get(model.name)
        if checkpoint is None:
            return PROCESS_GIB
        need = host_memory(model, checkpoint, cast(Engine, engine), self._file.drafts.get(model.name))
        return need.load + need.compile

    def _work(self, job: Job, ended: queue.SimpleQueue[tuple[Job, Outcome]]) -> None:
        """Whatever becomes of it, whoever waits is told."""
        outcome = _failed(job, _died("compiled", job.config))
        try:
            outcome = self._build(job)
        finally:
            ended.put((job, outcome))

    def _build(self, job: Job) -> Outcome:
        config = job.config
        failure = _died("compiled", config)
        built: Built | None = None
        try:
            for told in ahead.answers("compile", config, self._stop, push=self._push):
                if isinstance(told, Working):
                    self._watch(Step(job.models, told.phase, told.done, told.total))
                elif isinstance(told, Built):
                    built = told
                elif isinstance(told, Trouble):
                    failure = told.failure
        except Stopped:
            failure = Failure("compile-stopped", f"compiling {config.model} was stopped", "the next one begins anew")
        self._watch(Step(job.models, "done" if built is not None else "failed"))
        return _failed(job, failure) if built is None else _outcome(job, built)


def _failed(job: Job, failure: Failure) -> Outcome:
    return Outcome(models=job.models, engine=job.config.engine, result="failed", keys=job.keys, failure=failure)


def _outcome(job: Job, built: Built) -> Outcome:
    result: Result = "compiled" if built.compiled else "pulled" if built.pulled else "there"
    return Outcome(
        models=job.models,
        engine=job.config.engine,
        result=result,
        keys=tuple(one.key for one in built.wanted),
        folders=tuple(one.folder for one in built.wanted),
        seconds=built.seconds,
        pushed=tuple(built.pushed),
    )


def _revision(file: SpecFile) -> Revision:
    return Revision(
        number=0, cause="apply", by="", text=file.text, file=file.name, base_dir=file.base_dir, of=None, plan={}
    )


def _for_the_target(config: ReplicaConfig, file: SpecFile) -> ReplicaConfig:
    """On a machine without Neuron devices the compiler is told for which it compiles: for those of the spec's host."""
    host = next(host for host in file.hosts if host.name == config.host)
    family = (this_host.instance_type() or "").partition(".")[0]
    if not needs_neuron(cast(Engine, config.engine)) or host.topology is None or family in neuron_target.TARGETS:
        return config
    if os.environ.get(neuron_target.OVERRIDE):
        return config
    meant = host.topology.instance.partition(".")[0]
    env = {**config.env, neuron_target.OVERRIDE: neuron_target.TARGETS.get(meant, meant)}
    return msgspec.structs.replace(config, env=env)


def _died(doing: str, config: ReplicaConfig) -> Failure:
    what = f"the process that {doing} {config.model} ended without a word"
    return Failure("compile-failed", what, f"the log is {config.log}")


class _Fetching(Progress):
    """Tells how many bytes are there, while they come."""

    def __init__(self, source: str, models: tuple[str, ...], watch: Watch) -> None:
        super().__init__(source)
        self._models, self._watch = models, watch

    def add(self, count: int) -> None:
        super().add(count)
        now = self.status()
        self._watch(Step(self._models, "fetching", now.done, now.total))


class _ThisMachine:
    """What is asked of a cluster before a start, answered by this machine."""

    def __init__(self) -> None:
        self._interpreters = Interpreters()

    async def interpreter(self, python: str | None, host: str) -> Interpreter:
        return self._interpreters.ask(python)
