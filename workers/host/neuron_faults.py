"""Recognizes faults of the Neuron runtime and compiler by their messages and status codes.

The framework above them often raises a RuntimeError with only a status; details are in the lines that the libraries
write to the process's log. Both are searched, messages before codes: a device with bad memory ends many executions with
the status of a timeout. Texts and codes are from AWS's runtime troubleshooting guide and its nrt_status.h; those
reported by users are marked.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec.structs

from workers.host.nrt_status import STATUS_NAMES
from workers.messages.status import Failure, Reaction

MOST_TEXT = 64 * 1024  # of an exception and of the log; a compiler's output may be megabytes
# Generic ids that only say where something failed. An engine's own error with another id is more specific.
VAGUE = frozenset({"load-failed", "probe-failed", "engine-failed", "compile-failed", "replica-died"})

# A path in a cache: its folder, the compiler's folder, the graph's folder.
_GRAPH = re.compile(r"^(?:file://)?(?P<cache>\S+?)/neuronxcc-[^/\s]+/(?P<graph>MODULE_[^/\s]+)")

Reader = Callable[[re.Match[str]], Failure]
R = TypeVar("R", bound=Reader)

_MESSAGES: list[tuple[re.Pattern[str], Reader]] = []  # the first match wins


def fault_of(error: BaseException | None, log: Iterable[str] = ()) -> Failure | None:
    """Returns the known fault in ``error``, its causes, or the lines of the log; None: there is none.

    1. a known message, in the order of this module
    2. a status with a known cause, in the same order of importance
    3. any other status of the runtime
    """
    text = "\n".join([*_chain(error), "\n".join(log)[-MOST_TEXT:]])
    for pattern, reader in _MESSAGES:  # 1
        if (match := pattern.search(text)) is not None:
            return _with_devices(reader(match), text)
    codes = {code for match in _STATUS.finditer(text) if (code := _code(match)) != 0}
    for code, from_status in _STATUSES.items():  # 2
        if code in codes:
            return _with_devices(from_status(code), text)
    named = codes & STATUS_NAMES.keys()
    return _runtime_failed(min(named)) if named else None  # 3


def after_serving(failure: Failure) -> Failure:
    """Returns the failure for a replica that has served: retries instead of stopping, since a start once succeeded."""
    again = failure.reaction is Reaction.STOP
    return msgspec.structs.replace(failure, reaction=Reaction.RETRY) if again else failure


def _chain(error: BaseException | None) -> list[str]:
    texts: list[str] = []
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        texts.append(str(error)[-MOST_TEXT:])
        error = error.__cause__ or error.__context__
    return texts


# Which devices a text names

_DEVICE = re.compile(r"\[(?:ND|MLA) ?(\d{1,3})\]|\bND (\d{1,3}):NC \d|Neuron Device (\d{1,3})\b|\bnd(\d{1,3})[ :]nc\d")


def _with_devices(failure: Failure, text: str) -> Failure:
    """Adds the devices named in lines of an uncorrectable or fatal error, or else in any line."""
    if failure.reaction is not Reaction.QUARANTINE or failure.devices:
        return failure
    lines = text.splitlines()
    fatal = [line for line in lines if re.search(r"uncorrectable|FATAL|abort state", line, re.IGNORECASE)]
    for some in (fatal, lines):
        devices = {int(next(filter(None, match.groups()))) for line in some for match in _DEVICE.finditer(line)}
        if devices:
            named = ", ".join(map(str, sorted(devices)))
            return msgspec.structs.replace(
                failure, what=f"{failure.what} (device {named})", devices=tuple(sorted(devices))
            )
    return failure


# Messages


def _line(match: re.Match[str]) -> str:
    """Returns the line of a match."""
    text = match.string
    end = text.find("\n", match.end())
    return text[text.rfind("\n", 0, match.start()) + 1 : len(text) if end < 0 else end].strip()[:300]


def _matches(pattern: str) -> Callable[[R], R]:
    """Registers the function as the reader of a pattern's match; readers of status codes are called without a match."""

    def register(reader: R) -> R:
        _MESSAGES.append((re.compile(pattern, re.IGNORECASE), reader))
        return reader

    return register


