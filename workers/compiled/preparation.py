"""What a host does ahead of the starts of its replicas: it checks, predicts, compiles and fetches."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any, Literal

import msgspec

from placements.engines.registry import ENGINES
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, wanted_by, with_folders
from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.fetch.single_flight import End, SingleFlight, Work
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store.store import Store
from workers.compiled.host_sets import Buildable, compiles
from workers.compiled.memory_gate import MemoryGate, need_gib
from workers.compiled.orders import Built, Checked, Order, Predicted, Reply, Wanted, Working
from workers.compiled.places import places_for
from workers.compiled.prediction import Prediction, predict
from workers.compiled.storage import PATIENCE_S
from workers.host import host_facts, json_process
from workers.host.neuron_faults import explained
from workers.messages.actor_message import actor_message
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Trouble

log = logging.getLogger(__name__)

MODULE = "workers.serving.prepare"
DOING = {  # the error of a process without a result, and what it did
    "check": ("start-failed", "checked"),
    "predict": ("cache-not-verified", "predicted the artifacts of"),
    "compile": ("compile-failed", "compiled"),
}
ASK_S = 120.0 + PATIENCE_S  # to import an engine's package on a busy host, and for a cache that does not answer
LOOKS = 8  # maximum concurrent checks and predictions
CPUS_FOR_ONE = 2  # importing an engine's package keeps one busy, while replicas serve


@actor_message
class Foreseen(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction of what a start would compile."""

    missing: list[str] = []  # missing sets that can be compiled ahead, for display; empty: nothing to do
    trouble: str = ""  # why the prediction failed; the start will find out on its cores


def build_key(config: ReplicaConfig) -> str:
    """Returns a key that is equal for configs whose replicas need the same compiled artifacts."""
    model, run, folders = config.model, config.run, {key: origin.folder for key, origin in config.origins.items()}
    parts = (model.name, model.started_with, sorted(config.adapters.items()), sorted(folders.items()))
    interpreters = (run.python, run.server_python, run.server_launch, run.compiled, config.place.claims)
    return blake2s(repr((parts, interpreters)).encode(), digest_size=10).hexdigest()


