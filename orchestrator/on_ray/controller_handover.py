"""Replaces the controller of a fleet on a joined cluster by one of another version of corewright.

Replicas and gateways keep serving meanwhile, by their last routes. The new controller uses the host actors of the old
one, and then replaces them. Run as a program, it starts the controller of the arguments on stdin: the way back, in the
old interpreter.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from typing import Any, TypeAlias

import msgspec.structs
import ray

from orchestrator.fleet.cluster_names import ray_name
from orchestrator.fleet.controller_settings import ControllerSettings
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer
from orchestrator.on_ray.controller_actor import start_controller
from orchestrator.on_ray.ray_nodes import CONTROLLER, join_ray
from orchestrator.process.failure import Failed

HANDOVER_S = 30.0  # for the reply of the running controller
END_S = 30.0  # for the name of the ended controller to be free: a second, on an idle machine
START_S = 120.0
POLL_S = 0.1

Handover: TypeAlias = tuple[ControllerSettings, GatewaySettings | None]  # the controller's arguments


def replace_controller(name: str, controller: Any) -> Any:
    """Returns the handle of a controller in this process's interpreter, which has taken the fleet over. Blocks.

    Raises Failed if there is none: then the old one runs, or runs again.
    """
    try:
        old: Handover = answer(controller.handover.remote, HANDOVER_S)
    except (CallFailed, ActorUnavailable) as error:
        hint = "see controller.log on the head; nothing was changed"
        raise Failed("upgrade-failed", f"the running controller does not hand over: {error}", hint) from None
    _end(name)
    try:
        return _started(old)
    except (CallFailed, ActorUnavailable) as error:
        _end(name)
        cause = f"the controller does not start in {sys.executable}: {error}"
    build = old[0].build
    assert build is not None
    hint = f"see controller.log on the head; the controller of corewright {build.version} runs again"
    raise Failed("upgrade-failed", cause + _start_old(old, build.python), hint)


def _start_old(handover: Handover, python: str) -> str:
    """Start the controller by the code of another version, since an actor's class is pickled with its list of methods.
    Returns what went wrong; empty: nothing."""
    command = [python, "-m", "orchestrator.on_ray.controller_handover"]
    try:
        ended = subprocess.run(
            command, input=msgspec.msgpack.encode(handover), capture_output=True, cwd="/", timeout=START_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"; and the old one does not start again: {error}"
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {ended.returncode}"]
        return f"; and the old one does not start again in {python}: {lines[-1]}"
    return ""


def _started(handover: Handover) -> Any:
    settings, gateway = handover
    controller = start_controller(msgspec.structs.replace(settings, follows=True), gateway)
    answer(controller.handover.remote, START_S)  # it has adopted the replicas
    return controller


def _end(name: str) -> None:
    """End the controller of the fleet, and wait until its name is free."""
    namespace, deadline = ray_name(name), time.monotonic() + END_S
    while {"name": CONTROLLER, "namespace": namespace} in ray.util.list_named_actors(all_namespaces=True):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            ray.kill(ray.get_actor(CONTROLLER, namespace), no_restart=True)
        if time.monotonic() > deadline:
            raise Failed("upgrade-failed", "the old controller cannot be ended", "see `ray list actors`")
        time.sleep(POLL_S)


def _main() -> None:
    handover = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Handover)
    record = handover[0].record
    assert record is not None
    join_ray(record.ray_address, record.name)
    _started(handover)


if __name__ == "__main__":
    _main()
