"""The machine that a command runs on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The machine that the command runs on, as observed by the caller."""

    cpus: tuple[int, ...]  # ids of the CPUs this process may use, ascending
    instance: str | None = None  # instance type when it has Neuron devices
    joined: bool = False  # a Ray cluster was joined: each host is a machine of its own, emulated ones with these CPUs
    devices: tuple[int, ...] | None = None  # n of its /dev/neuron<n>, which a container may have some of; None: all