def run_process(
    command: Literal["check", "predict", "compile"],
    order: Order,
    stop: threading.Event,
    limit_s: float | None = None,
    *,
    warm: str | None = None,
    tell: Callable[[Working], None] = lambda _: None,
) -> Any:
    """Returns the result of the process for a command, or its Failure, also if it cannot be started or has no result.
    Blocks. ``tell`` gets its progress; ``warm`` as in `json_process.start`.

    Raises Stopped soon after ``stop`` is set, when its compilers have ended.
    """
    config = order.config.with_run(token="", credentials=None)
    began, fact, trouble = time.monotonic(), "ended without a result", None
    try:
        with json_process.running(
            (MODULE, command),
            msgspec.structs.replace(order, config=config),
            python=config.run.python,
            env=config.place.env,
            log_file=config.run.log,
            warm=warm,
            stop=stop,
            limit_s=limit_s,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                reply = msgspec.json.decode(line, type=Reply)
                if not isinstance(reply, Working):
                    return reply.failure if isinstance(reply, Trouble) else reply
                tell(reply)
            if process.wait():
                fact = f"ended with exit code {process.returncode}"
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        fact, trouble = f"failed: {type(error).__name__}: {error}", error
    if stop.is_set():
        raise Stopped(f"stopped {command} of {config.model.name}: it has no waiters left")
    if limit_s is not None and time.monotonic() - began >= limit_s:
        fact = f"had no result within {limit_s:.0f} s"
    id, doing = DOING[command]
    failure = Failure(id, f"the process that {doing} {config.model.name} {fact}", f"its log is {config.run.log}")
    return explained(failure, trouble, config.run.log)


def check(config: ReplicaConfig, stop: threading.Event, warm: str | None = None) -> Checked | Failure:
    """Checks whether a start of ``config`` could load its files. Blocks while the engine's package is imported;
    ``warm`` as in `json_process.start`. Raises Stopped soon after ``stop`` is set."""
    result: Checked | Failure = run_process("check", Order(config=config), stop, ASK_S, warm=warm)
    return result


def foresee(config: ReplicaConfig, stop: threading.Event, warm: str | None = None) -> Foreseen:
    """Predicts what would be missing; else as `check`."""
    result = run_process("predict", Order(config=config, ahead=True), stop, ASK_S, warm=warm)
    return Foreseen(trouble=str(result)) if isinstance(result, Failure) else Foreseen(missing=result.missing)


def build(config: ReplicaConfig, progress: Progress, stop: threading.Event) -> Built | Failure:
    """Compiles missing sets. Raises Stopped soon after ``stop`` is set, when its compilers have ended."""

    def tell(working: Working) -> None:
        if working.total:
            progress.expect(working.total, working.done)

    progress.enter("compiling")
    result: Built | Failure = run_process("compile", Order(config=config), stop, tell=tell)
    return result


def verify(config: ReplicaConfig, *, read: bool = False) -> list[Wanted] | Failure:
    """Returns the sets that a start needs, each with the prediction of where it gets them; one for an engine that
    compiles nothing. ``read``: read weights whose digests are needed and unknown. Blocks."""
    result = _predicted(config, read) if compiles(config) else Predicted(engine=config.model.engine, wanted=[])
    return result if isinstance(result, Failure) else starts(config, result)


def starts(config: ReplicaConfig, predicted: Predicted) -> list[Wanted]:
    """Returns the predicted sets of a start; one if its engine compiles nothing."""
    if predicted.wanted:
        return predicted.wanted
    source, prediction = config.source or "", predict(None, [])
    if ENGINES[config.model.engine].stores_shards:
        prediction = Prediction("hit", "source", "the source is precompiled for the model's settings", source)
    return [
        Wanted(role="model", source=source, manifest={}, folder="", complete=True, ahead=False, prediction=prediction)
    ]


def _predicted(config: ReplicaConfig, read: bool) -> Predicted | Failure:
    """Predicts without a trace in the log of the replica, which may be running."""
    with tempfile.TemporaryDirectory(prefix="corewright-") as folder:
        config = config.with_run(log=str(Path(folder, "log")))
        order, limit_s = Order(config=config, read=read), None if read else ASK_S
        result: Predicted | Failure = run_process("predict", order, threading.Event(), limit_s)
        said = "".join(f": {line}" for line in host_facts.last_words(Path(config.run.log))[-1:])
    if isinstance(result, Failure) and result.id == "cache-not-verified":
        what = f"{config.run.python or sys.executable}: {result.what}{said}"
        return Failure("cache-not-verified", what, "check that interpreter with `corewright doctor SPEC`")
    return result


class Warmed(msgspec.Struct, frozen=True, kw_only=True):
    """What was fetched for one replica."""

    bytes: int = 0  # over the network
    brought: tuple[str, ...] = ()  # for display
    problem: str = ""  # why the rest could not be fetched


def warm(config: ReplicaConfig, store: Store, began: Callable[[str], Progress] = Progress) -> Warmed:
    """Fetches the model, its draft and adapters, then compiled artifacts from the other places of a start. Compiles
    nothing; blocks. ``began`` creates the progress of a fetch from its source."""
    size, brought, problem = 0, list[str](), ""
    try:
        for name, count in _bring(config, store, began):
            size += count
            brought.append(name)
    except (SourceError, EngineLoadError, OSError) as error:
        problem = str(error)
    return Warmed(bytes=size, brought=tuple(brought), problem=problem)


def _bring(config: ReplicaConfig, store: Store, began: Callable[[str], Progress]) -> Iterator[tuple[str, int]]:
    """Fetches each item, and yields its name and size in bytes."""
    landed = {}
    for keys, want in wanted_by(config).items():
        landed[keys] = ArtifactFetcher(store)(want, began(want.source), threading.Event())
        if landed[keys].moved:
            yield want.source, landed[keys].moved
    config = with_folders(config, landed)
    if config.run.compiled is None or not compiles(config):
        return
    result = _predicted(config, read=True)
    if isinstance(result, Failure):
        raise EngineLoadError(result.id, result.what, result.hint)
    for each in result.wanted:
        unit = Buildable(role=each.role, source=Path(each.source), manifest=each.manifest, kept=bool(each.folder))
        for place in places_for(unit, config):
            if (fetched := place.fetch(each.manifest)) is not None:
                yield fetched.name.format(each.role), fetched.bytes


class CompileService:
    """Runs each job once for all waiting replicas of a host. Thread-safe."""

    def __init__(
        self,
        turns: MemoryGate | None = None,
        looks: int | None = None,
        need: Callable[[ReplicaConfig], float] = need_gib,
        warm_command: Callable[[str, str | None, Mapping[str, str]], str | None] = lambda *_: None,
    ) -> None:
        """``turns``: limits concurrent compiles; None: by this host's memory. ``looks``: maximum concurrent checks and
        predictions; None: by its CPUs. ``need``: memory of one compile, in GiB. ``warm_command``: as
        `WarmProcesses.command`; a check then takes as long as the import of its engine's packages less."""
        self._flights: SingleFlight[Any] = SingleFlight()
        self._turns = turns or MemoryGate()
        self._looks = threading.BoundedSemaphore(looks or looks_at_once(len(host_facts.usable_cpus())))
        self._need = need
        self._warm_command = warm_command

    def compile(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Built | Failure | FetchStatus:
        """Compiles missing artifacts; FetchStatus: still running after ``wait_s``. See `SingleFlight.join`."""

        def work(progress: Progress, stop: threading.Event) -> Built | Failure:
            need = self._need(config)
            log.info("compiling %s needs about %.0f GiB of this host's memory", config.model.name, need)
            with self._turns.turn(need, stop):
                return build(config, progress, stop)

        return self._join(waiter, config, "compile", work, wait_s)

    def foresee(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Foreseen | Failure | FetchStatus:
        """Predicts what a start of ``config`` would compile, in a process of its own; FetchStatus as in `compile`."""
        return self._join(waiter, config, "foresee", self._limited(foresee, config), wait_s)

    def check(self, waiter: str, config: ReplicaConfig, wait_s: float) -> Checked | Failure | FetchStatus:
        """Checks whether a start of ``config`` could load its files; FetchStatus as in `compile`."""
        return self._join(waiter, config, "check", self._limited(check, config), wait_s)

    def leave(self, waiter: str) -> None:
        """Removes a waiter from all jobs."""
        self._flights.leave(waiter)

    def _join(
        self, waiter: str, config: ReplicaConfig, step: str, work: Work[End], wait_s: float
    ) -> End | Failure | FetchStatus:
        ended: End | Failure | FetchStatus = self._flights.join(
            waiter, (step, build_key(config)), config.model.name, work, wait_s
        )
        return ended

    def _limited(
        self, look: Callable[[ReplicaConfig, threading.Event, str | None], End], config: ReplicaConfig
    ) -> Work[End]:
        """Returns the job of a check or a prediction, which waits until few others run."""

        def work(_: Progress, stop: threading.Event) -> End:
            with self._looks:
                if stop.is_set():
                    raise Stopped(f"stopped before {config.model.name} was examined")
                return look(config, stop, self._warm_command(config.model.engine, config.run.python, config.place.env))

        return work


def looks_at_once(cpus: int) -> int:
    """Returns the number of concurrent checks and predictions for a number of CPUs."""
    return max(2, min(LOOKS, cpus // CPUS_FOR_ONE))
