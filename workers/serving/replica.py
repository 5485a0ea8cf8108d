"""The Ray actor of one replica: one engine and one batcher in one process, on its own cores.

No engine package is imported before the environment is checked and the cores are claimed. The actor always starts and
then reports its phase, including the cause of a failed load; only a killed process reports nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import quote

import msgspec.structs
import ray
from ray.util.metrics import Counter, Gauge

import workers
from placements.engines.registry import ENGINES
from workers.artifacts.fetch.arrival import read_ahead
from workers.artifacts.store.artifact_uses import using
from workers.compiled import host_sets
from workers.engines.open_engine import runner_of
from workers.host import fork_server, host_facts, private_file
from workers.host.core_claims import CoreClaim
from workers.host.json_process import set_variables
from workers.host.lifetime import since_boot
from workers.host.neuron_faults import after_serving
from workers.host.start_phases import START
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.status import Failure, Phase, ReplicaStatus
from workers.messages.wire import Welcome
from workers.serving.backend import Backend, failure_of, local_contents, open_backend
from workers.serving.dataplane import DataPlane
from workers.serving.replica_metrics import REFRESH_S, TAGS, Metric, Sink, StepMetrics
from workers.serving.spans import ReplicaTracing, open_provider

log = logging.getLogger(__name__)

LOG_CHECK_S = 30.0  # between two checks of the log's size
CONSOLE_VARIABLE = "COREWRIGHT_CONSOLE"  # the address of the fleet's web console
PROBE_ID = "probe"
PROBE_TOKENS = 2  # one from the prefill, one from a decode
PROBE_DEADLINE_S = 60.0
CAUSE_S = 1.0
# They claim cores, or read the environment, at import or soon after.
NEURON_MODULES = frozenset(
    {
        "libneuronxla",
        "neuronx_distributed",
        "neuronx_distributed_inference",
        "torch",
        "torch_neuronx",
        "torch_xla",
        "transformers_neuronx",
    }
)


M = TypeVar("M", bound=Callable[..., object])


def _ctl(method: M) -> M:
    """Run the method on a thread of the actor's control group, so that it responds while a load blocks."""
    return cast(M, ray.method(concurrency_group="ctl")(method))


