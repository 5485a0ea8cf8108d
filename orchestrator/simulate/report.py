"""The report of a simulation: its data for JSON, and tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.process.text_table import columns, three_digits
from orchestrator.simulate.run import Outcome
from orchestrator.simulate.scenario import DEFAULT_OBJECTIVES, SimModel
from orchestrator.simulate.simulated_fleet import Change, SimulatedPhase
from placements.planner.spec_hosts import host_groups, least_hosts, prices

BINS = 60  # columns of the core timeline
MOST_DECISIONS = 1000  # the last ones, in the JSON
COUNTS = ("answered", "refused", "lost", "open")  # of requests
OBJECTIVES = ("ttft_ms", "tpot_ms", "queue_ms")
PERCENTILES = (50, 90, 95, 99)
BARS = " ▁▂▃▄▅▆▇█"
MODEL_COLUMNS = (
    *("MODEL", "REQUESTS", "WITHIN", "TTFT p50", "p99", "LATENCY p50", "p99"),
    *("REFUSED", "STARTS", "CORE-HOURS"),
)


@dataclass(frozen=True)
class Summary:
    """The mean and the percentiles of a list of numbers, in their unit."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """Returns the summary; None without values."""
        ordered = sorted(values)
        if not ordered:
            return None
        mean = math.fsum(ordered) / len(ordered)
        return cls(len(ordered), mean, *(_at(ordered, percent) for percent in PERCENTILES))

    def as_dict(self) -> dict[str, float | int]:
        figures = {f"p{percent}": round(getattr(self, f"p{percent}"), 3) for percent in PERCENTILES}
        return {"count": self.count, "mean": round(self.mean, 3), **figures}


def _at(ordered: Sequence[float], percent: float) -> float:
    """Returns the percentile with linear interpolation, like numpy's default."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    value = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    return min(max(value, ordered[low]), ordered[high])  # rounding must not exceed the neighbours


def run_data(outcome: Outcome) -> dict[str, Any]:
    """Returns one run as `simulate -o json` shows it."""
    scenario, measured = outcome.scenario, outcome.measured.values()
    seconds = max(outcome.seconds, 1e-9)
    cores = timeline(outcome.changes, [model.name for model in scenario.models], seconds, BINS)
    return {
        "spec": scenario.name,
        "hosts": len(scenario.hosts),
        "hosts_min": len(least_hosts(host_groups(scenario.spec, scenario.hosts))),
        "host_hours": round(sum(outcome.host_s.values()) / 3600, 2),
        "host_starts": outcome.host_starts,
        "cores": scenario.cores,
        "gateways": scenario.gateways,
        "duration_s": round(outcome.seconds, 3),
        "requests": sum(item.arrived for item in measured),
        "attainment": round(outcome.attainment, 4),
        **{name: sum(getattr(item, name) for item in measured) for name in COUNTS},
        "starts": sum(outcome.loads.values()),
        "core_hours": round(sum(outcome.core_s.values()) / 3600, 2),
        "cost": _cost(outcome),
        "models": [_model_data(outcome, model) for model in scenario.models],
        "timeline": {
            "width_s": round(seconds / BINS, 3),
            "cores": {name: [round(value, 2) for value in values] for name, values in cores.items()},
        },
        "decisions": [
            {"at": round(item.at, 3), "model": item.model, "from": item.before, "to": item.after, "reason": item.reason}
            for item in outcome.decisions[-MOST_DECISIONS:]
        ],
    }


def _cost(outcome: Outcome) -> float | None:
    """Returns the cost of all hosts while they had or awaited a machine, used or not; None without prices."""
    scenario = outcome.scenario
    each = prices(scenario.spec, scenario.hosts)
    if not any(each.values()):
        return None
    return round(sum(each[host.name] * host.cores * outcome.host_s[host.name] / 3600 for host in scenario.hosts), 2)


def _model_data(outcome: Outcome, model: SimModel) -> dict[str, Any]:
    name, judged = model.name, model.judged
    measured, core_s = outcome.measured[name], outcome.core_s[name]
    times = {"ttft_ms": measured.ttfts, "latency_ms": measured.latencies, "queue_ms": measured.queued}
    summaries = {key: Summary.of(value * 1000 for value in values) for key, values in times.items()}
    seconds = max(outcome.seconds, 1e-9)
    return {
        "model": name,
        "requests": measured.arrived,
        **{name: getattr(measured, name) for name in COUNTS},
        "attainment": round(measured.attainment, 4),
        "objectives": {name: float(limit) for name in OBJECTIVES if (limit := getattr(judged, name)) is not None},
        **{key: None if summary is None else summary.as_dict() for key, summary in summaries.items()},
        "output_tokens_per_s": round(measured.output_tokens / seconds, 2),
        "starts": outcome.loads[name],
        "core_hours": round(core_s / 3600, 3),
        "replicas": round(core_s / seconds / model.cores, 2) if model.cores else None,
        "speed": {**model.speed.as_dict(), **({} if model.encoder is None else {"batch": model.encoder.rows})},
    }


