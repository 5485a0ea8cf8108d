"""Versions of packages, compared by their numbers."""

from __future__ import annotations


def series(version: str) -> str:
    """Returns the series of a version, as in the tables of versions: "0.8.16251+f3ca5575" -> "0.8"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def order(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to compare; 0 for a part that is not a number."""
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("+")[0].split("."))


def reaches(version: str, first: str) -> bool:
    """Returns whether a version belongs to the series ``first`` or a later one."""
    return order(series(version)) >= order(first)
