"""What the wheel holds: the three packages and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_the_three_packages_and_no_tests_or_models(tmp_path: Path) -> None:
    """A node installs code and type markers; tests, examples and weights stay in the repository."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("corewright-*.whl")
    names = zipfile.ZipFile(wheel).namelist()

    assert {name.split("/")[0].split("-")[0] for name in names} == {
        "placements",
        "workers",
        "orchestrator",
        "corewright",
    }
    assert not [name for name in names if "examples" in name or "test" in name]
    assert {"placements/py.typed", "workers/engines/cpu.py", "orchestrator/cli/main.py"} <= set(names)
    assert {"workers/surfaces/transformers_neuronx.json", "orchestrator/bench/chat.json"} <= set(names)