@_matches(r"uncorrectable[^\n]{0,200}reload the neuron driver|NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE")
def _memory_repairable(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "memory-repairable",
        "the device's memory had an uncorrectable error that can be repaired: results may be wrong",
        "end all processes on the device, reload the driver (sudo rmmod neuron; sudo modprobe neuron) or reboot, then "
        "corewright uncordon its cores",
        Reaction.QUARANTINE,
    )


@_matches(r"uncorrectable (?:HBM )?memory error|NRT_EXEC_HW_ERR_(?:HBM|NC)_UE")
def _memory_uncorrectable(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "memory-uncorrectable",
        "the device's memory had an uncorrectable error: results may be wrong",
        "stop and start the instance, or replace it: AWS retires such machines",
        Reaction.QUARANTINE,
    )


@_matches(
    r"DMA [TR]X engine \d+ is in an abort state|NRT_EXEC_HW_ERR_DMA_ABORT|NRT_EXEC_UNIT_UNRECOVERABLE|NRT_HW_ERROR"
)
def _device_failed(match: re.Match[str] | None = None) -> Failure:
    detail = f" ({match[0]})" if match else ""
    return Failure(
        "device-failed",
        f"the device has failed{detail}",
        "reset it (sudo rmmod neuron; sudo modprobe neuron), then corewright uncordon its cores; if it fails again, "
        "stop and start the instance",
        Reaction.QUARANTINE,
    )


@_matches(r"missing collectives status[^\n]*|NRT_EXEC_HW_ERR_COLLECTIVES")
def _collectives_hung(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "collectives-hung",
        "a collective operation between the replica's cores hangs: one of their devices may be broken",
        "find the broken device with dmesg | grep NEURON_HW_ERR; corewright uncordon the cores of the others",
        Reaction.QUARANTINE,
    )


@_matches(r"NeuronCore\(s\) not available - Requested: ?(\S+) Available: ?(\d+)")
def _cores_taken(match: re.Match[str]) -> Failure:
    return Failure(
        "cores-taken",
        f"the runtime cannot allocate its cores: {match[1]} were requested, {match[2]} of them are available",
        "end the process that holds them; neuron-ls shows which processes have the devices open",
        Reaction.ELSEWHERE,
    )


@_matches(r"NRT_EXEC_NC_BUSY")
def _cores_busy(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "cores-taken",
        "another model or process uses a core of the replica (status 1005)",
        "end the process that holds them; neuron-ls shows which processes have the devices open",
        Reaction.ELSEWHERE,
    )


@_matches(r"Neuron cores are not contiguous")
def _visible_cores_refused(match: re.Match[str]) -> Failure:
    return Failure(
        "visible-cores-refused",
        "the runtime rejects NEURON_RT_VISIBLE_CORES: its cores are not one ascending range",
        "check whether something changes it in the process, or hides some of the host's devices",
        Reaction.STOP,
    )


@_matches(r"Could not open the nd(\d+)")
def _device_missing(match: re.Match[str]) -> Failure:
    return Failure(
        "device-missing",
        f"the runtime cannot open device {match[1]}, /dev/neuron{match[1]}",
        "check with corewright doctor that the machine has the device and that this user or container may open it",
        Reaction.QUARANTINE,
        (int(match[1]),),
    )


@_matches(r"No neuron device available")
def _no_devices(match: re.Match[str]) -> Failure:
    return Failure(
        "no-devices",
        "the runtime finds no Neuron device",
        "check that the driver is loaded (lsmod | grep neuron) and that the container has the devices (--device)",
        Reaction.STOP,
    )


