"""Recognizes out-of-memory errors and describes them."""

from __future__ import annotations

import errno
import re
import resource

import psutil

from workers.host.neuron_faults import error_chain
from workers.messages.engine_protocol import EngineLoadError

# Messages of torch, safetensors and C++ that raise neither MemoryError nor an OSError with ENOMEM.
# A full static TLS block has a similar message, but depends on the order in which libraries are loaded.
_TEXTS = re.compile(r"can(?:'|no)t allocate memory(?! in static TLS)|not enough memory|std::bad_alloc", re.IGNORECASE)
_ASKED = re.compile(r"tried to allocate (\d+) bytes|unable to mmap (\d+) bytes")
_LIMITS = (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA))
_HINT = "use fewer slots (max_batch), a shorter max_len, a smaller dtype, or fewer replicas on this machine"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` or one of its causes is a failed memory allocation."""
    return _refusal(error) is not None


def out_of_memory(error: BaseException, operation: str) -> EngineLoadError:
    """Returns an ``out-of-memory`` error; ``operation``: the failed operation as a noun.

    Its message has the requested size, if known, and the memory of this process and the machine.
    """
    requested = _ASKED.search(str(_refusal(error) or error))
    more = f"; {_size(int(requested[1] or requested[2]))} were requested at once" if requested else ""
    machine = psutil.virtual_memory()
    has = f"{_size(machine.available)} of the machine's {_size(machine.total)} are available"
    uses = f"this process uses {_size(psutil.Process().memory_info().rss)}"
    limits = [
        f", limited to {_size(limit)} of {name} (rlimit)"
        for name, limit in ((name, resource.getrlimit(kind)[0]) for name, kind in _LIMITS)
        if limit != resource.RLIM_INFINITY
    ]
    message = f"not enough memory for {operation}{more}; {has}, {uses}{''.join(limits)}"
    return EngineLoadError("out-of-memory", message, _HINT)


def _refusal(error: BaseException) -> BaseException | None:
    """Returns the first failed allocation in the chain of causes."""
    for link in error_chain(error):
        if isinstance(link, MemoryError) or (isinstance(link, OSError) and link.errno == errno.ENOMEM):
            return link
        if not isinstance(link, EngineLoadError) and _TEXTS.search(str(link)):
            return link
    return None


def _size(count: int) -> str:
    """Returns a byte count for display: 1536 MiB is "1.50 GiB"."""
    number, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.2f} {unit}" if unit != "B" else f"{count} B"
