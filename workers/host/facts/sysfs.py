"""Reads the Neuron driver's files under /sys/devices/virtual/neuron_device, mostly without privileges or tools."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from workers.host.facts.neuron_monitor import Ecc
from workers.host.facts.sections import Findings, excerpt, whole

LONGEST_FILE = 4096  # bytes of one sysfs attribute
# An allow list, since other files (``reset``) act on the device when written, and have no content.
_WANTED = re.compile(
    r"core_count|connected_devices|serial_number|device_name|instance_type|arch_type|total|(mem|sram)_ecc_\w+"
)
_CORE = re.compile(r"neuron_core([0-9]{1,4})")
_SUCCESS = "success"  # the only NRT status that is not a failure


class SysfsCore(msgspec.Struct, frozen=True, kw_only=True):
    """A core, by its number on the device. Counters start when the driver is loaded."""

    core: int
    memory: dict[
        str, int
    ] = {}  # class -> current bytes (Neuron Sysfs User Guide: for memory, ``total`` is the current value)
    failures: dict[str, int] = {}  # NRT status other than success -> times returned


class SysfsDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device directory. None: not readable."""

    index: int
    core_count: int | None = None
    connected_to: tuple[int, ...] = ()
    serial_number: str | None = None
    device_name: str | None = None  # "Inferentia2", "Trainium1"
    arch: str | None = None
    instance_type: str | None = None  # the family only: "Inf2", "Trn1"
    ecc: Ecc
    cores: tuple[SysfsCore, ...] = ()


