"""Compiles all models of a spec ahead of time: selects what to compile, schedules the builds, reports outcomes.

Each set of artifacts is compiled in its own process, in the interpreter of its engine (`workers.serving.prepare`).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from orchestrator.control.resolve.offline_configs import OfflineConfigs
from orchestrator.control.resolve.spec_file import SpecFile
from orchestrator.process.home import Home
from placements.engines.registry import capabilities
from placements.planner.placement import Placement
from placements.spec.schema import ModelSpec
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, wanted_by, with_folders
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store.store import StoreSettings
from workers.compiled import preparation
from workers.compiled.host_sets import compiles
from workers.compiled.memory_gate import need_gib, startable
from workers.compiled.orders import NEEDS_DEVICE, Built, Order, Predicted, Working
from workers.compiled.preparation import build_key
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure

PREDICT_S = 600.0  # to import an engine's package, from a network disk

Result = Literal["compiled", "pulled", "there", "nothing", "needs-device", "failed"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One build, for all models whose replicas use the same artifacts."""

    models: tuple[str, ...]
    config: ReplicaConfig  # of the first model
    keys: tuple[str, ...]  # of its artifacts; empty if they depend on weights that have not been read yet
    need_gib: float  # host memory during the build
    complete: bool = False  # nothing is left to compile
    target: str = ""  # what it is compiled for, if the model has several targets; see `target_of`
    unfetched: Placement | None = None
    """The placement, if everything is compiled (here or in the ``neff_cache``) and the weights are not on this host."""


@dataclass(frozen=True, kw_only=True)
class CompileOutcome:
    """The outcome of one model, or of several that share their artifacts."""

    models: tuple[str, ...]
    target: str = ""  # as in `Job`
    engine: str
    result: Result
    keys: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    seconds: float = 0.0
    pushed: tuple[str, ...] = ()  # keys uploaded to the model's neff_cache
    unsent: Failure | None = None  # why a requested upload is incomplete
    warnings: tuple[str, ...] = ()
    failure: Failure | None = None

    def as_dict(self) -> dict[str, object]:
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        return fields | {"failure": _failure_fields(self.failure), "unsent": _failure_fields(self.unsent)}


@dataclass(frozen=True)
class BuildStep:
    """The progress of one build."""

    models: tuple[str, ...]
    # predicting, fetching, queued (for memory), turn (for one of `most`), waiting (for another build of the same),
    # looking, compiling, sending, done, failed
    phase: str
    done: int = 0  # graphs; bytes while fetching
    total: int = 0  # 0: unknown
    target: str = ""  # as in `Job`


Watch = Callable[[BuildStep], None]


def named(of: Job | CompileOutcome | BuildStep) -> str:
    """Returns the models, and their target if they have several."""
    return ", ".join(of.models) + (f" for {of.target}" if of.target else "")


