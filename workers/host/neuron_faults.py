"""Recognizes faults of the Neuron runtime and compiler by their messages and status codes.

The framework above them often raises a RuntimeError with only a status; details are in the lines that the libraries
write to the process's log. Both are searched, messages before codes: a device with bad memory ends many executions with
the status of a timeout. Texts and codes are from AWS's runtime troubleshooting guide, its list of compiler error codes
and its nrt_status.h; those reported by users are marked, or have a row in `placements.facts.known_failures`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec.structs

from placements.facts.known_failures import KNOWN_FAILURE, KNOWN_FAILURES
from workers.host import host_facts
from workers.messages.status import Failure, Reaction


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its cause or context, and so on, each once."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


STATUS_NAMES: Mapping[int, str] = MappingProxyType(
    {
        1: "failure",
        2: "invalid NEFF, instruction or input",
        3: "invalid handle",
        4: "resource unavailable",
        5: "timeout",
        6: "hardware error",
        7: "queue full",
        9: "not enough cores",
        10: "unsupported NEFF version",
        11: "no host memory",
        13: "not initialized",
        14: "closed",
        15: "queue empty",
        101: "execution unit unrecoverable",
        1002: "bad input",
        1003: "numerical error",
        1004: "completed with an error",
        1005: "core busy",
        1006: "out of bounds",
        1100: "collectives pending",
        1200: "hardware error in collectives",
        1201: "uncorrectable error in HBM",
        1202: "uncorrectable error in a core",
        1203: "DMA aborted",
        1204: "notification queue overflow",
        1205: "repairable error in HBM",
        1206: "network proxy failed",
    }
)
"""Descriptions of NRT_STATUS in AWS's nrt_status.h."""


MOST_TEXT = 64 * 1024  # of an exception and of the log; a compiler's output may be megabytes
# Generic ids that only say where something failed. An engine's own error with another id is more specific.
VAGUE = frozenset({"load-failed", "probe-failed", "engine-failed", "compile-failed", "replica-died", "start-failed"})

# A path in a cache: its folder, the compiler's folder, the graph's folder.
_GRAPH = re.compile(r"^(?:file://)?(?P<cache>\S+?)/neuronxcc-[^/\s]+/(?P<graph>MODULE_[^/\s]+)")
_COMPILER_ENDED = (
    r"(?:neuronx-cc|neuron compiler|compil\w+)[^\n]{0,200}(?:failed with|exit(?:ed)?(?: code| status| with)*|"
    r"return(?:ed)?(?: code| non-zero exit status)*|died with|killed by)[ :=<]*(?:signal )?"
)
_RELOAD = "reload the driver (sudo rmmod neuron; sudo modprobe neuron) or reboot"
_LNC = r"\b(?:LNC|logical[ _-]?(?:neuron[ _-]?core|nc)"


class Fault(NamedTuple):
    """A failure, and the messages and status codes that show it.

    ``messages``: regular expression -> addition to ``what``, where {0} is the matched text, {1} and {2} are its first
    matched groups and {line} is its line. ``{graph}`` in ``hint`` stands for the options that name the message's graph.
    """

    id: str
    what: str
    hint: str
    reaction: Reaction = Reaction.RETRY
    messages: Mapping[str, str] = MappingProxyType({})
    statuses: tuple[int, ...] = ()


def _reported() -> Iterator[Fault]:
    """Yields a fault for each text of `known_failures`, with all failures that have shown it."""
    for text in dict.fromkeys(row.text for row in KNOWN_FAILURES if row.text):
        rows = [row for row in KNOWN_FAILURES if row.text == text]
        what = "; or ".join(dict.fromkeys(row.what for row in rows))
        hint = "; or ".join(dict.fromkeys(f"{row.helps} ({row.source})" for row in rows))
        yield Fault(
            KNOWN_FAILURE, f"others have reported this: {what}", hint, Reaction(rows[0].reaction), {text: " ({0})"}
        )


