"""What the controller of a fleet is told at its start, and tells again after each restart."""

from __future__ import annotations

import msgspec

START_DEADLINE_S = 900.0  # a start that takes longer is an error; a Neuron model may load for minutes
DRAIN_S = 20.0
ADMIN_PATH = "/admin/v1"


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed for the life of a fleet (an `up`)."""

    fleet: str
    home: str
    spec_text: str
    spec_file: str
    base_dir: str
    token: str  # for the admin API, and between gateway and replicas
    admin_port: int
    cpus: tuple[int, ...]  # of this machine, for planning
    instance: str | None  # of this machine, when it has Neuron devices
    start_deadline_s: float = START_DEADLINE_S
    drain_s: float = DRAIN_S
