"""Limits the concurrent compiles of a host by its memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from placements.engines.cpu.memory import CPU_COMPILE_GIB
from placements.engines.memory import COMPILE_WORKER_GIB, PROCESS_GIB
from placements.engines.registry import needs_neuron
from placements.facts.checkpoints import Checkpoint, CheckpointError
from placements.facts.encoders import Kind
from placements.resources.host_memory import host_memory
from placements.spec.schema import ModelSpec
from workers.artifacts.sources.listing import Stopped
from workers.host import foreign_files, host_facts
from workers.messages.replica_config import ReplicaConfig

GIB = 2**30
LOOK_S = 1.0  # interval of memory checks, since other processes allocate and free it
MOST = 256  # concurrent compiles


class Compile(Protocol):
    """A compile job."""

    @property
    def need_gib(self) -> float:
        """The host memory that it needs, in GiB."""
        ...


C = TypeVar("C", bound=Compile)


def startable(waiting: Sequence[C], running: Collection[Compile], *, memory_gib: float, jobs: int) -> tuple[C, ...]:
    """Returns the jobs of ``waiting``, in order, that can start beside the running ones.

    1. At most ``jobs`` run at once.
    2. The sum of their needs stays within ``memory_gib``; later jobs may overtake one that does not fit.
    3. A job that needs more than the total runs alone, since its need is an estimate.
    """
    begun: list[C] = []
    used = sum(job.need_gib for job in running)
    for job in waiting:
        if len(running) + len(begun) >= jobs:  # 1
            break
        alone = not running and not begun
        if alone or used + job.need_gib <= memory_gib:  # 3, 2
            begun.append(job)
            used += job.need_gib
    return tuple(begun)


def need_gib(config: ReplicaConfig, load_gib: float | None = None) -> float:
    """Returns the host memory for compiling, in GiB, by the plan's estimate: reading the checkpoint and its compilers.

    The config's sources are local folders; ``load_gib``: the spec's ``host_memory_gib``. For a checkpoint that the
    planner cannot read, counts only the process and its compiler.
    """
    checkpoint, model = _checkpoint(config.source, config.model.kind), _model(config, load_gib)
    if checkpoint is None or model is None:
        compiler = COMPILE_WORKER_GIB if needs_neuron(config.model.engine) else CPU_COMPILE_GIB
        return (load_gib or PROCESS_GIB) + compiler
    need = host_memory(model, checkpoint, model.engine, _checkpoint(config.draft_source, config.model.kind))
    return need.load + need.compile


def _model(config: ReplicaConfig, load_gib: float | None) -> ModelSpec | None:
    """Returns a spec with the fields that determine memory; None: they are invalid, which the compile will report."""
    fields: dict[str, Any] = {
        "name": config.model.name,
        "source": "/",  # the checkpoint is passed separately
        "engine": config.model.engine,
        "kind": config.model.kind,
        "dtype": config.dtype,
        "tp_degree": config.model.tp_degree,
        "max_batch": config.model.max_batch,
        "max_len": config.max_len,
        "engine_options": config.model.engine_options,
        "buckets": {"prefill": config.model.buckets.prefill, "decode": config.model.buckets.decode},
        "compiler": {"workers": config.model.compiler.workers},
        "host_memory_gib": load_gib,
    }
    try:
        return ModelSpec(**fields)
    except ValueError:
        return None


def free_gib() -> float:
    """Returns the free host memory that this process may use, in GiB."""
    return host_facts.available_memory() / GIB


@dataclass(eq=False)
class _Turn:
    need_gib: float


class MemoryGate:
    """Admits the compiles of one host. Thread-safe."""

    def __init__(self, memory_gib: Callable[[], float] = free_gib) -> None:
        """``memory_gib``: returns the free memory."""
        self._free_gib = memory_gib
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._budget_gib = 0.0  # free memory when no compile was running
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, need_gib: float, stop: threading.Event) -> Iterator[None]:
        """Waits until ``need_gib`` are available and reserves them inside the context. Raises Stopped soon after
        ``stop`` is set."""
        own = _Turn(need_gib)
        with self._changed:
            self._waiting.append(own)
            try:
                while own not in self._running:
                    self._begin()
                    if own not in self._running:
                        self._changed.wait(LOOK_S)
                        if stop.is_set():
                            raise Stopped("stopped while waiting for memory to compile")
            except BaseException:
                if own in self._running:
                    self._running.remove(own)
                raise
            finally:
                if own in self._waiting:
                    self._waiting.remove(own)
        try:
            yield
        finally:
            with self._changed:
                self._running.remove(own)
                self._changed.notify_all()

    def _begin(self) -> None:
        """Starts jobs within both the memory that was free before the running ones and the memory that is free now:
        running jobs have not allocated all of theirs yet, and other processes allocate, too."""
        free, used = self._free_gib(), sum(turn.need_gib for turn in self._running)
        if not self._running:
            self._budget_gib = free
        memory_gib = min(self._budget_gib, used + free)
        for turn in startable(self._waiting, self._running, memory_gib=memory_gib, jobs=MOST):
            self._waiting.remove(turn)
            self._running.append(turn)
        self._changed.notify_all()


def _checkpoint(source: str | None, kind: Kind) -> Checkpoint | None:
    """Returns the checkpoint; None: there is none, or its family is unknown."""
    if source is None:
        return None
    try:
        config = foreign_files.read_json(Path(source, "config.json"))
        return Checkpoint.from_config(config, kind) if isinstance(config, dict) else None
    except (OSError, ValueError, CheckpointError):
        return None
