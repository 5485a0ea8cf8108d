"""The report of a simulation: its data for JSON, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.process.text_table import columns, three_digits
from orchestrator.simulate.from_spec import TTFT_S, SpecScenario
from orchestrator.simulate.run import Outcome
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.statistics import Summary
from orchestrator.simulate.timeline import sparkline, timeline
from placements.planner.host_groups import host_groups, least_hosts
from placements.planner.spec_hosts import prices

BINS = 60  # columns of the core timeline
MOST_DECISIONS = 1000  # the last ones, in the JSON
COUNTS = ("answered", "refused", "lost", "open")  # of requests


def run_data(read: SpecScenario, outcome: Outcome) -> dict[str, Any]:
    """Returns one run as `simulate -o json` shows it."""
    scenario = outcome.scenario
    arrived = sum(item.arrived for item in outcome.measured.values())
    core_hours = sum(outcome.core_s.values()) / 3600
    seconds = max(outcome.seconds, 1e-9)
    cores = timeline(outcome.changes, [model.name for model in scenario.models], seconds, BINS)
    return {
        "spec": read.name,
        "hosts": len(scenario.hosts),
        "hosts_min": len(least_hosts(host_groups(scenario.spec, scenario.hosts))),
        "host_hours": round(sum(outcome.host_s.values()) / 3600, 2),
        "host_starts": outcome.host_starts,
        "cores": scenario.cores,
        "gateways": scenario.gateways,
        "duration_s": round(outcome.seconds, 3),
        "requests": arrived,
        "attainment": round(outcome.attainment, 4),
        **{name: sum(getattr(item, name) for item in outcome.measured.values()) for name in COUNTS},
        "starts": sum(outcome.loads.values()),
        "core_hours": round(core_hours, 2),
        "cost": _cost(outcome),
        "models": [_model_data(read, outcome, model) for model in scenario.models],
        "timeline": {
            "width_s": round(cores.width_s, 3),
            "cores": {name: [round(value, 2) for value in values] for name, values in cores.cores.items()},
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
    hours = {name: seconds / 3600 for name, seconds in outcome.host_s.items()}
    return round(sum(each[host.name] * host.cores * hours[host.name] for host in scenario.hosts), 2)


def _model_data(read: SpecScenario, outcome: Outcome, model: SimModel) -> dict[str, Any]:
    name = model.name
    measured, core_s = outcome.measured[name], outcome.core_s[name]
    summaries = {
        key: Summary.of([value * 1000 for value in values])
        for key, values in (
            ("ttft_ms", measured.ttfts),
            ("latency_ms", measured.latencies),
            ("queue_ms", measured.queued),
        )
    }
    seconds = max(outcome.seconds, 1e-9)
    return {
        "model": name,
        "requests": measured.arrived,
        **{name: getattr(measured, name) for name in COUNTS},
        "attainment": round(measured.attainment, 4),
        "objectives": _objectives(model),
        **{key: None if summary is None else summary.as_dict() for key, summary in summaries.items()},
        "output_tokens_per_s": round(measured.output_tokens / seconds, 2),
        "starts": outcome.loads[name],
        "core_hours": round(core_s / 3600, 3),
        "replicas": round(core_s / seconds / model.cores, 2) if model.cores else None,
        "speed": {
            **read.speeds[name].as_dict(),
            **({} if model.encoder is None else {"batch": model.encoder.rows}),
        },
    }


def _objectives(model: SimModel) -> dict[str, float]:
    """Returns the objectives in milliseconds; the default for a model without any."""
    objectives = {"ttft_ms": model.ttft_s, "tpot_ms": model.tpot_s, "queue_ms": model.queue_s}
    limits = {name: value * 1000 for name, value in objectives.items() if value is not None}
    return limits or ({} if model.judged_ttft_s is None else {"ttft_ms": model.judged_ttft_s * 1000})


# Text


def text(runs: Sequence[dict[str, Any]], load: str) -> str:
    """Returns the report of one run, or of two with the same load."""
    parts = [f"{load}\n{_totals(runs)}"]
    for run in runs:
        title = [] if len(runs) == 1 else [run["spec"]]
        parts += [*title, _models(run), _picture(run), _speeds(run)]
    return "\n\n".join(parts)


def _totals(runs: Sequence[dict[str, Any]]) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("hosts", [f"{_hosts(run)} with {run['cores']} cores" for run in runs]),
        ("machines started", [str(run["host_starts"]) for run in runs]),
        ("host-hours", [f"{run['host_hours']:.1f}" if _is_elastic(run) else "-" for run in runs]),
        ("within objectives", [f"{run['attainment']:.1%}" for run in runs]),
        *(
            ("open at the end" if name == "open" else name, [str(run[name]) for run in runs])
            for name in (*COUNTS, "starts")
        ),
        ("core-hours", [f"{run['core_hours']:.1f}" for run in runs]),
        ("cost", ["-" if run["cost"] is None else f"{run['cost']:.2f}" for run in runs]),
    ]
    optional = ("lost", "open at the end", "cost", "host-hours", "machines started")
    shown = [row for row in rows if row[0] not in optional or set(row[1]) - {"0", "-"}]
    header = ("TOTAL", *(run["spec"] for run in runs))
    return columns(header, [(name, *values) for name, values in shown])


def _is_elastic(run: dict[str, Any]) -> bool:
    return bool(run["hosts_min"] < run["hosts"])


def _hosts(run: dict[str, Any]) -> str:
    return f"{run['hosts_min']} to {run['hosts']}" if _is_elastic(run) else str(run["hosts"])


def _models(run: dict[str, Any]) -> str:
    header = ("MODEL", "REQUESTS", "WITHIN", "TTFT p50", "p99", "LATENCY p50", "p99", "REFUSED", "STARTS", "CORE-HOURS")
    rows = [
        (
            model["model"],
            model["requests"],
            f"{model['attainment']:.1%}" if model["requests"] else "-",
            *(_seconds(model["ttft_ms"], key) for key in ("p50", "p99")),
            *(_seconds(model["latency_ms"], key) for key in ("p50", "p99")),
            model["refused"],
            model["starts"],
            f"{model['core_hours']:.1f}",
        )
        for model in run["models"]
    ]
    return columns(header, rows)


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
        error = speed["decode_error"]
        sure = "" if not error else " (order of magnitude)" if error >= 1 else f" (+-{error:.0%})"
        prefill_error = speed["prefill_error"]
        rough = "" if not prefill_error or prefill_error >= 1 else f" (+-{prefill_error:.0%})"
        if "batch" in speed:
            lines.append(
                f"  {model['model']}: batch of {speed['batch']} inputs at most "
                f"{_terms(speed)}, "
                f"load {three_digits(speed['load_s'])} s; {speed['source']}"
            )
            continue
        lines.append(
            f"  {model['model']}: step {three_digits(speed['step_ms'])} ms{sure}, "
            f"prefill {_terms(speed)}{rough}, "
            f"load {three_digits(speed['load_s'])} s; {speed['source']}"
        )
    default = f"ttft {TTFT_S * 1000:g} ms"
    lines.append(f"The default objective of models without objectives is {default}.")
    return "\n".join(lines)


def _terms(speed: dict[str, Any]) -> str:
    """Returns the time of a prefill as a sum; a term of 0 is left out, but not the first two."""
    square = speed["prefill_square_ns"]
    line = f"{three_digits(speed['prefill_base_ms'])} ms + {three_digits(speed['prefill_token_ms'])} ms/token"
    return f"{line} + {three_digits(square)} ns/token^2" if square else line
