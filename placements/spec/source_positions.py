"""Positions of a spec's keys in its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Path = tuple[str | int, ...]  # ("models", "tiny", "cores", 0)


@dataclass(frozen=True)
class SourcePosition:
    """Line and column of a key, or of an item of a list, both counted from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class SourcePositions:
    """The positions of one file's keys. All instances compare equal, so that positions do not affect equality."""

    filename: str = field(default="<spec>", compare=False)
    positions: Mapping[Path, SourcePosition] = field(default_factory=dict, compare=False, repr=False)

    def where(self, *path: str | int) -> str:
        """Returns "file:line:column" of the path or of the nearest key above it; "" for a spec without a file."""
        place = nearest(self.positions, path)
        return "" if place is None else f"{self.filename}:{place.line}:{place.column}"


def nearest(positions: Mapping[Path, SourcePosition], path: Path) -> SourcePosition | None:
    """Returns the position of the path or of the nearest key above it."""
    above = (path[:length] for length in range(len(path), -1, -1))
    return next((positions[key] for key in above if key in positions), None)
