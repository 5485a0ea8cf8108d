"""What a machine of a Ray cluster reports about itself, and whether it can be a host of the fleet.

As a program, it writes the report of this machine as JSON.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from orchestrator.process.version import corewright_version
from workers.host import host_facts as this_host
from workers.messages.actor_message import actor_message
from workers.messages.wire import PROTOCOL


@actor_message
class HostGreeting(msgspec.Struct, frozen=True):
    """The report of one machine."""

    version: str  # of corewright
    folder: str  # where its packages are
    devices: bool  # it has Neuron devices
    protocol: int = 1  # of its messages, see `wire.py`


def own_greeting() -> HostGreeting:
    """Returns the report of this machine, by the packages of this interpreter."""
    folder = Path(__file__).parent.parent.parent
    return HostGreeting(corewright_version(), str(folder), this_host.has_devices(), PROTOCOL)


def unfit(greeting: HostGreeting | str, own: HostGreeting, *, emulated: bool) -> str | None:
    """Returns why a machine cannot be a host of the fleet whose `up` or controller is ``own``; None if it can.

    ``greeting`` is the reason itself if the machine has not answered. ``emulated``: the spec emulates its instance
    type, which a machine with devices is not for.
    """
    if isinstance(greeting, str):
        return greeting
    if greeting.protocol != own.protocol:
        versions = f"it has corewright {greeting.version}, and the fleet {own.version}"
        return f"{versions}: protocols {greeting.protocol} and {own.protocol}; install one version on all machines"
    if greeting.devices and emulated:
        return "it has Neuron devices, and the spec emulates them"
    if not greeting.devices and not emulated:
        return "it has no Neuron devices"
    return None


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(own_greeting()))
