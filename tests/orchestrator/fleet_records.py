"""The record of a fleet that does not run."""

from __future__ import annotations

from typing import Any

import msgspec

from orchestrator.process.home import FleetRecord


def fleet_record(**changes: Any) -> FleetRecord:
    """Returns a record with these fields, and others of no meaning."""
    record = FleetRecord(
        fleet="f",
        name="n",
        url="",
        admin_url="",
        token="t",
        dashboard_url=None,
        ray_address="",
        pid=1,
        started=0.0,
        version="0",
    )
    return msgspec.structs.replace(record, **changes)
