"""Exchanges the usage of API keys between the machines whose gateways share the keys' limits. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class KeyUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one key has used on some machines."""

    key: str  # its id
    requests: float = 0.0  # since the last report
    tokens: float = 0.0  # since the last report; negative: returned by requests that used less than they reserved
    live: int = 0  # requests now, including queued ones

    def plus(self, requests: float, tokens: float) -> KeyUsage:
        """Returns the usage with more requests and tokens."""
        return KeyUsage(self.key, self.requests + requests, self.tokens + tokens, self.live)


class KeyUsageExchange:
    """The usage not yet sent to each machine, and the live requests of each gateway."""

    def __init__(self) -> None:
        self._unreported: dict[str, dict[str, KeyUsage]] = {}  # by machine and key
        self._live: dict[str, tuple[str, dict[str, int]]] = {}  # machine and live requests by key, by gateway

    def receive(self, gateway: str, machine: str, usage: Iterable[KeyUsage]) -> list[KeyUsage]:
        """Count what a gateway reports. Returns what the gateways of other machines have used since the last reply to
        this machine, and their live requests."""
        used = list(usage)
        own = self._unreported.setdefault(machine, {})
        self._live[gateway] = machine, {item.key: item.live for item in used if item.live}
        for other, unreported in self._unreported.items():
            if other != machine:
                for item in used:
                    if item.requests or item.tokens:
                        before = unreported.get(item.key, KeyUsage(item.key))
                        unreported[item.key] = before.plus(item.requests, item.tokens)
        live: dict[str, int] = {}
        for elsewhere, counts in self._live.values():
            if elsewhere != machine:
                for key, count in counts.items():
                    live[key] = live.get(key, 0) + count
        reply = [
            KeyUsage(key, item.requests, item.tokens, live.get(key, 0))
            for key in sorted(own.keys() | live.keys())
            for item in (own.get(key, KeyUsage(key)),)
        ]
        own.clear()
        return reply

    def forget(self, gateway: str) -> None:
        """Forget a gateway that does not report any more, and its machine if it was the last one there."""
        machine, _ = self._live.pop(gateway, ("", {}))
        if all(other != machine for other, _ in self._live.values()):
            self._unreported.pop(machine, None)
