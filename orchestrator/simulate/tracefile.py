"""Traces: read from a file, written to one, and taken in pages from what gateways have recorded."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from orchestrator.bench.lengths import cut_pair
from orchestrator.gateway.recorder import parts
from orchestrator.simulate.request import Arrival
from placements.problems import Problem

MAX_PROBLEMS = 20
MOST_TOKENS = 1 << 24
COLUMNS = ("time", "model", "prompt_tokens", "output_tokens", "key")
EPOCH = 1e8  # a first time beyond it is taken for seconds since the epoch, not since the beginning of the trace


class TraceWrong(Exception):
    """What is wrong with a trace, line by line; the first MAX_PROBLEMS."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__(problems[0].what)
        self.problems = tuple(problems)


@dataclass(frozen=True)
class Trace:
    """Arrivals in the order of their times, held small: 22 bytes each. ``begins``: the first one's time in seconds
    since the epoch, where the file told it."""

    models: tuple[str, ...]
    keys: tuple[str, ...]
    begins: float | None
    times: array[float]
    of_model: array[int]
    prompts: array[int]
    outputs: array[int]
    of_key: array[int]

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[Arrival]:
        models, keys = self.models, self.keys
        for at, model, prompt, output, key in zip(
            self.times, self.of_model, self.prompts, self.outputs, self.of_key, strict=True
        ):
            yield Arrival(at, models[model], prompt, output, keys[key])

    @property
    def seconds(self) -> float:
        """From 0 to the last arrival."""
        return self.times[-1] if len(self.times) else 0.0


def fitted(trace: Trace, limits: Mapping[str, int]) -> tuple[Trace, int]:
    """With requests that are longer than ``limits`` allows for prompt and answer together cut as
    `orchestrator.bench.lengths` cuts them; and how many were."""
    most = [limits[model] for model in trace.models]
    prompts, outputs, cut = array("I", trace.prompts), array("I", trace.outputs), 0
    for i, model in enumerate(trace.of_model):
        if prompts[i] + outputs[i] > most[model]:
            prompts[i], outputs[i] = cut_pair((prompts[i], outputs[i]), most[model])
            cut += 1
    return (replace(trace, prompts=prompts, outputs=outputs), cut) if cut else (trace, 0)


class _Gathering:
    """A trace in the making."""

    def __init__(self) -> None:
        self.models: dict[str, int] = {}
        self.keys: dict[str, int] = {}
        self.times = array("d")
        self.of_model, self.of_key = array("H"), array("I")
        self.prompts, self.outputs = array("I"), array("I")

    def add(self, at: float, model: str, prompt: int, output: int, key: str) -> None:
        self.times.append(at)
        self.of_model.append(self.models.setdefault(model, len(self.models)))
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.of_key.append(self.keys.setdefault(key, len(self.keys)))

    def trace(self) -> Trace:
        """Times that are of the epoch begin at 0 then; those of a trace stay. Lines may stand in any order."""
        times = self.times
        order = sorted(range(len(times)), key=times.__getitem__)
        begins = times[order[0]] if order and times[order[0]] > EPOCH else None
        first = begins or 0.0
        return Trace(
            tuple(self.models),
            tuple(self.keys),
            begins,
            array("d", (times[i] - first for i in order)),
            array("H", (self.of_model[i] for i in order)),
            array("I", (self.prompts[i] for i in order)),
            array("I", (self.outputs[i] for i in order)),
            array("I", (self.of_key[i] for i in order)),
        )


def read_trace(stream: TextIO, name: str, models: Mapping[str, str]) -> Trace:
    """Read CSV, whose first line names the columns, or JSON lines; ``models`` gives the model that a name means.

    Further columns are passed over. Raises TraceWrong; it says of each bad line where it is and what is wrong.
    """
    gathered, problems = _Gathering(), list[Problem]()
    first = stream.readline()
    if not first.strip():
        raise TraceWrong([_problem(name, 1, "the trace is empty", "a header, or an object of JSON on each line")])
    rows = _json_rows(first, stream) if first.lstrip().startswith("{") else _csv_rows(first, stream, name)
    for number, row in rows:
        try:
            gathered.add(*_fields(row, models))
        except ValueError as error:
            problems.append(_problem(name, number, str(error), "mend the line, or leave it out"))
            if len(problems) >= MAX_PROBLEMS:
                break
    if problems:
        raise TraceWrong(problems)
    return gathered.trace()


def _csv_rows(first: str, stream: TextIO, name: str) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    header = [column.strip() for column in next(csv.reader([first]))]
    missing = [column for column in COLUMNS[:4] if column not in header]
    if missing:
        what = f"the header has no {' and no '.join(missing)}"
        raise TraceWrong([_problem(name, 1, what, f"the first line is {','.join(COLUMNS)}")])
    reader = csv.reader(stream)
    try:
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                yield reader.line_num + 1, ValueError(f"{len(row)} fields, the header has {len(header)}")
            else:
                yield reader.line_num + 1, dict(zip(header, row, strict=True))
    except csv.Error as error:
        yield reader.line_num + 1, ValueError(str(error))