# The first match wins, of messages and of statuses: a cause before its effects, the most precise message first.
FAULTS = (
    Fault(
        "memory-repairable",
        "the device's memory had an uncorrectable error that can be repaired: results may be wrong",
        f"end all processes on the device, {_RELOAD}, then corewright uncordon its cores",
        Reaction.QUARANTINE,
        {r"uncorrectable[^\n]{0,200}reload the neuron driver|NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE": ""},
        (1205,),
    ),
    Fault(
        "memory-uncorrectable",
        "the device's memory had an uncorrectable error: results may be wrong",
        "stop and start the instance, or replace it: AWS retires such machines",
        Reaction.QUARANTINE,
        {r"uncorrectable (?:HBM )?memory error|NRT_EXEC_HW_ERR_(?:HBM|NC)_UE": ""},
        (1201, 1202),
    ),
    Fault(
        "device-failed",
        "the device has failed",
        "reset it (sudo rmmod neuron; sudo modprobe neuron), then corewright uncordon its cores; if it fails "
        "again, stop and start the instance",
        Reaction.QUARANTINE,
        {
            r"DMA [TR]X engine \d+ is in an abort state|NRT_EXEC_HW_ERR_DMA_ABORT"
            r"|NRT_EXEC_UNIT_UNRECOVERABLE|NRT_HW_ERROR": " ({0})"
        },
        (1203, 101, 6),
    ),
    Fault(
        "collectives-hung",
        "a collective operation between the replica's cores hangs: one of their devices may be broken",
        "find the broken device with dmesg | grep NEURON_HW_ERR; corewright uncordon the cores of the others",
        Reaction.QUARANTINE,
        {r"missing collectives status|NRT_EXEC_HW_ERR_COLLECTIVES": ""},
        (1200,),
    ),
    Fault(
        "cores-taken",
        "the runtime cannot allocate its cores",
        "end the process that holds them, which neuron-ls shows; if there is none, the driver keeps them for a dead "
        f"one (reported by users): {_RELOAD}",
        Reaction.ELSEWHERE,
        {
            r"NeuronCore\(s\) not available - Requested: ?(\S+) Available: ?(\d+)": ": {1} were requested, "
            "{2} of them are available"
        },
    ),
    Fault(
        "visible-cores-refused",
        "the runtime rejects NEURON_RT_VISIBLE_CORES: its cores are not one ascending range",
        "check whether something changes it in the process, or hides some of the host's devices",
        Reaction.STOP,
        {r"Neuron cores are not contiguous": ""},
    ),
    Fault(
        "device-missing",
        "the runtime cannot open",
        "check with corewright doctor that the machine has the device and that this user or container may open it",
        Reaction.QUARANTINE,
        {r"Could not open the nd(\d+)": " /dev/neuron{1}"},
    ),
    Fault(
        "no-devices",
        "the runtime finds no Neuron device",
        "check that the driver is loaded (lsmod | grep neuron) and that the container has the devices (--device)",
        Reaction.STOP,
        {r"No neuron device available|Unable to determine Neuron Driver version": ""},
    ),
    Fault(
        "neff-unsupported",
        "the compiled model is newer than the runtime",
        "update aws-neuronx-runtime-lib and aws-neuronx-dkms to the compiler's release, or compile with an older one",
        Reaction.STOP,
        {
            r"NEFF version mismatch supported: ?([\w.]+) received: ?([\w.]+)": ": it has version {2}, and {1} is "
            "supported",
            r"unsupported NEFF features?[^\n]{0,200}|Unsupported hardware operator code \d+[^\n]{0,80}": ": {0}",
            r"NEFF version mismatch|NRT_UNSUPPORTED_NEFF_VERSION": "",
        },
        (10,),
    ),
    Fault(
        "neff-wants-cores",
        "the compiled model needs more cores than the replica has",
        "it was compiled for another tp_degree or LNC; remove its folder of compiled artifacts",
        Reaction.STOP,
        {r"Could not find VNC id (\S+)": ": it has no logical core {1}"},
        (9,),
    ),
    Fault(
        "cores-taken",
        "another model or process uses a core of the replica",
        "end the process that holds them; neuron-ls shows which processes have the devices open",
        Reaction.ELSEWHERE,
        {r"NRT_EXEC_NC_BUSY": " ({0})"},
        (1005,),
    ),
    Fault(
        "topology-refused",
        "the runtime cannot join these cores into one group",
        "choose another tp_degree; `corewright plan` shows the core range",
        Reaction.STOP,
        {r"Unsupported topology\.?\s*[^\n]{0,200}": ": {0}"},
    ),
    Fault(
        "lnc-differs",
        "the compiled model is for another number of physical cores per logical core",
        "set lnc of the host in the spec and of the driver to the compiled one, or remove its compiled artifacts",
        Reaction.STOP,
        {
            _LNC + r"|virtual[ _-]?core[ _-]?size)\b[^\n]{0,80}"
            r"(?:mismatch|does not match|differs|incompatible|compiled (?:for|with))"
            r"|(?:mismatch|compiled (?:for|with))[^\n]{0,60}" + _LNC + r")\b": ": {line}"
        },
    ),
    Fault(  # reported by users
        "neff-invalid",
        "the runtime rejects the compiled model",
        "remove its folder of compiled artifacts, so that it is compiled again; if that does not help, update "
        "aws-neuronx-runtime-lib to the compiler's release",
        Reaction.STOP,
        {r"nrt_load(?:_collectives)?\b[^\n]{0,200}status(?:_code)?[ =:]*2\b|NRT_INVALID in nrt_load": ""},
    ),
    Fault(
        "compile-cached-failure",
        "the compiler's cache has a failed compilation, which is not retried",
        "fix the cause, which model.log in it shows, then run on this host: `corewright cache retry{graph}`",
        Reaction.STOP,
        {r"got a cached failed neff at (?P<neff>\S+?)[.,]?(?:\s|$)": ": {1}", r"got a cached failed neff\b": ""},
    ),
    Fault(
        "compiler-killed",
        "neuronx-cc was killed, most likely by the kernel because of low host memory",
        "compile one graph at a time with compiler: {workers: 1}, or use fewer buckets or a machine with more memory",
        messages={
            r"\[F137\]|neuronx-cc was forcibly killed|Backend exited with code -9\b"
            r"|process in the process pool was terminated abruptly|"
            + _COMPILER_ENDED
            + r"(?:-9\b|137\b|(?:Signals\.)?SIGKILL|(?<=signal )9\b)": ""
        },
    ),
    Fault(  # not the graph's fault either
        "compiler-killed",
        "neuronx-cc was ended from outside",
        "no action is needed",
        messages={_COMPILER_ENDED + r"(-(?:1|2|15)\b|(?:Signals\.)?SIG(?:TERM|INT|HUP))": " ({1})"},
    ),
    *_reported(),
    Fault(
        "graph-exceeds-hbm",
        "a graph needs more device memory than the cores have",
        "lower max_batch, max_len or the longest bucket, raise tp_degree, or quantize",
        Reaction.STOP,
        {r"\[(?:NCC_)?EOOM00\d\]|Estimated peak HBM usage[^\n]{0,40} exceeds \d+ ?GB|\[(?:NCC_I)?XCG815\]": " ({0})"},
    ),
    Fault(
        "graph-exceeds-instructions",
        "the model has a graph of more instructions than neuronx-cc supports",
        "raise tp_degree, or lower max_batch, max_len or the longest bucket",
        Reaction.STOP,
        {r"too many instructions(?: after unroll)?|\[(?:NCC_E)?BVF030\]|\[LUR015\]": " ({0})"},
    ),
    Fault(
        "environment-incomplete",
        "the engine's environment is incomplete",
        "install libneuronxla, torch-neuronx and neuronx-cc of one release in it, and add its bin folder to PATH",
        Reaction.STOP,
        {
            r"No such file or directory: '(libneuronpjrt-path|\S*neuronx-cc)'|(neuronx-cc): (?:command )?not found"
            r"|(neuronx-cc) compiler binary does not exist": ": {1} is not in its PATH",
            r"neuronxcc/\S+: error while loading shared libraries: (\S+?):": ": neuronx-cc needs {1}",
        },
    ),
    Fault(
        "compiler-crashed",
        "neuronx-cc has crashed",
        "use another release of neuronx-cc, compiler: {optlevel: 1}, or other shapes",
        Reaction.STOP,
        {
            r"Backend exited with code -\d+[^\n]{0,200}|\[F134\]|neuronx-cc terminated abnormally"
            r"|neuronx-cc[^\n]{0,40} crashed": " ({0})"
        },
    ),
    Fault(
        "compiler-failed",
        "neuronx-cc could not compile the model",
        "see the replica's log; try compiler: {optlevel: 1}, another release of neuronx-cc, or other shapes",
        Reaction.STOP,
        {
            r"neuronx-cc (?:compilation )?failed with (-?\d+)"
            r"|neuronx-cc[^\n]{0,200}(?:exit(?:ed)?(?: code| status| with)*|non-zero exit status)[ :=]*(-?\d+)"
            r"|\[(NCC_[A-Z]+\d+)\]|Compiler status (ERROR|FAIL\w*)": " ({1})",
            r"Failed compilation with \['neuronx-cc'[^\n]{0,2000}?\]: ([^\n]{0,200})": ": {1}",
        },
    ),
    Fault(
        "hbm-exhausted",
        "the cores' memory is full",
        "lower max_batch or max_len, raise tp_degree, or quantize; hbm_overhead_gib makes the planner more careful",
        Reaction.STOP,
        {
            r"Failed to allocate ([\d.]+ ?[KMG]?B)[^\n]{0,120} on ND \d+:NC \d+": ": the runtime requested {1}",
            r"mc_alloc[^\n]{0,60}mempool[^\n]*needed (\d+) available (\d+)": ": the runtime requested {1} bytes, {2} "
            "are free",
            r"Failed to allocate DEVICE memory \((\d+) bytes\)": ": the runtime requested {1} bytes",
            r"nrt_tensor_allocate[^\n]{0,200}status(?:_code)?[ =:]*4\b|device mempool[^\n]{0,100}": ": {0}",
        },
    ),
    Fault(  # reported by users for full memory and for unsupported degrees: only the surrounding lines distinguish them
        "hbm-exhausted",
        "the runtime has no resources to join the cores into one group, most often memory",
        "lower max_batch or max_len, or quantize; check that the machine supports the tp_degree",
        Reaction.STOP,
        {r"nrt_load_collectives[^\n]{0,200}status(?:_code)?[ =:]*4\b": ": {line}"},
    ),
    Fault(
        "hbm-exhausted",
        "the runtime could not allocate a resource, most often memory of the cores",
        "lower max_batch or max_len, raise tp_degree, or quantize; see the runtime's messages in the replica's log",
        Reaction.STOP,
        statuses=(4,),
    ),
    Fault(
        "out-of-memory",
        "the runtime cannot allocate host memory",
        "use fewer replicas on this machine, a smaller model, or a machine with more memory",
        messages={r"NRT_FAIL_HOST_MEM_ALLOC": " ({0})"},
        statuses=(11,),
    ),
    Fault(
        "notifications-lost",
        "the device's notification queue has overflowed",
        "set NEURON_RT_ENABLE_DGE_NOTIFICATIONS=0 in the environment of `up`",
        messages={r"NRT_EXEC_SW_NQ_OVERFLOW|potentially caused by DGE notifications": ""},
        statuses=(1204,),
    ),
    Fault(
        "numerical-error",
        "an execution returned NaN",
        "check that the weights belong to config.json; try dtype: bf16 or fp32 instead of fp16, or no quantization",
        messages={r"INFER_ERROR_SUBTYPE_NUMERICAL|NRT_EXEC_COMPLETED_WITH_NUM_ERR": " ({0})"},
        statuses=(1003,),
    ),
    Fault(
        "collectives-missing",
        "the library for collective operations, libnccom.so, is missing",
        "install aws-neuronx-collectives, of the same release as aws-neuronx-runtime-lib",
        Reaction.STOP,
        {r"libnccom\.so[^\n]{0,120}(?:cannot|No such file)": ""},
    ),
    Fault(
        "open-files-exhausted",
        "the collective operations between the replica's cores need more open files than the process may have",
        "raise the limit where `up` or the Ray node starts: ulimit -n 65536, or LimitNOFILE=65536 in its unit",
        Reaction.STOP,
        {r"(?:bootstrap|CCOM)[^\n]{0,200}Too many open files": ""},
    ),
    Fault(
        "collectives-failed",
        "the collective operations between the replica's cores have failed",
        "if it happens again, check that aws-neuronx-collectives and aws-neuronx-runtime-lib are of one release",
        messages={r"RX, connection closed by remote peer|NRT_NETWORK_PROXY_FAILURE|NRT_COLL_PENDING": ""},
        statuses=(1206, 1100),
    ),
    Fault(
        "execution-timeout",
        "an execution on the cores did not end in time",
        "set NEURON_RT_EXEC_TIMEOUT=SECONDS in the environment of `up` if executions take longer; else the device "
        "hangs: dmesg | grep neuron",
        messages={r"(?:execution|inference) timeout \((\d+) ms\)": " ({1} ms)", r"NRT_TIMEOUT": ""},
        statuses=(5,),
    ),
    Fault(
        "out-of-bounds",
        "an execution read or wrote outside of a tensor: a kernel of the model, or an input, is wrong",
        "use another release of the engine; NEURON_RT_DBG_DUMP_INPUTS_ON_ERR=1006 in the environment of `up` keeps the "
        "inputs",
        Reaction.STOP,
        {r"NRT_EXEC_OOB|failed to run scatter/gather[^\n]{0,200}out-of-bound": " ({0})"},
        (1006,),
    ),
    Fault(
        "execution-failed",
        "an execution on the cores ended with an error",
        "see the runtime's messages in the replica's log; if other cores fail, too, use another release of the engine",
        Reaction.ELSEWHERE,
        {r"NRT_EXEC_COMPLETED_WITH_ERR\b": " ({0})"},
        (1004,),
    ),
    Fault(  # reported by users; often processes that hold the cores
        "runtime-not-started",
        "the Neuron runtime could not be initialized",
        "see sudo dmesg | grep -i neuron, check with corewright doctor that the driver is loaded, and end processes "
        "that neuron-ls shows on the cores",
        Reaction.ELSEWHERE,
        {r"Neuron Runtime (?:could not|cannot) be initialized": ""},
    ),
)


