"""Positions of a spec's keys in its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Path = tuple[str | int, ...]  # ("models", "tiny", "cores", 0)


@dataclass(frozen=True)
class SourcePosition:
    """Line and column of a key, or of an item of a list, both counted from 1."""

    line: int
    column: int


class SourcePositions(Mapping[Path, SourcePosition]):
    """Path of keys -> position, for one file. All instances compare equal, so that positions do not affect equality."""

    def __init__(self, filename: str = "<spec>", places: Mapping[Path, SourcePosition] | None = None) -> None:
        self.filename = filename
        self._places = dict(places or {})

    def where(self, *path: str | int) -> str:
        """Returns "file:line:column" of the path or of the nearest key above it; "" for a spec without a file."""
        for length in range(len(path), -1, -1):
            place = self._places.get(path[:length])
            if place is not None:
                return f"{self.filename}:{place.line}:{place.column}"
        return ""

    def __getitem__(self, path: Path) -> SourcePosition:
        return self._places[path]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SourcePositions)

    def __hash__(self) -> int:
        return hash(SourcePositions)

    def __repr__(self) -> str:
        return f"Places({self.filename!r}, {len(self)} keys)"
