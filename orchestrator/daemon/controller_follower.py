"""Follows the controller for `up`: calls it through its restarts, reports its progress, and applies a changed spec."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.access.audit_log import Audit
from orchestrator.daemon.display import Display, NoDisplay
from orchestrator.daemon.narration import Narration
from orchestrator.daemon.spec_watch import SpecWatch
from orchestrator.process.awake_clock import LATE_S
from orchestrator.process.failure import Failed
from workers.host.lifetime import Process, end_process

STATUS_WAIT_S = 1.0  # longest background call to Ray, which the shutdown waits for
CONTROLLER_AWAY_S = 30.0  # a restart takes 2 s
CONTROLLER_RETRY_S = 0.2
CONTROLLER_THERE_S = 5.0  # a call that lasted this long had a controller: without one it fails immediately
CONTROLLER_LATE_S = 12.0  # for a status
PING_S = 6.0  # for a reply to the next two calls, which a living controller answers at once
WATCH_POLL_S = 0.5  # a change is applied once two readings agree


class ControllerFollower:
    """The controller as `up` sees it. ``controller`` is its handle, once it is started. Set ``ending`` before the
    fleet or this process ends: calls return then, and nothing is reported any more."""

    def __init__(
        self,
        report: Callable[[str], None],
        logs: Path,
        away_s: float = CONTROLLER_AWAY_S,
        display: Display | None = None,
    ) -> None:
        """``away_s``: the controller must be back after this time. ``display`` gets each status."""
        self.controller: Any = None
        self.ending = False
        self.ready = threading.Event()
        self.narration = Narration()
        self._report = report
        self._display = display or NoDisplay()
        self._logs = logs
        self._away_s = away_s
        self._seen = 0  # the version of the status that was reported last
        self._process: Process | None = None  # the controller's

    def ask(self, call: Callable[[], Any], within_s: float | None = None) -> Any:
        """Returns the result of ``call``, retried while the controller restarts; None once the fleet ends. A controller
        that does not reply ``within_s`` and hangs is killed, and Ray restarts it.

        Raises Failed if the controller does not come back."""
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, CallLate, answer

        away_s, failed_at = 0.0, float("inf")
        while not self.ending:
            started = time.monotonic()
            try:
                return answer(call, within_s)
            except CallLate as error:
                if self._hangs():  # else it still adopts its replicas, for half a minute if one does not reply
                    self._end_hung(str(error))
            except CallFailed as error:
                raise self._failed(f"the controller failed: {error}") from None
            except ActorUnavailable as error:
                now = time.monotonic()
                # a longer gap is a pause of this process, in which the controller was paused too
                away_s += min(max(0.0, now - failed_at), LATE_S)
                if now - started > CONTROLLER_THERE_S:
                    away_s = 0.0
                failed_at = now
                if away_s > self._away_s:
                    raise self._failed(f"the controller does not come back: {error}") from None
                self._seen, self._process = 0, None  # a restarted controller counts from the start
                time.sleep(CONTROLLER_RETRY_S)
        return None

    def _hangs(self) -> bool:
        """Returns whether the controller's process does not reply, twice: once can be a pause of the whole machine."""
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, CallLate, answer

        for _ in range(2):
            try:
                answer(lambda: self.controller.process.remote(), PING_S)
            except CallLate:
                continue
            except (ActorUnavailable, CallFailed):
                return False
            else:
                return False
        return True

    def _end_hung(self, cause: str) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.report(f"the controller hangs ({cause}) and is restarted")
            end_process(process)

    def _failed(self, what: str) -> Failed:
        return Failed("controller-failed", what, f"see {self._logs / 'controller.log'}")

    def narrate(self) -> None:
        """Report changes of replicas until the fleet ends, and set ``ready`` once it is."""
        while not self.ending:
            if self._process is None:
                self._process = self.ask(lambda: self.controller.process.remote(), CONTROLLER_LATE_S)
            reply = self.ask(lambda: self.controller.status.remote(self._seen, STATUS_WAIT_S), CONTROLLER_LATE_S)
            if reply is None:
                return
            self._seen, status = reply
            for line in self.narration.news(status):
                self.report(line)
            self._display.show_status(status)
            if status.ready:
                self.ready.set()

    def report(self, line: str) -> None:
        if not self.ending:
            self._report(line)

    def watch(self, spec: tuple[str, str, str], audit: Audit) -> None:
        """Apply the spec's file when it changes, until the fleet ends."""
        watch = SpecWatch(spec, audit, self._apply_watched, self.report)
        while not self.ending:
            time.sleep(WATCH_POLL_S)
            watch.poll()

    def _apply_watched(self, text: str, file: str, base_dir: str) -> Any:
        return self.ask(lambda: self.controller.apply.remote(text, file, base_dir, "up --watch", "watch"))
