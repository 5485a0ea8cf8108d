"""What the cpu engine compiles: the code that torch's inductor makes of each bucket, kept between starts.

The code is C++, compiled for the very CPU and found again by torch through digests of the graph, of torch's settings
and of the compiler's command line. All of them follow from the manifest, so that one entry of
``workers.neff_cache.compiled_artifacts`` holds all graphs of a model, and torch finds each of them there or, with
another manifest, nothing at all.
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
from importlib import metadata
from pathlib import Path
from typing import Any

from workers.engines.checkpoint_files import read_config
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError

CODE = "inductor"  # in an entry: the folder that torch keeps its code in
COMPILER = "CXX", "g++"  # torch reads that variable, and takes g++ without it (``torch._inductor.config.cpp.cxx``)
PACKAGES = ("torch", "transformers")
# What g++ -march=native, as inductor says, may use of a CPU. The other words of /proc/cpuinfo change with the kernel.
_SETS = re.compile(r"(sse|ssse|avx|amx|fma|bmi|f16c|vaes|vpclmul|gfni|adx|sha|movbe|popcnt|aes|pclmul|sve|asimd|bf16)")
VERSION_S = 10.0  # for a compiler to tell its version


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
    """All that the code of the model in ``source`` depends on, as JSON. Weights are none of it; the checkpoint's own
    Python is, where it is run. Imports no torch. Raises EngineLoadError."""
    try:
        config = foreign_files.read_bytes(source / "config.json")
        own = {"code": _digest_of_code(source)} if trust_remote_code and read_config(source).get("auto_map") else {}
    except OSError as error:
        raise EngineLoadError("config-unreadable", f"{error.filename}: {error}") from error
    return {
        "engine": "cpu",
        "versions": {name: _version(name) for name in PACKAGES},
        "compiler": compiler_version(),
        # inductor's command line names the folders of this Python, and is a part of what code is found by
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
    """Of every Python file of the checkpoint, with its name: ``auto_map`` names some, and these import others."""
    found = blake2s()
    for file in sorted(source.rglob("*.py")):
        data = foreign_files.read_bytes(file)
        found.update(f"{file.relative_to(source).as_posix()}\0{len(data)}\0".encode() + data)
    return found.hexdigest()


def compiler_version() -> str:
    """The first line that the C++ compiler tells of itself; empty where there is none."""
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
    """The path of the C++ compiler that inductor would run; None: there is none."""
    variable, usual = COMPILER
    return shutil.which(os.environ.get(variable) or usual)


def check_compiler() -> None:
    """Raises EngineLoadError where no C++ compiler answers. Code that is compiled already needs it as well: torch asks
    it before it looks."""
    if compiler_version():
        return
    variable, usual = COMPILER
    named = os.environ.get(variable)
    what = "the cpu engine compiles with a C++ compiler, and there is no "
    what += f"{named} ({variable}) that tells its version" if named else f"{usual} in PATH"
    hint = f"apt-get install {usual} on this host, or name another by {variable}; or leave `compile` out"
    raise EngineLoadError("compiler-missing", what, hint)


def cpu_target() -> str:
    """The machine's architecture and a digest of the instructions that code may use: code of one runs on the other
    only where both are the same."""
    found: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("flags", "features"):
                found = {word for word in value.split() if _SETS.match(word)}
                break
    except OSError:
        pass
    widest = next((name for name in ("amx_tile", "avx512f", "avx2", "sve", "asimd") if name in found), "plain")
    digest = blake2s(" ".join(sorted(found)).encode(), digest_size=4).hexdigest()
    return f"{platform.machine()} {widest} {digest}"


def is_whole(folder: Path) -> bool:
    """Whether there is code at all; the entry's record tells whether it is as it was."""
    return next((folder / CODE).rglob("*.so"), None) is not None


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
