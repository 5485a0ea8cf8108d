"""What the wheel holds, and how the environment is made."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_holds_the_three_packages_and_the_demo(tmp_path: Path) -> None:
    """Its spec and weights, so that `corewright demo` needs no checkout. Tests and other examples are not in it."""
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
    assert not [name for name in names if "test" in name]
    shown = {name.removeprefix("placements/examples/") for name in names if "examples" in name}
    assert {name for name in shown if "/" not in name} == {"demo.yaml"}
    models = {f"models/{model}/{file}" for model in ("tiny", "draft") for file in ("config.json", "model.safetensors")}
    assert models <= shown
    assert {"placements/py.typed", "workers/engines/cpu/engine.py", "orchestrator/cli/main.py"} <= set(names)
    assert {
        "placements/facts/neuron_sdks.csv",
        "placements/facts/neuron_environments.csv",
        "placements/lmi/settings.json",
        "placements/engines/nxd_inference/options.json",
        "placements/spec/other_names.json",
        "workers/engines/transformers_neuronx/surface.json",
        "orchestrator/cli/specs/machine.yaml",
        "orchestrator/simulate/chat.json",
        "orchestrator/console/static/index.html",
        "orchestrator/console/static/vendor/uplot/LICENSE",
    } <= set(names)


@pytest.mark.parametrize(("index", "cuda"), [("", None), ("file:///wheels", "13.0")])
def test_make_venv_installs_torch_first_and_warns_of_a_cuda_build(index: str, cuda: str | None, tmp_path: Path) -> None:
    """From the index that is set, with pip's progress, and with the size said before."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "torch.py").write_text(f"class version: cuda = {cuda!r}\n")
    made, python = tmp_path / "made", tmp_path / "python3"
    made.mkdir()
    (made / "pip").write_text('#!/bin/sh\necho "pip $*"\n')
    (made / "python").write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.write_text(f"#!/bin/sh\nmkdir -p .venv && cp -r {made} .venv/bin\n")
    for script in (python, made / "pip", made / "python"):
        script.chmod(0o755)
    ran = subprocess.run(
        ["make", "-C", str(tmp_path), "-s", "venv", f"PYTHON={python}", f"TORCH_INDEX_URL={index}"],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"},
    )
    lines = ran.stdout.splitlines()
    torch, rest = (position for position, line in enumerate(lines) if line.startswith("pip install"))
    assert "0.2 GB" in lines[0]
    assert ("TORCH_INDEX_URL" in lines[1]) is (not index)
    assert lines[torch].endswith("torch==2.13.0")
    assert ("--index-url file:///wheels" in lines[torch], "--index-url" in lines[rest]) == (bool(index), False)
    assert "--quiet" not in ran.stdout
    assert ("CUDA build (13.0)" in lines[-1]) is (cuda is not None)


def test_each_pin_installs_on_the_oldest_python_or_has_a_marker() -> None:
    """By the metadata of the installed distributions that have the version of the pin."""
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    checked, wrong = 0, []
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin, _, marker = line.partition(" ; ")
        name, _, version = pin.partition("==")
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.distribution(name)
            required = SpecifierSet(",".join(installed.metadata.get_all("Requires-Python") or ()))
            if installed.version == version:
                checked += 1
                wrong += [line] if not marker and not required.contains(f"{oldest[1]}.0") else []
    assert checked > 50
    assert wrong == []