class Replica:
    """The actor class. ``orchestrator/cluster/replicas.py`` names it after the model, for Ray's dashboard."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        _show_log(Path(config.run.log), f"replica-{config.model.name}-{config.place.replica}.log", config.place.host)
        _redirect_output(Path(config.run.log))
        host_facts.log_sigterm()
        self._began = time.monotonic()
        START.begin()
        self._changed = threading.Condition()
        started = host_facts.process_start(os.getpid())
        assert started is not None
        self._process_s = since_boot() - started  # until here
        self._status = ReplicaStatus(version=1, phase=Phase.LOADING, pid=os.getpid(), started=started)
        self._batcher: Backend | None = None
        self._plane: DataPlane | None = None
        self._tracing: ReplicaTracing | None = None
        self._claim: CoreClaim | None = None
        self._uses = contextlib.ExitStack()  # keeps its artifacts from being evicted while this process lives
        self._probed = threading.Event()
        self._probe_error: str | None = None
        self._steps = threading.Thread(target=self._run_batcher, name="batcher", daemon=True)
        threading.Thread(target=self._live, name="load", daemon=True).start()

    def __repr__(self) -> str:
        cores = self._config.place.env.get("NEURON_RT_VISIBLE_CORES") if self._config.place.cores else None
        return f"{self._config.model.name}/{self._config.place.replica}" + (f"@nc{cores}" if cores else "")

    @_ctl
    def watch(self, seen: int, timeout_s: float) -> ReplicaStatus:
        """Returns the status once its version is above ``seen``, or after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._status.version > seen, timeout_s)
            return self._reading()

    @_ctl
    def describe(self) -> tuple[ReplicaConfig, ReplicaStatus]:
        """Returns the configuration and the status: enough for a new controller to take over."""
        return self._config, self._reading()

    @_ctl
    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the live ones. Returns whether all have ended."""
        batcher = self._batcher
        if batcher is None or self._status.phase not in (Phase.READY, Phase.DRAINING):
            return True
        if self._status.phase is Phase.READY:  # else a previous controller began to drain; requests may still run
            self._set(Phase.DRAINING)
        drained = batcher.drain(timeout_s)
        if self._plane is not None:
            self._plane.flush()  # the controller may kill a drained process at once
        if self._tracing is not None:
            self._tracing.flush()
        return drained

    @_ctl
    def set_adapters(self, config: ReplicaConfig) -> Failure | None:
        """Serves the LoRA adapters of ``config`` instead of its own. Returns why it cannot."""
        from workers.engines.server.completion_relay import CompletionRelay  # no other backend has adapters

        assert isinstance(self._batcher, CompletionRelay)
        with contextlib.ExitStack() as uses:
            for folder in {*config.fetched_folders().values()} - {*self._config.fetched_folders().values()}:
                uses.enter_context(using(folder))
            try:
                self._batcher.set_adapters(config.adapters)
            except Exception as error:  # noqa: BLE001 - it becomes the failure of the change
                return failure_of("adapter-unusable", error, "the change of its adapters", self._config)
            self._uses.push(uses.pop_all())  # as long as the process lives: its server may read it again
        self._config = config
        return None

    def _reading(self) -> ReplicaStatus:
        age_s, compile_s = time.monotonic() - self._began, host_sets.SPENT.seconds
        status = msgspec.structs.replace(self._status, age_s=age_s, compile_s=compile_s)
        if status.phase is Phase.LOADING:
            status = msgspec.structs.replace(status, load_phases=self._phases())
        if self._batcher is None:
            return status
        stats, now = self._batcher.stats, time.monotonic()
        return msgspec.structs.replace(
            status,
            live=stats.live,
            waiting=stats.waiting,
            step_s=0.0 if stats.step_started_at is None else now - stats.step_started_at,
            drafted=stats.drafted,
            accepted=stats.accepted,
            prefix_queries=stats.prefix_queries,
            prefix_hits=stats.prefix_hits,
            slots=stats.slots,
            steps=stats.steps,
            tokens=stats.tokens,
            server=stats.server,
        )

    def _live(self) -> None:
        try:
            self._load()
        except Exception as error:  # noqa: BLE001 - it becomes the replica's failure
            self._fail(failure_of("load-failed", error, "the load", self._config))

    def _load(self) -> None:
        config = self._config
        set_environment(config.place.env)
        fork_server.use_threads()
        host_facts.pin_to(config.place.env.get("COREWRIGHT_CPUS"))
        for folder in config.fetched_folders().values():
            self._uses.enter_context(using(folder))
        if runner_of(config.model.engine).serve is None and not ENGINES[config.model.engine].stores_shards:
            threading.Thread(target=read_ahead, args=(weights_of(config),), name="read ahead", daemon=True).start()
        if config.place.claims is not None and config.place.cores:
            self._claim = CoreClaim(Path(config.place.claims), config.place.cores)
        contents = local_contents(config)
        self._batcher = open_backend(config, self._claim, self._emit)
        self._status = msgspec.structs.replace(self._status, contents=contents)
        self._steps.start()
        threading.Thread(target=self._batcher.warm_guides, name="guides", daemon=True).start()
        if config.model.server is None and not config.run.proven:  # `start_server` has sent a request
            self._probe()
        spec = self._batcher.spec
        provider = open_provider("corewright-replica", {"service.instance.id": config.id})
        if provider is not None:
            self._tracing = ReplicaTracing(
                provider, self._batcher, model=config.model.name, replica=config.place.replica
            )
        self._plane = DataPlane(
            Path(config.run.socket) if config.run.uses_socket else None,
            welcome=Welcome(
                version=version("corewright"),
                package=str(Path(workers.__file__).parent) if config.run.python is None else "",
                slots=spec.slots,
                max_len=spec.max_len,
                max_prompt=spec.prefill_buckets[-1],
                vocab_size=spec.vocab_size,
                prefix_block=spec.prefix_block,
                width=spec.width,
                labels=list(spec.labels),
            ),
            token=config.run.token,
            epoch=config.run.epoch,
            batcher=self._batcher if self._tracing is None else self._tracing,
            listen=config.run.listen,
            credentials=config.run.credentials,
            taken=self._batcher.taken,
        )
        self._plane.start()
        log.info("ready after %.2f s", time.monotonic() - self._began)
        host_facts.mark_log(2)  # later output is about serving
        START.end("first_token")
        load_s = round(time.monotonic() - self._began, 3)
        self._set(Phase.READY, load_s=load_s, load_phases=self._phases(), address=self._plane.address)

    def _phases(self) -> dict[str, float]:
        return {"process": self._process_s, **START.seconds}

    def _probe(self) -> None:
        """Run one real request before any other. Raises EngineLoadError when it fails."""
        assert self._batcher is not None
        prompt = [min(1, self._batcher.spec.vocab_size - 1)]
        if self._batcher.spec.width:
            probe = GenerateRequest(id=PROBE_ID, prompt_ids=[], max_tokens=0, inputs=[EncodeInput(prompt)])
        else:
            probe = GenerateRequest(
                id=PROBE_ID, prompt_ids=prompt, max_tokens=PROBE_TOKENS, temperature=0.0, ignore_eos=True
            )
        self._batcher.submit(probe)
        if not any(
            self._probed.wait(1.0) for _ in range(int(PROBE_DEADLINE_S))
        ):  # a freeze of the machine counts as one second
            raise EngineLoadError("probe-failed", f"the first request did not finish within {PROBE_DEADLINE_S:.0f} s")
        if self._probe_error is not None:
            self._steps.join(CAUSE_S)  # if the engine has failed, this thread has the cause
            raise EngineLoadError("probe-failed", f"the first request failed: {self._probe_error}")

    def _emit(self, events: list[TokenEvent]) -> None:
        if self._plane is not None:
            self._plane.emit(events)
            if self._tracing is not None:
                self._tracing.emitted(events)
            return
        for event in events:
            if event.id == PROBE_ID and event.finish is not None:
                self._probe_error = event.error if event.finish is FinishReason.ERROR else None
                self._probed.set()

    def _run_batcher(self) -> None:
        batcher = self._batcher
        assert batcher is not None
        fork_server.use_threads()
        metrics = StepMetrics(self._open_sink)
        threading.Thread(target=_refresh, args=(metrics, batcher), name="metrics", daemon=True).start()
        try:
            batcher.run(after_step=lambda: metrics.record(batcher.stats))
        except Exception as error:  # noqa: BLE001 - it becomes the replica's failure
            self._fail(failure_of("engine-failed", error, "a step of the engine", self._config))

    def _open_sink(self, metric: Metric) -> Sink:
        tags = dict(zip(TAGS, (self._config.model.name, str(self._config.place.replica)), strict=True))
        if metric.is_counter:
            return cast(Sink, Counter(metric.name, metric.description, TAGS).set_default_tags(tags).inc)
        return cast(Sink, Gauge(metric.name, metric.description, TAGS).set_default_tags(tags).set)

    def _fail(self, failure: Failure) -> None:
        log.error("%s: %s", failure.id, failure.what)
        if self._status.phase is Phase.FAILED:
            return  # the first cause counts
        has_served = self._status.phase in (Phase.READY, Phase.DRAINING)
        self._set(Phase.FAILED, failure=after_serving(failure) if has_served else failure)

    def _set(self, phase: Phase, **changes: object) -> None:
        with self._changed:
            version = self._status.version + 1
            self._status = msgspec.structs.replace(self._status, version=version, phase=phase, **changes)
            self._changed.notify_all()


def _refresh(metrics: StepMetrics, batcher: Backend) -> None:
    while True:
        metrics.record(batcher.stats)
        time.sleep(REFRESH_S)


def weights_of(config: ReplicaConfig) -> list[Path]:
    """Returns the weight files of the model and of its draft that are complete, without pickles."""
    folders = [Path(folder) for folder in (config.source, config.draft_source) if folder is not None]
    return [file for folder in folders for file in sorted(folder.glob("model*.safetensors"))]


def set_environment(planned: Mapping[str, str]) -> None:
    """Sets the planned variables: Ray has started a fork of a warm process, or the fresh process in place of a refused
    fork, for any replica. Raises EngineLoadError if an engine has been imported: engines read these variables at
    import, and would use another model's cores, or all of them."""
    early = sorted(NEURON_MODULES & set(sys.modules) - ({"torch"} & fork_server.imported))
    if early:
        raise EngineLoadError("environment-late", f"{', '.join(early)} was imported before the environment was set")
    set_variables(planned)  # Ray cannot unset a variable for an actor


