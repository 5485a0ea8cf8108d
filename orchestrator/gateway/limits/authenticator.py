"""Who may use the gateway: keys, and the origins of browsers' scripts."""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection
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
class _Known:
    """Who has used a connection last: a client need not be looked up again that says the same as before."""

    key: ApiKey
    given: bytes
    ring: KeyRing


class Authenticator:
    """The keys of one gateway, and what it asks of everyone who comes."""

    def __init__(self, settings: GatewaySettings, file: KeyFile) -> None:
        """Raises Failed when the file of keys cannot be read."""
        self._file = file
        self._insecure = settings.insecure
        self._on_loopback = is_loopback(settings.host)
        self._origins = frozenset(settings.cors_origins)
        self._limit = settings.max_connections_per_key
        file.read()
        self._ring = file.current()
        self._passed: float | None = None  # the end of a time without keys that has been reached
        self._used: dict[str, float] = {}  # when a key was last presented, by id; monotonic seconds

    @property
    def demands_keys(self) -> bool:
        """On the network always; on loopback once the home has a key, but for a grace period or `keys open`."""
        return not self._insecure and (not self._on_loopback or self._closed())

    def _closed(self) -> bool:
        """Whether the time without keys is over. It stays so when the machine's clock is set back."""
        until = self._ring.keyless_until
        if until is None:
            return False
        if until != self._passed and self._ring.demands(time.time()):
            self._passed = until
        return until == self._passed

    @property
    def keys(self) -> KeyRing:
        return self._ring

    def in_use(self, within_s: float) -> int:
        """How many keys have been presented within so many seconds."""
        since = time.monotonic() - within_s
        self._used = {id: at for id, at in self._used.items() if at >= since}
        return len(self._used)

    def refresh(self) -> None:
        """Take over what has changed in the file."""
        self._ring = self._file.current()

    def admit(self, exchange: Exchange) -> None:
        """Raises ApiError 401 without a good key where one is demanded, 429 where it has too many connections. Sets the
        exchange's key."""
        if not (demanded := self.demands_keys) and (self._insecure or not self._ring.keys):
            return
        headers = exchange.request.headers
        connection = exchange.connection
        known: _Known | None = connection.known
        now = time.time()
        if (
            known is not None
            and known.ring is self._ring
            and hmac.compare_digest(known.given, headers.get(b"authorization", b""))
            and not known.key.expired(now)
        ):
            exchange.key = known.key
            self._used[known.key.id] = time.monotonic()
            return
        given = headers.get(b"authorization", b"")
        try:
            key = self._key_of(headers, now)
        except ApiError:
            if demanded:
                raise
            connection.known = None
            return
        exchange.key = key
        self._used[key.id] = time.monotonic()
        if exchange.count_for(key.id) > self._limit:
            exchange.request.keep_alive = False
            raise errors.too_many_connections(self._limit, of_key=True)
        connection.known = _Known(key, given, self._ring) if given else None

    def early(self, headers: dict[bytes, bytes]) -> ApiError | None:
        """What is wrong with whoever sends these, before the body is read."""
        if self.demands_keys:
            try:
                self._key_of(headers, time.time())
            except ApiError as error:
                return error
        return None

    def _key_of(self, headers: dict[bytes, bytes], now: float) -> ApiKey:
        given = headers.get(b"authorization", b"")
        presented = given[7:] if given[:7].lower() == b"bearer " else headers.get(b"x-api-key", b"")
        key = self._ring.authenticate(presented.strip().decode("latin-1"), now)
        if key is None:
            raise errors.invalid_api_key(bool(presented))
        return key

    def admit_origin(self, exchange: Exchange) -> None:
        """A browser says whose script asks. One of another origin may ask nothing unless the settings name it: without
        this any page could use what listens on its reader's loopback. Raises ApiError 403."""
        request = exchange.request
        origin = request.headers.get(b"origin", b"").decode("latin-1")
        if not origin or (origin in self._origins or "*" in self._origins):
            if origin:
                exchange.add_headers(_cors(origin))
            return
        host = request.headers.get(b"host", b"").decode("latin-1")
        same = origin.partition("://")[2] == host and (self.demands_keys or is_loopback(host_name(host)))
        if not same and request.method != "GET":
            raise errors.origin_not_allowed(origin)


def allow_model(key: ApiKey | None, names: Collection[str], asked: str) -> None:
    """Raises ApiError 403 when the key is for other models. ``names`` are all that the model goes by."""
    if key is not None and key.models and not set(key.models) & set(names):
        raise errors.key_not_for(f"the model {asked!r}")


def allow_scope(key: ApiKey | None, *scopes: str) -> None:
    """Raises ApiError 403 when the key has none of the scopes."""
    if key is None:
        return
    for scope in scopes:
        if scope in key.scopes:
            return
    raise errors.key_not_for(" or ".join(scopes))


def host_name(host: str) -> str:
    """Without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdecimal() else host).strip("[]")


_RATES = b", ".join(
    b"x-ratelimit-%b-%b" % (what, of) for of in (b"requests", b"tokens") for what in (b"limit", b"remaining", b"reset")
)
EXPOSED = (
    b"x-request-id, x-corewright-replica, x-corewright-overhead-ms, x-corewright-decision, retry-after, %b" % _RATES
)


def _cors(origin: str) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"access-control-allow-origin", origin.encode("latin-1")),
        (
            b"access-control-expose-headers",
            EXPOSED,
        ),
        (b"vary", b"origin"),
    )


PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
    (
        b"access-control-allow-headers",
        b"authorization, content-type, x-api-key, x-request-id, x-session-id, x-deadline-ms, x-corewright-explain",
    ),
    (b"access-control-max-age", b"600"),
)
