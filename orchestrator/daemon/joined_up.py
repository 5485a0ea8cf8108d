"""`up` on a Ray cluster that others started: starts the fleet there, or adopts it, and leaves it running.

The phases, each with its own problems: reach, survey, own or adopt, controller, gateways, ready. Then it ends
(`--detach`) or shows what happens until a signal. The fleet lives in detached actors, and does not need this process.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec.structs

from orchestrator.access.audit_log import Audit, AuditLine, caller
from orchestrator.daemon.cluster_reach import reach
from orchestrator.daemon.cluster_survey import emulated_types, survey
from orchestrator.daemon.controller_follower import ControllerFollower
from orchestrator.daemon.daemon import SIGNALS, UpOptions, report_if_possible, watched
from orchestrator.daemon.display import Display, NoDisplay
from orchestrator.daemon.gateway_readiness import wait_for_gateway
from orchestrator.daemon.head_loss import head_loss_warning
from orchestrator.daemon.joined_gateways import are_starting, client_url, loopback_warning, not_started
from orchestrator.fleet.controller_settings import ControllerSettings, FleetSettings
from orchestrator.fleet.fleet_status import GatewayInFleet
from orchestrator.fleet.gateway_places import wanted_gateways
from orchestrator.process.child_process import apart
from orchestrator.process.failure import Failed
from orchestrator.process.home import FLEET_VARIABLE, FleetRecord, Home
from orchestrator.process.version import corewright_version
from orchestrator.process.waiting_notice import WaitingNotice
from placements.facts.topology import Host
from placements.spec.problems import render

if TYPE_CHECKING:
    from orchestrator.on_ray.ray_nodes import RayNode

log = logging.getLogger(__name__)

READY, ENDED = b"r", b"e"  # marks of the child: the fleet was ready, the end has been reported
CONTROLLER_AWAY_S = 120.0  # a new head is there after half a minute
CONTROLLER_START_S = 120.0  # another `up` may be starting the controller of a younger fleet
RECORD_POLL_S = 0.1
GATEWAYS_S = 120.0  # for the first gateways; later ones may still start


@dataclass(frozen=True)
class JoinedSpec:
    """The spec of a fleet on a joined cluster, with its name and the planner's hosts."""

    text: str
    file: str
    base_dir: str
    name: str
    hosts: tuple[Host, ...]
    elastic: bool = False  # machines of some hosts are requested when they are needed