@_matches(r"Could not find VNC id (\S+)")
def _neff_wants_cores(match: re.Match[str] | None = None) -> Failure:
    more = f": it has no logical core {match[1]}" if match else ""
    return Failure(
        "neff-wants-cores",
        f"the compiled model needs more cores than the replica has{more}",
        "it was compiled for another tp_degree or LNC; remove its folder of compiled artifacts",
        Reaction.STOP,
    )


@_matches(r"Unsupported topology\.?\s*([^\n]{0,200})")
def _topology_refused(match: re.Match[str]) -> Failure:
    return Failure(
        "topology-refused",
        f"the runtime cannot join these cores into one group: {match[0].strip()}",
        "choose another tp_degree; `corewright plan` shows the core range",
        Reaction.STOP,
    )


@_matches(
    r"NEFF version mismatch supported: ?(?P<supported>[\w.]+) received: ?(?P<received>[\w.]+)"
    r"|(?P<features>unsupported NEFF features?[^\n]{0,200}|Unsupported hardware operator code \d+[^\n]{0,80})"
    r"|NEFF version mismatch|NRT_UNSUPPORTED_NEFF_VERSION"
)
def _neff_unsupported(match: re.Match[str] | None = None) -> Failure:
    groups: Mapping[str, str | None] = match.groupdict() if match else {}
    detail = groups.get("features") or ""
    if groups.get("received"):
        detail = f"it has version {groups['received']}, and {groups['supported']} is supported"
    return Failure(
        "neff-unsupported",
        "the compiled model is newer than the runtime" + (f": {detail}" if detail else " (status 10)"),
        "update aws-neuronx-runtime-lib and aws-neuronx-dkms to the compiler's release, or compile with an older one",
        Reaction.STOP,
    )


@_matches(
    r"\b(?:LNC|logical[ _-]?(?:neuron[ _-]?core|nc)|virtual[ _-]?core[ _-]?size)\b[^\n]{0,80}"
    r"(?:mismatch|does not match|differs|incompatible|compiled (?:for|with))"
    r"|(?:mismatch|compiled (?:for|with))[^\n]{0,60}\b(?:LNC|logical[ _-]?(?:neuron[ _-]?core|nc))\b"
)
def _lnc_differs(match: re.Match[str]) -> Failure:
    return Failure(
        "lnc-differs",
        f"the compiled model is for another number of physical cores per logical core: {_line(match)}",
        "set lnc of the host in the spec and of the driver to the compiled one, or remove its compiled artifacts",
        Reaction.STOP,
    )


@_matches(r"got a cached failed neff(?: at (\S+?))?[.,]?(?:\s|$)")
def _cached_failure(match: re.Match[str]) -> Failure:
    where = f": {match[1]}" if match[1] else ""
    return Failure(
        "compile-cached-failure",
        f"the compiler's cache has a failed compilation, which is not retried{where}",
        f"fix the cause, which model.log in it shows, then run on this host: `{_retry(match[1] or '')}`",
        Reaction.STOP,
    )


def _retry(neff: str) -> str:
    """Returns the command that clears the failure of the graph with NEFF path ``neff``, in its cache only."""
    place = _GRAPH.search(neff)
    return "corewright cache retry" + (
        f" {shlex.quote(place['graph'])} --cache {shlex.quote(place['cache'])}" if place else ""
    )


@_matches(
    r"\[F137\]|neuronx-cc was forcibly killed"
    r"|(?:neuronx-cc|neuron compiler|compil\w+)[^\n]{0,200}(?:failed with|exit(?:ed)?(?: code| status| with)*|"
    r"return(?:ed)?(?: code| non-zero exit status)*|died with|killed by)[ :=<]*(?:signal )?"
    r"(?:-9\b|137\b|(?:Signals\.)?SIGKILL|(?<=signal )9\b|(?P<ended>-(?:1|2|15)\b|(?:Signals\.)?SIG(?:TERM|INT|HUP)))"
)
def _compiler_killed(match: re.Match[str]) -> Failure:
    if match["ended"]:  # not the graph's fault either
        return Failure(
            "compiler-killed", f"neuronx-cc was ended from outside ({match['ended']})", "no action is needed"
        )
    return Failure(
        "compiler-killed",
        "neuronx-cc was killed, most likely by the kernel because of low host memory",
        "compile one graph at a time with compiler: {workers: 1}, or use fewer buckets or a machine with more memory",
    )


