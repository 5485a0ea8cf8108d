"""How a client wants its request to be served, beside what it asks for: from its key, its headers and its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from orchestrator.access.keys import ApiKey
from orchestrator.gateway.openai.errors import invalid

LONGEST_SESSION = 256  # bytes
LONGEST_DEADLINE_MS = 86_400_000.0
FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class SchedulingParameters:
    """Of one request. Without keys and headers they are the same for all."""

    tenant: str = ""  # the id of its key: whom its tokens are counted to
    weight: float = 1.0  # of the tenant
    priority: int = 0  # lower goes first
    deadline: float | None = None  # monotonic: by when its first token should come
    session: str = ""  # whose requests had better go to one replica
    explains: bool = False  # the answer tells how it came to its replica


_PLAIN = SchedulingParameters()


def terms_of(
    headers: Mapping[bytes, bytes], key: ApiKey | None, priority: int | None, now: float
) -> SchedulingParameters:
    """``priority`` is the body's; a key's own is the best that its requests may have. Raises ApiError 400."""
    deadline = headers.get(b"x-deadline-ms")
    session = headers.get(b"x-session-id")
    explain = headers.get(b"x-corewright-explain")
    if key is None and deadline is None and session is None and explain is None and not priority:
        return _PLAIN
    if key is not None and deadline is None and session is None and explain is None and priority is None:
        return _terms_of_key(key.id, key.weight, key.priority)
    tenant, weight, least = ("", 1.0, None) if key is None else (key.id, key.weight, key.priority)
    asked = (least or 0) if priority is None else priority
    return SchedulingParameters(
        tenant,
        weight,
        asked if least is None else max(asked, least),
        None if deadline is None else now + _milliseconds(deadline) / 1000,
        "" if session is None else _session(session, tenant),
        explain is not None and _flag(explain),
    )


@lru_cache(maxsize=1024)
def _terms_of_key(tenant: str, weight: float, priority: int | None) -> SchedulingParameters:
    """The terms of a request that has no other wishes than its key's."""
    return SchedulingParameters(tenant, weight, priority or 0)


def _flag(given: bytes) -> bool:
    found = FLAGS.get(given.decode("latin-1").strip().lower())
    if found is None:
        what = f"The header x-corewright-explain is {given[:40].decode('latin-1')!r}, and neither 1 nor 0."
        raise invalid(what, param="x-corewright-explain")
    return found


def _milliseconds(given: bytes) -> float:
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found <= LONGEST_DEADLINE_MS:
        what = (
            f"The header x-deadline-ms is {given[:40].decode('latin-1')!r}, and no number of milliseconds up to a day."
        )
        raise invalid(what, param="x-deadline-ms")
    return found


def _session(given: bytes, tenant: str) -> str:
    """The name is the client's own: two keys may have chosen the same."""
    if len(given) > LONGEST_SESSION:
        raise invalid(f"The header x-session-id has more than {LONGEST_SESSION} bytes.", param="x-session-id")
    name = given.decode("latin-1").strip()
    return f"{tenant} {name}" if name else ""
