"""Want of memory is a fault of its own, whoever says it and however: with numbers and a remedy."""

from __future__ import annotations

import errno
import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.messages.engine_protocol import EngineLoadError
from workers.serving.replica import failure_of

TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "34359738368 bytes. Error code 12 (Cannot allocate memory)"
)
REFUSALS: list[Exception] = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError(TORCH),
    RuntimeError("unable to mmap 419431885 bytes from file </m/pytorch_model.bin>: Cannot allocate memory (12)"),
    RuntimeError("std::bad_alloc"),
]
OTHERS: list[Exception] = [
    OSError(errno.ENOENT, "No such file or directory"),
    RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
    ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
    EngineLoadError("weights-broken", "model.safetensors cannot be read"),
]

# Loads the model at argv[1] with as little memory to spare as argv[3] says. Its imports and first load are done before.
LIMITED = """
import json, resource, sys
import psutil, torch
from pathlib import Path
from workers.messages.engine_protocol import EngineLoadError
from workers.engines.cpu.engine import CpuEngine

path, slots, spare, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
CpuEngine(Path(path), slots=1, max_len=64, threads=1).load()
resource.setrlimit(getattr(resource, limit), (psutil.Process().memory_info().vms + spare, resource.RLIM_INFINITY))
engine = CpuEngine(Path(path), slots=slots, max_len=512, threads=1)
try:
    engine.load()
except EngineLoadError as error:
    print(json.dumps([error.id, error.what, error.hint]))
else:
    print(json.dumps(["loaded", "", ""]))
"""
MIB = 2**20


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_refusal_is_known_whatever_says_it(error: Exception) -> None:
    """Also as the cause of another error, and as what was being handled when another came."""
    outer = EngineLoadError("weights-mismatch", "it cannot be loaded")
    outer.__cause__ = error
    during = ValueError("the cleanup failed")
    during.__context__ = error
    assert [is_out_of_memory(raised) for raised in (error, outer, during)] == [True, True, True]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_none(error: Exception) -> None:
    """They keep the id that they had."""
    assert not is_out_of_memory(error)


def test_the_text_has_the_numbers() -> None:
    """What was asked for, what the machine has, what the process holds."""
    told = out_of_memory(RuntimeError(TORCH), "a step")
    size = r"[\d.]+ [KMGT]iB"
    assert told.id == "out-of-memory"
    assert "32.00 GiB were requested" in told.what
    assert re.search(rf"{size} of the machine's {size} are available, this process uses {size}", told.what)
    assert all(word in told.hint for word in ("max_batch", "max_len", "dtype", "replicas"))


def test_a_step_that_fails_for_want_of_memory_says_so() -> None:
    """A replica's failure is out-of-memory then, and else what it was."""
    failures = [
        failure_of("engine-failed", error, "a step of the engine", "a.log") for error in (MemoryError(), KeyError(1))
    ]
    assert [failure.id for failure in failures] == ["out-of-memory", "engine-failed"]
    assert "a step of the engine" in failures[0].what


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "spare", "id"),
    [(1, 256 * MIB, "loaded"), (1024, 256 * MIB, "out-of-memory"), (1, -256 * MIB, "out-of-memory")],
    ids=["enough", "no room for the KV cache", "no room for anything"],
)
def test_under_a_real_limit_a_load_ends_with_the_cause(
    checkpoint: Callable[[str], Path], slots: int, spare: int, id: str
) -> None:
    """RLIMIT_AS in a process of its own: 1024 slots of 512 tokens need 512 MiB of KV cache."""
    found = run_limited(checkpoint("llama"), slots, spare)
    assert found[0] == id
    if id == "out-of-memory":
        assert f"{slots} slots of 512 tokens in fp32" in found[1]
        assert "of address space (rlimit)" in found[1]


def run_limited(path: Path, slots: int, spare: int) -> list[str]:
    command = [sys.executable, "-c", LIMITED, str(path), str(slots), str(spare), "RLIMIT_AS"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_no_limit_is_left_in_this_process() -> None:
    """The limited loads run elsewhere."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
