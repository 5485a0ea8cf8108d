"""The report of a benchmark: its data for JSON, and tables for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.bench.measurement import Measured, error_messages, kinds
from orchestrator.bench.serving import Serving
from orchestrator.bench.statistics import PERCENTILES, Summary
from orchestrator.bench.sweep import Cell, Sweep
from orchestrator.process.text_table import columns

FIGURES = {
    "ttft_ms": "TTFT",
    "itl_ms": "ITL (between chunks)",
    "tpot_ms": "TPOT (mean of a request)",
    "e2e_ms": "E2E",
}


def figures(measured: Sequence[Measured]) -> dict[str, list[float]]:
    """Returns the latencies of complete answers in milliseconds, in the given order."""
    answered = [request for request in measured if request.ok]
    each: dict[str, list[float | None]] = {
        "ttft_ms": [request.ttft_s for request in answered],
        "itl_ms": [gap for request in answered for gap in request.gaps_s],
        "tpot_ms": [request.tpot_s for request in answered],
        "e2e_ms": [request.e2e_s for request in answered],
    }
    return {name: [value * 1000 for value in values if value is not None] for name, values in each.items()}


def serving_data(run: Serving) -> dict[str, Any]:
    """Returns the JSON of `bench serving -o json`."""
    answered = [request for request in run.measured if request.ok]
    output = sum(request.output_tokens or 0 for request in answered)
    chunks = sum(len(request.chunks) for request in answered)
    prompt = sum(request.prompt for request in answered)
    summaries = {name: Summary.of(values) for name, values in figures(run.measured).items()}
    return {
        "url": run.url,
        "model": run.model,
        "load": asdict(run.load),
        "lengths": {"name": run.lengths.name, "source": run.lengths.source, "capped": run.lengths.capped},
        "refused": list(run.refused),
        "sent": len(run.measured),
        "ok": len(answered),
        "errors": kinds(run.measured),
        "said": error_messages(run.measured),
        "short_answers": sum(1 for request in answered if (request.output_tokens or 0) < request.output_wanted),
        "duration_s": round(run.duration_s, 3),
        "requests_per_s": round(len(answered) / run.duration_s, 4),
        "output_tokens": output,
        "output_tokens_per_s": round(output / run.duration_s, 3),
        "prompt_tokens": prompt,
        "prompt_tokens_per_s": round(prompt / run.duration_s, 3),
        "tokens_per_chunk": round(output / chunks, 3) if chunks else None,
        **{name: None if summary is None else summary.as_dict() for name, summary in summaries.items()},
        "goodput": None if run.slo is None else _goodput(run),
        "client": run.client.as_dict(),
    }


def _goodput(run: Serving) -> dict[str, Any]:
    assert run.slo is not None
    good = sum(1 for request in run.measured if run.slo.met(request))
    return {
        "slo": {"ttft_ms": run.slo.ttft, "itl_ms": run.slo.itl, "e2e_ms": run.slo.e2e},
        "good": good,
        "share": round(run.slo.share(run.measured), 4),
        "requests_per_s": round(good / run.duration_s, 4),
    }


def load_text(load: dict[str, Any]) -> str:
    """Returns the kind of a load."""
    closed = load["rate"] is None
    return f"{load['concurrency']} concurrent requests" if closed else f"Poisson arrivals, {load['rate']:g}/s"


def serving_text(data: dict[str, Any]) -> str:
    """Formats ``serving_data`` as text with a table."""
    load, client, goodput = data["load"], data["client"], data["goodput"]
    seed = "" if load["rate"] is None else f", seed {load['seed']}"
    failed = data["sent"] - data["ok"]
    counts = ", ".join(f"{kind}: {count}" for kind, count in data["errors"].items())
    lines = [
        ("model", f"{data['model']} at {data['url']}"),
        ("load", f"{load_text(load)}{seed}; lengths {data['lengths']['name']}"),
        ("requests", f"{data['ok']} answered, {failed} failed{f' ({counts})' if counts else ''}"),
        ("time", f"{data['duration_s']:.1f} s, {data['requests_per_s']:.2f} requests/s"),
        ("output", f"{data['output_tokens_per_s']:.1f} tokens/s ({data['output_tokens']} tokens)"),
        ("prompts", f"{data['prompt_tokens_per_s']:.1f} tokens/s ({data['prompt_tokens']} tokens)"),
    ]
    if goodput is not None:
        bounds = (f"{name.removesuffix('_ms')} <= {v:g} ms" for name, v in goodput["slo"].items() if v is not None)
        good = f"{goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} of those sent"
        lines.append(("goodput", f"{good} ({', '.join(bounds)})"))
    text = "\n".join(f"{name:<9} {value}" for name, value in lines)
    header = ("MILLISECONDS", "mean", *(f"p{percent}" for percent in PERCENTILES))
    rows = []
    for name, label in FIGURES.items():
        summary = data[name]
        values = ("-",) * 5 if summary is None else tuple(f"{summary[key]:.1f}" for key in header[1:])
        rows.append((label, *values))
    return "\n".join([text, "", columns(header, rows), "", *remarks(data, client)])


def encoding_text(data: dict[str, Any]) -> str:
    """Formats the data of an encoding benchmark as text with a table."""
    load, client, texts = data["load"], data["client"], data["texts"]
    seed = "" if load["rate"] is None else f", seed {load['seed']}"
    failed = data["sent"] - data["ok"]
    counts = ", ".join(f"{kind}: {count}" for kind, count in data["errors"].items())
    lines = [
        ("model", f"{data['model']} at {data['url']}, {data['route']}"),
        (
            "load",
            f"{load_text(load)}{seed}; {texts['inputs']} x {texts['least']} to {texts['most']} words each",
        ),
        ("requests", f"{data['ok']} answered, {failed} failed{f' ({counts})' if counts else ''}"),
        ("time", f"{data['duration_s']:.1f} s, {data['requests_per_s']:.2f} requests/s"),
        ("inputs", f"{data['items_per_s']:.1f} items/s"),
        ("tokens", f"{data['tokens_per_s']:.1f} tokens/s ({data['tokens']} tokens)"),
    ]
    text = "\n".join(f"{name:<9} {value}" for name, value in lines)
    header = ("MILLISECONDS", "mean", *(f"p{percent}" for percent in PERCENTILES))
    latency = data["latency_ms"]
    row = ("LATENCY", *(("-",) * 5 if latency is None else tuple(f"{latency[key]:.1f}" for key in header[1:])))
    said = [f"  {kind}: {words}" for kind, words in data["said"].items() if words]
    return "\n".join([text, "", columns(header, [row]), "", *_client_lines(client), *said])


def remarks(data: dict[str, Any], client: dict[str, Any]) -> list[str]:
    """Returns the caveats of the figures."""
    lines = _client_lines(client)
    if (data["tokens_per_chunk"] or 1) > 1.05:
        lines.append(f"  a chunk has {data['tokens_per_chunk']:.2f} tokens on average: ITL is between chunks")
    if data["short_answers"]:
        lines.append(f"  {data['short_answers']} answers are shorter than requested")
    if data["lengths"]["capped"]:
        lines.append(f"  {data['lengths']['capped']} of the lengths were cut to fit the model")
    lines += [f"  the server refuses {feature}" for feature in data["refused"]]
    lines += [f"  {kind}: {words}" for kind, words in data["said"].items() if words]
    return lines


def _client_lines(client: dict[str, Any]) -> list[str]:
    late = "" if client["late_p99_ms"] is None else f", requests sent {client['late_p99_ms']:.1f} ms late (p99)"
    used = f"{client['cpu']:.0%} of a CPU, event loop {client['lag_p99_ms']:.1f} ms late (p99){late}"
    lines = [f"client    {used}"]
    if client["limits"]:
        lines.append(f"  the client, not the server, may have been the bottleneck: {'; '.join(client['limits'])}")
    return lines


def latency_text(sweep: Sweep) -> str:
    """Formats the times to reach the length and to the first token."""
    tables = {
        f"Time to reach {sweep.length} tokens:": lambda cell: _number(cell.latency_s, ".2f", " s"),
        "Time to the first token (prefill):": lambda cell: _number(cell.ttft_s, ".3f", " s"),
    }
    return _sweep_text(sweep, tables)


def throughput_text(sweep: Sweep) -> str:
    """Formats output tokens/s and the figure as the optimum-neuron page defines it."""
    page = "As the optimum-neuron page counts, with prompt tokens (not comparable with the above):"
    tables = {
        f"Output tokens/s until {sweep.length} tokens are reached:": lambda cell: _number(cell.throughput, ".1f"),
        page: lambda cell: _number(cell.page_throughput, ".1f"),
    }
    return _sweep_text(sweep, tables)


def _sweep_text(sweep: Sweep, tables: Mapping[str, Callable[[Cell], str]]) -> str:
    """Returns tables with a row for each batch size; ``tables`` has the cell text of each, by title."""
    parts = [f"{sweep.model} at {sweep.url}, median of {sweep.rounds}"]
    header = ["BATCH", *(f"{cell.share} % ({cell.prompt} tokens)" for cell in sweep.of(sweep.batches[0]))]
    for title, text in tables.items():
        rows = [[str(batch), *map(text, sweep.of(batch))] for batch in sweep.batches]
        parts += [title, columns(header, rows)]
    return "\n\n".join([*parts, *_notes(sweep)])


def _notes(sweep: Sweep) -> list[str]:
    lines = [f"the server refuses {feature}" for feature in sweep.refused]
    lines += [line for cell in sweep.cells for line in _cell_notes(cell)]
    return ["\n".join(lines)] if lines else []


def _cell_notes(cell: Cell) -> list[str]:
    where = f"batch of {cell.batch}, {cell.share} %"
    lines = []
    if cell.errors:
        failed = ", ".join(f"{kind}: {count}" for kind, count in cell.errors.items())
        lines.append(f"{where}: {len(cell.rounds) - len(cell.good)} of {len(cell.rounds)} rounds failed ({failed})")
        lines += [f"  {kind}: {words}" for kind, words in error_messages(cell.measured).items() if words]
    if cell.output_tokens is not None and cell.output_tokens != cell.output:
        lines.append(f"{where}: {cell.output_tokens:g} of the {cell.output} requested tokens were generated")
    if cell.prompt_tokens is not None and cell.prompt_tokens != cell.prompt:
        lines.append(f"{where}: the server counted {cell.prompt_tokens:g} prompt tokens, not {cell.prompt}")
    return lines


def _number(value: float | None, spec: str, unit: str = "") -> str:
    return "-" if value is None else format(value, spec) + unit
