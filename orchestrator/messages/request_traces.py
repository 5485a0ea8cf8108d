"""Reads the request traces that gateways record to files, in pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Page:
    """Requests in recording order, the cursor ``next`` of the following page, and whether there are ``more``."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    next: str = ""
    more: bool = False


def read_page(folder: Path, after: str, limit: int) -> Page:
    """Returns up to ``limit`` requests after the cursor ``after``: "" for the oldest stored one, or a page's ``next``.

    Deleted requests and unreadable lines, such as the last one after a crash, are skipped. Raises ValueError for an
    invalid cursor.
    """
    places = _places(after)
    requests_read: list[dict[str, Any]] = []
    more = False
    for gateway, files in parts(folder).items():
        for start, path in files:
            place = max(places.get(gateway, 0), start)
            requests, places[gateway], incomplete = _read_part(path, start, place, limit - len(requests_read))
            requests_read += requests
            if incomplete:
                more = True
                break
    cursor = ",".join(f"{gateway}:{place}" for gateway, place in sorted(places.items()))
    return Page(requests_read, cursor, more)


def _read_part(path: Path, start: int, place: int, limit: int) -> tuple[list[dict[str, Any]], int, bool]:
    """Returns the requests from byte ``place`` on, where the next one begins, and whether there are more."""
    requests: list[dict[str, Any]] = []
    try:
        with path.open("rb") as stream:
            stream.seek(place - start)
            for line in stream:
                if not line.endswith(b"\n"):  # it is still being written
                    break
                if len(requests) >= limit:
                    return requests, place, True
                place += len(line)
                if (request := _request(line)) is not None:
                    requests.append(request)
    except FileNotFoundError:
        pass
    return requests, place, False


def _request(line: bytes) -> dict[str, Any] | None:
    try:
        at, model, prompt, output, key, first, decode = line.decode().rstrip("\n").split(",")
        return {
            "time": float(at),
            "model": model,
            "prompt_tokens": int(prompt),
            "output_tokens": int(output),
            "key": key,
            "first_ms": float(first),
            "decode_ms": float(decode),
        }
    except ValueError:
        return None


def _places(after: str) -> dict[str, int]:
    places: dict[str, int] = {}
    for part in after.split(",") if after else ():
        gateway, _, place = part.rpartition(":")
        if not (gateway and place.isascii() and place.isdecimal()):
            raise ValueError(f"{part!r} is not a position in a trace")
        places[gateway] = int(place)
    return places


def parts(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    """Returns the files of each gateway in order, with the position of their first byte."""
    by_gateway: dict[str, list[tuple[int, Path]]] = {}
    for path in folder.glob("*.*.csv"):
        gateway, _, start = path.name.removesuffix(".csv").rpartition(".")
        if gateway and start.isascii() and start.isdecimal():
            by_gateway.setdefault(gateway, []).append((int(start), path))
    return {gateway: sorted(files) for gateway, files in sorted(by_gateway.items())}
