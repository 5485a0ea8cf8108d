"""Runs a child process that takes one request and replies with JSON lines: the parent's and the child's side.

The child reads the request from standard input. Standard output is reserved for replies; output of libraries goes to
standard error, which is its log. Checks, predictions, compilations and `corewright generate` run so, and the compilers
of engines take the same request.

Three kinds of children differ, and have modules of their own. A Neuron tool, or an interpreter that is probed, takes no
request and may be any program: `facts/tools.py` runs it to its end. A tokenizer's processes are forks of forks that
answer many calls, each with a limit of CPU time (`workers/text/tokenizer_pool.py`). A server may leave processes
behind, so a keeper counts them until the last one has ended (`workers/servers/keeper.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from workers.host import fork_server, host_facts, private_file
from workers.host.fork_client import ATTACHED
from workers.host.process_tree import end_marked, end_with
from workers.messages import json_form

log = logging.getLogger(__name__)

# Environment variables that are removed for every replica. The first would limit the cores of some engines, and the
# second is the older name of NEURON_LOGICAL_NC_CONFIG, which a replica has where it matters. The others are for models
# over several processes or hosts: neuronx-distributed and NxD Inference read them as a group that was started
# (`parallel_state`, `utils.distributed`, `application_base`), and NXD_CPU_MODE keeps them off the devices (`utils`);
# transformers-neuronx reads its own for its NeuronConfig (`config`, `decoder`).
NEVER_SET = (
    "NEURON_RT_NUM_CORES",
    "NEURON_RT_VIRTUAL_CORE_SIZE",
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("NEURON_RT_ROOT_COMM_ID", "NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_PROCESSES_NUM_DEVICES"),
    *("NEURONCORE_NUM_DEVICES", "NXD_CPU_MODE"),
    "NEURON_RANK_ID",
    "NEURON_LOCAL_TP",
    "NEURON_PP_STAGES",
    "CPU_COMM_ID",
    "NEURON_VOCAB_PAD_DIVISOR",
)
POLL_S = 0.5  # between two looks at a child that may have to be stopped
END_S = 10.0  # for the processes of a child to be gone


def start(
    arguments: Sequence[str], *, python: str | None, env: Mapping[str, str], log_file: str, warm: str | None = None
) -> subprocess.Popen[bytes]:
    """Starts ``python -m ARGUMENTS`` with pipes for the request and the replies; ``python`` None: this interpreter.
    ``warm``: the command of a warm process (`WarmProcesses.command`), of which it is a fork then.

    It runs in its own session: Ctrl-C on the terminal reaches only the parent, which ends it. Raises OSError.
    """
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # no log yet
        host_facts.cut_log(Path(log_file))
    log = private_file.open_to_append(Path(log_file))
    command = [python or sys.executable, "-m", *arguments]
    script = importlib.util.find_spec(arguments[0])
    if warm is not None and script is not None and script.origin is not None:
        command = [*shlex.split(warm), ATTACHED, script.origin, *arguments[1:]]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(env),
            cwd="/",  # the current folder may have another package `workers`
            start_new_session=True,
        )
    finally:
        os.close(log)


class ChildRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a child process is to do."""

    parent: int = 0  # pid of the process with which it ends; 0: none. `encoded` sets it.


R = TypeVar("R", bound=ChildRequest)


def encoded(request: ChildRequest) -> bytes:
    """Returns the standard input of a child of this process."""
    return json_form.encoded(msgspec.structs.replace(request, parent=os.getpid()))


@contextlib.contextmanager
def running(
    arguments: Sequence[str],
    request: ChildRequest,
    *,
    python: str | None,
    env: Mapping[str, str],
    log_file: str,
    warm: str | None = None,
    stop: threading.Event | None = None,
    limit_s: float | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a child as `start` and sends its request. The child is killed soon after ``stop`` is set, and after
    ``limit_s``, also if it has not read its request yet. When the context ends, it is killed with all processes that it
    has started. Raises OSError."""
    process = start(arguments, python=python, env=env, log_file=log_file, warm=warm)
    started = host_facts.process_start(process.pid)
    assert process.stdin is not None
    assert process.stdout is not None
    if stop is not None or limit_s is not None:
        threading.Thread(target=_end_when, args=(process, stop or threading.Event(), limit_s), daemon=True).start()
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # broken if it has ended
            stdin.write(encoded(request))
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if started is not None:
            end_marked(process.pid, started, END_S)


def _end_when(process: subprocess.Popen[bytes], stop: threading.Event, limit_s: float | None) -> None:
    waited_s = 0.0
    while process.poll() is None:
        if stop.wait(POLL_S):
            process.kill()
            return
        waited_s += POLL_S
        if limit_s is not None and waited_s > limit_s:
            log.warning("process %d has not answered within %.0f s", process.pid, limit_s)
            process.kill()
            return


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without the variables that no replica gets, plus ``env``."""
    return {name: value for name, value in os.environ.items() if name not in NEVER_SET} | dict(env)


def set_variables(planned: Mapping[str, str]) -> None:
    """Sets the planned variables of this process, and PATH to begin with the commands of its interpreter: Neuron's
    packages call `neuronx-cc` and `libneuronpjrt-path` by their names, and must not find those of another environment
    (optimum-neuron#698, aws-neuron-samples#69)."""
    for name in NEVER_SET:
        os.environ.pop(name, None)
    os.environ.update(planned)
    os.environ["PATH"] = path_from([sysconfig.get_path("scripts")])


def path_from(folders: Iterable[str]) -> str:
    """Returns this process's PATH with ``folders`` first."""
    others = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([*folders, *others]))


def read_request(kind: type[R]) -> R:
    """Reads the request of this process, which then ends with its parent. A fork of a warm process ends with its client
    instead."""
    request = json_form.decoded(sys.stdin.buffer.read(), kind)
    if request.parent and not fork_server.imported:
        end_with(request.parent)
    return request


def answering() -> Callable[[msgspec.Struct], None]:
    """Sets up the child's output, log and CPU mask, after it has read the request; returns the function that sends a
    reply."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    host_facts.mark_log(2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    host_facts.pin_to(os.environ.get("COREWRIGHT_CPUS"))

    def tell(reply: msgspec.Struct) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    return tell
