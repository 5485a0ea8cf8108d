"""The API keys of a home: who may ask for answers, and who may change the fleet. Of a key only a digest is kept.

A key reads `cw-ID-SECRET`. The id is public: it is what lists, logs and metrics show. The secret has 256 random bits,
so that one round of SHA-256 is enough: a slow hash protects what people choose, and would cost each request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
import msgspec.structs

from orchestrator.process.durations import moment, span_s
from orchestrator.process.failure import Failed

log = logging.getLogger(__name__)

Scope = Literal["inference", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "cw"
ID_LENGTH = 8
SECRET_LENGTH = 43  # of 32 random bytes, in urlsafe base64
TEXT_LENGTH = len(PREFIX) + 1 + ID_LENGTH + 1 + SECRET_LENGTH
LONGEST_LIFE_S = 100 * 365.25 * 86400.0
MAX_BYTES = 16 * 2**20  # of the file: some 50,000 keys

_ID = re.compile(rf"[0-9a-f]{{{ID_LENGTH}}}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,62}", re.ASCII)
_NAME_RULE = "letters, digits and . _ @ -, at most 63 of them, beginning with a letter or digit; 8 hex digits are an id"
NONE = "none"  # of a limit that is taken away
MOST: dict[str, int] = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "max_concurrent": 10**6}
WEIGHTS = (0.01, 100.0)  # least and most
MOST_PRIORITY = 10**6  # either way, as in a request's body
LIMIT_RULE = (
    f"a weight is {WEIGHTS[0]:g} to {WEIGHTS[1]:g}; a priority -{MOST_PRIORITY} to {MOST_PRIORITY}; "
    f"a limit a whole number from 1 on, or {NONE}; at most "
    + ", ".join(f"{most} {name}" for name, most in MOST.items())
)
LONGEST_NUMBER = 12  # digits
VERSION = 3  # of the file, where `keyless_until` is set; 2 with a weight or a limit; else 1, which all versions read
CLOSED = 0.0  # the time until which requests without a key pass, where every request needs one
EXPIRY_RULE = "a span like 90m, 12h, 30d or 8w, or a time like 2027-01-31 or 2027-01-31T18:00+01:00 (UTC without one)"


class Allowance(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How much one key may ask for, and its share where many wait: what of a key may change while it lives."""

    weight: float = 1.0  # of weight 3: three times the tokens of a key of weight 1, while requests of both wait
    priority: int = 0  # the most urgent that its requests may be, and those that name none; lower goes first
    requests_per_minute: int | None = None  # None: without limit; so for the others
    tokens_per_minute: int | None = None  # of prompts and answers together
    max_concurrent: int | None = None  # requests at a time, those in the queue among them

    @property
    def limited(self) -> bool:
        """Whether there is anything to count."""
        return (
            self.requests_per_minute is not None
            or self.tokens_per_minute is not None
            or self.max_concurrent is not None
        )

    def wrong(self) -> str | None:
        """What is out of bounds, if anything."""
        least, most = WEIGHTS
        if not least <= self.weight <= most:
            return f"a weight of {self.weight:g} is not between {least:g} and {most:g}"
        if not -MOST_PRIORITY <= self.priority <= MOST_PRIORITY:
            return f"a priority of {self.priority} is not between -{MOST_PRIORITY} and {MOST_PRIORITY}"
        for name, highest in MOST.items():
            limit: int | None = getattr(self, name)
            if limit is not None and not 1 <= limit <= highest:
                return f"{name} of {limit} is not between 1 and {highest}"
        return None


