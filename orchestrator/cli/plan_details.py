"""The details of a plan as text: memory of cores, threads of hosts, environments of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.process.text_table import columns, three_digits
from placements.explain.core_map import host_names

PROMPT = 512  # tokens of the prompt whose prefill is shown
MOST = 50  # replicas or groups of hosts that are shown
UNKNOWN_NOTE = "unknown: an order of magnitude, until a fleet measures the speed; see docs/sizing.md"
_SHORT = {
    "weights, sharded": "SHARDED",
    "weights, replicated": "REPLICATED",
    "KV cache": "KV",
    "draft weights": "DRAFT",
    "draft KV cache": "DRAFT KV",
}
_TAG = "NEURON_PROCESS_TAG"


def details(data: Mapping[str, Any]) -> list[str]:
    """Returns the sections, each with its title."""
    sections = [
        _memory(data.get("memory") or ()),
        _speeds(data.get("speeds") or ()),
        *_threads(data.get("hosts") or ()),
        _environments(data["placements"]),
    ]
    return [section for section in sections if section]


def _memory(needs: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each model and host type: the memory classes of the fullest core, and its usable memory."""
    if not needs:
        return ""
    names = list(dict.fromkeys(memory["class"] for need in needs for memory in need["classes"]))
    several = len({_type(need) for need in needs}) > 1
    rows = []
    for need in needs:
        sizes = {memory["class"]: memory["gib"] for memory in need["classes"]}
        rows.append(
            (
                need["model"],
                *([_type(need)] if several else []),
                *(f"{sizes[name]:.2f}" if name in sizes else None for name in names),
                f"{need['total_gib']:.2f}",
                f"{need['usable_gib']:.2f}",
                f"{need['host']['load_gib']:.1f}",
            )
        )
    header = ["MODEL", *(["INSTANCE"] if several else []), *(_SHORT.get(name, name.upper()) for name in names)]
    title = "Memory, GiB on the fullest core of a replica (HOST: of the host, to load it)"
    return f"{title}\n" + columns([*header, "TOTAL", "USABLE", "HOST"], rows)


def _speeds(speeds: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each model that generates: its step, its tokens, the prefill of a prompt, and their source."""
    rows = []
    for speed in speeds:
        error = speed["decode_error"]
        prompt = speed["prefill_base_ms"] + PROMPT * speed["prefill_token_ms"]
        prompt += PROMPT**2 * speed["prefill_square_ns"] / 1e6
        sure = "" if not error else "unknown" if error >= 1 else f"+-{error:.0%}"
        step, rate = f"{three_digits(speed['step_ms'])} ms", three_digits(speed["tokens_per_s"])
        rows.append((speed["model"], step, sure, rate, f"{three_digits(prompt)} ms", speed["source"]))
    header = ("MODEL", "STEP", "ERROR", "TOKENS/S", f"PROMPT OF {PROMPT}", "SOURCE")
    if not rows:
        return ""
    note = f"\n{UNKNOWN_NOTE}" if any(row[2] == "unknown" for row in rows) else ""
    return "Speed of a replica\n" + columns(header, rows) + note


def _type(need: Mapping[str, Any]) -> str:
    """ "trn2.48xlarge lnc 2"."""
    lnc = need.get("lnc")
    return f"{need['instance']} lnc {lnc}" if lnc else str(need["instance"])


def _threads(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the thread arithmetic of each host; hosts with equal arithmetic share a table."""
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for host in hosts:
        if host["thread_ledger"]:
            key = repr((host["cpus"], host["reserve_vcpus"], host["thread_ledger"]))
            alike.setdefault(key, []).append(host)
    groups = list(alike.values())
    sections = []
    for group in groups[:MOST]:
        host, budget = group[0], group[0]["cpus"] - group[0]["reserve_vcpus"]
        rows = [
            (line["model"], line["replicas"], line["arithmetic"], line["together"]) for line in host["thread_ledger"]
        ]
        names = host_names([member["name"] for member in group])
        title = f"Threads on {names}: {host['cpus']} CPUs - {host['reserve_vcpus']} reserved = {budget}"
        title += f", {host['threads']} in use"
        sections.append(f"{title}\n" + columns(("MODEL", "REPLICAS", "THREADS OF EACH", "TOGETHER"), rows))
    more = sum(map(len, groups[MOST:]))
    return [*sections, f"... and {more} more hosts"] if more else sections


def _environments(placements: Sequence[Mapping[str, Any]]) -> str:
    """Returns the variables that all replicas share, then those of each replica."""
    placed = [placement for placement in placements if placement["env"]]
    if not placed:
        return ""
    common = set(placed[0]["env"].items())
    for placement in placed[1:]:
        common &= set(placement["env"].items())
    rows = []
    for placement in placed[:MOST]:
        own = [
            f"{key}={value}" for key, value in placement["env"].items() if (key, value) not in common and key != _TAG
        ]
        rows.append((f"{placement['model']}/{placement['replica']}", " ".join(own)))
    lines = [f"Environment of each replica: {_TAG}=MODEL/REPLICA"]
    lines += [f"  {key}={value}" for key, value in sorted(common) if key != _TAG]
    own_rows = [row for row in rows if row[1]]
    if own_rows:
        width = max(len(row[0]) for row in own_rows)
        lines += [f"{name.ljust(width)}  {text}" for name, text in own_rows]
    if len(placed) > MOST:
        lines.append(f"... and {len(placed) - MOST} more; `-o json` has every replica")
    return "\n".join(lines)
