"""The display of a fleet's progress beside the lines that `up` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Display(Protocol):
    """Shows which replicas start. Calls come from several threads."""

    @property
    def drawn(self) -> bool:
        """True while something is shown, in place of lines about what `up` waits for."""

    def show_status(self, status: Mapping[str, Any]) -> None:
        """Shows the status in place of the last one."""

    def close(self) -> None:
        """Removes what is shown; later statuses are ignored."""


class NoDisplay:
    """The display of `up` without a terminal: only lines."""

    drawn = False

    def show_status(self, status: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass
