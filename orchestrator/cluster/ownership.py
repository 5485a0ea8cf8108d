"""A fleet on a joined cluster, by its name: its entry in Ray's KV, its controller, its removal, and `down`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from orchestrator.cluster.calls import ActorUnavailable, CallFailed, RayKeyValues, answer, within
from orchestrator.cluster.gateways import applications_of, delete_applications
from orchestrator.cluster.machine_claims import claims, release_machines
from orchestrator.cluster.nodes import CONTROLLER
from orchestrator.cluster.ray_names import HOST_ACTOR, ray_name
from orchestrator.cluster.reach import join, reach
from orchestrator.process.failure import Failed
from orchestrator.process.home import FleetRecord
from workers.host.lifetime import is_alive, pid_space, process_start

OWNER = "owner"  # the key in Ray's KV of the fleet's entry
RECORD = "record"  # the key of the content of `fleet.json`, which the controller writes at each of its starts
LOOKUP_S = 30.0  # for a lookup: without a limit it blocks while Ray's head is away
LATE_S = 0.2  # between two lists of actors
POLL_S = 0.2
SPARE_S = 40.0  # after the drain: for replicas to end, and what the fleet has on the cluster to be removed
FORGET_S = 5.0  # for a host to remove the fleet's files
SERVE = ("SERVE_CONTROLLER_ACTOR", "serve")  # the name and the namespace of Serve's controller


class ClusterOwner(msgspec.Struct, frozen=True):
    """The fleet with a name on a joined cluster."""

    fleet: str  # its id
    name: str
    user: str  # who has started it, as user@machine
    home: str
    since: float  # Unix time
    pid: int = 0  # of the `up` that has claimed the name
    started: float = 0.0  # its start, see `lifetime`
    pid_space: str = ""

    @classmethod
    def here(cls, fleet: str, name: str, user: str, home: str) -> ClusterOwner:
        """Returns the owner that this process claims the name for."""
        pid = os.getpid()
        return cls(fleet, name, user, home, time.time(), pid, process_start(pid) or 0.0, pid_space())

    @property
    def has_died(self) -> bool:
        """The `up` that has claimed the name is gone; False also if it ran where this process cannot see it."""
        return bool(self.pid_space) and self.pid_space == pid_space() and not is_alive(self.pid, self.started)


def owner_of(name: str) -> ClusterOwner | None:
    """Returns the fleet of that name, or None."""
    value = _stored(name, OWNER)
    return None if value is None else msgspec.json.decode(value, type=ClusterOwner)


def record_of(name: str) -> FleetRecord | None:
    """Returns what the controller of the fleet has written; None before its start."""
    value = _stored(name, RECORD)
    return None if value is None else msgspec.json.decode(value, type=FleetRecord)


def _stored(name: str, key: str) -> bytes | None:
    return RayKeyValues().get(ray_name(name), [key]).get(key)


def claim_name(owner: ClusterOwner) -> bool:
    """Returns whether the fleet has its name now; False: another has it."""
    return RayKeyValues().put(ray_name(owner.name), OWNER, msgspec.json.encode(owner), overwrite=False)


def store_record(record: FleetRecord) -> None:
    """Write the record for commands and the next `up`, wherever they run."""
    RayKeyValues().put(ray_name(record.name), RECORD, msgspec.json.encode(record))


def taken_from(name: str) -> frozenset[str]:
    """Returns the labels of the machines that other fleets have claimed."""
    return frozenset(label for label, claim in claims(RayKeyValues()).items() if claim.fleet != name)


def find_controller(name: str) -> Any:
    """Returns the handle of the fleet's controller, also while it restarts; None without one. Raises TimeoutError."""

    def find() -> Any:
        with contextlib.suppress(ValueError):
            return ray.get_actor(CONTROLLER, ray_name(name))

    return within(find, LOOKUP_S)


def fleets() -> list[str]:
    """Returns the names of the fleets on the cluster that have actors there."""
    prefix = ray_name("")
    named = within(lambda: ray.util.list_named_actors(all_namespaces=True), LOOKUP_S)
    spaces = {actor["namespace"] for actor in named if actor["namespace"].startswith(prefix)}
    return sorted(space.removeprefix(prefix) for space in spaces)


