"""Programs of clients, run with the packages that `make clients` has installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
INSTALLED = FOLDER.parents[1] / ".venv-clients"
PROGRAM_S = 120.0
OFFLINE = {  # some would ask for prices, or report their use
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "127.0.0.1",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # where nothing listens
    "CLAUDE_CODE_MAX_RETRIES": "0",  # so that a failure is seen at once
}


def node_modules() -> Path:
    return _installed(Path(os.environ.get("COREWRIGHT_CLIENTS_NODE_MODULES") or INSTALLED / "node_modules"))


def run(
    command: Sequence[str], home: Path, environment: Mapping[str, str] | None = None, timeout_s: float = PROGRAM_S
) -> str:
    """Returns what a program prints, offline, in its home. Raises AssertionError with the end of its errors."""
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), **OFFLINE, **(environment or {})}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=clean,
        cwd=home,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def run_program(client: str, url: str, home: Path) -> dict[str, Any]:
    """Returns the JSON that a program of `programs` prints last. ``client``: its name, and arguments after the URL."""
    name, *arguments = client.split()
    command = _of_javascript(name, home) if "_js" in name else _of_python(name)
    read: dict[str, Any] = json.loads(run([*command, url, *arguments], home).splitlines()[-1])
    return read


def installed_python() -> Path:
    return _installed(Path(os.environ.get("COREWRIGHT_CLIENTS_PYTHON") or INSTALLED / "bin" / "python"))


def _of_python(name: str) -> list[str]:
    return [str(installed_python()), str(FOLDER / "programs" / f"{name}.py")]


def _of_javascript(name: str, home: Path) -> list[str]:
    """Node looks for packages beside the program and above it."""
    link, program = home / "node_modules", home / f"{name}.mjs"
    if not link.exists():
        link.symlink_to(node_modules(), target_is_directory=True)
    shutil.copyfile(FOLDER / "programs" / program.name, program)
    return ["node", str(program)]


def _installed(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} does not exist: make clients installs it")
    return path
