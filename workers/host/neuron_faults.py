"""Faults of the Neuron runtime and compiler, read from what they print and from the codes that they return.

The framework above them raises a RuntimeError that tells little, often only a status; what happened stands in the lines
that the libraries write to the process's log. So both are searched, the messages before the codes: a device with bad
memory ends many executions with the status of a timeout. Texts and codes are those of AWS's runtime troubleshooting
guide and of its nrt_status.h; others were reported by users, which is said where they are.
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

MOST_TEXT = 64 * 1024  # of an exception, and of the log; a compiler's output may be megabytes
# What these say is only where something went wrong. An engine's own finding, of any other id, is the better account.
VAGUE = frozenset({"load-failed", "probe-failed", "engine-failed", "compile-failed", "replica-died"})

# A path of a cache: its folder, the compiler's, the graph's.
_GRAPH = re.compile(r"^(?:file://)?(?P<cache>\S+?)/neuronxcc-[^/\s]+/(?P<graph>MODULE_[^/\s]+)")

Reader = Callable[[re.Match[str]], Failure]
R = TypeVar("R", bound=Reader)

_MESSAGES: list[tuple[re.Pattern[str], Reader]] = []  # the first that fits counts


def fault_of(error: BaseException | None, log: Iterable[str] = ()) -> Failure | None:
    """The fault that ``error``, what it was raised from, or the lines of the log tell of; None: none that is known.

    1. what a message says, in the order of this module
    2. a status that names a cause, by the same order of importance
    3. any other status of the runtime
    """
    text = "\n".join([*_chain(error), "\n".join(log)[-MOST_TEXT:]])
    for pattern, reader in _MESSAGES:  # 1
        if (found := pattern.search(text)) is not None:
            return _with_devices(reader(found), text)
    codes = {code for found in _STATUS.finditer(text) if (code := _code(found)) != 0}
    for code, from_status in _STATUSES.items():  # 2
        if code in codes:
            return _with_devices(from_status(code), text)
    named = codes & STATUS_NAMES.keys()
    return _runtime_failed(min(named)) if named else None  # 3


def after_serving(failure: Failure) -> Failure:
    """The same of a replica that has served: what was possible once is not given up."""
    again = failure.reaction is Reaction.STOP
    return msgspec.structs.replace(failure, reaction=Reaction.RETRY) if again else failure


def _chain(error: BaseException | None) -> list[str]:
    texts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        texts.append(str(error)[-MOST_TEXT:])
        error = error.__cause__ or error.__context__
    return texts


# Which devices a text names

_DEVICE = re.compile(r"\[(?:ND|MLA) ?(\d{1,3})\]|\bND (\d{1,3}):NC \d|Neuron Device (\d{1,3})\b|\bnd(\d{1,3})[ :]nc\d")


def _with_devices(failure: Failure, text: str) -> Failure:
    """With the devices that the lines of an uncorrectable or fatal error name, or all lines where none does."""
    if failure.reaction is not Reaction.QUARANTINE or failure.devices:
        return failure
    lines = text.splitlines()
    fatal = [line for line in lines if re.search(r"uncorrectable|FATAL|abort state", line, re.IGNORECASE)]
    for some in (fatal, lines):
        devices = {int(next(filter(None, found.groups()))) for line in some for found in _DEVICE.finditer(line)}
        if devices:
            named = ", ".join(map(str, sorted(devices)))
            return msgspec.structs.replace(
                failure, what=f"{failure.what} (device {named})", devices=tuple(sorted(devices))
            )
    return failure


# Messages


def _line(found: re.Match[str]) -> str:
    """The line of what was found."""
    text = found.string
    end = text.find("\n", found.end())
    return text[text.rfind("\n", 0, found.start()) + 1 : len(text) if end < 0 else end].strip()[:300]


def _says(pattern: str) -> Callable[[R], R]:
    """The function below reads what this pattern finds; without a finding it is given nothing."""

    def register(reader: R) -> R:
        _MESSAGES.append((re.compile(pattern, re.IGNORECASE), reader))
        return reader

    return register


@_says(r"uncorrectable[^\n]{0,200}reload the neuron driver|NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE")
def _memory_repairable(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "memory-repairable",
        "the device's memory had an error that cannot be corrected, but repaired: results may be wrong",
        "end what runs on the device, reload the driver (sudo rmmod neuron; sudo modprobe neuron) or reboot, then "
        "corewright uncordon its cores",
        Reaction.QUARANTINE,
    )


@_says(r"uncorrectable (?:HBM )?memory error|NRT_EXEC_HW_ERR_(?:HBM|NC)_UE")
def _memory_uncorrectable(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "memory-uncorrectable",
        "the device's memory had an error that cannot be corrected: results may be wrong",
        "stop and start the instance, or replace it: AWS retires such a machine",
        Reaction.QUARANTINE,
    )


@_says(r"DMA [TR]X engine \d+ is in an abort state|NRT_EXEC_HW_ERR_DMA_ABORT|NRT_EXEC_UNIT_UNRECOVERABLE|NRT_HW_ERROR")
def _device_failed(found: re.Match[str] | None = None) -> Failure:
    what = f" ({found[0]})" if found else ""
    return Failure(
        "device-failed",
        f"the device does not work any more{what}",
        "sudo rmmod neuron; sudo modprobe neuron resets it, then corewright uncordon its cores; when it comes again, "
        "stop and start the instance",
        Reaction.QUARANTINE,
    )


@_says(r"missing collectives status[^\n]*|NRT_EXEC_HW_ERR_COLLECTIVES")
def _collectives_hung(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "collectives-hung",
        "a collective operation among the replica's cores does not end: one of their devices may be broken",
        "dmesg | grep NEURON_HW_ERR names a broken device; corewright uncordon the cores of the others",
        Reaction.QUARANTINE,
    )


@_says(r"NeuronCore\(s\) not available - Requested: ?(\S+) Available: ?(\d+)")
def _cores_taken(found: re.Match[str]) -> Failure:
    return Failure(
        "cores-taken",
        f"the runtime does not get its cores: {found[1]} were asked for, {found[2]} of them are available",
        "end the process that holds them; neuron-ls shows who has the devices open",
        Reaction.ELSEWHERE,
    )


@_says(r"NRT_EXEC_NC_BUSY")
def _cores_busy(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "cores-taken",
        "another model or process uses a core of the replica (status 1005)",
        "end the process that holds them; neuron-ls shows who has the devices open",
        Reaction.ELSEWHERE,
    )


@_says(r"Neuron cores are not contiguous")
def _visible_cores_refused(found: re.Match[str]) -> Failure:
    return Failure(
        "visible-cores-refused",
        "the runtime refuses NEURON_RT_VISIBLE_CORES: its cores are not one rising run",
        "does something set it anew in the process, or hide some of the host's devices?",
        Reaction.STOP,
    )


@_says(r"Could not open the nd(\d+)")
def _device_missing(found: re.Match[str]) -> Failure:
    return Failure(
        "device-missing",
        f"the runtime cannot open device {found[1]}, /dev/neuron{found[1]}",
        "has the machine so many devices, and may this user or container open it? corewright doctor shows it",
        Reaction.QUARANTINE,
        (int(found[1]),),
    )


@_says(r"No neuron device available")
def _no_devices(found: re.Match[str]) -> Failure:
    return Failure(
        "no-devices",
        "the runtime finds no Neuron device at all",
        "is the driver loaded (lsmod | grep neuron), and are the devices given to the container (--device)?",
        Reaction.STOP,
    )


@_says(r"Could not find VNC id (\S+)")
def _neff_wants_cores(found: re.Match[str] | None = None) -> Failure:
    more = f": it has no logical core {found[1]}" if found else ""
    return Failure(
        "neff-wants-cores",
        f"the compiled model wants more cores than the replica has{more}",
        "it was compiled for another tp_degree or LNC; remove its folder of compiled artifacts",
        Reaction.STOP,
    )


@_says(r"Unsupported topology\.?\s*([^\n]{0,200})")
def _topology_refused(found: re.Match[str]) -> Failure:
    return Failure(
        "topology-refused",
        f"the runtime cannot join these cores into one group: {found[0].strip()}",
        "choose another tp_degree; `corewright plan` shows where the range lies",
        Reaction.STOP,
    )


@_says(
    r"NEFF version mismatch supported: ?(?P<supported>[\w.]+) received: ?(?P<received>[\w.]+)"
    r"|(?P<features>unsupported NEFF features?[^\n]{0,200}|Unsupported hardware operator code \d+[^\n]{0,80})"
    r"|NEFF version mismatch|NRT_UNSUPPORTED_NEFF_VERSION"
)
def _neff_unsupported(found: re.Match[str] | None = None) -> Failure:
    groups: Mapping[str, str | None] = found.groupdict() if found else {}
    told = groups.get("features") or ""
    if groups.get("received"):
        told = f"it is of version {groups['received']}, and {groups['supported']} is supported"
    return Failure(
        "neff-unsupported",
        "the compiled model is newer than the runtime" + (f": {told}" if told else " (status 10)"),
        "update aws-neuronx-runtime-lib and aws-neuronx-dkms to the compiler's release, or compile with an older one",
        Reaction.STOP,
    )


@_says(
    r"\b(?:LNC|logical[ _-]?(?:neuron[ _-]?core|nc)|virtual[ _-]?core[ _-]?size)\b[^\n]{0,80}"
    r"(?:mismatch|does not match|differs|incompatible|compiled (?:for|with))"
    r"|(?:mismatch|compiled (?:for|with))[^\n]{0,60}\b(?:LNC|logical[ _-]?(?:neuron[ _-]?core|nc))\b"
)
def _lnc_differs(found: re.Match[str]) -> Failure:
    return Failure(
        "lnc-differs",
        f"the compiled model is for another number of physical cores in a logical one: {_line(found)}",
        "lnc of the host in the spec, and the driver's, must be that of the compilation; remove its compiled artifacts",
        Reaction.STOP,
    )


@_says(r"got a cached failed neff(?: at (\S+?))?[.,]?(?:\s|$)")
def _cached_failure(found: re.Match[str]) -> Failure:
    where = f": {found[1]}" if found[1] else ""
    return Failure(
        "compile-cached-failure",
        f"the compiler's cache holds a compilation that has failed, and does not try it again{where}",
        f"model.log in it tells the cause; when that is gone, on this host: `{_retry(found[1] or '')}`",
        Reaction.STOP,
    )


def _retry(neff: str) -> str:
    """The command that has a graph tried again whose NEFF would be ``neff``: only that one, and in that cache."""
    place = _GRAPH.search(neff)
    return "corewright cache retry" + (
        f" {shlex.quote(place['graph'])} --cache {shlex.quote(place['cache'])}" if place else ""
    )


@_says(
    r"\[F137\]|neuronx-cc was forcibly killed"
    r"|(?:neuronx-cc|neuron compiler|compil\w+)[^\n]{0,200}(?:failed with|exit(?:ed)?(?: code| status| with)*|"
    r"return(?:ed)?(?: code| non-zero exit status)*|died with|killed by)[ :=<]*(?:signal )?"
    r"(?:-9\b|137\b|(?:Signals\.)?SIGKILL|(?<=signal )9\b|(?P<ended>-(?:1|2|15)\b|(?:Signals\.)?SIG(?:TERM|INT|HUP)))"
)
def _compiler_killed(found: re.Match[str]) -> Failure:
    if found["ended"]:  # the graph is not to blame here either
        return Failure(
            "compiler-killed", f"neuronx-cc was ended from outside ({found['ended']})", "nothing is to be done"
        )
    return Failure(
        "compiler-killed",
        "neuronx-cc was killed, most likely by the kernel, for want of host memory",
        "compiler: {workers: 1} compiles one graph at a time; fewer buckets or a machine with more memory help too",
    )


@_says(
    r"neuronx-cc failed with (?P<a>-?\d+)"
    r"|neuronx-cc[^\n]{0,200}(?:exit(?:ed)?(?: code| status| with)*|non-zero exit status)[ :=]*(?P<b>-?\d+)"
    r"|\[(?P<c>NCC_[A-Z]+\d+)\]|Compiler status (?P<d>ERROR|FAIL\w*)"
)
def _compiler_failed(found: re.Match[str]) -> Failure:
    code = next(filter(None, found.groups()))
    return Failure(
        "compiler-failed",
        f"neuronx-cc could not compile the model ({code})",
        "the replica's log has its words; compiler: {optlevel: 1}, another release of neuronx-cc, or other shapes",
        Reaction.STOP,
    )


@_says(
    r"Failed to allocate (?P<size>[\d.]+ ?[KMG]?B)[^\n]{0,120} on ND \d+:NC \d+"
    r"|mc_alloc[^\n]{0,60}mempool[^\n]*needed (?P<needed>\d+) available (?P<available>\d+)"
    r"|nrt_tensor_allocate[^\n]{0,200}status(?:_code)?[ =:]*4\b"
    r"|Failed to allocate DEVICE memory \((?P<bytes>\d+) bytes\)|device mempool[^\n]{0,100}"
)
def _hbm_exhausted(found: re.Match[str]) -> Failure:
    groups = found.groupdict()
    told = groups["size"] or (f"{groups['bytes']} bytes" if groups["bytes"] else "")
    if groups["needed"]:
        told = f"{groups['needed']} bytes, {groups['available']} are free"
    return Failure(
        "hbm-exhausted",
        "the cores' memory is full" + (f": the runtime asked for {told}" if told else f": {found[0].strip()}"),
        "lower max_batch or max_len, raise tp_degree, or quantize; hbm_overhead_gib makes the planner more careful",
        Reaction.STOP,
    )


@_says(r"nrt_load_collectives[^\n]{0,200}status(?:_code)?[ =:]*4\b")
def _group_refused(found: re.Match[str]) -> Failure:
    # Users report it of full memory, and of degrees that a machine does not join: only the lines around it tell.
    return Failure(
        "hbm-exhausted",
        f"the runtime had no resources to join the cores into one group, most often memory: {_line(found)}",
        "lower max_batch or max_len, or quantize; is the tp_degree one that the machine's documents name?",
        Reaction.STOP,
    )


@_says(r"NRT_EXEC_SW_NQ_OVERFLOW|potentially caused by DGE notifications")
def _notifications_lost(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "notifications-lost",
        "the device's queue of notifications has overflowed (status 1204)",
        "NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0 in the environment of `up`",
    )


@_says(r"(?:execution|inference) timeout \((\d+) ms\)|NRT_TIMEOUT")
def _execution_timeout(found: re.Match[str] | None = None) -> Failure:
    told = f" within {int(found[1]) / 1000:g} s" if found and found[1] else " in time (status 5)"
    return Failure(
        "execution-timeout",
        f"an execution on the cores did not end{told}",
        "NEURON_RT_EXEC_TIMEOUT=SECONDS in the environment of `up`, if it takes longer in good order; else the device "
        "hangs: dmesg | grep neuron",
    )


@_says(r"INFER_ERROR_SUBTYPE_NUMERICAL|NRT_EXEC_COMPLETED_WITH_NUM_ERR")
def _numerical_error(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "numerical-error",
        "an execution gave numbers that are none (NaN; status 1003)",
        "do the weights belong to config.json? dtype: bf16 or fp32 in place of fp16, or no quantization, may help",
    )


@_says(r"libnccom\.so[^\n]{0,120}(?:cannot|No such file)")
def _collectives_missing(found: re.Match[str]) -> Failure:
    return Failure(
        "collectives-missing",
        "the library of collective operations, libnccom.so, is not there",
        "install aws-neuronx-collectives, of the same release as aws-neuronx-runtime-lib",
        Reaction.STOP,
    )


@_says(r"RX, connection closed by remote peer|NRT_NETWORK_PROXY_FAILURE|NRT_COLL_PENDING")
def _collectives_failed(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "collectives-failed",
        "the collective operations among the replica's cores have failed",
        "when it comes again: are aws-neuronx-collectives and aws-neuronx-runtime-lib of one release?",
    )


@_says(r"NRT_FAIL_HOST_MEM_ALLOC")
def _host_memory(found: re.Match[str] | None = None) -> Failure:
    return Failure(
        "out-of-memory",
        "the runtime got no memory of the host (status 11)",
        "fewer replicas on this machine, a smaller model, or a machine with more memory",
    )


# Statuses

# "nrt_execute status=5", "status_code: 1201", "Inference completed with err: 1006", "Failed to ..., err: 2",
# "NRT_EXEC_HW_ERR_HBM_UE (1201)": only in a line of the runtime's, since "status" is a common word.
_STATUS = re.compile(
    r"(?:nrt_?|NMGR|TDRV|NERR|neuron)[^\n]{0,300}?"
    r"(?:\bstatus(?:[ _]code)?|\berr(?:or)?|\bcode)[ =:]{1,3}\(?(\d{1,4})\b"
    r"|completed with err(?:or)?:? ?(\d{1,4})\b|\bNRT_[A-Z_]+ ?\((\d{1,4})\)",
    re.IGNORECASE,
)


def _code(found: re.Match[str]) -> int:
    return int(next(filter(None, found.groups())))


def _resource(code: int) -> Failure:
    return Failure(
        "hbm-exhausted",
        "the runtime could not get a resource (status 4): most often memory of the cores",
        "lower max_batch or max_len, raise tp_degree, or quantize; the replica's log has the runtime's words",
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
        "the replica's log has its words",
    )
