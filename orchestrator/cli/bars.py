"""Progress bars on a terminal, below the lines that a command prints."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from orchestrator.cli.output import can_redraw
from orchestrator.messages.fleet_status import FleetStatus, ReplicaInFleet
from orchestrator.messages.replica_states import STARTING, State

SHOW_CURSOR = "\x1b[?25h"
ALMOST = 0.99  # of a bar whose task takes longer than usual


@dataclass(frozen=True)
class Bar:
    """The progress of one task. ``total`` and ``done`` have any unit; without a total the bar pulses.

    ``left_s`` is the remaining time in seconds; None: as the progress so far predicts it, if there is a total.
    """

    name: str
    text: str
    done: float = 0.0
    total: float | None = None
    left_s: float | None = None

    @property
    def full(self) -> bool:
        return self.total is not None and self.done >= self.total


class Bars:
    """The bars on one terminal; nothing is drawn while there are none. Thread-safe."""

    def __init__(self, stream: TextIO, *, keep: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """``keep``: the last bars stay on the terminal when they are closed."""
        self._stream, self._keep, self._clock = stream, keep, clock
        self._loading: dict[str, float] = {}  # when a status first showed that a replica loads
        self._lock = threading.Lock()
        self._progress: Any = None  # rich is imported with the first bar: most commands have none
        self._tasks: dict[str, Any] = {}
        self._closed = False

    @property
    def drawn(self) -> bool:
        """True while there are bars on the terminal."""
        return bool(self._tasks)

    def show(self, bars: Iterable[Bar]) -> None:
        """Draws these bars in place of the last ones. The time of a task counts from its first bar."""
        with self._lock:
            shown = {} if self._closed else {bar.name: bar for bar in bars}
            if not shown and not self._tasks:
                return
            if self._progress is None:
                self._progress = _progress(self._stream, keep=self._keep)
            for name in self._tasks.keys() - shown.keys():
                self._progress.remove_task(self._tasks.pop(name))
            for name, bar in shown.items():
                if name not in self._tasks:
                    self._tasks[name] = self._progress.add_task(name, total=None, text="", left_s=None)
                shown_now = {"completed": bar.done, "total": bar.total, "text": bar.text, "left_s": bar.left_s}
                self._progress.update(self._tasks[name], **shown_now)
                if bar.full:
                    self._progress.stop_task(self._tasks[name])
            if shown:
                self._progress.start()
            else:
                self._progress.stop()

    def say(self, line: str) -> None:
        """Prints a line above the bars."""
        with self._lock:
            if self._tasks:
                self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
            else:
                self._stream.write(line + "\n")
                self._stream.flush()

    def show_status(self, status: FleetStatus) -> None:
        """Draws a bar for each replica that starts."""
        now, bars, loading = self._clock(), [], {}
        for model in status.models:
            usual_s = max((replica.load_s or 0.0 for replica in model.replicas), default=0.0)
            for replica in model.replicas:
                if replica.state is State.LOADING:
                    loading[replica.id] = self._loading.get(replica.id, now)
                if replica.state in STARTING:
                    bars.append(_replica_bar(replica, now - loading.get(replica.id, now), usual_s))
        self._loading = loading
        self.show(bars)

    def clear(self) -> None:
        """Removes the bars until the next ones."""
        self.show(())

    def close(self) -> None:
        """Ends the drawing: lines may still be printed. Also shows the cursor, which a killed process left hidden."""
        with self._lock:
            self._closed = True
            if self._progress is not None:
                self._progress.stop()
            self._tasks.clear()
            self._stream.write(SHOW_CURSOR)
            self._stream.flush()


@contextlib.contextmanager
def bars_on(stream: TextIO, *, keep: bool = False) -> Iterator[Bars | None]:
    """Yields the bars of a terminal, and closes them; None for a stream whose text cannot be replaced."""
    if not can_redraw(stream):
        yield None
        return
    with contextlib.closing(Bars(stream, keep=keep)) as bars:
        yield bars


def _progress(stream: TextIO, *, keep: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            left_s = task.time_remaining if task.fields["left_s"] is None else task.fields["left_s"]
            return Text(f"{task.elapsed or 0:.0f} s" + (f", {left_s:.0f} s left" if left_s else ""))

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        Times(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[text]}", markup=False),
    )
    return Progress(*columns, console=Console(file=stream), transient=not keep, refresh_per_second=4)


def _replica_bar(replica: ReplicaInFleet, loading_s: float, usual_s: float) -> Bar:
    """Returns the progress of a replica: the bytes of its fetch, or the time of its load over that of earlier loads of
    its model, if there were any."""
    fetch = replica.fetch
    if fetch is not None:
        text = f"{fetch.phase} {fetch.numbers(left=False)}"
        return Bar(replica.id, text, fetch.bytes, fetch.total, fetch.left_s)
    text = replica.state.value + (f" on {replica.host} cores {replica.cores}" if replica.cores else "")
    if replica.state is not State.LOADING or not usual_s:
        return Bar(replica.id, text)
    left_s = max(0.0, usual_s - loading_s)
    return Bar(replica.id, text, min(loading_s, ALMOST * usual_s), usual_s, left_s or None)