def _show_log(path: Path, name: str, host: str) -> None:
    """Show the log in Ray's dashboard: as ``name`` among the session's logs, listed in the Logs tab, and by its name on
    the actor's own page, whose log would be empty otherwise. There is also the way to its cores in the console.

    The session's folder is where Ray redirected this process's output; its viewer follows a link out of it.
    """
    output = Path("/proc/self/fd/2").readlink()
    if not output.name.startswith("worker-"):
        return
    print(f"The log of this replica is {name} in the Logs tab, and {path}.", file=sys.stderr, flush=True)  # noqa: T201
    if console := os.environ.get(CONSOLE_VARIABLE):
        print(f"Its cores are in the console: {console}#cores/{quote(host, safe='')}", file=sys.stderr, flush=True)  # noqa: T201
    with contextlib.suppress(FileExistsError):  # by an earlier start, to the same file
        (output.parent / name).symlink_to(path)


def _redirect_output(path: Path) -> None:
    """Redirect file descriptors 1 and 2, including the output of C libraries, to the replica's log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = private_file.open_to_append(path)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    host_facts.mark_log(2)
    threading.Thread(target=_bound_log, args=(path,), name="log", daemon=True).start()
    logging.basicConfig(
        stream=os.fdopen(2, "w", buffering=1, closefd=False),
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )


def _bound_log(path: Path) -> None:
    """Limit the size of this process's log as long as it runs."""
    while True:
        with contextlib.suppress(OSError):  # a full disk: retry next time
            host_facts.cut_log(path)
        time.sleep(LOG_CHECK_S)
