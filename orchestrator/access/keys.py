"""The API keys of a home: their file, their scopes and their limits. Only a digest of each key is stored.

A key has the form `cw-ID-SECRET`. The id is public: lists, logs and metrics show it. The secret has 256 random bits, so
one round of SHA-256 is enough: a slow hash protects passwords that people choose, and would slow down each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
import msgspec.structs

from orchestrator.process.durations import moment, span_s
from orchestrator.process.failure import Failed
from workers.host import file_lock, private_file

log = logging.getLogger(__name__)

Scope = Literal["inference", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "cw"
ID_LENGTH = 8
SECRET_LENGTH = 43  # characters: 32 random bytes in urlsafe base64
TEXT_LENGTH = len(PREFIX) + 1 + ID_LENGTH + 1 + SECRET_LENGTH
MAX_LIFE_S = 100 * 365.25 * 86400.0
MAX_BYTES = 16 * 2**20  # of the file: about 50,000 keys

_ID = rf"^[0-9a-f]{{{ID_LENGTH}}}\Z"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}\Z"
_NAME_RULE = (
    "use at most 63 letters, digits and . _ @ -, with a letter or digit first, and not 8 hex digits, which are an id"
)
NONE = "none"  # removes a limit
MAX_LIMITS: dict[str, int] = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 10**6}
MAX_PRIORITY = 10**6  # absolute value, as in a request's body
BOUNDS: dict[str, tuple[float, int]] = {
    "weight": (0.01, 100),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
    **{name: (1, most) for name, most in MAX_LIMITS.items()},
}
LIMIT_RULE = (
    f"a weight is 0.01 to 100; a priority -{MAX_PRIORITY} to {MAX_PRIORITY}; a limit is an integer from 1, "
    f"or {NONE}; at most " + ", ".join(f"{most} {name}" for name, most in MAX_LIMITS.items())
)
MAX_NUMBER_DIGITS = 12  # digits
VERSION = 3  # of the file if `keyless_until` is set; 2 with a weight or a limit; else 1, which all versions read
CLOSED = 0.0  # the value of `keyless_until` if every request needs a key
EXPIRY_RULE = (
    "use a duration like 90m, 12h, 30d or 8w, or a time like 2027-01-31 or 2027-01-31T18:00+01:00 "
    "(UTC without an offset)"
)
_NO_DIGEST = hashlib.sha256(secrets.token_bytes(32)).hexdigest()  # compared with the secret of an unknown id
POLL_S = 0.5  # between two looks at the file; each is one `stat`


class Allowance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The limits of one key and its share of a busy fleet: the fields of a key that can change."""

    weight: float = 1.0  # a key of weight 3 gets three times the tokens of one of weight 1, while both have requests
    priority: int = 0  # the most urgent priority of its requests, and their default; lower goes first
    requests_per_minute: int | None = None  # None: unlimited, as for the next two
    tokens_per_minute: int | None = None  # prompt and output tokens
    max_concurrent: int | None = None  # concurrent requests, including queued ones

    @property
    def limited(self) -> bool:
        """Returns whether the key has any limit."""
        return (self.requests_per_minute, self.tokens_per_minute, self.max_concurrent) != (None, None, None)

    def violation(self) -> str | None:
        """Returns the first field that is out of bounds, as a message."""
        for name, (least, most) in BOUNDS.items():
            value: float | None = getattr(self, name)
            if value is not None and not least <= value <= most:
                return f"a {name} of {value} is not between {least} and {most}"
        return None


