"""``workers`` with the oldest Python and transformers of Neuron images, in a virtual environment."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.workers.engines.test_families_transformers_4_57 import DEADLINE_S, run

PYTHON = "python3.10"
PACKAGES = (
    "transformers==4.47.0",
    "aiohttp",
    "msgspec",
    "psutil",
    "pydantic",
    "PyYAML",
    "jinja2",
    "numpy",
    "cronsim",
    "uvloop",
)
IMPORT_ALL = """
import importlib, pkgutil, sys, workers
names = [module.name for module in pkgutil.walk_packages(workers.__path__, "workers.")]
for name in names:
    if name != "workers.serving.replica":  # needs Ray
        importlib.import_module(name)
assert not {"torch", "ray"} & set(sys.modules)
print(len(names))
"""


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 10)
def test_workers_import_on_python_3_10_and_transformers_4_47(tmp_path: Path) -> None:
    """Without torch and Ray: engines import their libraries when they are opened."""
    interpreter = next(filter(works, candidates()), None)
    if interpreter is None:
        pytest.skip(f"this machine has no {PYTHON}")
    began = time.monotonic()
    environment = tmp_path / "venv"
    run(began, interpreter, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(began, python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *PACKAGES)

    count = run(began, python, "-c", IMPORT_ALL)

    assert int(count) > 40


def candidates() -> list[str]:
    """Returns Pythons of that minor version on the PATH and of pyenv, where the one on the PATH may be inactive."""
    return [PYTHON, *map(str, sorted(Path.home().glob(f".pyenv/versions/3.10*/bin/{PYTHON}")))]


def works(python: str) -> bool:
    path = shutil.which(python)
    return path is not None and subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode == 0
