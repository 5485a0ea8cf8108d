"""What the controller and the gateways tell each other besides the routes: places, usage of keys, hosted models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

GATEWAY_LOST_S = 10.0  # a gateway without a report for this long has ended, or is cut off
HOSTS, HEAD = "hosts", "head"  # values of the setting `gateways_on`, besides a label KEY=VALUE


@dataclass(frozen=True, order=True)
class GatewayPlace:
    """A machine on which gateways run."""

    label: str  # its identity, which stays when it joins again
    node: str  # the id of its Ray node


@dataclass(frozen=True)
class ClusterMachine:
    """A living machine of the cluster, as its Ray node describes it."""

    place: GatewayPlace
    address: str
    host: str | None = None  # the planner's host that it is
    is_head: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def wanted_gateways(
    places_on: str, machines: Iterable[ClusterMachine], ended: Collection[str] = ()
) -> frozenset[GatewayPlace]:
    """Returns where gateways run by the setting ``places_on``; ``ended`` are hosts that are about to end.

    Ray nodes of one address are one machine, on which only one of them can have the port."""
    key, is_label, value = places_on.partition("=")
    by_address: dict[str, GatewayPlace] = {}
    for machine in machines:
        if is_label:
            fits = machine.labels.get(key) == value
        else:
            fits = machine.is_head if places_on == HEAD else machine.host is not None
        if fits and machine.host not in ended:
            by_address[machine.address] = min(machine.place, by_address.get(machine.address, machine.place))
    return frozenset(by_address.values())


class Hosting(NamedTuple):
    """An HTTP status of SageMaker's contract for containers with several models, and its message. 202: ask again."""

    status: int
    message: str


class KeyUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one key has used at some gateways."""

    key: str  # its id
    requests: float = 0.0  # since the last report
    tokens: float = 0.0  # since the last report; negative: returned by requests that used less than they reserved
    live: int = 0  # requests now, including queued ones

    def plus(self, requests: float, tokens: float) -> KeyUsage:
        """Returns the usage with more requests and tokens."""
        return KeyUsage(self.key, self.requests + requests, self.tokens + tokens, self.live)


class KeyUsageExchange:
    """The usage not yet sent to each gateway, and the live requests of each."""

    def __init__(self) -> None:
        self._unreported: dict[str, dict[str, KeyUsage]] = {}  # by gateway and key
        self._live: dict[str, dict[str, int]] = {}  # by gateway and key

    def receive(self, gateway: str, usage: Iterable[KeyUsage]) -> list[KeyUsage]:
        """Count what a gateway reports. Returns what the others have used since the last reply to it, and their live
        requests."""
        used = list(usage)
        own = self._unreported.setdefault(gateway, {})
        self._live[gateway] = {item.key: item.live for item in used if item.live}
        for other, unreported in self._unreported.items():
            if other != gateway:
                for item in used:
                    if item.requests or item.tokens:
                        before = unreported.get(item.key, KeyUsage(item.key))
                        unreported[item.key] = before.plus(item.requests, item.tokens)
        live = Counter[str]()
        for other, counts in self._live.items():
            if other != gateway:
                live.update(counts)
        reply = [
            KeyUsage(key, item.requests, item.tokens, live[key])
            for key in sorted(own.keys() | live.keys())
            for item in (own.get(key, KeyUsage(key)),)
        ]
        own.clear()
        return reply

    def forget(self, gateway: str) -> None:
        """Forget a gateway that does not report any more."""
        self._live.pop(gateway, None)
        self._unreported.pop(gateway, None)
