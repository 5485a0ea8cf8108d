"""What a run has shown, as data and as tables for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.bench.statistics import Summary
from orchestrator.process.text_table import columns
from orchestrator.simulate.from_spec import TTFT_S, Read
from orchestrator.simulate.run import Outcome
from orchestrator.simulate.simulated_model import SimModel
from orchestrator.simulate.timeline import sparkline, timeline
from placements.planner.spec_hosts import prices

BINS = 60  # of the picture
MOST_DECISIONS = 1000  # in the JSON; the last ones


def run_data(read: Read, outcome: Outcome) -> dict[str, Any]:
    """One run, as `simulate -o json` has it."""
    scenario = outcome.scenario
    arrived = sum(one.arrived for one in outcome.measured.values())
    core_hours = sum(outcome.core_s.values()) / 3600
    seconds = max(outcome.seconds, 1e-9)
    cores = timeline(outcome.changes, [model.name for model in scenario.models], seconds, BINS)
    return {
        "spec": read.name,
        "hosts": len(scenario.hosts),
        "cores": scenario.cores,
        "gateways": scenario.gateways,
        "duration_s": round(outcome.seconds, 3),
        "requests": arrived,
        "attainment": round(outcome.attainment, 4),
        "answered": sum(one.answered for one in outcome.measured.values()),
        "refused": sum(one.refused for one in outcome.measured.values()),
        "lost": sum(one.lost for one in outcome.measured.values()),
        "open": sum(one.open for one in outcome.measured.values()),
        "starts": sum(outcome.loads.values()),
        "core_hours": round(core_hours, 2),
        "cost": _cost(outcome),
        "models": [_model_data(read, outcome, model) for model in scenario.models],
        "timeline": {
            "width_s": round(cores.width_s, 3),
            "cores": {name: [round(value, 2) for value in values] for name, values in cores.cores.items()},
        },
        "decisions": [
            {"at": round(one.at, 3), "model": one.model, "from": one.before, "to": one.after, "reason": one.reason}
            for one in outcome.decisions[-MOST_DECISIONS:]
        ],
    }


def _cost(outcome: Outcome) -> float | None:
    """Of the hosts for the time of the run, used or not; None where none has a price."""
    scenario = outcome.scenario
    each = prices(scenario.spec, scenario.hosts)
    if not any(each.values()):
        return None
    hours = outcome.seconds / 3600
    return round(sum(each[host.name] * host.cores * hours for host in scenario.hosts), 2)


def _model_data(read: Read, outcome: Outcome, model: SimModel) -> dict[str, Any]:
    name = model.name
    found, core_s = outcome.measured[name], outcome.core_s[name]
    summaries = {
        key: Summary.of([value * 1000 for value in values])
        for key, values in (("ttft_ms", found.ttfts), ("latency_ms", found.latencies), ("queue_ms", found.queued))
    }
    seconds = max(outcome.seconds, 1e-9)
    return {
        "model": name,
        "requests": found.arrived,
        "answered": found.answered,
        "refused": found.refused,
        "lost": found.lost,
        "open": found.open,
        "attainment": round(found.attainment, 4),
        "objectives": _objectives(model),
        **{key: None if summary is None else summary.as_dict() for key, summary in summaries.items()},
        "output_tokens_per_s": round(found.output_tokens / seconds, 2),
        "starts": outcome.loads[name],
        "core_hours": round(core_s / 3600, 3),
        "replicas": round(core_s / seconds / model.cores, 2) if model.cores else None,
        "speed": {
            "step_ms": round(model.step_s * 1000, 4),
            "prefill_base_ms": round(model.prefill_base_s * 1000, 4),
            "prefill_token_ms": round(model.prefill_token_s * 1000, 6),
            "load_s": round(model.load_s, 3),
            "decode_error": read.speeds[name].decode_error if not read.told.get(name) else None,
            "prefill_error": read.speeds[name].prefill_error if not read.told.get(name) else None,
            "source": read.source(name),
        },
    }


def _objectives(model: SimModel) -> dict[str, float]:
    """In milliseconds; of a model without any the default."""
    given = {"ttft_ms": model.ttft_s, "tpot_ms": model.tpot_s, "queue_ms": model.queue_s}
    told = {name: value * 1000 for name, value in given.items() if value is not None}
    return told or ({} if model.judged_ttft_s is None else {"ttft_ms": model.judged_ttft_s * 1000})


# For a person


def text(runs: Sequence[dict[str, Any]], load: str) -> str:
    """Of one run, or of two that were given the same load."""
    parts = [f"{load}\n{_totals(runs)}"]
    for run in runs:
        title = [] if len(runs) == 1 else [run["spec"]]
        parts += [*title, _models(run), _picture(run), _speeds(run)]
    return "\n\n".join(parts)


def _totals(runs: Sequence[dict[str, Any]]) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("hosts", [f"{run['hosts']} with {run['cores']} cores" for run in runs]),
        ("within objectives", [f"{run['attainment']:.1%}" for run in runs]),
        ("answered", [str(run["answered"]) for run in runs]),
        ("refused", [str(run["refused"]) for run in runs]),
        ("lost", [str(run["lost"]) for run in runs]),
        ("open at the end", [str(run["open"]) for run in runs]),
        ("starts", [str(run["starts"]) for run in runs]),
        ("core-hours", [f"{run['core_hours']:.1f}" for run in runs]),
        ("cost", ["-" if run["cost"] is None else f"{run['cost']:.2f}" for run in runs]),
    ]
    shown = [row for row in rows if row[0] not in ("lost", "open at the end", "cost") or set(row[1]) - {"0", "-"}]
    header = ("TOTAL", *(run["spec"] for run in runs))
    return columns(header, [(name, *values) for name, values in shown])


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
    """A line for each model: how many cores it held."""
    cores = run["timeline"]["cores"]
    most = max((value for values in cores.values() for value in values), default=0.0)
    together = [sum(values) for values in zip(*cores.values(), strict=True)]
    wide = max(map(len, [*cores, "all"]))
    lines = [f"Cores, {span(run['timeline']['width_s'])} a column:"]
    lines += [
        f"{name:<{wide}} |{sparkline(values, most)}| up to {max(values, default=0.0):.0f}"
        for name, values in cores.items()
    ]
    lines.append(f"{'all':<{wide}} |{sparkline(together, run['cores'])}| of {run['cores']}")
    return "\n".join(lines)


def span(seconds: float) -> str:
    """ "12 s", "3.5 min" or "2 h"."""
    for unit, name in ((3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def _speeds(run: dict[str, Any]) -> str:
    """What the times of the run rest on."""
    lines = ["Speeds that this rests on:"]
    for model in run["models"]:
        speed = model["speed"]
        error = speed["decode_error"]
        sure = "" if not error else " (the order of magnitude)" if error >= 1 else f" (+-{error:.0%})"
        prefill_error = speed["prefill_error"]
        rough = "" if not prefill_error or prefill_error >= 1 else f" (+-{prefill_error:.0%})"
        lines.append(
            f"  {model['model']}: step {speed['step_ms']:.3g} ms{sure}, "
            f"prefill {speed['prefill_base_ms']:.3g} ms + {speed['prefill_token_ms']:.3g} ms/token{rough}, "
            f"load {speed['load_s']:.3g} s; {speed['source']}"
        )
    default = f"ttft {TTFT_S * 1000:g} ms"
    lines.append(f"A model without objectives is judged by {default}.")
    return "\n".join(lines)
