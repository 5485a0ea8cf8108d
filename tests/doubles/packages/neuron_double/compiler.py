"""neuronx-cc, and the persistent cache around it. A NEFF here is a text that tells what it was compiled from."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from neuron_double import faults
from neuron_double.machine import INSTANCES, instance, state

EMPTY_FLAGS = "d41d8cd9"
UNKNOWN = "--no-such-option"  # of argparse, which neuronx-cc parses its command with


class CompilerFailed(RuntimeError):
    """neuronx-cc ended with an error, or was killed."""


def compiler_version() -> str:
    return os.environ.get("NEURON_DOUBLE_CC_VERSION", "2.16.372.0+4a9b2326")


def compile_graph(hlo_text: str, flags: str, cores: int = 1, program: bytes = b"") -> bytes:
    """Compile. Needs no device. Raises CompilerFailed with a planned fault's exit code (-9: the kernel's OOM killer).

    ``cores`` is how many the NEFF runs on (the tensor-parallel degree). Each compile is a line of ``compiles.jsonl``.
    ``program`` becomes part of the NEFF, for a runtime that executes it.
    """
    line = {"hlo": hashlib.sha256(hlo_text.encode()).hexdigest()[:20], "flags": flags, "pid": os.getpid()}
    with (state() / "compiles.jsonl").open("a") as log:
        log.write(json.dumps(line) + "\n")
    fault = faults.due("compile")
    if fault is not None and fault.get("hangs"):
        _hang()
    if fault is not None and fault.get("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault is not None and "says" in fault:
        sys.stderr.write(f"{fault['says']}\n")
        sys.stderr.flush()
        raise CompilerFailed("the compiler has failed")
    if fault is not None:
        code = fault.get("exit", 1)
        command = ["neuronx-cc", "compile", *flags.split()]
        sys.stderr.write(f"ERROR ||NEURON_CC_WRAPPER||: Failed compilation with {command}\n")
        sys.stderr.write(f"INFO:Neuron:Compile command returned: {code}\n")
        sys.stderr.flush()
        raise CompilerFailed(f"neuronx-cc failed with {code}")
    if UNKNOWN in flags.split():
        sys.stderr.write(f"neuronx-cc: error: unrecognized arguments: {UNKNOWN}\n")
        sys.stderr.flush()
        raise CompilerFailed("neuronx-cc failed with 2")
    override = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    machine = INSTANCES[override] if override in INSTANCES else instance()
    neff = {
        "neff_version": int(os.environ.get("NEURON_DOUBLE_NEFF_VERSION", "2")),
        "compiler": compiler_version(),
        "flags": flags,
        "target": override if override in ("trn1", "trn2") else machine.target,
        "lnc": machine.lnc,
        "cores": cores,
        "hlo": line["hlo"],
        "program": base64.b64encode(program).decode(),
    }
    return json.dumps(neff, sort_keys=True).encode()


def _hang() -> None:
    """neuronx-cc is a process with processes below it, one here in a session of its own. They are told in
    $NEURON_DOUBLE_STATE/compilers, a pid a line, and never end by themselves."""
    below = "import os, subprocess, sys; told = open(sys.argv[1], 'a')\n"
    below += "print(os.getpid(), file=told, flush=True)\n"
    below += "again = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
    below += "print(again.pid, file=told, flush=True); again.wait()"
    subprocess.run([sys.executable, "-c", below, str(state() / "compilers")], check=True)


def compiles() -> list[dict[str, object]]:
    """What was compiled since the state folder was made, in order."""
    try:
        return [json.loads(line) for line in (state() / "compiles.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def cached_compile(hlo_text: str, flags: str, cores: int = 1, program: bytes = b"") -> bytes:
    """Through the persistent cache: NEURON_COMPILE_CACHE_URL, or --cache_dir in NEURON_CC_FLAGS, or AWS's default.

    An entry that failed once fails again, until it is deleted or --retry_failed_compilation is given. One that is
    locked is waited for. The wrapper's own flags do not reach the compiler.
    """
    wrapper, plain = [], []
    for flag in flags.split():
        own = flag.split("=")[0] in ("--cache_dir", "--no_cache", "--log_level", "--retry_failed_compilation")
        (wrapper if own else plain).append(flag)
    if "--no_cache" in wrapper:
        return compile_graph(hlo_text, " ".join(plain), cores, program)
    named = next((flag.partition("=")[2] for flag in wrapper if flag.startswith("--cache_dir=")), None)
    root = Path(named or os.environ.get("NEURON_COMPILE_CACHE_URL") or "/var/tmp/neuron-compile-cache")
    key = hashlib.sha256(hlo_text.encode()).hexdigest()[:20]
    half = hashlib.md5(" ".join(plain).encode(), usedforsecurity=False).hexdigest()[:8]
    entry = root / f"neuronxcc-{compiler_version()}" / f"MODULE_{key}+{half}"
    if (entry / "model.done").exists() and (entry / "model.neff").exists():
        return (entry / "model.neff").read_bytes()
    entry.mkdir(parents=True, exist_ok=True)
    with _locked(entry / "model.hlo_module.pb.lock"):
        if (entry / "model.done").exists() and (entry / "model.neff").exists():  # by whom it has waited for
            return (entry / "model.neff").read_bytes()
        if (entry / "model.log").exists() and "--retry_failed_compilation" not in wrapper:
            message = f"Got a cached failed neff at {entry}/model.neff. Will skip compilation, please set "
            message += f"--retry_failed_compilation for recompilation.\n{(entry / 'model.log').read_text()}"
            sys.stderr.write(f"ERROR ||NEURON_CC_WRAPPER||: {message}\n")
            raise CompilerFailed(message)
        (entry / "model.hlo_module.pb").write_text(hlo_text)
        (entry / "compile_flags.json").write_text(json.dumps(plain))
        try:
            neff = compile_graph(hlo_text, " ".join(plain), cores, program)
        except CompilerFailed as error:
            (entry / "model.log").write_text(str(error))
            raise
        (entry / "model.neff").write_bytes(neff)
        (entry / "model.done").touch()
        (entry / "model.log").unlink(missing_ok=True)
    return neff


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """A file that is there while somebody compiles. Whoever is killed leaves it, and the others wait: without end in
    the real one, here $NEURON_DOUBLE_LOCK_WAIT_S seconds."""
    began = time.monotonic()
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            waited = time.monotonic() - began
            if waited > float(os.environ.get("NEURON_DOUBLE_LOCK_WAIT_S", "60")):
                raise TimeoutError(f"endless waiting on lock {lock}") from None
            sys.stderr.write(
                f"[INFO]: Another process must be compiling {lock}, been waiting for: {waited / 60} minutes\n"
            )
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