class ApiKey(Allowance, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key, without its secret."""

    id: Annotated[str, msgspec.Meta(pattern=_ID)]
    name: Annotated[str, msgspec.Meta(pattern=_NAME)]
    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]  # SHA-256 of the secret, in hex
    scopes: Annotated[tuple[Scope, ...], msgspec.Meta(min_length=1)]
    models: tuple[str, ...]  # that it may use; empty: all
    created: float  # seconds since the epoch
    expires: float | None  # None: never

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    def has_scope(self, scope: Scope) -> bool:
        return scope in self.scopes


class _StoredKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Literal[1, 2, 3]
    keys: list[ApiKey]
    keyless_until: float | None = CLOSED  # seconds since the epoch; None: forever


class _Versioned(msgspec.Struct):
    version: int = VERSION


UNLIMITED = Allowance()


class KeyRing:
    """An immutable snapshot of the keys."""

    def __init__(self, keys: Iterable[ApiKey] = (), *, keyless_until: float | None = None) -> None:
        """``keyless_until``: the time until which requests without a key are accepted, in seconds since the epoch; None
        is forever, as in a home that never had a key."""
        self.keys = tuple(keys)
        self.keyless_until = keyless_until
        self._by_id = {key.id: key for key in self.keys}

    def __len__(self) -> int:
        return len(self.keys)

    def by_id(self, id: str) -> ApiKey | None:
        return self._by_id.get(id)

    def requires_key(self, now: float) -> bool:
        """Returns whether a request needs a key."""
        return self.keyless_until is not None and now >= self.keyless_until

    def usable(self, now: float, scope: Scope) -> int:
        """Returns the number of unexpired keys with that scope."""
        return sum(key.has_scope(scope) and not key.expired(now) for key in self.keys)

    def authenticate(self, presented: str, now: float) -> ApiKey | None:
        """Returns the key that was presented, or None. Timing does not reveal which part of a wrong key is wrong.

        ``now`` is in seconds since the epoch. The caller checks scopes and models.
        """
        if len(presented) != TEXT_LENGTH or not presented.startswith(f"{PREFIX}-"):
            return None
        id, dash, secret = presented[3:].partition("-")
        key = self._by_id.get(id)
        expected = _NO_DIGEST if key is None else key.digest
        same = hmac.compare_digest(_digest(secret), expected)
        if not same or not dash or key is None or key.expired(now):
            return None
        return key


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class KeyFile:
    """The file of keys. Any number of processes can read and write it; each sees a complete file."""

    def __init__(self, path: Path, *, required: bool = False) -> None:
        """``required``: without the file no request is accepted, instead of every one on loopback."""
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._ring = KeyRing(keyless_until=CLOSED if required else None)
        self._loaded = False  # whether `_ring` is from the file
        self._logged = False

    def read(self) -> KeyRing:
        """Returns the keys of the file; without a file there are none, and none is required. Raises Failed for a file
        that is damaged, unreadable, or writable by other users."""
        ring = self._read()
        return KeyRing() if ring is None else ring

    def _read(self) -> KeyRing | None:
        """Like ``read``, but None without a file."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            message = f"{self.path} cannot be read: {error.strerror}"
            raise Failed("keys-unreadable", message, "run the command as the owner of the file") from None
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            message = f"{self.path} is writable by other users"
            raise Failed("keys-unreadable", message, f"check its contents, then run: chmod 600 {self.path}")
        return self._parsed(data)

    def _parsed(self, data: bytes) -> KeyRing:
        hint = "restore the file, or remove it and create new keys; running gateways keep the keys that they have read"
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"it is larger than {MAX_BYTES} bytes")
            version = msgspec.json.decode(data, type=_Versioned).version
            if version > VERSION:
                raise ValueError(f"its version is {version}; this corewright reads versions up to {VERSION}")
            stored = msgspec.json.decode(data, type=_StoredKeys)
            _check(stored.keys)
        except (ValueError, RecursionError) as error:  # ValueError includes msgspec's errors
            raise Failed("keys-broken", f"{self.path} is not a valid key file: {error}", hint) from None
        return KeyRing(stored.keys, keyless_until=stored.keyless_until)

    def current(self) -> KeyRing:
        """Returns the keys of the file as it is now; one `stat` if nothing has changed. Never raises: if the file is
        damaged or missing, the last valid keys stay, which is logged once; without any, no request is accepted."""
        status = self._stat()
        if status == self._seen:
            return self._ring
        try:
            ring = self._read()
            if ring is not None:
                self._ring, self._loaded = ring, True
            elif self._loaded:
                raise Failed("keys-broken", f"{self.path} is missing", "")
            self._logged = False
        except Failed as failed:
            if not self._logged:
                log.error("%s; the previous keys stay in use", failed)
            self._logged = True
            if not self._loaded:  # a gateway that starts now must not be open to all
                self._ring = KeyRing(keyless_until=CLOSED)
            if failed.problem.id == "keys-unreadable":  # for example no free descriptors: retry even if unchanged
                return self._ring
        self._seen = status  # taken before the file was read, so that a change during the read is noticed
        return self._ring

    def _stat(self) -> tuple[int, ...]:
        try:
            status = self.path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid)

    def create(
        self,
        name: str,
        *,
        scopes: Sequence[Scope] = ("inference",),
        models: Sequence[str] = (),
        expires: float | None = None,
        allowance: Allowance = UNLIMITED,
        activate_at: float | None = None,
        now: float | None = None,
    ) -> tuple[ApiKey, str]:
        """Creates a key; returns it and its text, which is stored nowhere. From now on, or from ``activate_at`` on,
        every request needs a key; a grace period that has begun keeps its end. Raises Failed for a name that is taken
        or invalid, an allowance out of bounds, and an ``activate_at`` if every request needs a key already."""
        check_new(name, models, allowance)
        now = time.time() if now is None else now
        with self._locked():
            ring = self.read()
            keys = list(ring.keys)
            if activate_at is not None and ring.requires_key(now):
                hint = "omit --activate-at; corewright keys open accepts requests without a key again"
                raise Failed("keys-required", "every request needs a key already", hint)
            if any(key.name == name for key in keys):
                hint = f"choose another name, or first run: corewright keys revoke {name}"
                raise Failed("key-name-taken", f"a key named {name} already exists", hint)
            ids = {key.id for key in keys}
            id = next(id for id in iter(lambda: secrets.token_hex(ID_LENGTH // 2), "") if id not in ids)
            secret = secrets.token_urlsafe(32)
            key = ApiKey(
                id=id,
                name=name,
                digest=_digest(secret),
                scopes=tuple(scope for scope in SCOPES if scope in scopes),
                models=tuple(dict.fromkeys(models)),
                created=now,
                expires=expires,
                **msgspec.structs.asdict(allowance),
            )
            until = ring.keyless_until or CLOSED if activate_at is None else activate_at
            self._write([*keys, key], CLOSED if until <= now else until)
        return key, f"{PREFIX}-{id}-{secret}"

    def change(self, id_or_name: str, **changes: float | None) -> ApiKey:
        """Changes the weight or the limits of a key: ``changes`` are fields of Allowance. Raises Failed for an unknown
        key and for values out of bounds."""
        with self._locked_key(id_or_name) as (ring, key):
            changed = msgspec.structs.replace(key, **changes)
            _check_bounds(changed)
            self._write([changed if other is key else other for other in ring.keys], ring.keyless_until)
        return changed

    def revoke(self, id_or_name: str) -> ApiKey:
        """Deletes a key; requests without a key stay refused. Raises Failed for an unknown key."""
        with self._locked_key(id_or_name) as (ring, key):
            self._write([other for other in ring.keys if other is not key], ring.keyless_until)
        return key

    def open_keyless(self, until: float | None = None) -> None:
        """Accepts requests without a key on loopback, forever or until a time in seconds since the epoch. Raises Failed
        if no key has ever been created: they are accepted already."""
        if not self.path.exists():
            message = "no key has been created, so requests without a key are accepted already"
            raise Failed("keys-none", message, "corewright keys create NAME creates the first key and requires one")
        with self._locked():
            self._write(self.read().keys, until)

    def close_keyless(self) -> None:
        """Requires a key for every request from now on, even if no key exists yet."""
        with self._locked():
            self._write(self.read().keys, CLOSED)

    @contextlib.contextmanager
    def _locked_key(self, id_or_name: str) -> Iterator[tuple[KeyRing, ApiKey]]:
        """The ring and its key of that id or name, locked against other writers. Raises Failed for an unknown key."""
        if not self.path.exists():
            raise _unknown(id_or_name, ())
        with self._locked():
            ring = self.read()
            key = next((key for key in ring.keys if id_or_name in (key.id, key.name)), None)
            if key is None:
                raise _unknown(id_or_name, ring.keys)
            yield ring, key

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = file_lock.opened(self.path.with_suffix(".lock"))
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            file_lock.lock(lock)
            yield
        finally:
            os.close(lock)

    def _write(self, keys: Sequence[ApiKey], keyless_until: float | None) -> None:
        try:
            private_file.replace(self.path, encoded(keys, keyless_until), sync=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None


def encoded(keys: Sequence[ApiKey], keyless_until: float | None) -> bytes:
    """Returns the content of a key file."""
    defaults = [getattr(UNLIMITED, name) for name in BOUNDS]
    plain = all([getattr(key, name) for name in BOUNDS] == defaults for key in keys)
    version: Literal[1, 2, 3] = 3 if keyless_until != CLOSED else 1 if plain else 2
    stored = _StoredKeys(version=version, keys=list(keys), keyless_until=keyless_until)
    return msgspec.json.format(msgspec.json.encode(stored), indent=2)


def _unknown(id_or_name: str, keys: Sequence[ApiKey]) -> Failed:
    names = ", ".join(key.name for key in keys)
    hint = f"existing keys: {names}" if names else "no key exists; corewright keys create NAME creates one"
    return Failed("key-unknown", f"there is no key {without_secret(id_or_name)!r}", hint)


def check_new(name: str, models: Sequence[str], allowance: Allowance) -> None:
    """Raises Failed for a name of a key or of a model that is invalid, and for an allowance out of bounds."""
    _check_bounds(allowance)
    if not re.match(_NAME, name) or re.match(_ID, name):
        raise Failed("key-name-wrong", f"{name!r} is not a valid key name", _NAME_RULE)
    for model in models:
        if not all(re.match(_NAME, part) for part in model.split(":", 1)):  # MODEL:ADAPTER
            message = f"{model!r} is not a valid model name"
            raise Failed("key-name-wrong", message, "--model takes the name of a model in the spec, or MODEL:ADAPTER")


def _check_bounds(allowance: Allowance) -> None:
    violation = allowance.violation()
    if violation is not None:
        raise Failed("key-limit-wrong", violation, LIMIT_RULE)


def _unwritable(path: Path, error: OSError) -> Failed:
    return Failed("keys-unwritable", f"{path} cannot be written: {error.strerror}", "nothing was changed")


def without_secret(text: str) -> str:
    """Returns what the user typed, without the secret if it is a whole key."""
    return f"{text[: len(PREFIX) + 1 + ID_LENGTH]}..." if text.startswith(f"{PREFIX}-") else text


def _check(keys: Sequence[ApiKey]) -> None:
    """Raises ValueError for keys that `create` cannot have written, besides what their fields already exclude."""
    for key in keys:
        if len({*key.scopes}) != len(key.scopes):
            raise ValueError(f"{key.name!r} has a scope twice")
        if (violation := key.violation()) is not None:
            raise ValueError(f"{key.name!r} has {violation}")
    for field in ("id", "name"):
        values = [getattr(key, field) for key in keys]
        if len({*values}) != len(values):
            raise ValueError(f"two keys have the same {field}")


def read_limit(option: str, text: str) -> int | None:
    """Parses a limit: an integer, or `none`, which removes it. Raises Failed for anything else; `KeyFile` checks the
    bounds."""
    limit = text.strip()
    if limit == NONE:
        return None
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= MAX_NUMBER_DIGITS):
        raise Failed("key-limit-wrong", f"{option} {text!r} is not a limit", LIMIT_RULE)
    return int(limit)


def read_expiry(text: str, now: float, option: str = "--expires") -> float:
    """Returns the time of ``option``, in seconds since the epoch. Raises Failed for an invalid or past time."""
    expiry = text.strip()
    span = span_s(expiry)
    if span is not None:
        at = now + span
    else:
        try:
            at = moment(expiry)
        except ValueError:
            raise Failed(
                "key-expiry-wrong", f"{option} {text!r} is neither a duration nor a time", EXPIRY_RULE
            ) from None
    if not now < at <= now + MAX_LIFE_S:
        reason = "is in the past" if at <= now else "is more than 100 years away"
        raise Failed("key-expiry-wrong", f"{option} {text!r} {reason}", EXPIRY_RULE)
    return at


class KeyFeed:
    """The file as its last valid content, with a digest as its version: it stays the same in a restarted controller."""

    def __init__(self, file: KeyFile) -> None:
        self._file = file
        self._ring: KeyRing | None = None
        self._content = b""
        self._version = ""

    async def next(self, seen: str, timeout_s: float) -> tuple[str, bytes]:
        """Returns the version and the content once the version is not ``seen``, or after ``timeout_s``. The content is
        empty if this home never had a key."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self._read()
        while self._version == seen and loop.time() < deadline:
            await asyncio.sleep(min(POLL_S, timeout_s))
            self._read()
        return self._version, self._content

    def _read(self) -> None:
        ring = self._file.current()
        if ring is not self._ring:
            is_new = not ring.keys and ring.keyless_until is None  # such as a new head's
            self._ring, self._content = ring, b"" if is_new else encoded(ring.keys, ring.keyless_until)
            self._version = hashlib.sha256(self._content).hexdigest()
