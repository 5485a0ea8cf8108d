"""The machines of a Ray cluster: bound to the planner's hosts, and claimed.

A machine belongs to one fleet, and stands for one host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from orchestrator.cluster.ray_names import SHARED


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


MACHINE = "machine/"  # begins the key of each claim; the label of the machine follows


class KeyValues(Protocol):
    """Ray's KV, which all processes of the cluster share. Calls block, and raise Ray's errors if its head is away."""

    def get(self, namespace: str, keys: Sequence[str]) -> Mapping[str, bytes]:
        """Returns the values of those keys that exist."""

    def put(self, namespace: str, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Returns whether the key is new. Without ``overwrite``, the value of an existing key stays."""

    def delete(self, namespace: str, key: str) -> None: ...

    def keys(self, namespace: str, prefix: str) -> Sequence[str]: ...


class Claim(msgspec.Struct, frozen=True):
    """The value of a claim."""

    fleet: str  # its name
    host: str  # the planner's host


def claims(kv: KeyValues) -> dict[str, Claim]:
    """Returns the claim on each machine of the cluster, by the machine's label."""
    values = kv.get(SHARED, kv.keys(SHARED, MACHINE))
    return {key.removeprefix(MACHINE): msgspec.json.decode(value, type=Claim) for key, value in values.items()}


def release_machines(kv: KeyValues, fleet: str) -> None:
    """Release all machines of a fleet."""
    for label, claim in claims(kv).items():
        if claim.fleet == fleet:
            kv.delete(SHARED, MACHINE + label)


class MachineClaims:
    """The machines of one fleet's hosts. Only the fleet's controller uses it, from one thread at a time."""

    def __init__(self, kv: KeyValues, fleet: str) -> None:
        self._kv = kv
        self._fleet = fleet
        self.labels = {claim.host: label for label, claim in claims(kv).items() if claim.fleet == fleet}

    def bind(self, names: Iterable[str], members: Iterable[Member], *, keep: bool = False) -> dict[str, str]:
        """Returns the label of each host's machine, as ``bind_hosts`` chooses it among the machines without a fleet.

        Machines that no host uses any more are released. If it raises, the claims that were made stand.
        """
        wanted, seen = list(names), list(members)
        taken: set[str] = set()  # by other fleets
        while True:
            labels = bind_hosts(wanted, self.labels, seen, taken, keep=keep)
            for name, label in labels.items():
                if self.labels.get(name) != label:
                    if self._claim(label, name):
                        self._drop(self.labels.get(name), labels)
                        self.labels = {**self.labels, name: label}
                    else:
                        taken.add(label)
            if not taken & set(labels.values()):
                break
        for label in set(self.labels.values()) - set(labels.values()):
            self._drop(label, labels)
        self.labels = labels
        return labels

    def _drop(self, label: str | None, labels: Mapping[str, str]) -> None:
        if label is not None and label not in labels.values():
            self._kv.delete(SHARED, MACHINE + label)

    def _claim(self, label: str, host: str) -> bool:
        """Returns whether the machine is this fleet's now."""
        key, claim = MACHINE + label, msgspec.json.encode(Claim(self._fleet, host))
        if self._kv.put(SHARED, key, claim, overwrite=False):
            return True
        stored = self._kv.get(SHARED, [key]).get(key)
        if stored is None or msgspec.json.decode(stored, type=Claim).fleet != self._fleet:
            return False
        self._kv.put(SHARED, key, claim)
        return True
