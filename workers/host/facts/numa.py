"""Reads the NUMA nodes of a host from /sys/devices/system/node (kernel documentation, sysfs-devices-node)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from workers.host.facts.cpu_list import parse_cpulist
from workers.host.facts.sections import Findings, excerpt


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node and its usable CPUs."""

    node: int
    cpus: tuple[int, ...]


def parse_numa(cpulists: Mapping[str, str], usable: tuple[int, ...]) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Returns nodes and problems from the contents of node*/cpulist, by folder name. Never raises."""
    findings = Findings()
    nodes = []
    for name, text in cpulists.items():
        match = re.fullmatch(r"node([0-9]{1,4})", name)
        cpus = parse_cpulist(text)
        if match is None:
            continue
        if cpus is None:
            findings.add(f"NUMA: {name}/cpulist", f"is {excerpt(text)}, not a list of CPUs")
            continue
        nodes.append(NumaNode(node=int(match[1]), cpus=tuple(cpu for cpu in usable if cpu in set(cpus))))
    return tuple(sorted(nodes, key=lambda node: node.node)), findings()


def read_numa(root: Path, usable: tuple[int, ...]) -> tuple[tuple[NumaNode, ...], tuple[str, ...]]:
    """Reads /sys/devices/system/node. Returns no nodes if it does not exist."""
    texts: dict[str, str] = {}
    problems: list[str] = []
    for folder in root.glob("node[0-9]*"):
        try:
            texts[folder.name] = (folder / "cpulist").read_text(errors="replace")
        except OSError as error:
            problems.append(f"NUMA: {folder / 'cpulist'}: {error.strerror or error}")
    nodes, findings = parse_numa(texts, usable)
    return nodes, (*problems, *findings)
