"""Upgrades a fleet on a joined cluster to this version of corewright.

The order: the controller, host actors, gateways (the new controller replaces both), then replicas.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.daemon.controller_follower import STATUS_WAIT_S, ControllerFollower
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord
from orchestrator.process.version import corewright_version

UNHEARD_S = 60.0  # for gateways to report to the new controller; those that run report within seconds
POLL_S = 0.5
GO_BACK = "correct the cause and run this again; or go back: run the same command with corewright {}"


def refuse_version(record: FleetRecord) -> None:
    """Raises Failed if the fleet runs in another version of corewright."""
    if record.version != corewright_version():
        message = f"the fleet {record.name} runs corewright {record.version}, and this is {corewright_version()}"
        hint = f"add --upgrade to change the version of the fleet, or use corewright {record.version}"
        raise Failed("fleet-version-differs", message, hint)


class FleetUpgrade:
    """One upgrade, or the way back, which is an upgrade to the previous version."""

    def __init__(self, name: str, follower: ControllerFollower, report: Callable[[str], None]) -> None:
        self._name = name
        self._follower = follower
        self._report = report
        self._switching = threading.Lock()  # the fleet has no controller
        self._before = "of the previous version"
        self._seen = 0  # the version of the status that was read last

    def wait_switched(self) -> None:
        """Wait until the fleet has a controller, before this process ends."""
        self._switching.acquire()

    def replace_controller(self, record: FleetRecord | None) -> None:
        """Replace the controller, unless it has this version already. Raises Failed if the old one stays."""
        from orchestrator.on_ray import controller_handover

        if record is not None and record.version == corewright_version():
            return
        if record is not None:
            self._before = record.version
        if (reply := self._status()) is None:
            return
        _, status = reply
        if status.get("maintenance") is not None:
            message = f"a maintenance of hosts is in progress: {', '.join(status['maintenance']['hosts'])}"
            raise Failed("upgrade-refused", message, "wait for its end, or run `corewright hosts stop`")
        if status["rollout"]["state"] in ("progressing", "paused", "canary"):
            message = f"the rollout of revision {status['revision']} is {status['rollout']['state']}"
            raise Failed("upgrade-refused", message, "wait for its end: `corewright rollout status`")
        self._report(f"replacing the controller of corewright {self._before} by one of {corewright_version()}")
        with self._switching:
            self._follower.controller = controller_handover.replace_controller(self._name, self._follower.controller)

    def await_hosts(self) -> None:
        """Wait until host actors and gateways run this version. Raises Failed if one of them does not start."""
        self._report("replacing the host actors and the gateways, host after host")
        self._follower.ask(lambda: self._follower.controller.retry_upgrade.remote())  # if an earlier command has failed
        unheard_until = time.monotonic() + UNHEARD_S
        while (reply := self._status()) is not None:  # None: this process ends
            self._seen, status = reply
            versions = [gateway["version"] for gateway in status["gateways"]]
            others = status["versions"] or {"host_actors": {}, "problem": None}
            if others["problem"] is not None:
                hint = "the upgrade has stopped there, and the fleet serves; " + GO_BACK.format(self._before)
                raise Failed("upgrade-failed", others["problem"], hint)
            unheard = not versions or None in versions
            is_done = not others["host_actors"] and set(versions) <= {None, corewright_version()}
            if is_done and not (unheard and time.monotonic() < unheard_until):
                return
            time.sleep(POLL_S)

    def await_replicas(self, revision: int) -> None:
        """Wait until every replica runs this version. Raises Failed if that fails: models then have their old ones."""
        while (reply := self._status()) is not None:  # None: this process ends
            self._seen, status = reply
            rollout = status["rollout"]
            if status["revision"] != revision:
                message = f"revision {revision} was rolled back: the replicas of the previous version serve"
                raise Failed("upgrade-failed", message, "see `corewright events`; " + GO_BACK.format(self._before))
            if rollout["state"] == "complete":
                self._report(f"the fleet {self._name} runs corewright {corewright_version()}")
                return
            if rollout["state"] != "progressing":
                message = f"the rollout of revision {revision} is {rollout['state']}: {rollout['reason']}"
                raise Failed("upgrade-failed", message, GO_BACK.format(self._before))

    def _status(self) -> tuple[int, dict[str, Any]] | None:
        """Returns a newer status, in the form of its JSON: controllers of older versions tell it so. None: the end."""
        reply = self._follower.ask(lambda: self._follower.controller.status.remote(self._seen, STATUS_WAIT_S))
        return None if reply is None else (reply[0], msgspec.to_builtins(reply[1]))
