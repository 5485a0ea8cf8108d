"""Applies the spec's file when it changes, for `up --watch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.access.audit_log import Audit
from orchestrator.process.failure import Failed
from orchestrator.process.spec_text import read_text
from placements.spec.problems import Problem, render


class SpecWatch:
    """The file as it was last read, and as it was last applied. A rejected spec leaves the fleet unchanged."""

    def __init__(
        self,
        spec: tuple[str, str, str],
        audit: Audit,
        apply: Callable[[str, str, str], Any],
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
                self._report_result({"error": failed.problem, "problems": ()})
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
        before, self._failing = self._failing, result.get("status", 0) >= 500
        if not (self._failing and before):  # reported once, but retried
            self._report_result(result)
        if not self._failing:
            self._applied = text

    def _result(self, text: str) -> Any:
        fields = {"text": text, "file": self._file, "base_dir": self._base_dir}
        try:
            line = self._audit.begin("up", "apply", fields, by="up --watch")
        except Failed as failed:
            return {"error": failed.problem, "problems": (), "status": 507}
        result = self._apply(text, self._file, self._base_dir)
        if result is not None:
            self._audit.finish(line, result["error"].id if "error" in result else "done", result.get("revision"))
        return result

    def _report_result(self, result: dict[str, Any]) -> None:
        if "error" in result:
            self._report(render([*result["problems"], result["error"]]).rstrip("\n"))
            self._report(f"{self._file} was rejected: the fleet is unchanged")
        elif result["changed"]:
            self._report(f"{self._file} has changed: revision {result['revision']}")