@_matches(
    r"neuronx-cc failed with (?P<a>-?\d+)"
    r"|neuronx-cc[^\n]{0,200}(?:exit(?:ed)?(?: code| status| with)*|non-zero exit status)[ :=]*(?P<b>-?\d+)"
    r"|\[(?P<c>NCC_[A-Z]+\d+)\]|Compiler status (?P<d>ERROR|FAIL\w*)"
)
def _compiler_failed(match: re.Match[str]) -> Failure:
    code = next(filter(None, match.groups()))
    return Failure(
        "compiler-failed",
        f"neuronx-cc could not compile the model ({code})",
        "see the replica's log; try compiler: {optlevel: 1}, another release of neuronx-cc, or other shapes",
        Reaction.STOP,
    )


@_matches(
    r"Failed to allocate (?P<size>[\d.]+ ?[KMG]?B)[^\n]{0,120} on ND \d+:NC \d+"
    r"|mc_alloc[^\n]{0,60}mempool[^\n]*needed (?P<needed>\d+) available (?P<available>\d+)"
    r"|nrt_tensor_allocate[^\n]{0,200}status(?:_code)?[ =:]*4\b"
    r"|Failed to allocate DEVICE memory \((?P<bytes>\d+) bytes\)|device mempool[^\n]{0,100}"
)
def _hbm_exhausted(match: re.Match[str]) -> Failure:
    groups = match.groupdict()
    detail = groups["size"] or (f"{groups['bytes']} bytes" if groups["bytes"] else "")
    if groups["needed"]:
        detail = f"{groups['needed']} bytes, {groups['available']} are free"
    return Failure(
        "hbm-exhausted",
        "the cores' memory is full" + (f": the runtime requested {detail}" if detail else f": {match[0].strip()}"),
        "lower max_batch or max_len, raise tp_degree, or quantize; hbm_overhead_gib makes the planner more careful",
        Reaction.STOP,
    )


@_matches(r"nrt_load_collectives[^\n]{0,200}status(?:_code)?[ =:]*4\b")
def _group_refused(match: re.Match[str]) -> Failure:
    # Users report it for full memory and for unsupported degrees: only the surrounding lines distinguish them.
    return Failure(
        "hbm-exhausted",
        f"the runtime has no resources to join the cores into one group, most often memory: {_line(match)}",
        "lower max_batch or max_len, or quantize; check that the machine supports the tp_degree",
        Reaction.STOP,
    )


@_matches(r"NRT_EXEC_SW_NQ_OVERFLOW|potentially caused by DGE notifications")
def _notifications_lost(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "notifications-lost",
        "the device's notification queue has overflowed (status 1204)",
        "set NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0 in the environment of `up`",
    )


@_matches(r"(?:execution|inference) timeout \((\d+) ms\)|NRT_TIMEOUT")
def _execution_timeout(match: re.Match[str] | None = None) -> Failure:
    limit = f" within {int(match[1]) / 1000:g} s" if match and match[1] else " in time (status 5)"
    return Failure(
        "execution-timeout",
        f"an execution on the cores did not end{limit}",
        "set NEURON_RT_EXEC_TIMEOUT=SECONDS in the environment of `up` if executions take longer; else the device "
        "hangs: dmesg | grep neuron",
    )


