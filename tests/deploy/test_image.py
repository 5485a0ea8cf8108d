"""The image: its Dockerfile and script are linted, and the script's part for Python runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = Path(sysconfig.get_path("scripts"))


@pytest.mark.parametrize("path", ["Dockerfile", "kuberay/Dockerfile"])
def test_hadolint_accepts_the_dockerfile(path: str) -> None:
    """DL4006 asks for bash, which an image need not have."""
    linter = [str(SCRIPTS / "hadolint"), "--ignore", "DL4006", str(DEPLOY / path)]
    linted = subprocess.run(linter, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


def test_shellcheck_accepts_the_script() -> None:
    linted = subprocess.run(
        [SCRIPTS / "shellcheck", DEPLOY / "install.sh"], capture_output=True, text=True, check=False
    )
    assert (linted.returncode, linted.stdout) == (0, "")


def test_the_image_has_what_the_wheel_is_made_of() -> None:
    """The ignore file admits every package and each file that pyproject.toml names."""
    admitted = {
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    text = (ROOT / "pyproject.toml").read_text()
    packages = set(re.findall(r'"(placements|workers|orchestrator)"', text))
    files = {name for name in ("README.md", "LICENSE") if name in text}
    assert packages | files | {"pyproject.toml", "deploy/install.sh"} <= admitted
    assert all((ROOT / name).exists() for name in admitted)


def test_the_laptops_container_runs_without_privileges() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert "ARG RUN_AS=10001:10001\nUSER ${RUN_AS}\n" in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_script_installs_a_working_command_into_another_python(tmp_path: Path) -> None:
    """And keeps the versions of the packages that are there."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    python = tmp_path / "image" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "image"], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "psutil==7.0.0"], check=True, capture_output=True)
    script = ["sh", str(DEPLOY / "install.sh"), str(tmp_path), "json", str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True, env={**os.environ, "PYTHON": str(python)})
    shown = subprocess.run([python, "-m", "pip", "list"], check=True, capture_output=True, text=True).stdout
    assert re.search(r"^psutil +7\.0\.0$", shown, re.MULTILINE)
    started = subprocess.run(
        [tmp_path / "serve", "--model", tmp_path / "nothing"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env={**os.environ, "COREWRIGHT_HOME": str(tmp_path / "home")},
    )
    assert (started.returncode, "model-folder-empty" in started.stderr) == (1, True)
