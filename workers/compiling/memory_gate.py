"""Which compiles of a host run at once: as many as its memory allows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from placements.facts.checkpoints import Checkpoint, CheckpointError
from placements.facts.engines import Engine, needs_neuron
from placements.resources.memory import COMPILE_WORKER_GIB, CPU_COMPILE_GIB, PROCESS_GIB, host_memory
from placements.spec.schema import ModelSpec
from workers.artifacts.sources.listing import Stopped
from workers.engines.checkpoint_files import read_config
from workers.host import host_facts
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

GIB = 2**30
LOOK_S = 1.0  # between two looks at the memory, which others take and give back without a word
MOST = 256


class Compile(Protocol):
    """Something that is compiled."""

    @property
    def need_gib(self) -> float:
        """Of the host's memory, while it is compiled."""
        ...


C = TypeVar("C", bound=Compile)


def startable(waiting: Sequence[C], running: Collection[Compile], *, memory_gib: float, jobs: int) -> tuple[C, ...]:
    """Which of ``waiting``, in their order, are begun beside those that run.

    1. At most ``jobs`` run at once.
    2. Their needs together stay within ``memory_gib``; one that does not fit lets those behind it pass.
    3. A job that needs more than all of it runs alone: what it needs is an estimate.
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
    """What compiling for that replica takes of the host's memory, by the estimate of the plan: reading the checkpoint,
    and one compiler. Its sources are folders of this host; ``load_gib`` is the spec's ``host_memory_gib``.

    Of a checkpoint that the planner cannot read, only the process and its compiler are counted.
    """
    checkpoint, model = _checkpoint(config.source), _model(config, load_gib)
    if checkpoint is None or model is None:
        compiler = COMPILE_WORKER_GIB if needs_neuron(cast(Engine, config.engine)) else CPU_COMPILE_GIB
        return (load_gib or PROCESS_GIB) + compiler
    need = host_memory(model, checkpoint, model.engine, _checkpoint(config.draft_source))
    return need.load + need.compile


def _model(config: ReplicaConfig, load_gib: float | None) -> ModelSpec | None:
    """What of it decides about memory; None: no spec can say so, and the compile will tell what is wrong."""
    told: dict[str, Any] = {
        "name": config.model,
        "source": "/",  # the checkpoint is read apart
        "engine": config.engine,
        "dtype": config.dtype,
        "tp_degree": config.tp_degree,
        "max_batch": config.slots,
        "max_len": config.max_len,
        "engine_options": config.engine_options,
        "host_memory_gib": load_gib,
    }
    try:
        return ModelSpec(**told)
    except ValueError:
        return None


def free_gib() -> float:
    """The memory of this host that nobody uses, and that this process may take."""
    return host_facts.available_memory() / GIB


@dataclass(eq=False)
class _Turn:
    need_gib: float


class MemoryGate:
    """Of all compiles of one host. Used by any number of threads."""

    def __init__(self, memory_gib: Callable[[], float] = free_gib, jobs: int = MOST) -> None:
        """``memory_gib`` tells what is free now. ``jobs``: at most so many at once."""
        self._free_gib, self._jobs = memory_gib, jobs
        self._waiting: list[_Turn] = []
        self._running: list[_Turn] = []
        self._budget_gib = 0.0  # what was free when nothing was compiled
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def turn(self, need_gib: float, stop: threading.Event) -> Iterator[None]:
        """Within it ``need_gib`` are the caller's; waits for them. Raises Stopped soon after ``stop`` is set."""
        own = _Turn(need_gib)
        with self._changed:
            self._waiting.append(own)
            try:
                while own not in self._running:
                    self._begin()
                    if own not in self._running:
                        self._changed.wait(LOOK_S)
                        if stop.is_set():
                            raise Stopped("nobody waits for it to be compiled any more")
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
        """Those that run have not taken all yet that they will, and others take memory too: so what is free now, and
        what was free before they began, are both not to be passed."""
        free, used = self._free_gib(), sum(turn.need_gib for turn in self._running)
        if not self._running:
            self._budget_gib = free
        memory_gib = min(self._budget_gib, used + free)
        for turn in startable(self._waiting, self._running, memory_gib=memory_gib, jobs=self._jobs):
            self._waiting.remove(turn)
            self._running.append(turn)
        self._changed.notify_all()


def _checkpoint(source: str | None) -> Checkpoint | None:
    """None: there is none, or it is of a family that is not known."""
    if source is None:
        return None
    try:
        return Checkpoint.from_config(read_config(Path(source)))
    except (EngineLoadError, CheckpointError):
        return None
