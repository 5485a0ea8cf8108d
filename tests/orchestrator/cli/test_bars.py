"""Progress bars: what a terminal shows while replicas start, and that lines stay readable above them."""

from __future__ import annotations

import io
from typing import Any

from orchestrator.cli.bars import SHOW_CURSOR, Bar, Bars
from orchestrator.messages.fleet_status import FleetStatus
from tests.orchestrator.fakefleet import STATUS, replica, status_of


class Terminal(io.StringIO):
    """A terminal that keeps what was written to it."""

    def isatty(self) -> bool:
        return True


def showing(*replicas: dict[str, Any]) -> FleetStatus:
    return status_of({**STATUS, "models": [{**STATUS["models"][0], "replicas": list(replicas)}]})


FETCH = {
    "source": "s3://models/chat",
    "phase": "fetching",
    "bytes": 3_000_000_000,
    "total": 4_000_000_000,
    "bytes_per_s": 500_000_000,
    "left_s": 2.0,
    "trouble": None,
}


def test_a_fetch_shows_its_rate_and_the_time_left() -> None:
    terminal = Terminal()
    bars = Bars(terminal)
    bars.show_status(showing(replica("chat/0", "0-7", "fetching", fetch=FETCH)))
    bars.close()

    assert "chat/0" in terminal.getvalue()
    assert "fetching 3.0 GB of 4.0 GB, 500.0 MB/s" in terminal.getvalue()
    assert "2 s left" in terminal.getvalue()


def test_a_load_shows_the_time_left_of_the_usual_one() -> None:
    """That of an earlier start, or of another replica; a load that takes longer shows none."""
    terminal, now = Terminal(), [100.0]
    bars = Bars(terminal, clock=lambda: now[0])
    status = showing(replica("chat/0", "0-7", "loading", load_s=None), replica("chat/1", "8-15", load_s=30.0))
    bars.show_status(status)
    now[0] += 12.0
    bars.show_status(status)
    bars.close()
    early = terminal.getvalue()
    late = Terminal()
    bars = Bars(late, clock=lambda: now[0])
    bars.show_status(status)
    now[0] += 31.0
    bars.show_status(status)
    bars.close()

    assert "18 s left" in early
    assert late.getvalue().rstrip().endswith(SHOW_CURSOR)
    assert "-1 s left" not in late.getvalue()


def test_only_replicas_that_start_have_a_bar() -> None:
    bars = Bars(Terminal())
    bars.show_status(showing(replica("chat/0", "0-7"), replica("chat/1", "8-15", "loading")))
    drawn = bars.drawn
    bars.show_status(showing(replica("chat/0", "0-7"), replica("chat/1", "8-15")))

    assert (drawn, bars.drawn) == (True, False)


def test_a_line_is_whole_while_bars_are_drawn_and_after_them() -> None:
    """Also a line with the brackets of rich's markup, and one that is longer than the terminal."""
    terminal = Terminal()
    bars = Bars(terminal)
    bars.show([Bar("chat/0", "loading")])
    bars.say("[red]not markup[/red] " + "x" * 300)
    bars.close()
    bars.say("after")

    assert "[red]not markup[/red] " + "x" * 300 in terminal.getvalue()
    assert terminal.getvalue().endswith(SHOW_CURSOR + "after\n")


def test_nothing_is_drawn_before_the_first_bar_or_after_the_end() -> None:
    terminal = Terminal()
    bars = Bars(terminal)
    bars.show([])
    before = terminal.getvalue()
    bars.close()
    bars.show([Bar("chat/0", "loading")])

    assert before == ""
    assert terminal.getvalue() == SHOW_CURSOR
    assert not bars.drawn
