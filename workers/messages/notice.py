"""The notice that a host will end, from the machine's cloud or from Ray."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a host's end, and its time."""

    cause: str  # "spot interruption", "rebalance recommendation", "drain by Ray"
    until: float | None = None  # Unix time at which the host may be gone; None: it has no deadline


def earliest(notices: Iterable[Notice | None]) -> Notice | None:
    """Returns the notice with the first deadline; one without a deadline only if all have none."""
    given = [notice for notice in notices if notice is not None]
    return min(given, key=lambda notice: float("inf") if notice.until is None else notice.until, default=None)
