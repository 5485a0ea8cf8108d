"""Progress bars on a terminal, below the lines that a command prints."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from orchestrator.fleet.progress_text import fetch_text

SHOW_CURSOR = "\x1b[?25h"
STARTING = ("pending", "fetching", "compiling", "loading")


@dataclass(frozen=True)
class Bar:
    """The progress of one task. ``total`` and ``done`` have any unit; without a total the bar pulses."""

    name: str
    text: str
    done: float = 0.0
    total: float | None = None

    @property
    def full(self) -> bool:
        return self.total is not None and self.done >= self.total


class Bars:
    """The bars on one terminal; nothing is drawn while there are none. Thread-safe."""

    def __init__(self, stream: TextIO, *, keep: bool = False) -> None:
        """``keep``: the last bars stay on the terminal when they are closed."""
        self._stream, self._keep = stream, keep
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
                    self._tasks[name] = self._progress.add_task(name, total=None, text="")
                self._progress.update(self._tasks[name], completed=bar.done, total=bar.total, text=bar.text)
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

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Draws a bar for each replica that starts."""
        replicas = (replica for model in status["models"] for replica in model["replicas"])
        self.show(_replica_bar(replica) for replica in replicas if replica["state"] in STARTING)

    def close(self) -> None:
        """Ends the drawing: lines may still be printed. Also shows the cursor, which a killed process left hidden."""
        with self._lock:
            self._closed = True
            if self._progress is not None:
                self._progress.stop()
            self._tasks.clear()
            self._stream.write(SHOW_CURSOR)
            self._stream.flush()


def _progress(stream: TextIO, *, keep: bool) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    return Progress(*columns, console=Console(file=stream), transient=not keep, refresh_per_second=4)


def _replica_bar(replica: Mapping[str, Any]) -> Bar:
    """Returns the progress of a replica: the bytes of its fetch, else only its state."""
    fetch, cores = replica.get("fetch"), replica.get("cores")
    if fetch:
        return Bar(replica["id"], fetch_text(fetch), fetch["bytes"], fetch["total"])
    return Bar(replica["id"], replica["state"] + (f" on {replica['host']} cores {cores}" if cores else ""))
