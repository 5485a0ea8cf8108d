"""Traces: read from a file, and written to one."""

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

from orchestrator.bench.lengths import cut_pair
from orchestrator.process.durations import moment
from orchestrator.simulate.simulated_request import Arrival
from placements.spec.problems import Problem

MAX_PROBLEMS = 20
NAMED = 5  # models in one sentence
MOST_TOKENS = 1 << 24
COLUMNS = ("time", "model", "prompt_tokens", "output_tokens", "key")
MEASURED = ("first_ms", "decode_ms")  # further ones that an export has
EPOCH = 1e8  # a first time beyond it is taken for seconds since the epoch, not since the beginning of the trace


class TraceWrong(Exception):
    """What is wrong with a trace, line by line; the first MAX_PROBLEMS, and how many ``more`` there are."""

    def __init__(self, problems: list[Problem], more: int = 0) -> None:
        super().__init__(problems[0].what)
        self.problems = tuple(problems)
        self.more = more


@dataclass(frozen=True)
class Trace:
    """Arrivals in the order of their times, held small: 22 bytes each. ``begins``: the first one's time in seconds
    since the epoch, where the file told it. ``unknown``: requests that were left out, by the name that no model has.
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
        """From 0 to the last arrival."""
        return self.times[-1] if len(self.times) else 0.0


def fitted(trace: Trace, limits: Mapping[str, int]) -> tuple[Trace, Counter[str]]:
    """With requests that are longer than ``limits`` allows for prompt and answer together cut as
    `orchestrator.bench.lengths` cuts them; and how many were of each model."""
    most = [limits[model] for model in trace.models]
    prompts, outputs, cut = array("I", trace.prompts), array("I", trace.outputs), Counter[str]()
    for i, model in enumerate(trace.of_model):
        if prompts[i] + outputs[i] > most[model]:
            prompts[i], outputs[i] = cut_pair((prompts[i], outputs[i]), most[model])
            cut[trace.models[model]] += 1
    return (replace(trace, prompts=prompts, outputs=outputs), cut) if cut else (trace, cut)


class _Gathering:
    """A trace in the making."""

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
            MappingProxyType(dict(self.unknown)),
        )


def read_trace(stream: TextIO, name: str, models: Mapping[str, str]) -> Trace:
    """Read CSV, whose first line names the columns, or JSON lines; ``models`` gives the model that a name means.

    Further columns are passed over, and requests of other models counted. Raises TraceWrong; it says of each bad line
    where it is and what is wrong, or that no request is of one of the models.
    """
    gathered, problems, more = _Gathering(), list[Problem](), 0
    first = stream.readline()
    if not first.strip():
        raise TraceWrong([_problem(name, 1, "the trace is empty", "a header, or an object of JSON on each line")])
    rows = _json_rows(first, stream) if first.lstrip().startswith("{") else _csv_rows(first, stream, name)
    for number, row in rows:
        try:
            at, called, prompt, output, key = _fields(row)
        except ValueError as error:
            if len(problems) < MAX_PROBLEMS:
                problems.append(_problem(name, number, str(error), "mend the line, or leave it out"))
            else:
                more += 1
        else:
            if (model := models.get(called)) is None:
                gathered.unknown[called] += 1
            else:
                gathered.add(at, model, prompt, output, key)
    if problems:
        raise TraceWrong(problems, more)
    if gathered.unknown and not gathered.times:
        what = f"no request is of a model of the spec; they are of {by_model(gathered.unknown)}"
        raise TraceWrong([_problem(name, 1, what, f"the spec has {', '.join(sorted({*models.values()}))}")])
    return gathered.trace()


def by_model(counts: Mapping[str, int]) -> str:
    """Such as "chat (12), mail (3) and 2 more": the first NAMED of them, those with most requests."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    told = ", ".join(f"{name} ({count})" for name, count in ordered[:NAMED])
    return told if len(ordered) <= NAMED else f"{told} and {len(ordered) - NAMED} more"


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
            return moment(str(value))
        except ValueError:
            raise ValueError(f"time is neither seconds nor a date of ISO 8601: {value!r}") from None
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
