"""Claims cores without a model, again and again until it succeeds: ``python -m workers.host.core_probe``.

A ``ProbeRequest`` is read as JSON from standard input. The replies are JSON lines: a ``ClaimRefused`` when an attempt
fails in another way than the one before, and ``Claimed``; then the process holds the cores until it is killed. Each
attempt is a process of its own, a fork, since the Neuron runtime cannot be initialized twice. On real devices it calls
``nrt_init`` of libnrt, as every framework does; on an emulated host it takes the locks of `core_claims`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from workers.host.core_claims import CoreClaim, CoresTaken
from workers.host.host_facts import host_root
from workers.host.json_process import ChildRequest, answering, read_request
from workers.host.neuron_faults import STATUS_NAMES, fault_of
from workers.host.process_tree import end_with

LIBRARY = "libnrt.so.1"
FOLDER = "opt/aws/neuron/lib"  # of aws-neuronx-runtime-lib, below the root
NO_FRAMEWORK = 1  # NRT_FRAMEWORK_TYPE_NO_FW (AWS Neuron SDK docs, neuron-runtime/api/nrt.rst), with empty versions
RETRY_S = 0.01
MAX_TEXT_BYTES = 64 * 1024


class ProbeRequest(ChildRequest, frozen=True, kw_only=True):
    """The cores to claim."""

    cores: list[int]
    claims: str | None = None  # the folder of the core locks of an emulated host
    limit_s: float = 0.0  # for further attempts after the first


class ClaimRefused(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The cause of a failed attempt."""

    text: str  # of the runtime
    fault: str  # the id that the text gives; empty: it is not recognized


class Claimed(msgspec.Struct, frozen=True, kw_only=True, tag="claimed"):
    """The cores are held."""

    at: float  # by the monotonic clock, which all processes of a host share


ProbeReply = ClaimRefused | Claimed


def attempt(request: ProbeRequest) -> str:
    """Claims the cores for this process. Returns "" or the runtime's text."""
    if request.claims is not None:
        try:
            _held.append(CoreClaim(Path(request.claims), request.cores))
        except CoresTaken as error:
            return str(error)
        return ""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        try:
            library = ctypes.CDLL(str(host_root() / FOLDER / LIBRARY))
        except OSError as error:
            return str(error)
    status = int(library.nrt_init(NO_FRAMEWORK, b"", b""))
    return "" if status == 0 else f"nrt_init failed with status={status} ({STATUS_NAMES.get(status, 'unknown')})"


_held: list[CoreClaim] = []  # until the process ends


def probe(request: ProbeRequest, send: Callable[[ProbeReply], None]) -> None:
    """Tries until the cores are claimed or the limit has passed, then holds them."""
    began, said = time.monotonic(), ""
    while True:
        refused = _forked(request)
        if refused is None:
            send(Claimed(at=time.monotonic()))
            signal.pause()
        elif refused != said:
            fault = fault_of(RuntimeError(refused))
            send(ClaimRefused(text=refused, fault="" if fault is None else fault.id))
            said = refused
        if time.monotonic() - began >= request.limit_s:
            return
        time.sleep(RETRY_S)


def _forked(request: ProbeRequest) -> str | None:
    """Returns None once a fork holds the cores, which ends with this process; or the text of the failed attempt."""
    parent = os.getpid()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as log:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            end_with(parent)
            text = attempt(request)
            os.write(writing, b"+" if not text else b"-" + text.encode()[:1000])
            if not text:
                signal.pause()
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as answers:
            answer = answers.read(1001)
        if answer.startswith(b"+"):
            return None
        os.waitpid(pid, 0)
        log.seek(0)
        output = log.read(MAX_TEXT_BYTES).decode(errors="replace").strip()
    cause = answer[1:].decode(errors="replace") or "the process that called nrt_init died"
    return f"{output}\n{cause}" if output else cause


def main() -> None:
    """Read the request and claim its cores."""
    probe(read_request(ProbeRequest), answering())


if __name__ == "__main__":
    main()
