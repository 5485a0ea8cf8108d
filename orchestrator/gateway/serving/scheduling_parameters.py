"""The scheduling parameters of a request, from its API key, headers and body."""

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
    """The scheduling parameters of one request; the same for all requests without keys and headers."""

    tenant: str = ""  # the id of its key, which is charged for its tokens
    weight: float = 1.0  # of the tenant
    priority: int = 0  # lower goes first
    deadline: float | None = None  # monotonic: the latest time for its first token
    session: str = ""  # requests of one session prefer one replica
    explains: bool = False  # the answer reports its routing decision


PLAIN = SchedulingParameters()


def read_scheduling_parameters(
    headers: Mapping[bytes, bytes], key: ApiKey | None, priority: int | None, now: float
) -> SchedulingParameters:
    """Returns the parameters of a request. ``priority`` is the body's; it is limited to that of the key. Raises
    ApiError 400."""
    deadline = headers.get(b"x-deadline-ms")
    session = headers.get(b"x-session-id")
    explain = headers.get(b"x-corewright-explain")
    if key is None and deadline is None and session is None and explain is None and not priority:
        return PLAIN
    if key is not None and deadline is None and session is None and explain is None and priority is None:
        return _parameters_of_key(key.id, key.weight, key.priority)
    tenant, weight, least = ("", 1.0, None) if key is None else (key.id, key.weight, key.priority)
    requested = (least or 0) if priority is None else priority
    return SchedulingParameters(
        tenant,
        weight,
        requested if least is None else max(requested, least),
        None if deadline is None else now + _milliseconds(deadline) / 1000,
        "" if session is None else _session(session, tenant),
        explain is not None and _flag(explain),
    )


@lru_cache(maxsize=1024)
def _parameters_of_key(tenant: str, weight: float, priority: int | None) -> SchedulingParameters:
    """Returns the parameters of a request that sets none itself."""
    return SchedulingParameters(tenant, weight, priority or 0)


def _flag(header: bytes) -> bool:
    value = FLAGS.get(header.decode("latin-1").strip().lower())
    if value is None:
        message = f"The header x-corewright-explain is {header[:40].decode('latin-1')!r}; it must be 1 or 0."
        raise invalid(message, param="x-corewright-explain")
    return value


def _milliseconds(header: bytes) -> float:
    try:
        value = float(header)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST_DEADLINE_MS:
        text = header[:40].decode("latin-1")
        message = f"The header x-deadline-ms is {text!r}; it must be a number of milliseconds above 0, up to a day."
        raise invalid(message, param="x-deadline-ms")
    return value


def _session(header: bytes, tenant: str) -> str:
    """Returns the session, with the tenant: clients choose the names, so two keys may use the same one."""
    if len(header) > LONGEST_SESSION:
        raise invalid(f"The header x-session-id has more than {LONGEST_SESSION} bytes.", param="x-session-id")
    name = header.decode("latin-1").strip()
    return f"{tenant} {name}" if name else ""
