"""Memory that is not there: how a process learns of it, and how that is told."""

from __future__ import annotations

import errno
import re
import resource

import psutil

from workers.messages.engine_protocol import EngineLoadError

# What torch, safetensors and C++ say where they raise neither MemoryError nor an OSError with its number.
# A full block of static TLS reads alike, and is a matter of the order in which libraries are loaded.
_TEXTS = re.compile(r"can(?:'|no)t allocate memory(?! in static TLS)|not enough memory|std::bad_alloc", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate (\d+) bytes|unable to mmap (\d+) bytes")
_LIMITS = (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA))
_HINT = "take fewer slots (max_batch), a shorter max_len, a smaller dtype, or fewer replicas on this machine"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error``, or one that it was raised from, says that memory was refused."""
    return _refusal(error) is not None


def out_of_memory(error: BaseException, what: str) -> EngineLoadError:
    """The same as a fault with the id ``out-of-memory``; ``what`` is what could not be done, as a noun.

    Its text has how much was asked for, where the error tells, and what this process and the machine have.
    """
    asked = _ASKED.search(str(_refusal(error) or error))
    more = f"; {_size(int(asked[1] or asked[2]))} were asked for at once" if asked else ""
    machine = psutil.virtual_memory()
    has = f"{_size(machine.available)} of the machine's {_size(machine.total)} are available"
    holds = f"this process holds {_size(psutil.Process().memory_info().rss)}"
    limits = [
        f", and may have {_size(limit)} of {name} (rlimit)"
        for name, limit in ((name, resource.getrlimit(kind)[0]) for name, kind in _LIMITS)
        if limit != resource.RLIM_INFINITY
    ]
    return EngineLoadError("out-of-memory", f"no memory for {what}{more}; {has}, {holds}{''.join(limits)}", _HINT)


def _refusal(error: BaseException) -> BaseException | None:
    """The first of the chain of causes that is a refusal of memory."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        if isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM):
            return link
        if not isinstance(link, EngineLoadError) and _TEXTS.search(str(link)):
            return link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return None


def _size(count: int) -> str:
    """Bytes as people read them: 1536 MiB is "1.50 GiB"."""
    number, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.2f} {unit}" if unit != "B" else f"{count} B"