_REACTIONS: Mapping[str, Reaction] = MappingProxyType({fault.id: fault.reaction for fault in FAULTS})


def fault_of(error: BaseException | None, log: Iterable[str] = ()) -> Failure | None:
    """Returns the known fault in ``error``, its causes, or the lines of the log; None: there is none.

    1. a known message, in the order of ``FAULTS``
    2. a status with a known cause, in the same order
    3. any other status of the runtime
    """
    texts = [*map(str, error_chain(error)), "\n".join(log)]
    text = "\n".join(text[-MOST_TEXT:] for text in texts)
    for fault in FAULTS:  # 1
        for pattern, detail in fault.messages.items():
            if (match := re.search(pattern, text, re.IGNORECASE)) is not None:
                groups, line = filter(None, match.groups()), _line(match)
                graph = _graph_options(match.groupdict().get("neff"))
                return _failure(fault, text, detail.format(match[0].strip(), *groups, line=line), graph)
    codes = {code for match in _STATUS.finditer(text) if (code := _number(match)) in STATUS_NAMES}
    for fault in FAULTS:  # 2
        for code in fault.statuses:
            if code in codes:
                return _failure(fault, text, f" (status {code}, {STATUS_NAMES[code]})")
    if not codes:
        return None
    code = min(codes)  # 3
    fact = f"the Neuron runtime returned status {code} ({STATUS_NAMES[code]})"
    return Failure("runtime-failed", fact, "see the replica's log")


