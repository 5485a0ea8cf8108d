"""Trace files: reads and writes recorded requests as CSV or JSON lines."""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TextIO

from orchestrator.process.durations import moment
from orchestrator.simulate.lengths import cut_pair
from orchestrator.simulate.simulated_request import Arrival
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


@dataclass(frozen=True)
class Trace:
    """Arrivals in the order of their times, 22 bytes each. ``begins`` is the first one's time in seconds since the
    epoch, if the file has such times. ``unknown`` counts the dropped requests by unknown model name.
    """

    models: tuple[str, ...]
    keys: tuple[str, ...]
    begins: float | None
    times: array[float]
    of_model: array[int]
    prompts: array[int]
    outputs: array[int]
    of_key: array[int]
    unknown: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

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
        """The time of the last arrival."""
        return self.times[-1] if len(self.times) else 0.0


def fit_lengths(trace: Trace, limits: Mapping[str, int]) -> tuple[Trace, Counter[str]]:
    """Cuts requests whose prompt and output together exceed ``limits``, as `cut_pair` does; returns the trace and the
    number of cut requests by model."""
    most = [limits[model] for model in trace.models]
    prompts, outputs, cut = array("I", trace.prompts), array("I", trace.outputs), Counter[str]()
    for i, model in enumerate(trace.of_model):
        if prompts[i] + outputs[i] > most[model]:
            prompts[i], outputs[i] = cut_pair((prompts[i], outputs[i]), most[model])
            cut[trace.models[model]] += 1
    return (replace(trace, prompts=prompts, outputs=outputs), cut) if cut else (trace, cut)


class _TraceBuilder:
    """Collects the arrivals of a trace."""

    def __init__(self) -> None:
        self.models: dict[str, int] = {}
        self.keys: dict[str, int] = {}
        self.times = array("d")
        self.of_model, self.of_key = array("H"), array("I")
        self.prompts, self.outputs = array("I"), array("I")
        self.unknown = Counter[str]()

    def add(self, at: float, model: str, prompt: int, output: int, key: str) -> None:
        self.times.append(at)
        self.of_model.append(self.models.setdefault(model, len(self.models)))
        self.prompts.append(prompt)
        self.outputs.append(output)
        self.of_key.append(self.keys.setdefault(key, len(self.keys)))

    def trace(self) -> Trace:
        """Returns the trace in the order of times. Shifts times since the epoch to start at 0; keeps others."""
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
            MappingProxyType(dict(self.unknown)),
        )


def read_trace(stream: TextIO, name: str, models: Mapping[str, str] | None) -> Trace:
    """Reads CSV, whose first line names the columns, or JSON lines; ``models`` maps names to models. None: any model.

    Ignores other columns and counts requests of other models. Raises InvalidTrace with the problem of each bad line, or
    if no request is for one of the models.
    """
    builder, problems, more = _TraceBuilder(), list[Problem](), 0
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
                builder.unknown[name_in_trace] += 1
            else:
                builder.add(at, model, prompt, output, key)
    if problems:
        raise InvalidTrace(problems, more)
    if models is not None and builder.unknown and not builder.times:
        what = f"no request is for a model in the spec; the requests are for {by_model(builder.unknown)}"
        raise InvalidTrace([_problem(name, 1, what, f"models in the spec: {', '.join(sorted({*models.values()}))}")])
    return builder.trace()


def by_model(counts: Mapping[str, int]) -> str:
    """Formats counts by model, like "chat (12), mail (3) and 2 more": the NAMED models with most requests."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    names = ", ".join(f"{name} ({count})" for name, count in ordered[:NAMED])
    return names if len(ordered) <= NAMED else f"{names} and {len(ordered) - NAMED} more"


def _csv_rows(first: str, stream: TextIO, name: str) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    header = [column.strip() for column in next(csv.reader([first]))]
    missing = [column for column in COLUMNS[:4] if column not in header]
    if missing:
        what = f"the header has no {' and no '.join(missing)} column"
        raise InvalidTrace([_problem(name, 1, what, f"the first line must be like {','.join(COLUMNS)}")])
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
