"""`down` of a fleet on a joined cluster, from any machine of the cluster and from the fleet's name alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.daemon.cluster_reach import reach
from orchestrator.process.failure import Failed

SPARE_S = 40.0  # after the drain: for replicas to end, and what the fleet has on the cluster to be removed
POLL_S = 0.2


def take_down(address: str, name: str | None, report: Callable[[str], None]) -> None:
    """Drain the fleet of that name (None: the only one) and remove it from the Ray cluster at ``address``.

    If its controller does not do so in time, or there is none, the fleet is removed without a drain. Raises Failed.
    """
    at = reach(address)
    from orchestrator.on_ray import fleet_on_cluster as cluster
    from orchestrator.on_ray import ray_nodes
    from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer

    ray_nodes.join_ray(at, name or "")
    try:
        name = name or only_fleet(cluster.fleets(), at)
        owner, controller = cluster.owner_of(name), cluster.find_controller(name)
        if owner is None and controller is None:
            raise Failed("no-fleet", f"no fleet {name} is on the Ray cluster at {at}", _on_cluster(cluster.fleets()))
        try:
            if controller is None:
                raise ActorUnavailable("it is gone")
            drain_s = float(answer(controller.take_down.remote, SPARE_S))
        except (CallFailed, ActorUnavailable) as error:
            report(f"the controller does not reply, so requests are not drained: {error}")
        else:
            report(f"draining for at most {drain_s:.0f} s")
            deadline = time.monotonic() + drain_s + SPARE_S
            while cluster.owner_of(name) is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        cluster.remove_fleet(name)  # what the controller has left: nothing, if it was in time
    except TimeoutError as error:
        message = f"the fleet {name} is not removed: {error}"
        raise Failed("down-incomplete", message, "run `corewright down` again when the head is back") from None
    finally:
        ray_nodes.leave_ray()
    report("stopped")


def only_fleet(names: list[str], at: str) -> str:
    """Returns the only name. Raises Failed if there are none or several."""
    if len(names) == 1:
        return names[0]
    what = f"several fleets are on the Ray cluster at {at}" if names else f"no fleet is on the Ray cluster at {at}"
    raise Failed("fleet-not-named" if names else "no-fleet", what, _on_cluster(names))


def _on_cluster(names: list[str]) -> str:
    return f"name one with --fleet: {', '.join(names)}" if names else "`ray list actors` shows what runs there"
