"""Trace files: reads and writes recorded requests as CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TextIO

from orchestrator.process.durations import moment
from orchestrator.simulate.scenario import Arrival
from orchestrator.simulate.workload import cut_pair
from placements.spec.problems import Problem

MAX_PROBLEMS = 20
NAMED = 5  # models listed in a message
MOST_TOKENS = 1 << 24
COLUMNS = ("time", "model", "prompt_tokens", "output_tokens", "key")
MEASURED = ("first_ms", "decode_ms")  # additional columns of an export
EPOCH = 1e8  # first times above this are seconds since the epoch, not since the start of the trace


class InvalidTrace(Exception):
    """The problems of a trace by line: the first MAX_PROBLEMS, and how many ``more`` there are."""

    def __init__(self, problems: list[Problem], more: int = 0) -> None:
        super().__init__(problems[0].what)
        self.problems = tuple(problems)
        self.more = more


class Trace:
    """Arrivals, 22 bytes each; after `sort` in the order of their times. ``begins`` is the first one's time in seconds
    since the epoch, if the file has such times. ``unknown`` counts the dropped requests by unknown model name.
    """

    def __init__(self) -> None:
        self.begins: float | None = None
        self.unknown = Counter[str]()
        self._models: dict[str, int] = {}  # the numbers of the names
        self._keys: dict[str, int] = {}
        self.times, self.prompts, self.outputs = array("d"), array("I"), array("I")
        self._of_model, self._of_key = array("H"), array("I")

    def __len__(self) -> int:
        return len(self.times)

    def __iter__(self) -> Iterator[Arrival]:
        models, keys = tuple(self._models), tuple(self._keys)
        columns = zip(self.times, self._of_model, self.prompts, self.outputs, self._of_key, strict=True)
        for at, model, prompt, output, key in columns:
            yield Arrival(at, models[model], prompt, output, keys[key])

    @property
    def models(self) -> tuple[str, ...]:
        """The models with requests, in the order of the file."""
        return tuple(self._models)

    @property
    def seconds(self) -> float:
        """The time of the last arrival."""
        return self.times[-1] if len(self.times) else 0.0

    def add(self, at: float, model: str, prompt: int, output: int, key: str) -> None:
        """Adds an arrival, in any order."""
        self.times.append(at)
        self._of_model.append(self._models.setdefault(model, len(self._models)))
        self.prompts.append(prompt)
        self.outputs.append(output)
        self._of_key.append(self._keys.setdefault(key, len(self._keys)))

    def sort(self) -> None:
        """Sorts the arrivals by time. Shifts times since the epoch to start at 0; keeps others."""
        times = self.times
        order = sorted(range(len(times)), key=times.__getitem__)
        if order and times[order[0]] > EPOCH:
            self.begins = times[order[0]]
        first = self.begins or 0.0
        self.times = array("d", (times[i] - first for i in order))
        for name in ("prompts", "outputs", "_of_model", "_of_key"):
            column = getattr(self, name)
            setattr(self, name, array(column.typecode, (column[i] for i in order)))


def fit_lengths(trace: Trace, limits: Mapping[str, int]) -> Counter[str]:
    """Cuts requests whose prompt and output together exceed ``limits``, as `cut_pair` does; returns the number of cut
    requests by model."""
    cut = Counter[str]()
    for i, arrival in enumerate(trace):
        pair, most = (arrival.prompt_tokens, arrival.output_tokens), limits[arrival.model]
        if sum(pair) > most:
            trace.prompts[i], trace.outputs[i] = cut_pair(pair, most)
            cut[arrival.model] += 1
    return cut


def read_trace(stream: TextIO, name: str, models: Mapping[str, str] | None) -> Trace:
    """Reads CSV, whose first line names the columns, or JSON lines; ``models`` maps names to models. None: any model.

    Ignores other columns and counts requests of other models. Raises InvalidTrace with the problem of each bad line, or
    if no request is for one of the models.
    """
    trace, problems, more = Trace(), list[Problem](), 0
    first = stream.readline()
    if not first.strip():
        raise InvalidTrace(
            [_problem(name, 1, "the trace is empty", "it needs a CSV header, or a JSON object on each line")]
        )
    rows = _json_rows(first, stream) if first.lstrip().startswith("{") else _csv_rows(first, stream, name)
    for number, row in rows:
        try:
            at, name_in_trace, prompt, output, key = _fields(row)
        except ValueError as error:
            if len(problems) < MAX_PROBLEMS:
                problems.append(_problem(name, number, str(error), "fix or remove the line"))
            else:
                more += 1
        else:
            if (model := name_in_trace if models is None else models.get(name_in_trace)) is None:
                trace.unknown[name_in_trace] += 1
            else:
                trace.add(at, model, prompt, output, key)
    if problems:
        raise InvalidTrace(problems, more)
    if models is not None and trace.unknown and not trace.times:
        fact = f"no request is for a model in the spec; the requests are for {by_model(trace.unknown)}"
        raise InvalidTrace([_problem(name, 1, fact, f"models in the spec: {', '.join(sorted({*models.values()}))}")])
    trace.sort()
    return trace


def by_model(counts: Mapping[str, int]) -> str:
    """Formats counts by model, like "chat (12), mail (3) and 2 more": the NAMED models with most requests."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    names = ", ".join(f"{name} ({count})" for name, count in ordered[:NAMED])
    return names if len(ordered) <= NAMED else f"{names} and {len(ordered) - NAMED} more"


