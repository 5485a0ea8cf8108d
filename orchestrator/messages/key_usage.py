"""The use of API keys at the gateways of a fleet, for limits that hold for all of them together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec


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
