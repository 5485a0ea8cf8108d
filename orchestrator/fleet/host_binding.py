"""Binds the planner's hosts to the machines of a Ray cluster that the fleet has joined."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Member:
    """A machine of the cluster, as its Ray node describes itself."""

    label: str  # stays when the machine joins again, with a new Ray node
    instance: str | None  # the label `corewright-instance`
    alive: bool
    cores: int  # its resources nc0, nc1, ...
    cpus: int


def bind_hosts(
    names: Iterable[str],
    bound: Mapping[str, str],
    members: Iterable[Member],
    taken: Collection[str] = (),
    *,
    keep: bool = False,
) -> dict[str, str]:
    """Returns the label of each host's machine, by the planner's host names. A host without one is lost.

    A host keeps its machine while that machine is alive, and also when it is dead and no other can replace it, or if
    hosts ``keep`` theirs: it may come back. Else the host gets the first free living machine of its instance type, in
    the order of labels, except those that are ``taken``.
    """
    living = {member.label: member for member in members if member.alive and member.cores}
    wanted = list(names)
    labels = {name: label for name, label in bound.items() if name in wanted}
    free = sorted(living.keys() - labels.values() - set(taken))
    for name in wanted:
        if labels.get(name) in living or (keep and name in labels):
            continue
        instance = name.rpartition("/")[0]
        label = next((label for label in free if living[label].instance == instance), None)
        if label is not None:
            free.remove(label)
            labels[name] = label
    return labels


def lost_hosts(
    names: Iterable[str], labels: Mapping[str, str], living: Collection[str], *, settling: bool
) -> frozenset[str]:
    """Returns the hosts without a living machine, given the ``labels`` of living ones. While nodes are ``settling``, a
    host that has a machine is not lost: its node may only not have registered again."""
    missing = {name for name in names if labels.get(name) not in living}
    return frozenset(missing - labels.keys() if settling else missing)