class JoinedUp:
    """One `up` on a joined cluster."""

    def __init__(
        self,
        home: Home,
        options: UpOptions,
        spec: JoinedSpec,
        address: str,
        report: Callable[[str], None],
        *,
        display: Display | None = None,
    ) -> None:
        self._home = home
        self._options = options
        self._spec = spec
        self._address = address
        self._display = display = display or NoDisplay()
        self._report = WaitingNotice(partial(report_if_possible, report), shown=lambda: display.drawn)
        self._audit = Audit(home.audit)
        self._follower = ControllerFollower(self._report, home.logs, CONTROLLER_AWAY_S, display)
        self._events: queue.SimpleQueue[str | Failed | None] = queue.SimpleQueue()  # signal, failure; None: done
        self._url = ""  # of the first gateway
        self._runs = False  # the fleet has a controller, and lives on without this process

    def run(self, on_ready: Callable[[FleetRecord], None], *, detach: bool) -> int:
        """Start or adopt the fleet and call ``on_ready``. Without ``detach``, show its changes until a signal, or its
        end. Returns the exit code. Must run on the main thread."""
        self._refuse_another_fleet()
        line = self._audit.begin("up", "up", self._audit_fields(), by=caller())
        ended = apart(partial(self._live, on_ready, detach, line), SIGNALS)
        if ENDED in ended.marks:
            return ended.code
        message = f"the process that was connected to Ray has ended ({ended.code}): Ray ends it when its raylet is gone"
        failed = Failed("up-died", message, "the fleet runs on if it had started: see `corewright status` on the head")
        self._audit.finish(line, failed.problem.id)
        self._report(render([failed.problem]).rstrip("\n"))
        return 1

    def _refuse_another_fleet(self) -> None:
        record = self._home.read_record()
        if record is not None and record.on_cluster and record.name != self._spec.name:
            message = f"the fleet {record.name} of {self._home.path} runs on the Ray cluster at {record.ray_address}"
            hint = "set another COREWRIGHT_HOME for another fleet, or stop that one with `corewright down`"
            raise Failed("fleet-already-running", message, hint)

    def _audit_fields(self) -> dict[str, Any]:
        spec, gateway = self._spec, self._options.gateway
        fields = {"text": spec.text, "file": spec.file, "base_dir": spec.base_dir, "ray_address": self._address}
        return {**fields, "host": gateway.host, "port": gateway.port, "insecure": gateway.insecure}

    # In the child

    def _live(
        self, on_ready: Callable[[FleetRecord], None], detach: bool, line: AuditLine, mark: Callable[[bytes], object]
    ) -> int:
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        self._in_background(partial(self._work, on_ready, detach, line))
        event = self._events.get()
        self._follower.ending = True
        self._display.close()
        code = 0
        if isinstance(event, Failed):
            self._audit.finish(line, event.problem.id)
            self._report(render([event.problem]).rstrip("\n"))
            code = 1
        elif event is not None:
            self._audit.finish(line, event)
            runs = f"the fleet {self._spec.name} runs on; stop it with `corewright down`"
            self._report(f"{event}: {runs if self._runs else 'nothing was started'}")
            code = 0 if self._runs else 1
        mark(ENDED)
        return code

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._events.put(signal.Signals(number).name)

    def _work(self, on_ready: Callable[[FleetRecord], None], detach: bool, line: AuditLine) -> None:
        self._start(on_ready)
        self._audit.finish(line, "ready")
        name = self._spec.name
        if detach:
            self._report(f"the fleet {name} runs on the cluster; `corewright down` stops it")
        else:
            self._report(f"watching the fleet {name}: Ctrl-C ends only this command")
            self._view()
        self._events.put(None)

    def _start(self, on_ready: Callable[[FleetRecord], None]) -> None:
        self._report("reaching the Ray cluster")
        os.chdir(self._home.path)  # Ray lets all workers import from here, and there may be another corewright
        with self._report.waiting(lambda: f"the Ray cluster at {self._address}"):
            at = reach(self._address)
            from orchestrator.on_ray import ray_nodes

            addresses = joined_or_failed(partial(ray_nodes.join_ray, at, self._spec.name), at)
        with self._report.waiting(lambda: "the machines of the cluster"):
            cpus = self._survey()
        warning = head_loss_warning(addresses["gcs_address"], self._home.path)
        if warning is not None:
            self._report(render([warning]).rstrip("\n"))
        with self._report.waiting(lambda: "the controller"):
            self._own_or_adopt(cpus, addresses)
        self._in_background(self._follower.narrate)
        self._report("starting the gateways")
        with self._report.waiting(lambda: "the gateways"):
            self._wait_for_gateways()
        on_ready(self._wait_ready())

    def _in_background(self, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread. If it raises, this `up` ends."""
        threading.Thread(target=watched, args=(work, self._events.put), daemon=True).start()

    def _survey(self) -> tuple[int, ...]:
        """Report the machines of the cluster. Returns the CPUs of each."""
        from orchestrator.on_ray import host_survey, own_greeting, ray_nodes
        from orchestrator.on_ray.calls import within
        from orchestrator.on_ray.fleet_on_cluster import LOOKUP_S, taken_from

        nodes = within(ray_nodes.ray_nodes, LOOKUP_S)
        hosts = [node for node in nodes if node.alive and node.cores and node.instance is not None]
        greetings = host_survey.greet(hosts)
        head = greetings[host_survey.THE_HEAD]
        if isinstance(head, str):
            hint = "the controller runs there: install this version of corewright at the same path on each machine"
            raise Failed("head-unfit", f"the head of the Ray cluster cannot be used: {head}", hint)
        taken = within(partial(taken_from, self._spec.name), LOOKUP_S)
        for line in survey(self._spec.hosts, nodes, greetings, own_greeting.greeting(), taken, self._spec.elastic):
            self._report(line)
        self._place_gateways([node for node in nodes if node.alive], {node.label for node in hosts})
        return tuple(range(min((node.cpus for node in hosts), default=os.cpu_count() or 1)))

    def _place_gateways(self, nodes: Sequence[RayNode], hosts: Collection[str]) -> None:
        """Find the address of the gateways. ``hosts`` are the labels of machines that can be hosts."""
        gateway, places_on = self._options.gateway, self._options.gateways_on
        machines = [node.machine(node.label if node.label in hosts else None) for node in nodes]
        self._url = client_url(gateway, places_on, machines)
        warning = loopback_warning(gateway.host, places_on, len(wanted_gateways(places_on, machines)))
        if warning is not None:
            self._report(render([warning]).rstrip("\n"))

    def _own_or_adopt(self, cpus: tuple[int, ...], addresses: dict[str, Any]) -> None:
        from orchestrator.on_ray import fleet_on_cluster as cluster

        spec, home = self._spec, str(self._home.path)
        name, user = spec.name, f"{getpass.getuser()}@{platform.node()}"
        owner, controller = cluster.owner_of(name), cluster.find_controller(name)
        while (
            owner is not None
            and controller is None
            and not owner.has_died
            and abs(time.time() - owner.since) < CONTROLLER_START_S
        ):
            time.sleep(RECORD_POLL_S)
            owner, controller = cluster.owner_of(name), cluster.find_controller(name)
        if owner is not None and (owner.home, owner.user.partition("@")[0]) != (home, getpass.getuser()):
            began = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(owner.since))
            message = f"the fleet {name} of {owner.user} and {owner.home} is on this Ray cluster since {began} UTC"
            hint = "use another `name` in the spec, or stop the other fleet with `corewright down` there"
            raise Failed("fleet-already-running", message, hint)
        if owner is not None and controller is not None:
            self._follower.controller, self._runs = controller, True
            if (record := cluster.record_of(name)) is not None:
                refuse_version(record)
            self._apply()
            return
        if owner is not None or controller is not None:
            self._report(f"removing what an earlier fleet {name} has left")
            cluster.remove_fleet(name)
        fleet = secrets.token_hex(8)
        if not cluster.claim_name(cluster.ClusterOwner.here(fleet, name, user, home)):
            message = f"another `up` has just started a fleet {name} on this Ray cluster"
            raise Failed("fleet-already-running", message, "try again")
        self._report("starting the controller and the replicas")
        try:
            self._start_controller(fleet, cpus, addresses)
        except Exception:
            if (owner := cluster.owner_of(name)) is None or owner.fleet == fleet:
                cluster.remove_fleet(name)
            raise

    def _apply(self) -> None:
        """Apply the spec to the fleet that runs already."""
        spec, controller = self._spec, self._follower.controller
        reply = self._follower.ask(lambda: controller.apply.remote(spec.text, spec.file, spec.base_dir, caller(), "up"))
        if "error" in reply:
            self._report(render([*reply["problems"], reply["error"]]).rstrip("\n"))
            raise Failed("adopt-rejected", f"the fleet {spec.name} runs already, and keeps its spec", "fix the spec")
        changed = f"revision {reply['revision']} is applied" if reply["changed"] else "its spec is unchanged"
        self._report(f"the fleet {spec.name} runs already: {changed}")
        ours = {value["name"]: value["value"] for value in self._options.config}
        theirs = self._follower.ask(lambda: controller.config.remote())
        differing = [value["name"] for value in theirs if ours.get(value["name"]) != value["value"]]
        if differing:
            self._report(f"settings of a running fleet stay as they are: {', '.join(differing)}")

    def _start_controller(self, fleet: str, cpus: tuple[int, ...], addresses: dict[str, Any]) -> None:
        from orchestrator.access.tls import fleet_credentials
        from orchestrator.on_ray import controller_actor, gateway_applications

        gateway_applications.start_serve()  # from here, so that it runs in Ray's interpreter, which stays
        spec, gateway, credentials = self._spec, self._options.gateway, fleet_credentials()
        token, dashboard = secrets.token_urlsafe(32), addresses.get("webui_url")
        record = FleetRecord(
            fleet=fleet,
            name=spec.name,
            url=self._url,
            listens=gateway.host,
            admin_url="",  # the controller adds it, since it finds the port
            token=token,
            dashboard_url=f"http://{dashboard}" if dashboard else None,
            ray_address=addresses["gcs_address"],
            pid=0,
            started=0.0,
            version=corewright_version(),
            on_cluster=True,
            console_url=self._options.console_url,
        )
        settings = ControllerSettings(
            fleet=fleet,
            name=spec.name,
            home=str(self._home.path),
            spec_text=spec.text,
            spec_file=spec.file,
            base_dir=spec.base_dir,
            token=token,
            admin_port=self._options.admin_port or 0,
            cpus=cpus,
            record=record,
            emulated=tuple(sorted(emulated_types(spec.hosts))),
            instance=None,
            log_format=gateway.log_format,
            gateway=credentials.gateway,
            replica=credentials.replica,
            **{field: getattr(self._options, field) for field in FleetSettings.__struct_fields__},
        )
        os.environ.pop(FLEET_VARIABLE, None)  # of a fleet whose processes are found by it
        self._follower.controller = controller = controller_actor.start_controller(
            settings, msgspec.structs.replace(gateway, fleet=fleet)
        )
        self._follower.ask(lambda: controller.config.remote())  # it has started
        self._runs = True

    def _wait_for_gateways(self) -> None:
        """Wait until each gateway runs or cannot start. Raises Failed if none runs."""
        deadline = time.monotonic() + GATEWAYS_S
        gateways: Sequence[GatewayInFleet] = ()
        while are_starting(gateways) and time.monotonic() < deadline:
            reply = self._follower.ask(lambda: self._follower.controller.status.remote(0, 0.0))
            if reply is None:
                return
            gateways = reply[1].gateways
            time.sleep(RECORD_POLL_S)
        for cause in not_started(gateways, self._options.gateways_on, str(self._home.logs / "gateway.log")):
            self._report(f"the gateway does not run on {cause}")

    def _wait_ready(self) -> FleetRecord:
        with self._report.waiting(self._follower.narration.waited_for):
            self._follower.ready.wait()
            record = self._record()
        with self._report.waiting(lambda: "the gateway to load the tokenizers"):
            wait_for_gateway(record.url, lambda: None)
        return record

    def _record(self) -> FleetRecord:
        from orchestrator.on_ray.fleet_on_cluster import record_of

        while (record := record_of(self._spec.name)) is None:
            time.sleep(RECORD_POLL_S)
        return record

    def _view(self) -> None:
        """Report the changes of the fleet until it ends."""
        if self._options.watch:
            watch = partial(self._follower.watch, (self._spec.text, self._spec.file, self._spec.base_dir), self._audit)
            self._in_background(watch)
        self._follower.ask(lambda: self._follower.controller.wait_down.remote())
        self._report(f"the fleet {self._spec.name} has ended")


def refuse_version(record: FleetRecord) -> None:
    """Raises Failed if the fleet runs in another version of corewright."""
    if record.version != corewright_version():
        message = f"the fleet {record.name} runs corewright {record.version}, and this is {corewright_version()}"
        hint = f"use corewright {record.version}; or stop the fleet with `corewright down`, and start it with this one"
        raise Failed("fleet-version-differs", message, hint)


def joined_or_failed(join: Callable[[], dict[str, Any]], at: str) -> dict[str, Any]:
    """Returns Ray's addresses. Raises Failed for what Ray raises: many types, with pages of text."""
    try:
        return join()
    except Exception as error:
        log.exception("Ray cannot be joined")
        cause = str(error).strip().partition("\n")[0]
        hint = "see daemon.log; check that the Ray node of this machine runs: ray status"
        raise Failed("ray-not-joined", f"the Ray cluster at {at} does not admit this machine: {cause}", hint) from None
