"""Admits requests to the gateway by API key, and browser scripts by their origin."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.access.keys import ApiKey, KeyFile, KeyRing
from orchestrator.gateway.http.exchange import Exchange
from orchestrator.gateway.openai import errors
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.process.addresses import is_loopback

if TYPE_CHECKING:
    from orchestrator.gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class _CachedKey:
    """The key last used on a connection: the same header need not be looked up again."""

    key: ApiKey
    header: bytes
    ring: KeyRing


class Authenticator:
    """The keys of one gateway, and the checks that each request must pass."""

    def __init__(self, settings: GatewaySettings, file: KeyFile) -> None:
        """Raises Failed when the key file cannot be read."""
        self._file = file
        self._insecure = settings.insecure
        self._on_loopback = is_loopback(settings.host)
        self._origins = frozenset(settings.cors_origins)
        self._limit = settings.max_connections_per_key
        file.read()
        self._ring = file.current()
        self._passed: float | None = None  # the end of a keyless period, once it was reached
        self._used: dict[str, float] = {}  # the last use of a key, by id; monotonic seconds

    @property
    def requires_keys(self) -> bool:
        """True on the network always; on loopback once the home has a key, except in a grace period or after `keys
        open`."""
        return not self._insecure and (not self._on_loopback or self._closed())

    def _closed(self) -> bool:
        """Returns whether the keyless period is over, for good: also when the machine's clock is set back."""
        until = self._ring.keyless_until
        if until is None:
            return False
        if until != self._passed and self._ring.requires_key(time.time()):
            self._passed = until
        return until == self._passed

    @property
    def keys(self) -> KeyRing:
        return self._ring

    def in_use(self, within_s: float) -> int:
        """Returns how many keys were used within the last ``within_s`` seconds."""
        since = time.monotonic() - within_s
        self._used = {id: at for id, at in self._used.items() if at >= since}
        return len(self._used)

    def refresh(self) -> None:
        """Applies changes of the key file."""
        self._ring = self._file.current()

    def admit(self, exchange: Exchange) -> None:
        """Sets the exchange's key. Raises ApiError 401 without a valid key where one is required, 429 when the key has
        too many connections."""
        headers = exchange.request.headers
        connection = exchange.connection
        cached: _CachedKey | None = connection.client
        now = time.time()
        if (
            cached is not None
            and cached.ring is self._ring
            and hmac.compare_digest(cached.header, headers.get(b"authorization", b""))
            and b"x-api-key" not in headers
            and not cached.key.expired(now)
        ):
            exchange.key = cached.key
            self._used[cached.key.id] = time.monotonic()
            return
        if not (required := self.requires_keys) and (self._insecure or not self._ring.keys):
            return
        header = headers.get(b"authorization", b"")
        try:
            key = self._key_of(headers, now)
        except ApiError:
            if required:
                raise
            connection.client = None
            return
        exchange.key = key
        self._used[key.id] = time.monotonic()
        if connection.server.count_for(connection, key.id) > self._limit:
            exchange.request.keep_alive = False
            raise errors.too_many_connections(self._limit, of_key=True)
        connection.client = _CachedKey(key, header, self._ring) if _is_bearer(header) else None

    def early(self, headers: dict[bytes, bytes]) -> ApiError | None:
        """Returns the error for a request with these headers, before its body is read; None when it may go on."""
        if self.requires_keys:
            try:
                self._key_of(headers, time.time())
            except ApiError as error:
                return error
        return None

    def _key_of(self, headers: dict[bytes, bytes], now: float) -> ApiKey:
        header, own = headers.get(b"authorization", b""), headers.get(b"x-api-key", b"").strip()
        presented = header[7:].strip() if _is_bearer(header) else own
        if own and not hmac.compare_digest(own, presented):
            raise errors.two_api_keys()
        key = self._ring.authenticate(presented.decode("latin-1"), now)
        if key is None:
            raise errors.invalid_api_key(bool(presented))
        return key

    def admit_origin(self, exchange: Exchange) -> None:
        """Rejects scripts of other origins, unless the settings name them: otherwise any web page could use a gateway
        on its reader's loopback. Raises ApiError 403."""
        request = exchange.request
        origin = request.headers.get(b"origin", b"").decode("latin-1")
        if not origin:
            return
        if origin in self._origins or "*" in self._origins:
            exchange.add_headers(_cors(origin))
            return
        host = request.headers.get(b"host", b"").decode("latin-1")
        same = origin.partition("://")[2] == host and (self.requires_keys or is_loopback(host_name(host)))
        if not same and request.method != "GET":
            raise errors.origin_not_allowed(origin)


def _is_bearer(header: bytes) -> bool:
    return header[:7].lower() == b"bearer "


def host_name(host: str) -> str:
    """Returns the host without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]")


_RATES = b", ".join(
    b"x-ratelimit-%b-%b" % (kind, unit)
    for unit in (b"requests", b"tokens")
    for kind in (b"limit", b"remaining", b"reset")
)
EXPOSED = (
    b"x-request-id, request-id, x-corewright-replica, x-corewright-overhead-ms, x-corewright-decision, "
    b"x-corewright-ignored-tools, x-corewright-schema-relaxed, retry-after, %b" % _RATES
)


def _cors(origin: str) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"origin"),
    )


PREFLIGHT = (  # beside the methods
    (  # the request headers that a browser's script may send
        b"access-control-allow-headers",
        b"authorization, content-type, x-api-key, x-request-id, x-session-id, x-deadline-ms, x-corewright-explain, "
        b"x-corewright-strict, "
        b"anthropic-version, anthropic-beta, anthropic-dangerous-direct-browser-access",
    ),
    (b"access-control-max-age", b"600"),
)