@_matches(r"INFER_ERROR_SUBTYPE_NUMERICAL|NRT_EXEC_COMPLETED_WITH_NUM_ERR")
def _numerical_error(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "numerical-error",
        "an execution returned NaN (status 1003)",
        "check that the weights belong to config.json; try dtype: bf16 or fp32 instead of fp16, or no quantization",
    )


@_matches(r"libnccom\.so[^\n]{0,120}(?:cannot|No such file)")
def _collectives_missing(match: re.Match[str]) -> Failure:
    return Failure(
        "collectives-missing",
        "the library for collective operations, libnccom.so, is missing",
        "install aws-neuronx-collectives, of the same release as aws-neuronx-runtime-lib",
        Reaction.STOP,
    )


@_matches(r"RX, connection closed by remote peer|NRT_NETWORK_PROXY_FAILURE|NRT_COLL_PENDING")
def _collectives_failed(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "collectives-failed",
        "the collective operations between the replica's cores have failed",
        "if it happens again, check that aws-neuronx-collectives and aws-neuronx-runtime-lib are of one release",
    )


@_matches(r"NRT_FAIL_HOST_MEM_ALLOC")
def _host_memory(match: re.Match[str] | None = None) -> Failure:
    return Failure(
        "out-of-memory",
        "the runtime cannot allocate host memory (status 11)",
        "use fewer replicas on this machine, a smaller model, or a machine with more memory",
    )


# Statuses

# "nrt_execute status=5", "status_code: 1201", "Inference completed with err: 1006", "Failed to ..., err: 2",
# "NRT_EXEC_HW_ERR_HBM_UE (1201)": only in a line of the runtime, since "status" is a common word.
_STATUS = re.compile(
    r"(?:nrt_?|NMGR|TDRV|NERR|neuron)[^\n]{0,300}?"
    r"(?:\bstatus(?:[ _]code)?|\berr(?:or)?|\bcode)[ =:]{1,3}\(?(\d{1,4})\b"
    r"|completed with err(?:or)?:? ?(\d{1,4})\b|\bNRT_[A-Z_]+ ?\((\d{1,4})\)",
    re.IGNORECASE,
)


def _code(match: re.Match[str]) -> int:
    return int(next(filter(None, match.groups())))


def _resource(code: int) -> Failure:
    return Failure(
        "hbm-exhausted",
        "the runtime could not allocate a resource (status 4), most often memory of the cores",
        "lower max_batch or max_len, raise tp_degree, or quantize; see the runtime's messages in the replica's log",
        Reaction.STOP,
    )


_STATUSES: Mapping[int, Callable[[int], Failure]] = MappingProxyType(
    {
        1205: lambda code: _numbered(_memory_repairable(), code),
        1201: lambda code: _numbered(_memory_uncorrectable(), code),
        1202: lambda code: _numbered(_memory_uncorrectable(), code),
        1203: lambda code: _numbered(_device_failed(), code),
        101: lambda code: _numbered(_device_failed(), code),
        6: lambda code: _numbered(_device_failed(), code),
        1200: lambda code: _numbered(_collectives_hung(), code),
        10: lambda code: _neff_unsupported(),
        9: lambda code: _neff_wants_cores(),
        1005: lambda code: _cores_busy(),
        4: _resource,
        11: lambda code: _host_memory(),
        1204: lambda code: _notifications_lost(),
        1003: lambda code: _numerical_error(),
        1206: lambda code: _numbered(_collectives_failed(), code),
        1100: lambda code: _numbered(_collectives_failed(), code),
        5: lambda code: _execution_timeout(),
    }
)


def _numbered(failure: Failure, code: int) -> Failure:
    return msgspec.structs.replace(failure, what=f"{failure.what} (status {code}, {STATUS_NAMES[code]})")


def _runtime_failed(code: int) -> Failure:
    return Failure(
        "runtime-failed",
        f"the Neuron runtime returned status {code} ({STATUS_NAMES[code]})",
        "see the replica's log",
    )
