"""The report of advice: its data for JSON, and tables for the terminal."""

from __future__ import annotations

from typing import Any

from orchestrator.advise.advice import SHARE, WITHIN, Advice, Line
from orchestrator.advise.buckets import BucketAdvice, BucketSet
from orchestrator.process.text_table import columns
from placements.engines.evidence import THIN
from placements.facts.plural import counted

HEADER = (
    *("#", "INSTANCE", "HOSTS", "TP", "BATCH", "WEIGHTS", "REPLICAS", "HBM/CORE", "TOKENS/S/HOST"),
    *("TTFT p50", "p99", "TPOT p50", "p99", "ERROR"),
)


def advice_data(advice: Advice) -> dict[str, Any]:
    """Returns the JSON of `advise -o json`."""
    question = advice.question
    return {
        "source": question.source,
        "load": {
            **{
                name: getattr(question, name)
                for name in ("rps", "prompt_tokens", "output_tokens", "ttft_ms", "tpot_ms")
            },
            "max_len": question.slot,
        },
        "compared": advice.compared,
        "lines": [_line_data(line) for line in advice.lines],
        "left_out": [
            {**_candidate(candidate), "reason": id, "what": reason.what}
            for id, reasons in advice.left_out.items()
            for candidate, reason in reasons
        ],
        "evidence": [
            {"machines": machines, "engine": engine, "releases": releases}
            for (machines, engine), releases in advice.evidence.items()
        ],
    }


def _candidate(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in ("instance", "tp_degree", "max_batch", "weights")}


def _line_data(line: Line) -> dict[str, Any]:
    dollars = line.dollars_per_million
    return {
        **_candidate(line.candidate),
        "hosts": line.hosts,
        "replicas": line.replicas,
        "replicas_per_host": line.per_host,
        "cores": line.cores,
        "hbm_gib_per_core": round(line.hbm_gib, 2),
        "tokens_per_s_per_host": round(line.host_tokens_per_s, 1),
        "rps": round(line.rps, 4),
        "ttft_ms": line.ttft_ms.as_dict(),
        "tpot_ms": line.tpot_ms.as_dict(),
        "latency_ms": line.latency_ms.as_dict(),
        "dollars_per_million_tokens": None if dollars is None else round(dollars, 4),
        "speed": line.speed.as_dict(),
        "spec": line.spec,
    }


def advice_text(advice: Advice) -> str:
    """Returns the report as text."""
    question = advice.question
    load = f"{SHARE:.0%} of what a host can serve" if question.rps is None else f"{question.rps:g} requests/s"
    limits = {"TTFT": question.ttft_ms, "TPOT": question.tpot_ms}
    wanted = [f"{name} {limit:g} ms" for name, limit in limits.items() if limit is not None]
    lines = [
        f"{question.name}: {load} of {question.prompt_tokens} + {question.output_tokens} tokens, "
        f"in slots of {question.slot}" + (f"; {' and '.join(wanted)} for {WITHIN:.0%}" if wanted else "")
    ]
    priced = bool(question.prices)
    header = (*HEADER, "$/M TOKENS") if priced else HEADER
    lines += ["", columns(header, [_row(i, line, priced) for i, line in enumerate(advice.lines, 1)]), ""]
    lines.append("Times are as long as ERROR, the error of the estimated step, allows; docs/sizing.md has its sources.")
    for (machines, engine), releases in advice.evidence.items():
        each = "; ".join(f"SDK {evidence.sdk} {evidence.text}" for evidence in releases)
        lines.append(f"Reports on {machines} with {engine}: {each or 'none of this model'}.")
    lines.append(THIN)
    left_out = ", ".join(f"{len(reasons)} by {id}" for id, reasons in advice.left_out.items())
    lines.append(f"{counted(advice.compared, 'candidate')} compared" + (f"; left out: {left_out}" if left_out else ""))
    return "\n".join(lines)


def _row(number: int, line: Line, priced: bool) -> tuple[object, ...]:
    candidate = line.candidate
    row = (
        *(number, candidate.instance, line.hosts, candidate.tp_degree, candidate.max_batch, candidate.weights),
        f"{line.replicas} of {line.per_host * line.hosts}",
        f"{line.hbm_gib:.1f} GiB",
        f"{line.host_tokens_per_s:.0f}",
        *(f"{value:.0f} ms" for value in (line.ttft_ms.p50, line.ttft_ms.p99)),
        *(f"{value:.1f} ms" for value in (line.tpot_ms.p50, line.tpot_ms.p99)),
        f"{line.speed.decode_error:.0%}",
    )
    dollars = line.dollars_per_million
    return (*row, None if dollars is None else f"{dollars:.2f}") if priced else row


def buckets_data(advice: dict[str, BucketAdvice], compile_s: float | None) -> dict[str, Any]:
    """Returns the JSON of `advise buckets -o json`, by model."""
    return {
        model: {
            "prompts": own.prompts,
            "best": [_bucket_data(each, compile_s) for each in own.best],
            "default": _bucket_data(own.default, compile_s),
            "chosen": list(own.chosen.lengths),
        }
        for model, own in advice.items()
    }


def _bucket_data(each: BucketSet, compile_s: float | None) -> dict[str, Any]:
    seconds = None if compile_s is None else compile_s * len(each.lengths)
    return {"buckets": list(each.lengths), "padding": round(each.padding, 4), "compile_s": seconds}


def buckets_text(advice: dict[str, BucketAdvice], compile_s: float | None) -> str:
    """Returns the report as text: a table and a line for the spec for each model."""
    parts = []
    for model, own in advice.items():
        rows = [_bucket_row(each, compile_s, "*" if each is own.chosen else "") for each in own.best]
        rows.append(_bucket_row(own.default, compile_s, "default"))
        parts.append(
            f"{model}: {counted(own.prompts, 'prompt')}\n"
            + columns(("GRAPHS", "PADDING", "COMPILE", "BUCKETS", ""), rows)
            + f"\n\nbuckets: {{prefill: {list(own.chosen.lengths)}}}"
        )
    return "\n\n".join(parts)


def _bucket_row(each: BucketSet, compile_s: float | None, mark: str) -> tuple[object, ...]:
    count = len(each.lengths)
    minutes = None if compile_s is None else f"{compile_s * count / 60:.0f} min"
    return count, f"{each.padding:.0%}", minutes, " ".join(map(str, each.lengths)), mark
