"""Compiled artifacts of the cpu engine: the code that torch's inductor generates for each bucket.

The code is C++, compiled for the host's CPU, and torch finds it by digests of the graph, of torch's settings and of the
compiler's command line. All of them follow from the manifest, so one entry of
``workers.compiled.host_sets`` holds all graphs of a model: torch finds each of them there or, with another
manifest, none.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

from workers.engines.checkpoint_files import read_config
from workers.engines.manifest_parts import version_of
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

CODE = "inductor"  # torch's code folder in an entry
COMPILER = "CXX", "g++"  # the variable that torch reads, and its default (``torch._inductor.config.cpp.cxx``)
PACKAGES = ("torch", "transformers")
# The CPU features that g++ -march=native (inductor's flag) may use. Other words of /proc/cpuinfo depend on the kernel.
_SETS = re.compile(r"(sse|ssse|avx|amx|fma|bmi|f16c|vaes|vpclmul|gfni|adx|sha|movbe|popcnt|aes|pclmul|sve|asimd|bf16)")
VERSION_S = 10.0  # for a compiler to print its version


def manifest(
    source: Path,
    *,
    dtype: str,
    slots: int,
    max_len: int,
    prefill_buckets: Sequence[int],
    decode_buckets: Sequence[int],
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Returns everything that the code of the model in ``source`` depends on, as JSON: not the weights, but the
    checkpoint's own Python code, if it is run. Does not import torch. Raises EngineLoadError."""
    try:
        config = foreign_files.read_bytes(source / "config.json")
        own = {"code": _digest_of_code(source)} if trust_remote_code and read_config(source).get("auto_map") else {}
    except OSError as error:
        raise EngineLoadError("config-unreadable", f"{error.filename}: {error}") from error
    return {
        "engine": "cpu",
        "versions": {name: version_of(name) for name in PACKAGES},
        "compiler": compiler_version(),
        # inductor's command line, part of its digests, has the folders of this Python
        "python": f"{platform.python_implementation()} {platform.python_version()} in {sys.prefix}",
        "target": cpu_target(),
        "model": blake2s(config).hexdigest(),
        **own,
        "dtype": dtype,
        "shapes": {
            "slots": slots,
            "max_len": max_len,
            "prefill": list(prefill_buckets),
            "decode": list(decode_buckets),
        },
    }


def _digest_of_code(source: Path) -> str:
    """Returns a digest of all Python files of the checkpoint: ``auto_map`` names some, which may import others."""
    digest = blake2s()
    for file in sorted(source.rglob("*.py")):
        data = foreign_files.read_bytes(file)
        digest.update(f"{file.relative_to(source).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def compiler_version() -> str:
    """Returns the first line of the C++ compiler's version; empty where there is none."""
    path = compiler()
    return "" if path is None else _told_version(path, Path(path).stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _told_version(path: str, changed_ns: int) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=VERSION_S, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def compiler() -> str | None:
    """Returns the path of the C++ compiler that inductor would run; None where there is none."""
    variable, usual = COMPILER
    return shutil.which(os.environ.get(variable) or usual)


def check_compiler() -> None:
    """Raises EngineLoadError without a working C++ compiler. Cached code needs it too: torch runs it first."""
    if compiler_version():
        return
    variable, usual = COMPILER
    named = os.environ.get(variable)
    message = "the cpu engine needs a C++ compiler to compile, and there is no "
    message += f"working {named} ({variable})" if named else f"{usual} in PATH"
    hint = f"apt-get install {usual} on this host, or set {variable} to another one; or remove `compile`"
    raise EngineLoadError("compiler-missing", message, hint)


def cpu_target() -> str:
    """Returns the machine's architecture and a digest of its instruction sets: code runs on another machine only where
    both are the same."""
    features: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                features = {word for word in value.split() if _SETS.match(word)}
                break
    except OSError:
        pass
    widest = next((name for name in ("amx_tile", "avx512f", "avx2", "sve", "asimd") if name in features), "plain")
    digest = blake2s(" ".join(sorted(features)).encode(), digest_size=4).hexdigest()
    return f"{platform.machine()} {widest} {digest}"


def is_whole(folder: Path) -> bool:
    """Returns whether there is any code; the entry's record verifies its content."""
    return next((folder / CODE).rglob("*.so"), None) is not None
