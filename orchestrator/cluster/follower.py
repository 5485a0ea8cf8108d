"""Follows the controller for `up`: calls it through its restarts, reports its progress, and applies a changed spec."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from orchestrator.access.audit_log import Audit
from orchestrator.messages.controller_replies import SpecReply
from orchestrator.messages.fleet_status import FleetStatus, ModelInFleet, ReplicaInFleet
from orchestrator.process.awake_clock import LATE_S
from orchestrator.process.failure import Failed
from orchestrator.process.spec_text import read_text
from placements.spec.problems import Problem, render
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
        from orchestrator.cluster.calls import ActorUnavailable, CallFailed, CallLate, answer

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
        from orchestrator.cluster.calls import ActorUnavailable, CallFailed, CallLate, answer

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

    def _apply_watched(self, text: str, file: str, base_dir: str) -> SpecReply | None:
        reply: SpecReply | None = self.ask(
            lambda: self.controller.apply.remote(text, file, base_dir, "up --watch", "watch")
        )
        return reply


MOST_NAMED = 4  # replicas in a line that shows what `up` waits for


class Narration:
    """The news that were reported, and the replicas that the fleet waits for before it is ready."""

    def __init__(self) -> None:
        self.unready: list[str] = []
        self._reported: dict[str, str] = {}  # the last news of each replica or model
        self._hold = ""  # why the controller holds its actions

    def news(self, status: FleetStatus) -> list[str]:
        """Returns a line for each change since the last status."""
        self.unready = [text for model in status.models for text in _unready(model)]
        hold, lines = status.hold, []
        if hold and hold != self._hold:
            lines.append(f"error: {hold}")
        self._hold = hold
        for model in status.models:
            for id, (news, line) in _news(model).items():
                if self._reported.get(id) != news:
                    self._reported[id] = news
                    lines.append(line)
        return lines

    def waited_for(self) -> str:
        named, more = self.unready[:MOST_NAMED], len(self.unready) - MOST_NAMED
        return ", ".join(named) + (f" and {more} more" if more > 0 else "") or "the controller to find the fleet ready"


def _news(model: ModelInFleet) -> dict[str, tuple[str, str]]:
    """Returns a key and a line, as `progress`, for each replica, and for a model without one."""
    news = {replica.id: progress(replica) for replica in model.replicas}
    if not news and model.reason:
        text = f"{model.name} {model.state.value}: {model.reason}"
        news[model.name] = text, text
    for preparation in model.preparing:
        text = f"{model.name} {preparation.state} on {preparation.host}, for the new version"
        news[f"{model.name} on {preparation.host}"] = text, text
    return news


def _unready(model: ModelInFleet) -> list[str]:
    """Returns what a model waits for before it is ready, such as "chat/0 (loading)"."""
    replicas = [f"{replica.id} ({replica.state.value})" for replica in model.replicas if not replica.ready]
    return replicas or ([f"{model.name} ({model.state.value})"] if model.wanted and not model.replicas else [])


def progress(replica: ReplicaInFleet) -> tuple[str, str]:
    """Returns a key that changes with each news of a replica (of a fetch: each phase and each tenth), and its line."""
    held, fetch = replica.cores, replica.fetch
    cores = "" if held is None else f" on core{'s' if '-' in held else ''} {held}"
    reason = f": {replica.reason}" if replica.reason else ""
    line = f"{replica.id} {replica.state.value}{cores}{reason}"
    if fetch is None:
        return line, line
    silent = " silent" if fetch.trouble else ""
    return f"{line} {fetch.phase} {fetch.tenths}{silent}", f"{replica.id} {fetch.text}"


class Display(Protocol):
    """Shows which replicas start. Calls come from several threads."""

    @property
    def drawn(self) -> bool:
        """True while something is shown, in place of lines about what `up` waits for."""

    def show_status(self, status: FleetStatus) -> None:
        """Shows the status in place of the last one."""

    def clear(self) -> None:
        """Removes what is shown until the next status."""

    def close(self) -> None:
        """Removes what is shown; later statuses are ignored."""


class NoDisplay:
    """The display of `up` without a terminal: only lines."""

    drawn = False

    def show_status(self, status: FleetStatus) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass


class SpecWatch:
    """The file as it was last read, and as it was last applied. A rejected spec leaves the fleet unchanged."""

    def __init__(
        self,
        spec: tuple[str, str, str],
        audit: Audit,
        apply: Callable[[str, str, str], SpecReply | None],
        report: Callable[[str], None],
    ) -> None:
        """``spec``: its text, file and folder. ``apply`` returns None while the fleet ends."""
        self._applied = spec[0]
        self._last: str | None = spec[0]  # None: it cannot be read, which was reported
        self._file, self._base_dir = spec[1:]
        self._audit = audit
        self._apply = apply
        self._report = report
        self._failing = False  # the last apply failed for a reason outside the spec, such as a full disk
        self._unreadable: Problem | None = None  # why the file could not be read last

    def poll(self) -> None:
        """Applies the file if it differs from the applied text, and is the same in two polls. Reports a file that
        cannot be read in two polls once: an editor may replace it meanwhile."""
        try:
            text = read_text(self._file, regular=True)
        except Failed as failed:
            if self._last is not None and failed.problem == self._unreadable:
                self._report_result(SpecReply(error=failed.problem))
                self._last = None
            self._unreadable = failed.problem
            return
        self._unreadable = None
        if text != self._last or text == self._applied:  # still being written, or unchanged
            self._last = text
            return
        result = self._result(text)
        if result is None:
            return
        before, self._failing = self._failing, result.is_failure
        if not (self._failing and before):  # reported once, but retried
            self._report_result(result)
        if not self._failing:
            self._applied = text

    def _result(self, text: str) -> SpecReply | None:
        fields = {"text": text, "file": self._file, "base_dir": self._base_dir}
        try:
            line = self._audit.begin("up", "apply", fields, by="up --watch")
        except Failed as failed:
            return SpecReply(error=failed.problem, is_failure=True)
        result = self._apply(text, self._file, self._base_dir)
        if result is not None:
            self._audit.finish(line, "done" if result.error is None else result.error.id, result.revision)
        return result

    def _report_result(self, result: SpecReply) -> None:
        if result.error is not None:
            self._report(render([*result.problems, result.error]).rstrip("\n"))
            self._report(f"{self._file} was rejected: the fleet is unchanged")
        elif result.changed:
            self._report(f"{self._file} has changed: revision {result.revision}")
