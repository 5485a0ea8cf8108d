"""The controller's settings, fixed for the life of a fleet."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from orchestrator.messages.gateway_places import HOSTS
from orchestrator.process.home import FleetRecord
from placements.facts.topology import Machine
from workers.artifacts.store.store import StoreSettings
from workers.messages.credentials import Credentials

DRAIN_S = 20.0
ADMIN_PATH = "/admin/v1"
BY_HEADER = "x-corewright-by"  # the operator, recorded in the journal
LONGEST_WAIT_S = 30.0  # of one long poll


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of `up` that the daemon passes to the controller."""

    drain_s: float = DRAIN_S  # at the shutdown of the fleet
    config: tuple[dict[str, Any], ...] = ()  # the settings of this `up`: name, value, origin
    allowed_sources: tuple[str, ...] | None = None  # folders and s3:// prefixes that a spec may read; None: any
    store: StoreSettings | None = None  # artifact store of each host; None: without a limit, in the home
    data_plane: Literal["unix", "tcp"] = "unix"  # tcp: between all hosts, emulated ones too
    gateways_on: str = HOSTS  # of a joined cluster, see `gateway_places`
    console_url: str | None = None  # of the console behind a proxy; None: loopback only


class ControllerSettings(FleetSettings, frozen=True, kw_only=True):
    """Fixed for the life of a fleet (an `up`)."""

    fleet: str  # its id
    name: str  # its name at the start, which it keeps on the cluster
    home: str
    spec_text: str
    spec_file: str
    base_dir: str
    token: str  # for the admin API, and between gateway and replicas
    admin_port: int  # 0, on a joined cluster: a free one, which it keeps if it restarts
    machine: Machine  # this machine, or each one of the joined cluster, for which revisions are resolved
    record: FleetRecord | None = None  # on a Ray cluster that others started: what the controller completes and writes
    emulated: tuple[str, ...] = ()  # instance types that the spec emulates on such a cluster
    daemon_pid: int = 0
    log_format: Literal["text", "json"] = "text"
    gateway: Credentials | None = None  # of the data plane between hosts
    replica: Credentials | None = None

    @property
    def joined(self) -> bool:
        """The fleet runs on a Ray cluster that it did not start."""
        return self.record is not None
