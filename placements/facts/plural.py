"""English plurals in messages."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """Returns the noun in the form for the number: "host" for 1, else "hosts"."""
    return noun if number == 1 else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Returns, for example, "1 host" or "2 hosts"."""
    return f"{number} {plural(number, noun)}"
