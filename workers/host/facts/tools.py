"""Runs other programs of a host within deadlines, and reads the versions of its Neuron software."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

NEURON_TOOLS = "/opt/aws/neuron/bin"  # where aws-neuronx-tools installs; not on every service's PATH
MOST_OUTPUT = 16 * 1024 * 1024
ENDS_WITH_PARENT = """import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(sys.argv[1]):  # else it has ended before
    os.execv(sys.argv[2], sys.argv[2:])
"""
LAST_WORDS_S = 0.2  # wait for standard error after standard output was closed; a child may keep it open


@dataclass(frozen=True)
class Output:
    """The output of a tool until it exited, or until enough was read."""

    stdout: bytes
    problem: str | None  # why the output is incomplete; None: success


@dataclass(frozen=True)
class ProgramResult:
    """The output of a program that has exited, or that was killed: then it has no ``code``."""

    stdout: bytes
    stderr: bytes  # its end
    code: int | None


def find_tool(name: str, folder: str = NEURON_TOOLS) -> str | None:
    """Returns the path of a tool, in AWS's folder, else on PATH; None: not installed."""
    return shutil.which(name, path=folder) or shutil.which(name)


def _never(stdout: bytes) -> bool:
    return False


def run_tool(argv: Sequence[str], deadline_s: float, enough: Callable[[bytes], bool] = _never) -> Output:
    """Runs a tool as `run` does. Never raises."""
    name, by_hand = Path(argv[0]).name, f"; run `{' '.join(argv)}` by hand"
    try:
        ended = run(argv, deadline_s, enough)
    except (OSError, ValueError) as error:
        return Output(b"", f"{name}: cannot be started: {error}{by_hand}")
    if ended.code == 0 or (ended.code is None and enough(ended.stdout)):
        return Output(ended.stdout, None)
    message = last_line(ended.stderr) or last_line(ended.stdout[-1000:])
    message = f": {message}" if message else ""
    fact = f"no complete output within {deadline_s:g} s" if ended.code is None else f"exited with code {ended.code}"
    return Output(ended.stdout, f"{name}: {fact}{message}{by_hand}")


def run(
    argv: Sequence[str], deadline_s: float, enough: Callable[[bytes], bool] = _never, folder: str | None = None
) -> ProgramResult:
    """Runs a program in ``folder`` until it exits, or until ``enough`` returns True for its standard output. Raises
    OSError and ValueError if it cannot be started.

    Kills it with its children at the deadline. A process that hangs in the kernel survives that; it is left behind,
    since waiting for it would block the caller, too. A program with ``enough`` does not exit by itself, so the kernel
    kills it when the calling thread ends; not by a ``preexec_fn``, which is unsafe in a process with threads.
    """
    launcher = [] if enough is _never else [sys.executable, "-I", "-c", ENDS_WITH_PARENT, str(os.getpid())]
    process = subprocess.Popen(
        [*launcher, *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        start_new_session=True,
    )
    until = time.monotonic() + deadline_s
    try:
        stdout, stderr, closed = _read(process, until, enough)
        return ProgramResult(stdout, stderr, _wait(process, until) if closed else None)
    finally:
        _end_group(process)


def _read(process: subprocess.Popen[bytes], until: float, enough: Callable[[bytes], bool]) -> tuple[bytes, bytes, bool]:
    """Returns standard output, the end of standard error, and whether standard output was closed."""
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr, closed = b"", b"", False
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while selector.get_map() and (remaining := until - time.monotonic()) > 0 and len(stdout) < MOST_OUTPUT:
            for key, _ in selector.select(remaining):
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                    if key.fileobj is process.stdout:
                        closed = True
                        until = min(until, time.monotonic() + LAST_WORDS_S)
                elif key.fileobj is process.stdout:
                    stdout += data
                    if enough(stdout):
                        return stdout, stderr, False
                else:
                    stderr = (stderr + data)[-2000:]
    return stdout, stderr, closed


def _wait(process: subprocess.Popen[bytes], until: float) -> int | None:
    try:
        return process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads its own session, with its children, and closes its pipes."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def last_line(text: bytes) -> str:
    """Returns the last line of an output, at most 200 characters."""
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


# Package names from the Neuron Setup Guide; the same for apt and dnf.
PACKAGES: Mapping[str, str] = {
    "driver": "aws-neuronx-dkms",
    "runtime": "aws-neuronx-runtime-lib",
    "collectives": "aws-neuronx-collectives",
    "tools": "aws-neuronx-tools",
}


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Installed versions; None: not installed as a system package."""

    driver: str | None = None  # of the loaded kernel module
    runtime: str | None = None
    collectives: str | None = None
    tools: str | None = None


def parse_packages(listing: str | bytes) -> Versions:
    """Parses lines "name version" from dpkg-query or rpm; skips other lines, which report missing packages."""
    text = listing.decode(errors="replace") if isinstance(listing, bytes) else listing
    versions = dict(re.findall(r"^([a-z][a-z0-9-]*) ([0-9][0-9A-Za-z.+~:-]*)$", text, re.MULTILINE))
    return Versions(**{field: versions.get(package) for field, package in PACKAGES.items()})


def read_versions(sys: Path, deadline_s: float) -> Versions:
    """Returns the loaded driver's version (/sys/module/neuron/version), and the others from the package manager."""
    packages = parse_packages(_listing(deadline_s))
    try:
        loaded = (sys / "module/neuron/version").read_text(errors="replace").strip() or None
    except OSError:
        loaded = None
    return msgspec.structs.replace(packages, driver=loaded) if loaded else packages


def _listing(deadline_s: float) -> bytes:
    names = list(PACKAGES.values())
    for tool, arguments in (
        ("dpkg-query", ["-W", "-f", "${Package} ${Version}\\n"]),
        ("rpm", ["-q", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\\n"]),
    ):
        path = find_tool(tool)
        if path is not None:
            # Both exit with an error if a package is missing, but list the others.
            return run_tool([path, *arguments, *names], deadline_s).stdout
    return b""
