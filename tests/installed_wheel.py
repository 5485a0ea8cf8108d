"""The wheel of this checkout in an environment of its own, whose processes record what they read of the checkout."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOOK = """
import os, sys
root, packages, log = {root!r}, {packages!r}, {log!r}
def hook(event, args):
    if event == "open" and isinstance(args[0], str):
        path = os.path.abspath(args[0])
        if path.startswith(root) and not path.startswith(packages):
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.write(written, (path + "\\n").encode())
            os.close(written)
sys.addaudithook(hook)
"""


class InstalledWheel:
    """Dependencies are those of this environment, which are found behind the wheel's packages."""

    def __init__(self, folder: Path) -> None:
        """Builds the wheel and installs it below ``folder``."""
        self.empty = folder / "empty"
        self.empty.mkdir()
        self.command = folder / "env" / "bin" / "corewright"
        self._log = folder / "reads"
        python = str(folder / "env" / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        self._run(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
        self._run(sys.executable, "-m", "venv", "--without-pip", str(folder / "env"))
        (wheel,) = folder.glob("corewright-*.whl")
        self._run(*pip, "--python", python, "install", "--no-deps", str(wheel))
        site = Path(self._run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        ray = importlib.util.find_spec("ray")
        assert ray is not None
        assert ray.origin is not None
        (site / "dependencies.pth").write_text(f"{Path(ray.origin).parents[1]}\n")
        hook = HOOK.format(root=f"{ROOT}/", packages=f"{ROOT}/.venv", log=str(self._log))
        (site / "sitecustomize.py").write_text(hook)

    @property
    def environment(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    @property
    def reads(self) -> set[str]:
        """The files of the checkout that its processes have opened."""
        return set(self._log.read_text().splitlines()) if self._log.exists() else set()

    def _run(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, cwd=self.empty).stdout