class CompileAhead:
    """Compiles the models of one spec on this machine. Blocks; its threads wait for processes."""

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
        """``names``: the models to compile; empty: all. ``push``: upload complete artifacts to each ``neff_cache``."""
        assert file.spec is not None
        self._file, self._home, self._store, self._watch, self._push = file, home, store, watch, push
        self._spec = file.spec
        self._models = [model for model in file.spec.models if not names or model.name in names]
        self._offline = OfflineConfigs(file, home)
        self._stop = threading.Event()

    def prepare(self) -> tuple[list[Job], list[CompileOutcome]]:
        """Predicts what each model compiles, and fetches those that are not compiled anywhere. Returns the jobs, and
        the outcomes of models without anything to compile, or with a failure.

        Works on one model at a time: importing an engine takes seconds, and a fetch uses the whole network bandwidth.
        """
        jobs: dict[object, Job] = {}
        outcomes = list[CompileOutcome]()
        for model in self._models:
            for item in self._jobs(model):
                if isinstance(item, CompileOutcome):
                    outcomes.append(item)
                    ended = "failed" if item.result == "failed" else "done"
                    self._watch(BuildStep(item.models, ended, target=item.target))
                    continue
                kind: object = item.keys or (build_key(item.config), item.target)
                key, same = (kind, item.config.model.neff_cache), jobs.get((kind, item.config.model.neff_cache))
                models = item.models if same is None else tuple(dict.fromkeys((*same.models, *item.models)))
                jobs[key] = replace(item if same is None else same, models=models)
        return list(jobs.values()), outcomes

    def run(self, jobs: Sequence[Job], *, memory_gib: float, most: int) -> Generator[CompileOutcome, None, None]:
        """Compiles as many jobs in parallel as fit, and yields each outcome. Stops the compilers if closed early."""
        waiting, running = list(jobs), list[Job]()
        ended: queue.SimpleQueue[tuple[Job, Job | CompileOutcome | None]] = queue.SimpleQueue()
        try:
            while waiting or running:
                for job in startable(waiting, running, memory_gib=memory_gib, jobs=most):
                    waiting.remove(job)
                    running.append(job)
                    threading.Thread(target=self._work, args=(job, ended), name="compile", daemon=True).start()
                for job in waiting:
                    self._watch(BuildStep(job.models, "queued" if len(running) < most else "turn", target=job.target))
                job, outcome = ended.get()
                running.remove(job)
                if outcome is None and job.unfetched is not None:
                    outcome = self._job(job.models, job.unfetched, job.target, known=False)
                if isinstance(outcome, Job):
                    waiting.append(outcome)
                elif outcome is not None:
                    yield outcome
        finally:
            self._stop.set()
            while running:
                running.remove(ended.get()[0])

    def _jobs(self, model: ModelSpec) -> Iterator[Job | CompileOutcome]:
        """Yields a job or an outcome for each target that the plan places the model on."""
        places = self._offline.places(model)
        if isinstance(places, Failure):
            engine = self._offline.generation.engines[model.name]
            yield CompileOutcome(models=(model.name,), engine=engine, result="failed", failure=places)
            return
        for target, placement in places.items():
            name = target if len(places) > 1 else ""
            self._watch(BuildStep((model.name,), "predicting", target=name))
            yield self._job((model.name,), placement, name)

    def _job(
        self, models: tuple[str, ...], placement: Placement, target: str, *, known: bool = True
    ) -> Job | CompileOutcome:
        """Returns the job, or an outcome without one. With ``known`` the weights of compiled models are not fetched."""
        log = f"compile-{placement.model}{f'-{target}' if target else ''}.log"
        about: dict[str, Any] = {"models": models, "target": target}
        config = self._offline.config(placement)
        if isinstance(config, Failure):
            engine = self._offline.generation.engines[placement.model]
            return CompileOutcome(**about, engine=engine, result="failed", failure=config)
        config = config.with_run(log=str(self._home.logs / log))
        if not compiles(config):
            return CompileOutcome(**about, engine=config.model.engine, result="nothing")
        compiled = self._find_compiled(config) if known else None
        prediction = compiled or self._fetch_and_predict(config, BuildStep(models, "fetching", target=target))
        if isinstance(prediction, Failure):
            return CompileOutcome(**about, engine=config.model.engine, result="failed", failure=prediction)
        fetched, predicted = prediction
        if not self._are_obtainable(config, predicted):
            return CompileOutcome(**about, engine=config.model.engine, result="needs-device")
        complete = compiled is not None or not any(each.ahead and not each.complete for each in predicted.wanted)
        memory = self._spec.model(placement.model)
        return Job(
            **about,
            config=fetched,
            keys=tuple(artifacts.key for artifacts in predicted.wanted if artifacts.key),
            need_gib=0.0 if complete else need_gib(fetched, memory.host_memory_gib if memory else None),
            complete=complete,
            unfetched=placement if compiled is not None else None,
        )

    def _find_compiled(self, config: ReplicaConfig) -> tuple[ReplicaConfig, Predicted] | None:
        """Predicts the artifacts from the small files of the sources, without weights. None if they are incomplete here
        and in the ``neff_cache``, if they depend on the weights, or if all sources are on this host."""
        nowhere = config.model.neff_cache is None and not self._home.compiled.is_dir()
        if not wanted_by(config) or nowhere or capabilities(config.model.engine).stores_shards:
            return None
        heads = self._offline.with_heads(config)
        predicted = heads if isinstance(heads, Failure) else self._predict(heads)
        if isinstance(heads, Failure) or isinstance(predicted, Failure):
            return None
        complete = bool(predicted.wanted) and all(
            each.complete or (each.prediction.hit and each.prediction.where == "elsewhere") for each in predicted.wanted
        )
        return (heads, predicted) if complete or not self._are_obtainable(config, predicted) else None

    def _are_obtainable(self, config: ReplicaConfig, predicted: Predicted) -> bool:
        """Returns whether a build may provide all artifacts: it compiles or fetches them, or they are here already."""
        shared = config.model.neff_cache is not None
        return all(
            artifacts.ahead
            or artifacts.complete
            or (shared and artifacts.folder)
            or (artifacts.unread and (shared or self._home.compiled.is_dir()))  # its folder is not known yet
            for artifacts in predicted.wanted
        )

    def _fetch_and_predict(self, config: ReplicaConfig, step: BuildStep) -> tuple[ReplicaConfig, Predicted] | Failure:
        fetch, landed = ArtifactFetcher(self._store.open()), {}
        try:
            for keys, artifact in wanted_by(config).items():
                landed[keys] = fetch(artifact, _FetchProgress(artifact.source, step, self._watch), self._stop)
        except SourceError as error:
            return Failure(error.id, error.what, error.hint)
        fetched = with_folders(config, landed)
        predicted = self._predict(fetched)
        return predicted if isinstance(predicted, Failure) else (fetched, predicted)

    def _predict(self, config: ReplicaConfig) -> Predicted | Failure:
        order = Order(config=config, ahead=True)
        result: Predicted | Failure = preparation.run_process("predict", order, self._stop, PREDICT_S)
        return result

    def _work(self, job: Job, ended: queue.SimpleQueue[tuple[Job, Job | CompileOutcome | None]]) -> None:
        """Runs one job; always puts an outcome into the queue."""
        fact = f"the thread that compiled {job.config.model.name} failed"
        hint = f"see the log {job.config.run.log}"
        outcome: CompileOutcome | None = _failed(job, Failure("compile-failed", fact, hint))
        try:
            outcome = self._build(job)
        finally:
            ended.put((job, outcome))

    def _build(self, job: Job) -> CompileOutcome | None:
        """Returns the outcome; None: artifacts that were complete are gone, and the weights are not on this host."""
        order = Order(config=job.config, push=self._push, make=job.unfetched is None)

        def tell(working: Working) -> None:
            self._watch(BuildStep(job.models, working.phase, working.done, working.total, job.target))

        try:
            result = preparation.run_process("compile", order, self._stop, tell=tell)
        except Stopped:
            fact = f"compiling {job.config.model.name} was stopped"
            result = Failure("compile-stopped", fact, "run the command again to compile it")
        if isinstance(result, Built) and result.missing:
            return None
        self._watch(BuildStep(job.models, "done" if isinstance(result, Built) else "failed", target=job.target))
        return _outcome(job, result) if isinstance(result, Built) else _failed(job, result)


