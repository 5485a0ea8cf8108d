"""Applies the spec's file when it changes, for `up --watch`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.access.audit_log import Audit
from orchestrator.process.failure import Failed
from placements.spec.problems import render


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
        self._applied = self._last = spec[0]
        self._file, self._base_dir = spec[1:]
        self._audit = audit
        self._apply = apply
        self._report = report
        self._failing = False  # the last apply failed for a reason outside the spec, such as a full disk

    def poll(self) -> None:
        """Applies the file if it differs from the applied text, and is the same in two polls."""
        text = self._read()
        if text is None or text == self._applied or text != self._last:  # unchanged, or still being written
            self._last = text or self._last
            return
        result = self._result(text)
        if result is None:
            return
        before, self._failing = self._failing, result.get("status", 0) >= 500
        if not (self._failing and before):  # reported once, but retried
            self._report_result(result)
        if not self._failing:
            self._applied = text

    def _read(self) -> str | None:
        try:
            return Path(self._file).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None

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
