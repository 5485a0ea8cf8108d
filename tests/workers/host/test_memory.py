"""A failed allocation is recognized in any error, and described with numbers and a remedy."""

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

# Loads the model at argv[1] with argv[3] bytes of memory to spare, after its imports and a first load.
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
    engine.prefill([0], [[1]])
except EngineLoadError as error:
    print(json.dumps([error.id, error.what, error.hint]))
else:
    print(json.dumps(["loaded", "", ""]))
"""
MIB = 2**20


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
def test_a_failed_allocation_is_recognized(error: Exception) -> None:
    """Also as the cause or the context of another error."""
    outer = EngineLoadError("weights-mismatch", "it cannot be loaded")
    outer.__cause__ = error
    during = ValueError("the cleanup failed")
    during.__context__ = error
    assert [is_out_of_memory(raised) for raised in (error, outer, during)] == [True, True, True]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_failed_allocations(error: Exception) -> None:
    """They keep their id."""
    assert not is_out_of_memory(error)


def test_the_error_has_the_numbers() -> None:
    """The requested size, the machine's memory, and the memory of the process."""
    error = out_of_memory(RuntimeError(TORCH), "a step")
    size = r"[\d.]+ [KMGT]iB"
    assert error.id == "out-of-memory"
    assert "32.00 GiB were requested" in error.what
    assert re.search(rf"{size} of the machine's {size} are available, this process uses {size}", error.what)
    assert all(word in error.hint for word in ("max_batch", "max_len", "dtype", "replicas"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slots", "spare", "id"),
    [(1, 256 * MIB, "loaded"), (1024, 256 * MIB, "out-of-memory"), (1, -256 * MIB, "out-of-memory")],
    ids=["enough", "no room for the KV cache", "no room for anything"],
)
def test_under_a_real_limit_a_start_fails_with_the_cause(
    checkpoint: Callable[[str], Path], slots: int, spare: int, id: str
) -> None:
    """RLIMIT_AS in a process of its own: 1024 slots of 512 tokens need 512 MiB of KV cache, which the first token
    allocates."""
    outcome, what, _ = run_limited(checkpoint("llama"), slots, spare)
    assert outcome == id
    if id == "out-of-memory":
        assert f"{slots} slots of 512 tokens in fp32" in what
        assert "of address space (rlimit)" in what


def run_limited(path: Path, slots: int, spare: int) -> list[str]:
    command = [sys.executable, "-c", LIMITED, str(path), str(slots), str(spare), "RLIMIT_AS"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    outcome: list[str] = json.loads(result.stdout.splitlines()[-1])
    return outcome


def test_the_limit_does_not_apply_to_this_process() -> None:
    """Limited loads run in a process of their own."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
