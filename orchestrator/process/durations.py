"""Parses times and time spans from command-line texts."""

from __future__ import annotations

import datetime
import re

_SPAN = re.compile(r"([0-9]{1,9})([smhdw])", re.ASCII)
_SPAN_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def span_s(text: str) -> int | None:
    """Returns the seconds of a span such as 90m, 12h, 30d or 8w; None if the text is not a span."""
    span = _SPAN.fullmatch(text)
    return None if span is None else int(span[1]) * _SPAN_S[span[2]]


def moment(text: str) -> float:
    """Returns an ISO 8601 date or time in seconds since the epoch; without a zone it is in UTC.

    Raises ValueError.
    """
    when = datetime.datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
    try:
        return (when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)).timestamp()
    except OverflowError as error:
        raise ValueError(str(error)) from None