def _failure_fields(failure: Failure | None) -> dict[str, str] | None:
    return None if failure is None else {"id": failure.id, "what": failure.what, "hint": failure.hint}


def _failed(job: Job, failure: Failure) -> CompileOutcome:
    about: dict[str, Any] = {"models": job.models, "target": job.target, "engine": job.config.model.engine}
    if failure.id == NEEDS_DEVICE:
        return CompileOutcome(**about, result="needs-device", keys=job.keys)
    return CompileOutcome(**about, result="failed", keys=job.keys, failure=failure)


def _outcome(job: Job, built: Built) -> CompileOutcome:
    result: Result = "compiled" if built.compiled else "pulled" if built.pulled else "there"
    return CompileOutcome(
        models=job.models,
        target=job.target,
        engine=job.config.model.engine,
        result=result,
        keys=tuple(artifacts.key for artifacts in built.wanted),
        folders=tuple(artifacts.folder for artifacts in built.wanted),
        seconds=built.seconds,
        pushed=tuple(built.pushed),
        unsent=built.unsent[0] if built.unsent else None,
        warnings=tuple(dict.fromkeys(built.warnings)),
    )


class _FetchProgress(Progress):
    """Reports the progress of a fetch in bytes."""

    def __init__(self, source: str, step: BuildStep, watch: Watch) -> None:
        super().__init__(source)
        self._step, self._watch = step, watch

    def add(self, count: int) -> None:
        super().add(count)
        now = self.status()
        self._watch(replace(self._step, done=now.done, total=now.total))