MAX_LAST_LINES = 5  # of a compiler, in the failure of a compilation
MAX_LINE_CHARACTERS = 300  # of each of them


def explained(failure: Failure, error: BaseException | None, log_file: str) -> Failure:
    """Returns a failure with the cause that the exception and the log of its process show. ``log_file`` "": no log.

    1. A vague failure with a known fault is that fault.
    2. A failure with a fault's id, to which an engine has added details, has that fault's reaction.
    3. Other failed compilations stop, since they would fail again, and show the compiler's last lines. Errors of the
       operating system, such as a full disk, are retried.
    """
    log = host_facts.last_words(Path(log_file)) if log_file else []
    fault = fault_of(error, [*log, failure.what]) if failure.id in VAGUE else None
    if fault is not None:  # 1
        return fault
    if failure.id in _REACTIONS:  # 2
        return msgspec.structs.replace(failure, reaction=_REACTIONS[failure.id])
    cause = None if error is None else error.__cause__
    if failure.id != "compile-failed" or isinstance(error, OSError) or isinstance(cause, OSError):
        return failure
    output = log if cause is None else str(cause).splitlines()  # 3
    lines = [line.strip()[:MAX_LINE_CHARACTERS] for line in output if line.strip()][-MAX_LAST_LINES:]
    what = f"{failure.what[:MAX_LINE_CHARACTERS]}; its last lines: {'; '.join(lines)}" if lines else failure.what
    return msgspec.structs.replace(failure, what=what, reaction=Reaction.STOP)