def _csv_rows(first: str, stream: TextIO, name: str) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    header = [column.strip() for column in next(csv.reader([first]))]
    missing = [column for column in COLUMNS[:4] if column not in header]
    if missing:
        fact = f"the header has no {' and no '.join(missing)} column"
        raise InvalidTrace([_problem(name, 1, fact, f"the first line must be like {','.join(COLUMNS)}")])
    reader = csv.reader(stream)
    try:
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                yield reader.line_num + 1, ValueError(f"the line has {len(row)} fields, the header has {len(header)}")
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
                yield number, row if isinstance(row, dict) else ValueError("not a JSON object")
            except ValueError as error:
                yield number, ValueError(f"invalid JSON: {error}")
        line, number = stream.readline(), number + 1


def _fields(row: dict[str, Any] | ValueError) -> tuple[float, str, int, int, str]:
    """Raises ValueError."""
    if isinstance(row, ValueError):
        raise row
    for column in COLUMNS[:4]:
        if row.get(column) in (None, ""):
            raise ValueError(f"{column} is missing")
    key = row.get("key")
    prompt, output = _tokens(row, "prompt_tokens"), _tokens(row, "output_tokens")
    return _seconds(row["time"]), str(row["model"]), prompt, output, "" if key is None else str(key)


def _tokens(row: Mapping[str, Any], column: str) -> int:
    value = row[column]
    try:
        tokens = int(value) if not isinstance(value, bool) else 0
        is_integer = float(value) == tokens
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{column} is not an integer: {value!r}") from None
    if not is_integer or not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"{column} must be an integer >= 1, not {value!r}")
    return tokens


def _seconds(value: Any) -> float:
    """Parses a number of seconds, or an ISO 8601 date and time, which is UTC without a zone."""
    try:
        seconds = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        try:
            return moment(str(value))
        except ValueError:
            raise ValueError(f"time is neither a number of seconds nor an ISO 8601 time: {value!r}") from None
    if not 0 <= seconds < math.inf:
        raise ValueError(f"time must be >= 0 seconds, not {value!r}")
    return seconds


def _problem(name: str, line: int, what: str, hint: str) -> Problem:
    return Problem("trace-wrong", "error", f"{name}:{line}", what, hint)


def write_trace(requests: Iterable[Mapping[str, Any]], stream: TextIO) -> int:
    """Writes requests as CSV for `read_trace`, in the order of their times; returns their number.

    A request whose client disconnected before its first token is written with one output token. Requests without a
    prompt are dropped.
    """
    ordered = sorted(requests, key=lambda request: float(request["time"]))
    complete = [{**request, "output_tokens": max(1, request["output_tokens"])} for request in ordered]
    complete = [request for request in complete if request["prompt_tokens"] > 0]
    stream.write(",".join((*COLUMNS, *MEASURED)) + "\n")
    for request in complete:
        stream.write(",".join(str(request[column]) for column in (*COLUMNS, *MEASURED)) + "\n")
    return len(complete)
