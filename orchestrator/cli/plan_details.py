"""What a plan takes, as a person reads it: memory of the cores, threads of the hosts, environments of the processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.process.text_table import columns
from placements.explain.core_map import host_names

MOST = 50  # replicas or groups of hosts that are shown
_SHORT = {
    "weights, sharded": "SHARDED",
    "weights, replicated": "REPLICATED",
    "KV cache": "KV",
    "draft weights": "DRAFT",
    "draft KV cache": "DRAFT KV",
}
_TAG = "NEURON_PROCESS_TAG"


def details(data: Mapping[str, Any]) -> list[str]:
    """The sections, each with its title."""
    found = [
        _memory(data.get("memory") or ()),
        *_threads(data.get("hosts") or ()),
        _environments(data["placements"]),
    ]
    return [section for section in found if section]


def _memory(needs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each model and type of host: the classes of the fullest core, and what may be filled."""
    if not needs:
        return ""
    names = list(dict.fromkeys(one["class"] for need in needs for one in need["classes"]))
    several = len({_type(need) for need in needs}) > 1
    rows = []
    for need in needs:
        sizes = {one["class"]: one["gib"] for one in need["classes"]}
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


def _type(need: Mapping[str, Any]) -> str:
    """ "trn2.48xlarge lnc 2"."""
    lnc = need.get("lnc")
    return f"{need['instance']} lnc {lnc}" if lnc else str(need["instance"])


def _threads(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """The arithmetic of each host; hosts with the same share a table."""
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
        names = host_names([one["name"] for one in group])
        title = f"Threads on {names}: {host['cpus']} CPUs - {host['reserve_vcpus']} reserved = {budget}"
        title += f", {host['threads']} in use"
        sections.append(f"{title}\n" + columns(("MODEL", "REPLICAS", "THREADS OF EACH", "TOGETHER"), rows))
    more = sum(map(len, groups[MOST:]))
    return [*sections, f"... and {more} more hosts"] if more else sections


def _environments(placements: Sequence[Mapping[str, Any]]) -> str:
    """What is the same everywhere once, then what differs for each replica."""
    known = [placement for placement in placements if placement["env"]]
    if not known:
        return ""
    common = set(known[0]["env"].items())
    for placement in known[1:]:
        common &= set(placement["env"].items())
    rows = []
    for placement in known[:MOST]:
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
    if len(known) > MOST:
        lines.append(f"... and {len(known) - MOST} more; `-o json` has every replica")
    return "\n".join(lines)
