"""Reads the Neuron driver's files under /sys/devices/virtual/neuron_device, without privileges or tools."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from workers.host.facts.sections import Findings, excerpt, whole

LONGEST_FILE = 4096  # bytes of one sysfs attribute
# Only these are opened: other files, such as ``reset``, act on the device. They are sought at any depth, because Neuron
# Driver 2.31 moved nodes (Neuron Sysfs User Guide).
WANTED = ("core_count", "instance_type", "unhealthy_components")
_HEALTHY = frozenset({"", "0", "none"})  # how a driver may write that no component is unhealthy
_PATH = re.compile(rf"neuron([0-9]{{1,4}})/(?:.*/)?({'|'.join(WANTED)})")


class SysfsDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device directory. None: not readable."""

    index: int
    core_count: int | None = None
    instance_type: str | None = None  # the family only: "Inf2", "Trn1"
    unhealthy: str = ""  # failing parts, like "hbm,sram"; "" from drivers before 2.30, which do not report it


class Sysfs(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of the driver."""

    devices: tuple[SysfsDevice, ...] = ()
    problems: tuple[str, ...] = ()


def read_sysfs(root: Path) -> Sysfs | None:
    """Reads the driver's folder; None: it does not exist. Never raises."""
    if not root.is_dir():
        return None
    files: dict[str, str] = {}
    problems = []
    for path in (path for name in WANTED for path in root.rglob(name)):
        try:
            with path.open("rb") as file:
                files[path.relative_to(root).as_posix()] = file.read(LONGEST_FILE).decode(errors="replace")
        except OSError as error:
            hint = "; run as a user with read permission" if isinstance(error, PermissionError) else ""
            problems.append(f"sysfs: {path}: {error.strerror or error}{hint}")
    parsed = parse_sysfs(files)
    return Sysfs(devices=parsed.devices, problems=(*problems[:5], *parsed.problems))


def parse_sysfs(files: Mapping[str, str]) -> Sysfs:
    """Parses file contents by their path below the folder: "neuron0/core_count" -> "2". Never raises."""
    findings = Findings()
    texts_of: dict[int, dict[str, str]] = {}
    for path, text in files.items():
        if match := _PATH.fullmatch(path):
            texts_of.setdefault(int(match[1]), {})[match[2]] = text.strip()
    devices = tuple(
        SysfsDevice(
            index=index,
            core_count=_core_count(texts.get("core_count"), f"sysfs: neuron{index}/core_count", findings),
            instance_type=texts.get("instance_type") or None,
            unhealthy="" if (parts := texts.get("unhealthy_components", "")).lower() in _HEALTHY else parts,
        )
        for index, texts in sorted(texts_of.items())
    )
    return Sysfs(devices=devices, problems=findings())


def _core_count(text: str | None, where: str, findings: Findings) -> int | None:
    if text is None:
        findings.add(where, "is missing; this driver release may not have it (Neuron Sysfs User Guide)")
        return None
    count = whole(int(text)) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    if count is None:
        findings.add(where, f"is {excerpt(text)}, not a non-negative integer")
    return count
