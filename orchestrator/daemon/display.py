"""The display of a fleet's progress beside the lines that `up` prints."""

from __future__ import annotations

from typing import Protocol

from orchestrator.fleet.fleet_status import FleetStatus


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
