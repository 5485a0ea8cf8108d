"""Compiling all models of a spec before anything starts: what is compiled in which order, and how it went.

Every set of artifacts is compiled in a process of its own, in the interpreter of its engine
(`workers.compiling.build`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from orchestrator.process.home import Home
from orchestrator.revisions.spec_file import SpecFile
from orchestrator.starts.offline_configs import OfflineConfigs
from placements.planner.placement import Placement
from placements.spec.schema import ModelSpec
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, wanted_by, with_folders
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store.store_settings import StoreSettings
from workers.compiling import prefetch
from workers.compiling.build import GONE, Built, Predicted, Trouble, Wanted, Working
from workers.compiling.memory_gate import need_gib, startable
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.neff_cache.candidates import compiled_elsewhere

OF_WEIGHTS = "nxd-inference"  # what it has compiled is found by digests of the weights
PREDICT_S = 600.0  # to import an engine's package, from a network disk

Result = Literal["compiled", "pulled", "there", "nothing", "needs-device", "failed"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One build: of all models whose replicas look for the same artifacts."""

    models: tuple[str, ...]
    config: ReplicaConfig  # of the first of them
    keys: tuple[str, ...]  # of its artifacts; empty where they follow only from weights that nobody has read yet
    need_gib: float  # of this host's memory while it is compiled
    complete: bool = False  # nothing is to be compiled
    target: str = ""  # what it is compiled for, where the model is for several; see `target_of`
    unfetched: Placement | None = None
    """Where all of it is compiled, here or in the ``neff_cache``, and its weights are not here: the replica's place."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one model, or of several that share what is compiled."""

    models: tuple[str, ...]
    target: str = ""  # as in `Job`
    engine: str
    result: Result
    keys: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    seconds: float = 0.0
    pushed: tuple[str, ...] = ()  # keys that went to the model's neff_cache
    unsent: Failure | None = None  # why not all of it went there, though it was to
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None

    def as_dict(self) -> dict[str, object]:
        told = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return told | {"failure": _told(self.failure), "unsent": _told(self.unsent)}


@dataclass(frozen=True)
class Step:
    """How far one of them is, for whoever looks on."""

    models: tuple[str, ...]
    # predicting, fetching, queued (for memory), turn (of `most` at once), waiting (for another who compiles the same),
    # looking, compiling, sending, done, failed
    phase: str
    done: int = 0  # graphs, or bytes while it is fetched
    total: int = 0  # 0: nobody knows
    target: str = ""  # as in `Job`


Watch = Callable[[Step], None]


def named(of: Job | Outcome | Step) -> str:
    """Its models, and what they are compiled for where they are for several targets."""
    return ", ".join(of.models) + (f" for {of.target}" if of.target else "")


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
        self._offline = OfflineConfigs(file, home)
        self._stop = threading.Event()

    def prepare(self) -> Prepared:
        """Ask what each model would compile, and fetch those that are compiled nowhere. One after another: an engine's
        package takes seconds to import, and a fetch uses all of the network."""
        jobs: dict[object, Job] = {}
        outcomes = list[Outcome]()
        for model in self._models:
            for found in self._jobs(model):
                if isinstance(found, Outcome):
                    outcomes.append(found)
                    ended = "failed" if found.result == "failed" else "done"
                    self._watch(Step(found.models, ended, target=found.target))
                    continue
                kind: object = found.keys or (prefetch.build_key(found.config), found.target)
                key, same = (kind, found.config.neff_cache), jobs.get((kind, found.config.neff_cache))
                models = found.models if same is None else tuple(dict.fromkeys((*same.models, *found.models)))
                jobs[key] = replace(found if same is None else same, models=models)
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
                    self._watch(Step(job.models, "queued" if len(running) < most else "turn", target=job.target))
                job, outcome = ended.get()
                running.remove(job)
                if job.unfetched is None or outcome.failure is None or outcome.failure.id != GONE:
                    yield outcome
                    continue
                again = self._job(job.models, job.unfetched, job.target, known=False)
                if isinstance(again, Job):
                    waiting.append(again)
                else:
                    yield again
        finally:
            self._stop.set()
            while running:
                running.remove(ended.get()[0])

    def _jobs(self, model: ModelSpec) -> Iterator[Job | Outcome]:
        """One for each target that the plan places the model on."""
        places = self._offline.places(model)
        if isinstance(places, Failure):
            engine = self._offline.generation.engines[model.name]
            yield Outcome(models=(model.name,), engine=engine, result="failed", failure=places)
            return
        for target, placement in places.items():
            name = target if len(places) > 1 else ""
            self._watch(Step((model.name,), "predicting", target=name))
            yield self._job((model.name,), placement, name)

    def _job(self, models: tuple[str, ...], placement: Placement, target: str, *, known: bool = True) -> Job | Outcome:
        """``known``: where it is compiled already, its weights are not fetched."""
        log = f"compile-{placement.model}{f'-{target}' if target else ''}.log"
        about: dict[str, Any] = {"models": models, "target": target}
        config = self._offline.config(placement)
        if isinstance(config, Failure):
            engine = self._offline.generation.engines[placement.model]
            return Outcome(**about, engine=engine, result="failed", failure=config)
        config = msgspec.structs.replace(config, log=str(self._home.logs / log))
        if not prefetch.compiles(config):
            return Outcome(**about, engine=config.engine, result="nothing")
        asked = self._asked(config) if known else None
        if asked is not None and (not _ahead(asked[1]) or self._is_there(*asked)):
            fetched: ReplicaConfig | Failure = asked[0]
            told: Predicted | Failure = asked[1]
        else:
            asked = None
            fetched = self._fetched(config, models, target)
            told = fetched if isinstance(fetched, Failure) else self._predicted(fetched)
        if isinstance(fetched, Failure):
            return Outcome(**about, engine=config.engine, result="failed", failure=fetched)
        if isinstance(told, Failure):
            return Outcome(**about, engine=config.engine, result="failed", failure=told)
        if not _ahead(told):
            return Outcome(**about, engine=config.engine, result="needs-device")
        complete = asked is not None or all(one.complete for one in told.wanted)
        memory = self._spec.model(placement.model)
        return Job(
            **about,
            config=fetched,
            keys=tuple(one.key for one in told.wanted if one.key),
            need_gib=0.0 if complete else need_gib(fetched, memory.host_memory_gib if memory else None),
            complete=complete,
            unfetched=placement if asked is not None else None,
        )

    def _asked(self, config: ReplicaConfig) -> tuple[ReplicaConfig, Predicted] | None:
        """With the small files of its sources, what these tell of what it would compile. None: it is not asked, where
        nothing can be compiled already, or what it looks for depends on its weights, or all of it is here."""
        nowhere = config.neff_cache is None and not self._home.compiled.is_dir()
        if wanted_by(config) == (None, None) or nowhere or config.engine == OF_WEIGHTS:
            return None
        heads = self._offline.with_heads(config)
        told = None if isinstance(heads, Failure) else self._predicted(heads)
        return (heads, told) if not isinstance(heads, Failure) and isinstance(told, Predicted) else None

    def _is_there(self, config: ReplicaConfig, told: Predicted) -> bool:
        """Whether all of it is compiled, on this host or in its ``neff_cache``."""
        return bool(told.wanted) and all(one.complete or _is_pushed(config, one) for one in told.wanted)

    def _fetched(self, config: ReplicaConfig, models: tuple[str, ...], target: str) -> ReplicaConfig | Failure:
        wanted = wanted_by(config)
        if wanted == (None, None):
            return config
        bringing, landed = ArtifactFetcher(self._store.open()), []
        step = Step(models, "fetching", target=target)
        try:
            for one in wanted:
                progress = _Fetching(one.source if one else "", step, self._watch)
                landed.append(None if one is None else bringing(one, progress, self._stop))
        except SourceError as error:
            return Failure(error.id, error.what, error.hint)
        return with_folders(config, wanted, (landed[0], landed[1]))

    def _predicted(self, config: ReplicaConfig) -> Predicted | Failure:
        began = time.monotonic()
        for told in prefetch.answers("predict", config, self._stop, PREDICT_S):
            if isinstance(told, Predicted):
                return told
            if isinstance(told, Trouble):
                return told.failure
        if time.monotonic() - began < PREDICT_S:
            return _died("predicted what is compiled of", config)
        what = f"{config.python or 'this interpreter'} did not tell within {PREDICT_S:.0f} s what {config.model} needs"
        return Failure("cache-not-verified", what, f"the log is {config.log}")

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
            for told in prefetch.answers("compile", config, self._stop, push=self._push, make=job.unfetched is None):
                if isinstance(told, Working):
                    self._watch(Step(job.models, told.phase, told.done, told.total, job.target))
                elif isinstance(told, Built):
                    built = told
                elif isinstance(told, Trouble):
                    failure = told.failure
        except Stopped:
            failure = Failure("compile-stopped", f"compiling {config.model} was stopped", "the next one begins anew")
        if built is not None:
            self._watch(Step(job.models, "done", target=job.target))
            return _outcome(job, built)
        if job.unfetched is None or failure.id != GONE:  # else it is tried again
            self._watch(Step(job.models, "failed", target=job.target))
        return _failed(job, failure)


def _ahead(told: Predicted) -> bool:
    return all(one.ahead for one in told.wanted)


def _is_pushed(config: ReplicaConfig, one: Wanted) -> bool:
    """Whether the ``neff_cache`` holds all of that set; one that does not answer holds nothing."""
    if config.neff_cache is None or config.compiled is None or not one.key:
        return False
    try:
        found = list(compiled_elsewhere(one.manifest, Path(config.compiled), config.neff_cache))
    except SourceError:
        return False
    return any(there.manifest == one.manifest and not there.missing for there in found)


def _told(one: Failure | None) -> dict[str, str] | None:
    return None if one is None else {"id": one.id, "what": one.what, "hint": one.hint}


def _failed(job: Job, failure: Failure) -> Outcome:
    about: dict[str, Any] = {"models": job.models, "target": job.target, "engine": job.config.engine}
    return Outcome(**about, result="failed", keys=job.keys, failure=failure)


def _outcome(job: Job, built: Built) -> Outcome:
    result: Result = "compiled" if built.compiled else "pulled" if built.pulled else "there"
    return Outcome(
        models=job.models,
        target=job.target,
        engine=job.config.engine,
        result=result,
        keys=tuple(one.key for one in built.wanted),
        folders=tuple(one.folder for one in built.wanted),
        seconds=built.seconds,
        pushed=tuple(built.pushed),
        unsent=built.unsent[0] if built.unsent else None,
        warnings=tuple(dict.fromkeys(built.warnings)),
    )


def _died(doing: str, config: ReplicaConfig) -> Failure:
    what = f"the process that {doing} {config.model} ended without a word"
    return Failure("compile-failed", what, f"the log is {config.log}")


class _Fetching(Progress):
    """Tells how many bytes are there, while they come."""

    def __init__(self, source: str, step: Step, watch: Watch) -> None:
        super().__init__(source)
        self._step, self._watch = step, watch

    def add(self, count: int) -> None:
        super().add(count)
        now = self.status()
        self._watch(replace(self._step, done=now.done, total=now.total))