def remove_fleet(name: str, *, own: bool = False) -> None:
    """Remove everything of a fleet from the cluster, from its name alone: its Serve applications, its files on each
    host, its actors, placement groups and entries in Ray's KV. Others on the cluster stay.

    ``own``: the caller is the fleet's controller, which stays. Raises TimeoutError if Ray's head does not reply.
    """
    within(lambda: _remove(name, own), LOOKUP_S * 2)


def _remove(name: str, own: bool) -> None:
    namespace = ray_name(name)
    if not own:
        _kill(namespace, [CONTROLLER])  # first: it would replace what is removed
    _delete_applications(name)
    actors = _actors(namespace)
    hosts = [actor for actor in actors if actor.startswith(HOST_ACTOR)]
    _kill(namespace, [actor for actor in actors if actor not in hosts])
    _forget_files(namespace, hosts)
    while late := _actors(namespace):  # a start that the controller had begun may end after it
        _kill(namespace, late)
        time.sleep(LATE_S)
    for id, group in placement_group_table().items():
        if group["name"].startswith(f"{namespace}/"):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(id))))
    kv = RayKeyValues()
    release_machines(kv, name)
    for key in sorted(kv.keys(namespace, ""), key=OWNER.__eq__):  # its name is free last
        kv.delete(namespace, key)


def _actors(namespace: str) -> list[str]:
    """Returns the names of the fleet's actors, without the controller."""
    listed = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in listed if actor["namespace"] == namespace and actor["name"] != CONTROLLER]


def _delete_applications(fleet: str) -> None:
    try:
        ray.get_actor(*SERVE)
    except ValueError:
        return  # Serve does not run
    from ray import serve

    delete_applications(applications_of(fleet, serve.status().applications))


def _kill(namespace: str, names: Sequence[str]) -> None:
    for name in names:
        _with_actor(namespace, name, lambda actor: ray.kill(actor, no_restart=True))


def _forget_files(namespace: str, hosts: Sequence[str]) -> None:
    replies: list[Any] = []
    for host in hosts:
        _with_actor(namespace, host, lambda actor: replies.append(actor.forget_fleet.remote()))
    if replies:
        ray.wait(replies, num_returns=len(replies), timeout=FORGET_S)


def _with_actor(namespace: str, name: str, call: Callable[[Any], object]) -> None:
    with contextlib.suppress(ValueError):  # it has ended meanwhile
        call(ray.get_actor(name, namespace))


def take_down(address: str, name: str | None, report: Callable[[str], None]) -> None:
    """Drain the fleet of that name (None: the only one) and remove it from the Ray cluster at ``address``.

    If its controller does not do so in time, or there is none, the fleet is removed without a drain. Raises Failed.
    """
    at = reach(address)
    join(at, name or "")
    try:
        name = name or only_fleet(fleets(), at)
        owner, controller = owner_of(name), find_controller(name)
        if owner is None and controller is None:
            raise Failed("no-fleet", f"no fleet {name} is on the Ray cluster at {at}", _on_cluster(fleets()))
        try:
            if controller is None:
                raise ActorUnavailable("it is gone")
            drain_s = float(answer(controller.take_down.remote, SPARE_S))
        except (CallFailed, ActorUnavailable) as error:
            report(f"the controller does not reply, so requests are not drained: {error}")
        else:
            report(f"draining for at most {drain_s:.0f} s")
            deadline = time.monotonic() + drain_s + SPARE_S
            while owner_of(name) is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        remove_fleet(name)  # what the controller has left: nothing, if it was in time
    except TimeoutError as error:
        message = f"the fleet {name} is not removed: {error}"
        raise Failed("down-incomplete", message, "run `corewright down` again when the head is back") from None
    finally:
        ray.shutdown()
    report("stopped")


def only_fleet(names: list[str], at: str) -> str:
    """Returns the only name. Raises Failed if there are none or several."""
    if len(names) == 1:
        return names[0]
    fact = f"several fleets are on the Ray cluster at {at}" if names else f"no fleet is on the Ray cluster at {at}"
    raise Failed("fleet-not-named" if names else "no-fleet", fact, _on_cluster(names))


def _on_cluster(names: list[str]) -> str:
    return f"name one with --fleet: {', '.join(names)}" if names else "`ray list actors` shows what runs there"