def after_serving(failure: Failure) -> Failure:
    """Returns the failure for a replica that has served: retries instead of stopping, since a start once succeeded."""
    again = failure.reaction is Reaction.STOP
    return msgspec.structs.replace(failure, reaction=Reaction.RETRY) if again else failure


def _failure(fault: Fault, text: str, detail: str, graph: str = "") -> Failure:
    devices = _devices(text) if fault.reaction is Reaction.QUARANTINE else ()
    named = f" (device {', '.join(map(str, devices))})" if devices else ""
    hint = fault.hint.replace("{graph}", graph)
    return Failure(fault.id, fault.what + detail + named, hint, fault.reaction, devices)


def _graph_options(neff: str | None) -> str:
    """Returns the options that limit `corewright cache retry` to the graph with this NEFF path, in its cache."""
    place = _GRAPH.search(neff or "")
    return f" {shlex.quote(place['graph'])} --cache {shlex.quote(place['cache'])}" if place else ""


def _line(match: re.Match[str]) -> str:
    """Returns the line of a match."""
    text = match.string
    end = text.find("\n", match.end())
    return text[text.rfind("\n", 0, match.start()) + 1 : len(text) if end < 0 else end].strip()[:300]


_DEVICE = re.compile(
    r"\[(?:ND|MLA) ?(\d{1,3})\]|\bND (\d{1,3}):NC \d|Neuron Device (\d{1,3})\b|\bnd(\d{1,3})[ :]nc\d"
    r"|Could not open the nd(\d{1,3})\b"
)