class Sysfs(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of the driver."""

    devices: tuple[SysfsDevice, ...] = ()
    problems: tuple[str, ...] = ()


def parse_sysfs(files: Mapping[str, str]) -> Sysfs:
    """Parses file contents by their path below the folder: "neuron0/core_count" -> "2". Never raises.

    Finds counters by the end of their path, because Neuron Driver 2.31 moved nodes (Neuron Sysfs User Guide); a counter
    is a file, or a directory with a file ``total``.
    """
    findings = Findings()
    below: dict[int, dict[str, str]] = {}
    for path, text in sorted(files.items()):
        top, _, relative = path.partition("/")
        if relative and (match := re.fullmatch(r"neuron([0-9]{1,4})", top)):
            below.setdefault(int(match[1]), {})[relative] = text.strip()
    devices = tuple(_device(index, texts, findings) for index, texts in sorted(below.items()))
    return Sysfs(devices=devices, problems=findings())


def _device(index: int, texts: dict[str, str], findings: Findings) -> SysfsDevice:
    where = f"sysfs: neuron{index}"
    own: dict[str, str] = {}  # files that belong to no core
    of_core: dict[int, dict[str, str]] = {}
    for path, text in texts.items():
        core, inside = _split_core(path)
        if core is None:
            own[path] = text
        else:
            of_core.setdefault(core, {})[inside] = text
    return SysfsDevice(
        index=index,
        core_count=_counter(own, "core_count", where, findings, must=True),
        connected_to=_connected(own, where, findings),
        serial_number=_text(own, "serial_number"),
        device_name=_text(own, "device_name"),
        arch=_text(own, "arch_type"),
        instance_type=_text(own, "instance_type"),
        ecc=Ecc(
            device=index,
            mem_uncorrected=_counter(own, "mem_ecc_uncorrected", where, findings, must=True),
            mem_repairable_uncorrected=_counter(own, "mem_ecc_repairable_uncorrected", where, findings),
            sram_uncorrected=_counter(own, "sram_ecc_uncorrected", where, findings, must=True),
        ),
        cores=tuple(
            _core(core, inside, f"{where}/neuron_core{core}", findings) for core, inside in sorted(of_core.items())
        ),
    )


def _split_core(path: str) -> tuple[int | None, str]:
    parts = path.split("/")
    for i, part in enumerate(parts):
        if match := _CORE.fullmatch(part):
            return int(match[1]), "/".join(parts[i + 1 :])
    return None, path


def _core(core: int, texts: dict[str, str], where: str, findings: Findings) -> SysfsCore:
    memory = _under(texts, "device_mem", where, findings)
    status = _under(texts, "status", where, findings)
    return SysfsCore(
        core=core,
        memory=memory,
        failures={name: count for name, count in status.items() if name != _SUCCESS and count},
    )


def _under(texts: dict[str, str], folder: str, where: str, findings: Findings) -> dict[str, int]:
    """Returns the counters directly under a folder: .../device_mem/tensors/total -> {"tensors": ...}."""
    pattern = re.compile(rf"(?:.*/)?{folder}/(\w+)(?:/total)?")
    counters = {}
    for path, text in texts.items():
        match = pattern.fullmatch(path)
        if match and match[1] != "total" and (count := _whole(text, f"{where}/{path}", findings)) is not None:
            counters[match[1]] = count
    return counters


def _at(texts: dict[str, str], name: str) -> str | None:
    """Returns the path of an attribute or counter in any driver release; the shortest if there are several."""
    ends = (f"/{name}", f"/{name}/total")
    return min((path for path in texts if f"/{path}".endswith(ends)), key=len, default=None)


def _text(texts: dict[str, str], name: str) -> str | None:
    path = _at(texts, name)
    return (texts[path] or None) if path is not None else None


def _counter(texts: dict[str, str], name: str, where: str, findings: Findings, *, must: bool = False) -> int | None:
    path = _at(texts, name)
    if path is None:
        if must:
            findings.add(
                f"{where}: {name}", "is missing; this driver release may not have it (Neuron Sysfs User Guide)"
            )
        return None
    return _whole(texts[path], f"{where}/{path}", findings)


def _connected(texts: dict[str, str], where: str, findings: Findings) -> tuple[int, ...]:
    """Parses ``connected_devices``, such as "12, 3, 4, 1", in this order. Empty on a host with one device."""
    text = _text(texts, "connected_devices") or ""
    parts = [part for part in re.split(r"[,\s]+", text) if part]
    if all(len(part) <= 4 and part.isascii() and part.isdecimal() for part in parts):
        return tuple(int(part) for part in parts)
    findings.add(f"{where}/connected_devices", f"is {excerpt(text)}, not a list of devices")
    return ()


def _whole(text: str, where: str, findings: Findings) -> int | None:
    number = whole(int(text)) if text.isascii() and text.isdecimal() and len(text) < 20 else None
    if number is None:
        findings.add(where, f"is {excerpt(text)}, not a non-negative integer")
    return number


def read_sysfs(root: Path, deadline_s: float = 2.0) -> Sysfs | None:
    """Reads the driver's folder; None: it does not exist. Never raises."""
    if not root.is_dir():
        return None
    until = time.monotonic() + deadline_s
    files: dict[str, str] = {}
    problems: dict[str, None] = {}

    def unreadable(error: OSError) -> None:
        hint = "; run as a user with read permission" if isinstance(error, PermissionError) else ""
        problems[f"sysfs: {error.filename}: {error.strerror or error}{hint}"] = None

    for folder, inner, names in os.walk(root, onerror=unreadable):
        if Path(folder).parent == root:
            inner[:] = [name for name in inner if name not in ("power", "subsystem")]  # the kernel's own
        for name in filter(_WANTED.fullmatch, names):
            path = Path(folder) / name
            try:
                with path.open("rb") as file:
                    files[path.relative_to(root).as_posix()] = file.read(LONGEST_FILE).decode(errors="replace")
            except OSError as error:
                unreadable(error)
        if time.monotonic() > until:
            problems[f"sysfs: reading {root} did not finish within {deadline_s:g} s"] = None
            break
    parsed = parse_sysfs(files)
    return Sysfs(devices=parsed.devices, problems=(*list(problems)[:5], *parsed.problems))