class ApiKey(Allowance, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key, without its secret."""

    id: str
    name: str
    digest: str  # SHA-256 of the secret, in hex
    scopes: tuple[Scope, ...]
    models: tuple[str, ...]  # that it may ask; empty: all
    created: float  # seconds since the epoch
    expires: float | None  # None: never

    def expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    def may(self, scope: Scope) -> bool:
        return scope in self.scopes


class _Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    version: Literal[1, 2, 3]
    keys: list[ApiKey]
    keyless_until: float | None = CLOSED  # seconds since the epoch; None: without end


class _Versioned(msgspec.Struct):
    version: int = VERSION


UNLIMITED = Allowance()
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()  # what an unknown id is compared with


class KeyRing:
    """The keys as they were read at one time."""

    def __init__(self, keys: Iterable[ApiKey] = (), *, keyless_until: float | None = None) -> None:
        """``keyless_until``: until then requests without a key pass, in seconds since the epoch; None: without end, as
        in a home that never had a key."""
        self.keys = tuple(keys)
        self.keyless_until = keyless_until
        self._by_id = {key.id: key for key in self.keys}

    def __len__(self) -> int:
        return len(self.keys)

    def demands(self, now: float) -> bool:
        """Whether a request needs a key."""
        return self.keyless_until is not None and now >= self.keyless_until

    def usable(self, now: float, scope: Scope) -> int:
        """How many keys with that scope have not expired."""
        return sum(key.may(scope) and not key.expired(now) for key in self.keys)

    def authenticate(self, presented: str, now: float) -> ApiKey | None:
        """The key that was presented, or None; which part of it was wrong cannot be told from the time that it takes.

        ``now`` in seconds since the epoch. Scopes and models are the caller's to judge.
        """
        if len(presented) != TEXT_LENGTH or not presented.startswith(f"{PREFIX}-"):
            return None
        id, dash, secret = presented[3:].partition("-")
        key = self._by_id.get(id)
        expected = _NOBODY if key is None else key.digest
        same = hmac.compare_digest(_digest(secret), expected)
        if not same or not dash or key is None or key.expired(now):
            return None
        return key


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


class KeyFile:
    """The file of keys. Any number of processes may read and write it; each finds it whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._ring = KeyRing()
        self._there = False  # whether `_ring` is of a file
        self._complained = False

    def read(self) -> KeyRing:
        """The keys of the file; without a file none, and none is demanded. Raises Failed for a file that is broken,
        cannot be read, or could have been written by someone else."""
        ring = self._read()
        return KeyRing() if ring is None else ring

    def _read(self) -> KeyRing | None:
        """As ``read``; None without a file."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise Failed("keys-unreadable", f"{self.path} cannot be read: {error.strerror}", "as its owner?") from None
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            what = f"{self.path} can be written by others than its user"
            raise Failed("keys-unreadable", what, f"look at what it holds; then chmod 600 {self.path}")
        return self._parsed(data)

    def _parsed(self, data: bytes) -> KeyRing:
        hint = "restore it, or remove it and create the keys anew; gateways that run keep the keys that they know"
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"it has more than {MAX_BYTES} bytes")
            version = msgspec.json.decode(data, type=_Versioned).version
            if version > VERSION:
                raise ValueError(f"it is of version {version}; this corewright reads up to {VERSION}")
            kept = msgspec.json.decode(data, type=_Kept)
            _check(kept.keys)
            if not math.isfinite(kept.keyless_until or 0.0):
                raise ValueError("keyless_until is not a time")
        except (ValueError, RecursionError) as error:  # of which msgspec's are some
            raise Failed("keys-broken", f"{self.path} holds no keys: {error}", hint) from None
        return KeyRing(kept.keys, keyless_until=kept.keyless_until)

    def current(self) -> KeyRing:
        """The keys as the file has them by now: one `stat` where nothing has changed. Never raises: when the file is
        broken or gone, the last good keys stay, and that is logged once; before any good ones, no request passes."""
        seen = self._stat()
        if seen == self._seen:
            return self._ring
        try:
            ring = self._read()
            if ring is not None:
                self._ring, self._there = ring, True
            elif self._there:
                raise Failed("keys-broken", f"{self.path} is gone", "")
            self._complained = False
        except Failed as failed:
            if not self._complained:
                log.error("%s; the keys that were known before stay", failed)
            self._complained = True
            if not self._there:  # none was known: a gateway that starts now must not be open to all
                self._ring = KeyRing(keyless_until=CLOSED)
            if failed.problem.id == "keys-unreadable":  # as without free descriptors: read again, changed or not
                return self._ring
        self._seen = seen  # as it was before the reading: a change in the midst of it is seen the next time
        return self._ring

    def _stat(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
        except OSError:
            return ()
        return (found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode, found.st_uid)

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
        """A new key, and its text, which is nowhere else. From now on, or from ``activate_at`` on, every request needs
        a key; a grace period that has begun keeps its end. Raises Failed for a name that is taken or none, for an
        allowance out of bounds, and for an ``activate_at`` where every request needs a key already."""
        _demand_bounds(allowance)
        if not _NAME.fullmatch(name) or _ID.fullmatch(name):
            raise Failed("key-name-wrong", f"{name!r} is no name of a key", _NAME_RULE)
        for model in models:
            if not _NAME.fullmatch(model):
                raise Failed("key-name-wrong", f"{model!r} is no name of a model", "--model takes a model of the spec")
        now = time.time() if now is None else now
        with self._locked():
            ring = self.read()
            keys = list(ring.keys)
            if activate_at is not None and ring.demands(now):
                hint = "leave out --activate-at; corewright keys open answers requests without a key again"
                raise Failed("keys-demanded", "every request needs a key already", hint)
            if any(key.name == name for key in keys):
                hint = f"another name, or first: corewright keys revoke {name}"
                raise Failed("key-name-taken", f"there is a key {name} already", hint)
            taken = {key.id for key in keys}
            id = next(id for id in iter(lambda: secrets.token_hex(ID_LENGTH // 2), "") if id not in taken)
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
        """Give a key another weight or other limits: ``changes`` are fields of Allowance, the others stay. Raises
        Failed when there is no such key, and for what is out of bounds."""
        with self._found(id_or_name) as (ring, found):
            changed = msgspec.structs.replace(found, **changes)
            _demand_bounds(changed)
            self._write([changed if key is found else key for key in ring.keys], ring.keyless_until)
        return changed

    def revoke(self, id_or_name: str) -> ApiKey:
        """Take a key away; that opens nothing. Raises Failed when there is none of that id or name."""
        with self._found(id_or_name) as (ring, found):
            self._write([key for key in ring.keys if key is not found], ring.keyless_until)
        return found

    def open_keyless(self, until: float | None = None) -> None:
        """Let requests without a key pass on loopback, without end or until a time in seconds since the epoch. Raises
        Failed where no key has been created: they pass already."""
        if not self.path.exists():
            what = "no key has been created, so requests without a key pass already"
            raise Failed("keys-none", what, "corewright keys create NAME ends that")
        with self._locked():
            self._write(self.read().keys, until)

    def close_keyless(self) -> None:
        """Demand a key of every request from now on, also where there is none yet."""
        with self._locked():
            self._write(self.read().keys, CLOSED)

    @contextlib.contextmanager
    def _found(self, id_or_name: str) -> Iterator[tuple[KeyRing, ApiKey]]:
        """The ring, and its key of that id or name, while no other process writes. Raises Failed without it."""
        if not self.path.exists():
            raise _unknown(id_or_name, ())
        with self._locked():
            ring = self.read()
            found = next((key for key in ring.keys if id_or_name in (key.id, key.name)), None)
            if found is None:
                raise _unknown(id_or_name, ring.keys)
            yield ring, found

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            lock = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _write(self, keys: Sequence[ApiKey], keyless_until: float | None) -> None:
        draft = self.path.with_suffix(".new")
        plain = all(_allowance(key) == UNLIMITED for key in keys)
        version: Literal[1, 2, 3] = 3 if keyless_until != CLOSED else 1 if plain else 2
        kept = _Kept(version=version, keys=list(keys), keyless_until=keyless_until)
        data = msgspec.json.format(msgspec.json.encode(kept), indent=2)
        try:
            draft.unlink(missing_ok=True)  # one that somebody left might be open to others
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.rename(self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise _unwritable(self.path, error) from None


def _unknown(id_or_name: str, keys: Sequence[ApiKey]) -> Failed:
    known = ", ".join(key.name for key in keys)
    hint = f"known are {known}" if known else "there is none; corewright keys create NAME makes one"
    return Failed("key-unknown", f"there is no key {shown(id_or_name)!r}", hint)


def _allowance(key: ApiKey) -> Allowance:
    return Allowance(**{name: getattr(key, name) for name in Allowance.__struct_fields__})


def _demand_bounds(allowance: Allowance) -> None:
    wrong = allowance.wrong()
    if wrong is not None:
        raise Failed("key-limit-wrong", wrong, LIMIT_RULE)


def _unwritable(path: Path, error: OSError) -> Failed:
    return Failed("keys-unwritable", f"{path} cannot be written: {error.strerror}", "nothing was changed")


def shown(text: str) -> str:
    """What was typed, without the secret if it was a whole key."""
    return f"{text[: len(PREFIX) + 1 + ID_LENGTH]}..." if text.startswith(f"{PREFIX}-") else text


def _check(keys: Sequence[ApiKey]) -> None:
    """Raises ValueError for what no `create` writes."""
    for key in keys:
        if not _ID.fullmatch(key.id) or not _DIGEST.fullmatch(key.digest):
            raise ValueError(f"the id or the digest of {key.name!r} is none")
        if not _NAME.fullmatch(key.name):
            raise ValueError(f"{key.name!r} is no name of a key")
        if not key.scopes or len({*key.scopes}) != len(key.scopes):
            raise ValueError(f"{key.name!r} has no scope, or one twice")
        if not all(math.isfinite(at) for at in (key.created, key.expires or 0.0)):
            raise ValueError(f"the times of {key.name!r} are none")
        if (wrong := key.wrong()) is not None:
            raise ValueError(f"of {key.name!r}, {wrong}")
    for what in ("id", "name"):
        values = [getattr(key, what) for key in keys]
        if len({*values}) != len(values):
            raise ValueError(f"two keys have one {what}")


def read_limit(option: str, text: str) -> int | None:
    """A limit as it was typed: a whole number, or `none`, which takes it away. Raises Failed for anything else; bounds
    are for the file to check."""
    told = text.strip()
    if told == NONE:
        return None
    if not (told.isascii() and told.isdecimal() and len(told) <= LONGEST_NUMBER):
        raise Failed("key-limit-wrong", f"{option} {text!r} is no limit", LIMIT_RULE)
    return int(told)


def read_expiry(text: str, now: float, option: str = "--expires") -> float:
    """The time of ``option``, in seconds since the epoch. Raises Failed for what is no time, or has passed."""
    told = text.strip()
    span = span_s(told)
    if span is not None:
        at = now + span
    else:
        try:
            at = moment(told)
        except ValueError:
            raise Failed("key-expiry-wrong", f"{option} {text!r} is not a time", EXPIRY_RULE) from None
    if not now < at <= now + LONGEST_LIFE_S:
        when_ = "has passed" if at <= now else "is more than 100 years away"
        raise Failed("key-expiry-wrong", f"{option} {text!r} {when_}", EXPIRY_RULE)
    return at