def _json_rows(first: str, stream: TextIO) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    line = first
    number = 1
    while line:
        if line.strip():
            try:
                row = json.loads(line)
                yield number, row if isinstance(row, dict) else ValueError("no JSON object")
            except ValueError as error:
                yield number, ValueError(f"no JSON: {error}")
        line, number = stream.readline(), number + 1


def _fields(row: dict[str, Any] | ValueError, models: Mapping[str, str]) -> tuple[float, str, int, int, str]:
    """Raises ValueError."""
    if isinstance(row, ValueError):
        raise row
    for column in COLUMNS[:4]:
        if row.get(column) in (None, ""):
            raise ValueError(f"{column} is missing")
    called = str(row["model"])
    model = models.get(called)
    if model is None:
        raise ValueError(f"the spec has no model {called!r}")
    key = row.get("key")
    prompt, output = _tokens(row, "prompt_tokens"), _tokens(row, "output_tokens")
    return _seconds(row["time"]), model, prompt, output, "" if key is None else str(key)


def _tokens(row: Mapping[str, Any], column: str) -> int:
    value = row[column]
    try:
        tokens = int(value) if not isinstance(value, bool) else 0
        whole = float(value) == tokens
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{column} is no whole number: {value!r}") from None
    if not whole or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{column} is a whole number from 1 on, not {value!r}")
    return tokens


def _seconds(value: Any) -> float:
    """A number of seconds, or a date and time of ISO 8601; without a zone it is UTC."""
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        try:
            moment = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
        except ValueError:
            raise ValueError(f"time is neither seconds nor a date of ISO 8601: {value!r}") from None
        return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
    if not 0 <= seconds < math.inf:
        raise ValueError(f"time is a number of seconds from 0 on, not {value!r}")
    return seconds


def _problem(name: str, line: int, what: str, hint: str) -> Problem:
    return Problem("trace-wrong", "error", f"{name}:{line}", what, hint)


def write_trace(requests: Iterable[Mapping[str, Any]], stream: TextIO) -> int:
    """As CSV that `read_trace` reads, in the order of the times. Says how many.

    A request whose client left before its first token counts as one of one token, since it came; one without a prompt
    is left out.
    """
    ordered = sorted(requests, key=lambda request: float(request["time"]))
    whole = [{**request, "output_tokens": max(1, request["output_tokens"])} for request in ordered]
    whole = [request for request in whole if request["prompt_tokens"] > 0]
    stream.write(",".join((*COLUMNS, *MEASURED)) + "\n")
    for request in whole:
        stream.write(",".join(str(request[column]) for column in (*COLUMNS, *MEASURED)) + "\n")
    return len(whole)


# What gateways have recorded

MEASURED = ("first_ms", "decode_ms")


@dataclass(frozen=True)
class Page:
    """Requests in the order in which they were recorded, ``next`` to go on behind them, and whether there are more."""

    requests: list[dict[str, Any]] = field(default_factory=list)
    next: str = ""
    more: bool = False


def read_page(folder: Path, after: str, limit: int) -> Page:
    """Up to ``limit`` requests behind ``after``: "" is the oldest that is still there, else the ``next`` of a page.

    What was deleted meanwhile is passed over. Lines that cannot be read, as the last one after a crash, are too. Raises
    ValueError for a place that no page has told.
    """
    places = _places(after)
    found: list[dict[str, Any]] = []
    more = False
    for gateway, files in parts(folder).items():
        for start, path in files:
            place = max(places.get(gateway, 0), start)
            requests, places[gateway], left = _read_part(path, start, place, limit - len(found))
            found += requests
            if left:
                more = True
                break
    told = ",".join(f"{gateway}:{place}" for gateway, place in sorted(places.items()))
    return Page(found, told, more)


def _read_part(path: Path, start: int, place: int, limit: int) -> tuple[list[dict[str, Any]], int, bool]:
    """The lines from ``place`` on, where the next one begins, and whether there are more."""
    found: list[dict[str, Any]] = []
    try:
        with path.open("rb") as stream:
            stream.seek(place - start)
            for line in stream:
                if not line.endswith(b"\n"):  # it is being written
                    break
                if len(found) >= limit:
                    return found, place, True
                place += len(line)
                if (request := _request(line)) is not None:
                    found.append(request)
    except FileNotFoundError:
        pass
    return found, place, False


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
            raise ValueError(f"{part!r} is no place in a trace")
        places[gateway] = int(place)
    return places
