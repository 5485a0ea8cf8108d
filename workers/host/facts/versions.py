"""Finds the installed versions of the Neuron software."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from workers.host.facts.tools import find_tool, run_tool

# Package names from the Neuron Setup Guide; the same for apt and dnf.
PACKAGES: Mapping[str, str] = {
    "driver": "aws-neuronx-dkms",
    "runtime": "aws-neuronx-runtime-lib",
    "collectives": "aws-neuronx-collectives",
    "tools": "aws-neuronx-tools",
}


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Installed versions; None: not installed as a system package."""

    driver: str | None = None  # of the loaded kernel module
    runtime: str | None = None
    collectives: str | None = None
    tools: str | None = None


def parse_packages(listing: str | bytes) -> Versions:
    """Parses lines "name version" from dpkg-query or rpm; skips other lines, which report missing packages."""
    text = listing.decode(errors="replace") if isinstance(listing, bytes) else listing
    versions = dict(re.findall(r"^([a-z][a-z0-9-]*) ([0-9][0-9A-Za-z.+~:-]*)$", text, re.MULTILINE))
    return Versions(**{field: versions.get(package) for field, package in PACKAGES.items()})


def read_versions(sys: Path, deadline_s: float) -> Versions:
    """Returns the loaded driver's version (/sys/module/neuron/version), and the others from the package manager."""
    packages = parse_packages(_listing(deadline_s))
    try:
        loaded = (sys / "module/neuron/version").read_text(errors="replace").strip() or None
    except OSError:
        loaded = None
    return msgspec.structs.replace(packages, driver=loaded) if loaded else packages


def _listing(deadline_s: float) -> bytes:
    names = list(PACKAGES.values())
    for tool, arguments in (
        ("dpkg-query", ["-W", "-f", "${Package} ${Version}\\n"]),
        ("rpm", ["-q", "--qf", "%{NAME} %{VERSION}-%{RELEASE}\\n"]),
    ):
        path = find_tool(tool)
        if path is not None:
            # Both exit with an error if a package is missing, but list the others.
            return run_tool([path, *arguments, *names], deadline_s).stdout
    return b""