def timeline(changes: Iterable[Change], models: Iterable[str], seconds: float, bins: int) -> dict[str, list[float]]:
    """Returns the mean cores of each model, loading and draining replicas included, in bins of equal width over a run
    of ``seconds``."""
    width = max(seconds, 1e-9) / bins
    cores: dict[str, list[float]] = {model: [0.0] * bins for model in models}
    since: dict[tuple[str, int], Change] = {}

    def spread(began: Change, ended: float) -> None:
        mean, count = cores[began.placement.model], len(began.placement.cores or ())
        for i in range(int(began.at / width), min(int(ended / width), bins - 1) + 1):
            share = min(ended, (i + 1) * width) - max(began.at, i * width)
            mean[i] += count * max(0.0, share) / width

    for change in changes:
        id = change.placement.model, change.placement.replica
        if change.phase is SimulatedPhase.LOADING:
            since[id] = change
        elif change.phase is SimulatedPhase.GONE:
            spread(since.pop(id), change.at)
    for began in since.values():
        spread(began, seconds)
    return cores


def sparkline(values: Iterable[float], most: float) -> str:
    """Returns one character per value; every value above 0 is visible."""
    steps = len(BARS) - 1
    return "".join(
        BARS[0] if value <= 1e-9 else BARS[max(1, min(steps, round(value / (most or 1.0) * steps)))] for value in values
    )


# Text


def text(runs: Sequence[dict[str, Any]], load: str) -> str:
    """Returns the report of one run, or of two with the same load."""
    parts = [f"{load}\n{_totals(runs)}"]
    for run in runs:
        title = [] if len(runs) == 1 else [run["spec"]]
        parts += [*title, columns(MODEL_COLUMNS, model_rows(run)), _picture(run), _speeds(run)]
    return "\n\n".join(parts)


def _totals(runs: Sequence[Mapping[str, Any]]) -> str:
    totals = [_run_totals(run) for run in runs]
    optional = ("lost", "open at the end", "cost", "host-hours", "machines started")
    rows = [(name, *(each[name] for each in totals)) for name in totals[0]]
    header = ("TOTAL", *(run["spec"] for run in runs))
    return columns(header, [row for row in rows if row[0] not in optional or set(row[1:]) - {"0", "-"}])


def _run_totals(run: Mapping[str, Any]) -> dict[str, str]:
    elastic = run["hosts_min"] < run["hosts"]
    hosts = f"{run['hosts_min']} to {run['hosts']}" if elastic else run["hosts"]
    return {
        "hosts": f"{hosts} with {run['cores']} cores",
        "machines started": str(run["host_starts"]),
        "host-hours": f"{run['host_hours']:.1f}" if elastic else "-",
        "within objectives": f"{run['attainment']:.1%}",
        **{"open at the end" if name == "open" else name: str(run[name]) for name in (*COUNTS, "starts")},
        "core-hours": f"{run['core_hours']:.1f}",
        "cost": "-" if run["cost"] is None else f"{run['cost']:.2f}",
    }


def model_rows(run: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns the cells of MODEL_COLUMNS for each model."""
    return [
        (
            model["model"],
            str(model["requests"]),
            f"{model['attainment']:.1%}" if model["requests"] else "-",
            *(_seconds(model[times], key) for times in ("ttft_ms", "latency_ms") for key in ("p50", "p99")),
            str(model["refused"]),
            str(model["starts"]),
            f"{model['core_hours']:.1f}",
        )
        for model in run["models"]
    ]


def _seconds(summary: dict[str, float] | None, key: str) -> str:
    if summary is None:
        return "-"
    milliseconds = summary[key]
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"


def _picture(run: dict[str, Any]) -> str:
    """Returns a line for each model with the cores that it held over time."""
    cores = run["timeline"]["cores"]
    most = max((value for values in cores.values() for value in values), default=0.0)
    together = [sum(values) for values in zip(*cores.values(), strict=True)]
    wide = max(map(len, [*cores, "all"]))
    lines = [f"Cores, {span(run['timeline']['width_s'])} per column:"]
    lines += [
        f"{name:<{wide}} |{sparkline(values, most)}| up to {max(values, default=0.0):.0f}"
        for name, values in cores.items()
    ]
    lines.append(f"{'all':<{wide}} |{sparkline(together, run['cores'])}| of {run['cores']}")
    return "\n".join(lines)


def span(seconds: float) -> str:
    """Formats a duration, like "12 s", "3.5 min" or "2 h"."""
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def _speeds(run: dict[str, Any]) -> str:
    """Returns the speeds that the run assumes, with their sources."""
    lines = ["Assumed speeds:"]
    for model in run["models"]:
        speed = model["speed"]
        error, prefill_error = speed["decode_error"], speed["prefill_error"]
        if "batch" in speed:
            work = f"batch of {speed['batch']} inputs at most {_terms(speed)}"
        else:
            sure = "" if not error else " (order of magnitude)" if error >= 1 else f" (+-{error:.0%})"
            rough = "" if not prefill_error or prefill_error >= 1 else f" (+-{prefill_error:.0%})"
            work = f"step {three_digits(speed['step_ms'])} ms{sure}, prefill {_terms(speed)}{rough}"
        lines.append(f"  {model['model']}: {work}, load {three_digits(speed['load_s'])} s; {speed['source']}")
    lines.append(f"The default objective of models without objectives is ttft {DEFAULT_OBJECTIVES.ttft_ms:g} ms.")
    return "\n".join(lines)


def _terms(speed: dict[str, Any]) -> str:
    """Returns the time of a prefill as a sum; a term of 0 is left out, but not the first two."""
    square = speed["prefill_square_ns"]
    line = f"{three_digits(speed['prefill_base_ms'])} ms + {three_digits(speed['prefill_token_ms'])} ms/token"
    return f"{line} + {three_digits(square)} ns/token^2" if square else line
