from __future__ import annotations

from placements.facts.core_range import CoreRange
from placements.planner.pins import FreeCores, assign
from placements.spec.notation import CorePin
from tests.placements.fleets import PLAIN, host

TWO = {"h/0": FreeCores.of(host()), "h/1": FreeCores.of(host())}


def assigned(*pins: str) -> tuple[str | None, ...]:
    return assign([CorePin.parse(pin) for pin in pins], TWO)


def test_pins_without_a_host_spread_over_hosts() -> None:
    """Two ranges that share cores are placed on two hosts; a third one finds none."""
    assert assigned("0-7", "4-11", "0-7") == ("h/0", "h/1", None)


def test_a_pin_with_a_host_precedes_one_without() -> None:
    """Whichever is written first."""
    assert assigned("0-7", "h/0:0-7") == ("h/1", "h/0")


def test_the_first_of_two_pins_on_one_host_is_placed() -> None:
    """The later one has no place."""
    assert assigned("h/0:0-7", "h/0:7-8", "h/1:7-8") == ("h/0", None, "h/1")


def test_a_search_is_needed_where_greed_fails() -> None:
    """0-3 and 8-11 must share a host, so that 2-9 gets the other."""
    assert assigned("0-3", "8-11", "2-9") == ("h/0", "h/0", "h/1")


def test_missing_cores_are_on_no_host() -> None:
    """A pin beyond the last core, or on an unknown host."""
    assert assigned("23-24", "x:0-1") == (None, None)


def test_used_cores_are_no_longer_free() -> None:
    """A range with one used core is not free, and one beyond the host never was."""
    rest = FreeCores.of(host(), range(8, 24)).without(CoreRange(2, 3))
    assert [rest.holds(CoreRange.parse(text)) for text in ("0-1", "1-2", "4-7", "24-25")] == [True, False, True, False]


def test_a_plain_host_has_no_free_cores() -> None:
    assert FreeCores.of(PLAIN).mask == 0