def _devices(text: str) -> tuple[int, ...]:
    """Returns the devices that the lines of an uncorrectable or fatal error name, else those of all lines."""
    lines = text.splitlines()
    fatal = [line for line in lines if re.search(r"uncorrectable|FATAL|abort state", line, re.IGNORECASE)]
    named, all_named = (
        {_number(match) for line in some for match in _DEVICE.finditer(line)} for some in (fatal, lines)
    )
    return tuple(sorted(named or all_named))


# "nrt_execute status=5", "status_code: 1201", "Inference completed with err: 1006", "Failed to ..., err: 2",
# "NRT_EXEC_HW_ERR_HBM_UE (1201)": only in a line of the runtime, since "status" is a common word.
_STATUS = re.compile(
    r"(?:nrt_?|NMGR|TDRV|NERR|neuron)[^\n]{0,300}?"
    r"(?:\bstatus(?:[ _]code)?|\berr(?:or)?|\bcode)[ =:]{1,3}\(?(\d{1,4})\b"
    r"|completed with err(?:or)?:? ?(\d{1,4})\b|\bNRT_[A-Z_]+ ?\((\d{1,4})\)",
    re.IGNORECASE,
)


def _number(match: re.Match[str]) -> int:
    """Returns the number in the only group that matched."""
    return int(next(filter(None, match.groups())))
