"""`up`: starts a fleet on a Ray cluster or adopts it there, follows it, and ends it or leaves it running.

Without an address, `up` first starts a Ray cluster of the fleet's own, which ends with it. The phases, each with its
own problems: connect, survey, own or adopt, controller, gateways, ready. On a cluster that others started, the fleet
lives in detached actors and does not need this process.

All that uses Ray runs in a child process (`apart`), since Ray ends a process whose raylet is gone.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import math
import os
import platform
import queue
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec.structs

from orchestrator.access.audit_log import Audit, caller
from orchestrator.cluster.follower import (
    CONTROLLER_AWAY_S,
    CONTROLLER_RETRY_S,
    STATUS_WAIT_S,
    ControllerFollower,
    Display,
    NoDisplay,
)
from orchestrator.cluster.gateway_start import (
    are_starting,
    client_url,
    gateway_url,
    listens,
    loopback_warning,
    not_started,
    wait_for_gateway,
)
from orchestrator.gateway.http.http_server import bind
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_settings import ControllerSettings, FleetSettings
from orchestrator.messages.fleet_status import GatewayInFleet
from orchestrator.messages.gateway_places import GatewayPlace, wanted_gateways
from orchestrator.process.addresses import free_port
from orchestrator.process.child_process import Ended, apart
from orchestrator.process.failure import Failed
from orchestrator.process.home import FLEET_VARIABLE, FleetRecord, Home, daemon_alive, end_leftovers
from orchestrator.process.version import corewright_version
from orchestrator.process.waiting_notice import WaitingNotice
from placements.facts.topology import Host, Machine
from placements.spec.problems import render
from workers.host import host_facts as this_host
from workers.host.task_boundary import task_boundary
from workers.host.warm_processes import HANDED_OVER, WarmProcesses

if TYPE_CHECKING:
    from orchestrator.cluster.own_ray import OwnRay

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
READY, REPORTED, GONE = b"r", b"t", b"g"  # marks of the child: was ready, has reported its end, has left nothing
DOWN = "down"  # the event, beside the names of signals
POLL_S = 0.1
READY_NEWS_S = 0.5  # for the status of a fleet that has just become ready
JOINED_AWAY_S = 120.0  # for the controller of a joined cluster: a new head is there after half a minute
CONTROLLER_START_S = 120.0  # another `up` may be starting the controller of a younger fleet
GATEWAYS_S = 120.0  # for the first gateways of a joined cluster; later ones may still start
# Shutdown: 20 s of drain by default, and all processes gone within 30 s.
SHUTDOWN_GRACE_S = 2.0  # for replicas to stop after the drain
GATEWAY_STOP_S = 3.0
LAST_DEADLINE_S = 3.0  # for killed processes to exit
LEFTOVERS_DEADLINE_S = 8.0  # for processes of an earlier, killed `up`; the documented limit is 10 s


class UpOptions(FleetSettings, frozen=True, kw_only=True):
    """The options of one `up`."""

    gateway: GatewaySettings
    admin_port: int | None = None  # of the admin API and the console; None: a free one
    dashboard: bool = True
    watch: bool = False  # apply the spec's file when it changes


@dataclass(frozen=True)
class FleetStart:
    """The spec that `up` starts, and where: the record of all that differs between an own and a joined cluster."""

    text: str
    file: str
    base_dir: str  # of its relative paths
    name: str  # of the fleet
    hosts: tuple[Host, ...]  # the planner's
    machine: Machine  # this one
    ray_address: str | None = None  # of the cluster to join; None: `up` starts one, and ends it
    detach: bool = False  # exit when the fleet is ready, which a joined cluster keeps
    elastic: bool = False  # machines of some hosts are requested when they are needed
    warm: Mapping[str, str | None] = field(default_factory=dict)  # the Python of each engine with a warm process

    @property
    def owns_ray(self) -> bool:
        return self.ray_address is None


class _Interrupted(Exception):
    """The end while the fleet was still starting; its argument is the event."""


class Up:
    """One `up`, from start to end."""

    def __init__(
        self,
        home: Home,
        options: UpOptions,
        start: FleetStart,
        report: Callable[[str], None],
        display: Display | None = None,
    ) -> None:
        """``report`` receives each progress line, and ``display`` each status."""
        self.home = home
        self._options = options
        self._spec = start
        self._owns_ray = start.owns_ray
        self._display = display = display or NoDisplay()
        self._report = WaitingNotice(partial(report_if_possible, report), shown=lambda: display.drawn)
        self._audit = Audit(home.audit)
        away_s = CONTROLLER_AWAY_S if start.owns_ray else JOINED_AWAY_S
        self._follower = ControllerFollower(self._report, home.logs, away_s, display)
        self._events: queue.SimpleQueue[str | Failed | None] = (
            queue.SimpleQueue()
        )  # signal, `down`, failure; None: done
        self._threads: list[threading.Thread] = []
        self._mark: Callable[[bytes], object] = lambda mark: None
        self._fleet = secrets.token_hex(8)
        self._pid = os.getpid()  # the child's record names this process
        self._record: FleetRecord  # of the fleet, as the child has written it
        self._machine = start.machine  # for which the controller plans
        self._ray: OwnRay | None = None
        self._serve_up = False
        self._end_requested = False
        self._runs = False  # the fleet has a controller, and lives on without this process on a joined cluster
        self._is_ready = False
        self._noting = threading.Lock()

    def run(self, on_ready: Callable[[FleetRecord], None]) -> int:
        """Start the fleet, call ``on_ready`` once, and follow it until a signal or `down`. Must run on the main thread.

        The fleet's own Ray ends with it. On a joined cluster only this command ends. The fleet and ``on_ready`` run in
        a child process. The child reports the cause of the end, also in the audit log; this process does so if the
        child cannot. Returns the exit code. Raises Failed if nothing was started.
        """
        check_host_root()
        self.home.prepare()
        lock = self.home.lock() if self._owns_ray else None  # on a cluster, the controller has it
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        try:
            _refuse_another_fleet(self.home, self._spec, is_locked=self._owns_ray and lock is None)
            if self._owns_ray:
                end_previous(self.home, self._report)
                _check_ports(self._options)
            self._line = self._audit.begin("up", "up", audit_fields(self._spec, self._options), by=caller())
            self._listen_to_signals()
            ended = apart(partial(self._live, on_ready), SIGNALS)
            if REPORTED not in ended.marks:
                self._report_death(ended)
            leftovers = None if GONE in ended.marks or not self._owns_ray else _end_everything(self.home, self._fleet)
            if leftovers is not None:
                self._report(f"stopped, but {leftovers}")
            return ended.code if REPORTED in ended.marks and ended.code >= 0 and leftovers is None else 1
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            if lock is not None:
                os.close(lock)

    def _new_record(self) -> FleetRecord:
        """Returns the fleet's record, without what the connection to Ray adds. On a joined cluster, the controller
        completes it with its port and its process."""
        gateway, own = self._options.gateway, self._owns_ray
        return FleetRecord(
            fleet=self._fleet,
            name=self._spec.name,
            url=gateway_url(gateway) if own else "",
            listens=gateway.host,
            admin_url=f"http://127.0.0.1:{self._options.admin_port or free_port()}" if own else "",
            token=secrets.token_urlsafe(32),
            dashboard_url=None,
            ray_address="",
            pid=self._pid if own else 0,
            started=(this_host.process_start(self._pid) or 0.0) if own else 0.0,
            version=corewright_version(),
            on_cluster=not own,
            console_url=self._options.console_url,
        )

    def _listen_to_signals(self) -> None:
        def on_signal(number: int, _: FrameType | None) -> None:
            if self._end_requested and self._owns_ray:
                self._report("stopping immediately")
                self._mark(REPORTED)
                _end_everything(self.home, self._fleet)
                self._mark(GONE)
                os._exit(1)
            self._end_requested = True
            self._events.put(signal.Signals(number).name)

        for number in SIGNALS:
            signal.signal(number, on_signal)

    # In the child

    def _live(self, on_ready: Callable[[FleetRecord], None], mark: Callable[[bytes], object]) -> int:
        """Run the fleet, from start to end. Returns the exit code."""
        self._mark = mark
        try:
            if self._owns_ray:
                self._start_ray()
            self._in_background(partial(self._work, on_ready))
            event = self._events.get()
        except _Interrupted as interrupted:
            event = interrupted.args[0]
        except SystemExit as end:  # Ray's own handler, while Ray starts
            event = signal.Signals(end.code).name if end.code in SIGNALS else str(end)
        except Exception as error:  # noqa: BLE001 - it is reported
            event = _as_failed(error)
        # the fleet may serve although Serve has not reported that its gateway runs
        may_serve = isinstance(event, str) and self._serve_up
        if may_serve and self._follower.ready.wait(READY_NEWS_S) and listens(self._record.url):
            with contextlib.suppress(Failed):  # the audit log cannot be written
                self._note_ready()
        with self._noting:
            self._follower.ending = True
        try:
            code = self._report_end(event)  # before Ray is shut down, which may end this process
            self._mark(REPORTED)
        finally:
            if self._owns_ray:
                self._end_ray()
        return code

    def _end_ray(self) -> None:
        try:
            with self._report.waiting(lambda: "running requests, replicas and Ray to end"):
                self._take_down()
        finally:
            if _end_everything(self.home, self._fleet) is None:
                self._mark(GONE)
                self._report("stopped")

    def _report_end(self, event: str | Failed | None) -> int:
        """Report the end of this command by its cause, also in the audit log. Returns the exit code."""
        outcome: str | None = "failed"
        code = 1
        if isinstance(event, Failed):
            outcome, line = event.problem.id, render([event.problem]).rstrip("\n")
        elif self._owns_ray and self._is_ready:
            self._end_requested = True
            immediately = "(a second signal stops immediately)"
            line = f"{event}: draining for at most {self._options.drain_s:.0f} s {immediately}"
            outcome, code = str(event), 0
        elif self._owns_ray or (event == DOWN and not self._is_ready):
            line = f"{event}: ended before the fleet was ready"
        elif event == DOWN:
            line = f"the fleet {self._spec.name} has ended"
            outcome, code = None, 0
        elif event is None:
            line = f"the fleet {self._spec.name} runs on the cluster; `corewright down` stops it"
            outcome, code = None, 0
        else:
            runs = f"the fleet {self._spec.name} runs on; stop it with `corewright down`"
            line = f"{event}: {runs if self._runs else 'nothing was started'}"
            outcome, code = event, 0 if self._runs else 1
        self._report(line)
        self._display.close()
        if self._owns_ray:
            _record_end(self.home)
        self._audit_end(outcome, was_ready=self._is_ready)
        return code

    def _audit_end(self, outcome: str | None, *, was_ready: bool) -> None:
        """Record the outcome of this `up`, or the end of its fleet if that was ready and ends with it. None: it has no
        further outcome."""
        try:
            if self._owns_ray and was_ready:
                self._audit.finish(self._audit.begin("up", "end", {"reason": outcome}, by=caller()), "done")
            elif outcome is not None:
                self._audit.finish(self._line, outcome)
        except Failed as failed:  # an end cannot be refused
            log.error("%s", failed)

    def _in_background(self, work: Callable[[], None]) -> None:
        """Run ``work``, which returns after the end has begun. If it raises, that is an event."""
        thread = threading.Thread(target=watched, args=(work, self._events.put), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, on_ready: Callable[[FleetRecord], None]) -> None:
        spec = self._spec
        record = self._start()
        with self._report.waiting(self._follower.narration.waited_for):
            while not self._follower.ready.wait(POLL_S):
                self._go_on()
            record = record or _stored_record(spec.name, self._go_on)
        with self._report.waiting(lambda: "the gateway to load the tokenizers"):
            wait_for_gateway(record.url, self._go_on)
        self._go_on()
        self._note_ready()
        self._go_on()
        with contextlib.suppress(OSError):  # as in `report_if_possible`
            on_ready(record)
        self._go_on()
        if spec.detach:
            self._events.put(None)
            return
        if self._owns_ray and self._options.gateway.gateway_spare:
            self._in_background(partial(_start_spare_gateway, self._options.gateway, spec.name))
        if not self._owns_ray:
            self._report(f"watching the fleet {spec.name}: Ctrl-C ends only this command")
        if self._options.watch:
            watched_spec = (spec.text, spec.file, spec.base_dir)
            self._in_background(partial(self._follower.watch, watched_spec, self._audit))

    def _note_ready(self) -> None:
        with self._noting:
            if not self._is_ready and not self._follower.ending:
                self._audit.finish(self._line, "ready")
                self._is_ready = True
                self._mark(READY)

    def _start(self) -> FleetRecord | None:
        """Have the fleet started, as far as its gateways. Returns its record; None: the controller has stored it."""
        if not self._owns_ray:
            self._join()
        with self._report.waiting(lambda: "the controller"):
            self._own_or_adopt()
        self._in_background(self._follower.narrate)
        self._in_background(self._wait_down)
        self._report("starting the gateway" if self._owns_ray else "starting the gateways")
        with self._report.waiting(lambda: ", ".join(("the gateway", *self._follower.narration.unready[:4]))):
            if self._owns_ray:
                self._start_gateway()
            else:
                self._wait_for_gateways()
        return self._record if self._owns_ray else None

    def _wait_down(self) -> None:
        self._follower.ask(lambda: self._follower.controller.wait_down.remote())
        self._events.put(DOWN)

    def _go_on(self) -> None:
        """Ends a background thread of this command once the end has begun."""
        if self._follower.ending:
            raise _Interrupted(None)

    # Connect

    def _start_ray(self) -> None:
        """Start the fleet's own Ray. On the main thread: Ray ends with the thread that has started it."""
        home, spec = self.home, self._spec
        self._record = self._new_record()
        os.environ[FLEET_VARIABLE] = self._fleet
        os.environ["COREWRIGHT_HOME"] = str(home.path)
        home.write_record(self._record)  # before any process starts, so that the next `up` finds leftovers
        if len(spec.hosts) == 1:
            _start_warm_processes(home, spec.warm)
        self._report("starting Ray")
        with self._report.waiting(lambda: "Ray"):
            home.secure_ray()  # before the import of Ray, which reads its settings
            from orchestrator.cluster.own_ray import OwnRay

            self._ray = OwnRay(spec.name, spec.hosts, dashboard=self._options.dashboard)
            try:
                addresses = self._ray.start(home.ray, self._proceed)
                self._listen_to_signals()  # Ray has handlers of its own
            except _Interrupted:
                raise
            except Exception as error:  # Ray raises many types, with pages of text
                log.exception("Ray does not start")
                cause = str(error).strip().partition("\n")[0] or type(error).__name__
                hint = f"see Ray's logs under {home.ray}, and {home.logs / 'daemon.log'}"
                raise Failed("ray-not-started", f"Ray does not start: {cause}", hint) from None
        self._record = _with_addresses(self._record, addresses)
        home.write_record(self._record)
        self._proceed()

    def _proceed(self) -> None:
        """Interrupts the start of Ray by an event."""
        with contextlib.suppress(queue.Empty):
            raise _Interrupted(self._events.get_nowait())

    def _join(self) -> None:
        """Connect to the cluster, and survey its machines."""
        address = self._spec.ray_address
        assert address is not None
        self._record = self._new_record()
        self._report("reaching the Ray cluster")
        os.chdir(self.home.path)  # Ray lets all workers import from here, and there may be another corewright
        os.environ.pop(FLEET_VARIABLE, None)  # of a fleet whose processes are found by it
        with self._report.waiting(lambda: f"the Ray cluster at {address}"):
            from orchestrator.cluster.reach import head_loss_warning, join, reach

            self._record = _with_addresses(self._record, join(reach(address), self._spec.name))
        with self._report.waiting(lambda: "the machines of the cluster"):
            self._survey()
        warning = head_loss_warning(self._record.ray_address, self.home.path)
        if warning is not None:
            self._report(render([warning]).rstrip("\n"))

    def _survey(self) -> None:
        """Report the machines of the cluster, and find their CPUs and the address of the gateways."""
        from orchestrator.cluster import survey
        from orchestrator.cluster.calls import within
        from orchestrator.cluster.host_greeting import own_greeting
        from orchestrator.cluster.nodes import ray_nodes
        from orchestrator.cluster.ownership import LOOKUP_S, taken_from

        spec = self._spec
        nodes = within(ray_nodes, LOOKUP_S)
        hosts = [node for node in nodes if node.alive and node.cores and node.instance is not None]
        greetings = survey.greet(hosts)
        head = greetings[survey.THE_HEAD]
        if isinstance(head, str):
            hint = "the controller runs there: install this version of corewright at the same path on each machine"
            raise Failed("head-unfit", f"the head of the Ray cluster cannot be used: {head}", hint)
        taken = within(partial(taken_from, spec.name), LOOKUP_S)
        for line in survey.survey(spec.hosts, nodes, greetings, own_greeting(), taken, spec.elastic):
            self._report(line)
        cpus = tuple(range(min((node.cpus for node in hosts), default=os.cpu_count() or 1)))
        self._machine = Machine(cpus, joined=True, measured=self._machine.measured)
        gateway, places_on, labels = self._options.gateway, self._options.gateways_on, {node.label for node in hosts}
        machines = [node.machine(node.label if node.label in labels else None) for node in nodes if node.alive]
        self._record = msgspec.structs.replace(self._record, url=client_url(gateway, places_on, machines))
        warning = loopback_warning(gateway.host, places_on, len(wanted_gateways(places_on, machines)))
        if warning is not None:
            self._report(render([warning]).rstrip("\n"))

    # Controller

    def _own_or_adopt(self) -> None:
        from orchestrator.cluster import ownership as cluster

        name, home = self._spec.name, str(self.home.path)
        user = getpass.getuser()
        owner, controller = cluster.owner_of(name), cluster.find_controller(name)
        while (
            owner is not None
            and controller is None
            and not owner.has_died
            and abs(time.time() - owner.since) < CONTROLLER_START_S
        ):
            self._go_on()
            time.sleep(POLL_S)
            owner, controller = cluster.owner_of(name), cluster.find_controller(name)
        if owner is not None and (owner.home, owner.user.partition("@")[0]) != (home, user):
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
        if not cluster.claim_name(cluster.ClusterOwner.here(self._fleet, name, f"{user}@{platform.node()}", home)):
            message = f"another `up` has just started a fleet {name} on this Ray cluster"
            raise Failed("fleet-already-running", message, "try again")
        self._report("starting the controller and the replicas")
        try:
            self._start_controller()
        except Exception:
            # an own Ray ends anyway, and may be what has failed
            if not self._owns_ray and ((owner := cluster.owner_of(name)) is None or owner.fleet == self._fleet):
                cluster.remove_fleet(name)
            raise

    def _apply(self) -> None:
        """Apply the spec to the fleet that runs already."""
        spec, controller = self._spec, self._follower.controller
        reply = self._follower.ask(lambda: controller.apply.remote(spec.text, spec.file, spec.base_dir, caller(), "up"))
        self._go_on()
        if reply.error is not None:
            self._report(render([*reply.problems, reply.error]).rstrip("\n"))
            raise Failed("adopt-rejected", f"the fleet {spec.name} runs already, and keeps its spec", "fix the spec")
        changed = f"revision {reply.revision} is applied" if reply.changed else "its spec is unchanged"
        self._report(f"the fleet {spec.name} runs already: {changed}")
        ours = {value["name"]: value["value"] for value in self._options.config}
        theirs = self._follower.ask(lambda: controller.config.remote()) or ()
        differing = [value["name"] for value in theirs if ours.get(value["name"]) != value["value"]]
        if differing:
            self._report(f"settings of a running fleet stay as they are: {', '.join(differing)}")

    def _start_controller(self) -> None:
        from orchestrator.access.tls import fleet_credentials
        from orchestrator.cluster.controller_actor import start_controller
        from orchestrator.cluster.gateways import start_serve
        from orchestrator.cluster.survey import emulated_types

        spec, record, own, credentials = self._spec, self._record, self._owns_ray, fleet_credentials()
        gateway = None if own else msgspec.structs.replace(self._options.gateway, fleet=record.fleet)
        if not own:
            start_serve()  # from here, so that it runs in Ray's interpreter, which stays
        settings = ControllerSettings(
            fleet=record.fleet,
            name=spec.name,
            home=str(self.home.path),
            spec_text=spec.text,
            spec_file=spec.file,
            base_dir=spec.base_dir,
            token=record.token,
            admin_port=int(record.admin_url.rpartition(":")[2]) if own else self._options.admin_port or 0,
            machine=self._machine,
            record=None if own else record,
            emulated=() if own else tuple(sorted(emulated_types(spec.hosts))),
            daemon_pid=record.pid,
            log_format=self._options.gateway.log_format,
            gateway=credentials.gateway,
            replica=credentials.replica,
            **{name: getattr(self._options, name) for name in FleetSettings.__struct_fields__},
        )
        self._follower.controller = controller = start_controller(settings, gateway)
        if not own:
            self._follower.ask(lambda: controller.config.remote())  # it has started
            self._runs = True

    # Gateways

    def _start_gateway(self) -> None:
        """Start the gateways of the fleet's own Ray, and wait until they listen."""
        from orchestrator.cluster.gateways import run_applications

        self._serve_up = True
        try:
            here = GatewayPlace("", "")
            problems = run_applications(self._spec.name, self._options.gateway, [here], math.inf, self._go_on)
        except _Interrupted:
            raise
        except Exception as error:  # Ray Serve raises many types
            log.exception("the gateway does not start")
            problems = {"": str(error)}
        for cause in problems.values():
            hint = f"see {self.home.logs / 'gateway.log'}"
            raise Failed("gateway-not-started", f"the gateway does not start: {cause}", hint)

    def _wait_for_gateways(self) -> None:
        """Wait until each gateway of the controller runs or cannot start. Raises Failed if none runs."""
        deadline = time.monotonic() + GATEWAYS_S
        gateways: Sequence[GatewayInFleet] = ()
        while are_starting(gateways) and time.monotonic() < deadline:
            reply = self._follower.ask(lambda: self._follower.controller.status.remote(0, 0.0))
            self._go_on()
            gateways = reply[1].gateways
            time.sleep(POLL_S)
        for cause in not_started(gateways, self._options.gateways_on, str(self.home.logs / "gateway.log")):
            self._report(f"the gateway does not run on {cause}")

    # End

    def _take_down(self) -> None:
        """Drain and stop in order. ``_end_everything`` kills the processes that remain."""
        if self._ray is None or not self._ray.is_connected:
            return
        from orchestrator.cluster.calls import ActorUnavailable, CallFailed, answer
        from orchestrator.cluster.gateways import stop_serve

        drain_s = self._options.drain_s
        if (controller := self._follower.controller) is not None:
            with contextlib.suppress(CallFailed, ActorUnavailable):
                answer(lambda: controller.shutdown.remote(drain_s), drain_s + SHUTDOWN_GRACE_S)
        if self._serve_up:
            stopping = threading.Thread(target=_log_errors, args=(stop_serve,), daemon=True)
            stopping.start()
            stopping.join(GATEWAY_STOP_S)
        for thread in self._threads:  # a call to Ray after its shutdown would end this process
            thread.join(STATUS_WAIT_S + CONTROLLER_RETRY_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._ray.stop()

    def _report_death(self, ended: Ended) -> None:
        """Report the end of a child that exited without reporting it."""
        how = f"exit code {ended.code}" if ended.code >= 0 else signal.Signals(-ended.code).name
        if self._owns_ray:
            message = (
                f"the process that owns Ray exited unexpectedly ({how}): Ray ends it when its raylet or GCS is gone"
            )
            hint = f"see {self.home.logs / 'daemon.log'}, and Ray's logs under {self.home.ray}"
        else:
            message = f"the process that was connected to Ray has ended ({how}): Ray ends it when its raylet is gone"
            hint = "the fleet runs on if it had started: see `corewright status` on the head"
        failed = Failed("up-died", message, hint)
        self._audit_end(failed.problem.id, was_ready=READY in ended.marks)
        log.error("%s", failed)
        self._report(render([failed.problem]).rstrip("\n"))


def _refuse_another_fleet(home: Home, spec: FleetStart, *, is_locked: bool) -> None:
    record, path = home.read_record(), home.path
    if record is not None and record.on_cluster and (spec.owns_ray or record.name != spec.name):
        message = f"the fleet {record.name} of {path} runs on the Ray cluster at {record.ray_address}"
        hint = "stop it with `corewright down`, or set another COREWRIGHT_HOME for another fleet"
        raise Failed("fleet-already-running", message, hint)
    if is_locked:
        where = f" at {record.url} (pid {record.pid})" if record is not None else ""
        hint = "change it with `corewright apply SPEC`, or stop it with `corewright down`"
        raise Failed("fleet-already-running", f"a fleet of {path} is already running{where}", hint)


def end_previous(home: Home, report: Callable[[str], object]) -> None:
    """End what a fleet of this home has left. Raises Failed if its processes do not exit."""
    record = home.read_record()
    if record is None:
        return
    if not daemon_alive(record):
        report(f"the fleet of pid {record.pid} did not end cleanly: removing its leftovers")
    pids_left = end_leftovers(home, record.fleet, LEFTOVERS_DEADLINE_S)
    if pids_left:
        pids = ", ".join(map(str, pids_left))
        raise Failed("leftover-processes", f"processes of an earlier fleet do not exit: {pids}", "kill them")
    home.forget_fleet()
    home.prepare()


def _check_ports(options: UpOptions) -> None:
    gateway, admin_port = options.gateway, options.admin_port
    check_port(gateway.host, gateway.port)
    if admin_port == gateway.port:
        raise Failed("port-in-use", f"--port and --admin-port are both {gateway.port}", "choose another one")
    if admin_port is not None:
        check_port("127.0.0.1", admin_port, "--admin-port")


def audit_fields(spec: FleetStart, options: UpOptions) -> dict[str, Any]:
    """Returns what the audit log notes of an `up`."""
    gateway = options.gateway
    fields = {"text": spec.text, "file": spec.file, "base_dir": spec.base_dir}
    address = {"host": gateway.host, "port": gateway.port, "insecure": gateway.insecure}
    more = {"tls": gateway.tls_cert is not None} if spec.owns_ray else {"ray_address": spec.ray_address}
    return {**fields, **address, **more}


def _record_end(home: Home) -> None:
    """Write that the fleet ends, for `down`, whose signal would be a second one."""
    record = home.read_record()
    if record is not None:
        with contextlib.suppress(OSError):  # a full disk
            home.write_record(msgspec.structs.replace(record, ending=True))


def _start_warm_processes(home: Home, engines: Mapping[str, str | None]) -> None:
    """Start those of the only host already, whose actor takes them over: they import while Ray starts."""
    with (home.logs / "daemon.log").open("ab") as output:
        processes = WarmProcesses(home.sockets, output=output.fileno())
        processes.keep(engines)
    os.environ[HANDED_OVER] = processes.handed_over()


def _end_everything(home: Home, fleet: str) -> str | None:
    """Kill the remaining processes, and remove the record. Returns what could not be removed, or None."""
    pids = end_leftovers(home, fleet, LAST_DEADLINE_S)
    if pids:
        return f"processes do not exit: {', '.join(map(str, pids))}"
    try:
        home.forget_fleet()
    except OSError as error:
        return f"{home.record_file} cannot be removed: {error.strerror}"
    return None


def _start_spare_gateway(gateway: GatewaySettings, fleet: str) -> None:
    from orchestrator.cluster.gateways import start_spare_gateway

    with task_boundary(log, "no gateway stands by for one that dies"):
        start_spare_gateway(gateway, fleet)


def _with_addresses(record: FleetRecord, addresses: Mapping[str, Any]) -> FleetRecord:
    dashboard = addresses.get("webui_url")
    dashboard_url = f"http://{dashboard}" if dashboard else None
    return msgspec.structs.replace(record, ray_address=addresses["gcs_address"], dashboard_url=dashboard_url)


def _stored_record(fleet: str, go_on: Callable[[], object]) -> FleetRecord:
    from orchestrator.cluster.ownership import record_of

    while (record := record_of(fleet)) is None:
        go_on()
        time.sleep(POLL_S)
    return record


def report_if_possible(report: Callable[[str], None], line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the fleet
        report(line)


def watched(work: Callable[[], None], ended: Callable[[Failed], None]) -> None:
    """Run ``work``. Passes any exception to ``ended`` as Failed."""
    try:
        work()
    except _Interrupted:
        return
    except Exception as error:  # noqa: BLE001 - it ends the fleet, and is reported
        ended(_as_failed(error))


def _as_failed(error: Exception) -> Failed:
    """Returns the failure to report; logs the traceback of an unexpected error."""
    if isinstance(error, Failed):
        return error
    log.error("`up` failed", exc_info=error)
    return Failed("up-failed", f"{type(error).__name__}: {error}", "this is a bug; see daemon.log")


def _log_errors(stop: Callable[[], None]) -> None:
    with task_boundary(log, "the gateway did not stop cleanly"):
        stop()


def refuse_version(record: FleetRecord) -> None:
    """Raises Failed if the fleet runs in another version of corewright."""
    if record.version != corewright_version():
        message = f"the fleet {record.name} runs corewright {record.version}, and this is {corewright_version()}"
        hint = f"use corewright {record.version}; or stop the fleet with `corewright down`, and start it with this one"
        raise Failed("fleet-version-differs", message, hint)


def check_host_root() -> None:
    """Raises Failed if the variable for the host's root, in containers, names no folder."""
    root = os.environ.get(this_host.ROOT_VARIABLE)
    if root is not None and not (root.startswith("/") and Path(root).is_dir()):
        message = f"{this_host.ROOT_VARIABLE} must be the absolute path of a folder, not {root!r}"
        hint = "set it to the mount point of the host's root; outside containers unset it"
        raise Failed("setting-wrong", message, hint)


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raise Failed for a port in use. Binds without SO_REUSEPORT, with which a second fleet would share the port."""
    try:
        bind(host, port, shared=False).close()
    except OSError as error:
        fact = f"{host}:{port} cannot be bound: {error.strerror}"
        raise Failed("port-in-use", fact, f"choose another {option}") from None
