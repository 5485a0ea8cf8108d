"""What this machine reports about itself. As a program, it writes that as JSON. Does not import Ray."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from orchestrator.fleet.host_greeting import HostGreeting
from orchestrator.process.version import corewright_version
from workers.host import host_facts as this_host
from workers.messages.wire import PROTOCOL


def greeting() -> HostGreeting:
    """Returns the report of this machine, by the packages of this interpreter."""
    folder = Path(__file__).parent.parent.parent
    return HostGreeting(corewright_version(), str(folder), this_host.has_devices(), PROTOCOL)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(greeting()))
