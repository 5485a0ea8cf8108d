"""The CPU engine on transformers 4.57, which the Neuron packages of today pin, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DEADLINE_S = 900.0  # for the installation and the tests together
PACKAGES = (
    "psutil",
    "transformers==4.57.6",
    "torch==2.13.0",  # a looser pin may take several GB of CUDA packages
    "tokenizers",
    "msgspec",
    "safetensors",
    "numpy",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
)
EXACTNESS = "16_ragged or window or chunks or half or conversations or full_to_its_end"
TESTS = ("tests/workers/engines/test_cpu_engine.py", "tests/workers/engines/test_cpu_prefix_reuse.py")


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 10)
def test_every_family_equals_generate_on_transformers_4_57(tmp_path: Path) -> None:
    """The exactness tests, as they are, pass in an environment that has the older release."""
    began = time.monotonic()
    environment = tmp_path / "venv"
    run(began, sys.executable, "-m", "venv", str(environment))
    python = str(environment / "bin" / "python")
    run(began, python, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *PACKAGES)
    version = run(began, python, "-c", "import transformers; print(transformers.__version__)")
    assert version.strip() == "4.57.6"

    report = run(began, python, "-m", "pytest", *TESTS, "-k", EXACTNESS)

    assert " passed" in report


def run(began: float, *command: str) -> str:
    """Run to the end within what is left of the time; gives the output."""
    left = DEADLINE_S - (time.monotonic() - began)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=left,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout
