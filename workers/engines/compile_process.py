"""Compiles in a process of its own, which does not hold cores when the caller claims them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from workers.host.process_tree import end_with
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache.compile_session import CompileSession
from workers.neff_cache.compiled_artifacts import LockedEntry, compiling

S = TypeVar("S", bound=msgspec.Struct)
LOG = "compile.log"  # in an entry
TAIL = 40  # lines of the compiler's output in an error


class CompileJob(msgspec.Struct):
    """What the process reads from standard input."""

    settings: dict[str, Any]
    folder: str
    parent: int  # the caller's pid


def run_compile(module: str, settings: msgspec.Struct, label: str, entry: LockedEntry, session: CompileSession) -> None:
    """Run ``python -m MODULE compile`` for ``entry``; ``label``: what is compiled, with which package.

    Raises EngineLoadError with the last lines of its output, all of which is in the entry's compile.log.
    """
    log = entry.path / LOG
    job = CompileJob(msgspec.to_builtins(settings), str(entry.path), os.getpid())
    with session.compiling(), compiling(label, f"the compilers write to {log}"):
        with log.open("wb") as output:
            process = subprocess.run(
                [sys.executable, "-m", module, "compile"],
                input=msgspec.json.encode(job),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if process.returncode != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-TAIL:])
            kept_log = entry.path.with_suffix(".log")  # a retry removes the entry
            shutil.copyfile(log, kept_log)
            what = f"compiling {label} ended with exit code {process.returncode}"
            raise EngineLoadError("compile-failed", what, f"its output is in {kept_log}") from RuntimeError(tail)


def compile_main(arguments: list[str], module: str, kind: type[S], compile_here: Callable[[S, Path], None]) -> int:
    """Runs that process, with a job on standard input; ``kind``: of its settings. Returns its exit code."""
    if arguments != ["compile"]:
        sys.stderr.write(f"usage: python -m {module} compile < JSON\n")
        return 2
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=CompileJob)
    # It holds the lock of the entry: without this, the next process would find two compilers in one folder.
    end_with(job.parent)
    compile_here(msgspec.convert(job.settings, kind), Path(job.folder))
    return 0
