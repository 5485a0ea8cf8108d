"""The daemon of `corewright up`: starts a fleet with its own Ray cluster, and stops all of it at the end."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import secrets
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field
from types import FrameType
from typing import Any

import msgspec.structs

from orchestrator.access.audit_log import Audit, AuditLine, caller
from orchestrator.access.tls import certified_name
from orchestrator.daemon.controller_follower import CONTROLLER_RETRY_S, STATUS_WAIT_S, ControllerFollower
from orchestrator.daemon.display import Display, NoDisplay
from orchestrator.daemon.gateway_readiness import wait_for_gateway
from orchestrator.daemon.narration import MOST_NAMED
from orchestrator.daemon.own_ray import OwnRay
from orchestrator.daemon.start_checks import check_host_root, check_port
from orchestrator.fleet.controller_settings import ControllerSettings, FleetSettings
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.addresses import free_port
from orchestrator.process.child_process import Ended, apart
from orchestrator.process.failure import Failed
from orchestrator.process.home import FLEET_VARIABLE, WILDCARDS, FleetRecord, Home, daemon_alive, end_leftovers
from orchestrator.process.version import corewright_version
from orchestrator.process.waiting_notice import WaitingNotice
from placements.facts.topology import Host
from placements.spec.problems import render
from workers.host import host_facts as this_host
from workers.host.task_boundary import task_boundary
from workers.host.warm_processes import HANDED_OVER, WarmProcesses

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Shutdown: 20 s of drain by default, and all processes gone within 30 s.
SHUTDOWN_GRACE_S = 2.0  # for replicas to stop after the drain
GATEWAY_STOP_S = 3.0
LAST_DEADLINE_S = 3.0  # for killed processes to exit
LEFTOVERS_DEADLINE_S = 8.0  # for processes of an earlier, killed daemon; the documented limit is 10 s
READY, REPORTED, GONE = b"r", b"t", b"g"  # marks of the child: was ready, has reported its end, has left nothing
READY_POLL_S = 0.5  # between checks for a signal


def _log_errors(stop: Callable[[], None]) -> None:
    with task_boundary(log, "the gateway did not stop cleanly"):
        stop()


def report_if_possible(report: Callable[[str], None], line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the fleet
        report(line)


class _Interrupted(Exception):
    """A signal or `down` while the fleet was still starting."""


class UpOptions(FleetSettings, frozen=True, kw_only=True):
    """The options of one `up`."""

    gateway: GatewaySettings
    admin_port: int | None = None  # of the admin API and the console; None: a free one
    dashboard: bool = True
    watch: bool = False  # apply the spec's file when it changes


def watched(work: Callable[[], None], ended: Callable[[Failed], None]) -> None:
    """Run ``work``. Passes any exception to ``ended`` as Failed."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - it ends the fleet, and is reported
        ended(_as_failed(error))


def _as_failed(error: Exception) -> Failed:
    """Returns the failure to report; logs the traceback of an unexpected error."""
    if isinstance(error, Failed):
        return error
    log.error("`up` failed", exc_info=error)
    return Failed("up-failed", f"{type(error).__name__}: {error}", "this is a bug; see daemon.log")


@dataclass(eq=False)
class Daemon:
    """Runs one fleet, from start to end."""

    home: Home
    options: UpOptions
    spec: tuple[str, str, str]  # its text, its file name and the folder of its relative paths
    name: str  # of the fleet
    hosts: tuple[Host, ...]
    instance: str | None
    report: InitVar[Callable[[str], None]]  # receives each progress line
    display: Display = field(default_factory=NoDisplay)
    warm: Mapping[str, str | None] = field(default_factory=dict)  # the Python of each engine with a warm process

    def __post_init__(self, report: Callable[[str], None]) -> None:
        self._audit = Audit(self.home.audit)
        say = functools.partial(report_if_possible, report)
        self._report = WaitingNotice(say, shown=lambda: self.display.drawn)
        self._fleet = secrets.token_hex(8)
        self._pid = os.getpid()
        self._mark: Callable[[bytes], object] = lambda mark: None
        self._requests: queue.SimpleQueue[str | Failed] = queue.SimpleQueue()  # to end: a signal, `down` or a failure
        self._threads: list[threading.Thread] = []
        self._follower = ControllerFollower(self._report, self.home.logs, display=self.display)
        self._end_requested = False
        self._ray_up = False
        self._ray = OwnRay(self.home, self.name, self.hosts, self.options.dashboard)
        self._serve_up = False

    def run(self, on_ready: Callable[[FleetRecord], None]) -> int:
        """Start the fleet, call ``on_ready`` once, and run until a signal or `down`. Must run on the main thread.

        The fleet and ``on_ready`` run in a child process (`apart`). The child reports the cause of the end, also in
        the audit log; this process does so if the child cannot. Returns the exit code. Raises Failed if nothing was
        started.
        """
        check_host_root()
        self.home.prepare()
        lock = self.home.lock()
        record = self.home.read_record()
        if record is not None and record.on_cluster:
            message = f"the fleet {record.name} of {self.home.path} runs on the Ray cluster at {record.ray_address}"
            hint = "stop it with `corewright down`, or set another COREWRIGHT_HOME"
            raise Failed("fleet-already-running", message, hint)
        if lock is None:
            where = f" at {record.url} (pid {record.pid})" if record is not None else ""
            raise Failed(
                "fleet-already-running",
                f"a fleet of {self.home.path} is already running{where}",
                "change it with `corewright apply SPEC`, or stop it with `corewright down`",
            )
        self._end_previous(record)
        gateway = self.options.gateway
        check_port(gateway.host, gateway.port)
        if self.options.admin_port is not None:
            if self.options.admin_port == gateway.port:
                raise Failed("port-in-use", f"--port and --admin-port are both {gateway.port}", "choose another one")
            check_port("127.0.0.1", self.options.admin_port, "--admin-port")
        written: AuditLine | None = self._audit.begin("up", "up", self._audit_fields(), by=caller())
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        self._listen_to_signals()
        try:
            ended = apart(functools.partial(self._live, written, on_ready), SIGNALS)
            if REPORTED not in ended.marks:
                self._report_death(ended, None if READY in ended.marks else written)
            leftovers = None if GONE in ended.marks else self._end_everything()
            if leftovers is not None:
                self._report(f"stopped, but {leftovers}")
            return ended.code if REPORTED in ended.marks and ended.code >= 0 and leftovers is None else 1
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(lock)

    def _report_death(self, ended: Ended, written: AuditLine | None) -> None:
        """Report the end of a child that exited without reporting it."""
        how = f"exit code {ended.code}" if ended.code >= 0 else signal.Signals(-ended.code).name
        message = f"the process that owns Ray exited unexpectedly ({how}): Ray ends it when its raylet or GCS is gone"
        hint = f"see {self.home.logs / 'daemon.log'}, and Ray's logs under {self.home.ray}"
        failed = Failed("up-died", message, hint)
        self._audit_end(written, failed.problem.id)
        log.error("%s", failed)
        self._report(render([failed.problem]).rstrip("\n"))

    def _live(
        self, written: AuditLine | None, on_ready: Callable[[FleetRecord], None], mark: Callable[[bytes], object]
    ) -> int:
        """Run the fleet in the child, from start to end. Returns the exit code."""
        self._mark = mark
        outcome, code = "failed", 1
        try:
            record = self._start()
            with self._report.waiting(self._follower.narration.waited_for):
                self._wait_ready()
            with self._report.waiting(lambda: "the gateway to load the tokenizers"):
                wait_for_gateway(record.url, self._raise_if_requested)
            self._audit_end(written, "ready")
            written = None
            mark(READY)
            with contextlib.suppress(OSError):  # as in `report_if_possible`
                on_ready(record)
            if self.options.gateway.gateway_spare:
                self._in_background(self._start_spare_gateway)
            if self.options.watch:
                self._in_background(functools.partial(self._follower.watch, self.spec, self._audit))
            request = self._requests.get()
            if isinstance(request, Failed):
                raise request
            outcome = request
            self._end_requested = True
            drain_s = self.options.drain_s
            self._report(f"{request}: draining for at most {drain_s:.0f} s (a second signal stops immediately)")
            code = 0
        except (_Interrupted, SystemExit) as reason:  # SystemExit: Ray's own handler, while Ray starts
            number = reason.code if isinstance(reason, SystemExit) else None
            cause = signal.Signals(number).name if number in SIGNALS else str(reason)
            self._report(f"{cause}: ended before the fleet was ready")
        except Exception as error:  # noqa: BLE001 - it is reported
            failed = _as_failed(error)
            outcome = failed.problem.id
            self._report(render([failed.problem]).rstrip("\n"))
        finally:
            self.display.close()
            self._record_end()
            self._audit_end(written, outcome)  # before Ray is shut down, which may end this process
            mark(REPORTED)
            try:
                with self._report.waiting(lambda: "running requests, replicas and Ray to end"):
                    self._take_down()
            finally:
                leftovers = self._end_everything()
                if leftovers is None:
                    mark(GONE)
                    self._report("stopped")
        return code

    def _record_end(self) -> None:
        """Write that the fleet ends, for `down`, whose signal would be a second one."""
        record = self.home.read_record()
        if record is not None:
            with contextlib.suppress(OSError):  # a full disk
                self.home.write_record(msgspec.structs.replace(record, ending=True))

    def _audit_fields(self) -> dict[str, Any]:
        text, file, base_dir = self.spec
        gateway = self.options.gateway
        fields = {"text": text, "file": file, "base_dir": base_dir, "host": gateway.host, "port": gateway.port}
        return {**fields, "insecure": gateway.insecure, "tls": gateway.tls_cert is not None}

    def _audit_end(self, line: AuditLine | None, outcome: str) -> None:
        """Record the outcome of ``line``; None: record the end of a fleet that was ready."""
        try:
            if line is None:
                line = self._audit.begin("up", "end", {"reason": outcome}, by=caller())
                outcome = "done"
            self._audit.finish(line, outcome)
        except Failed as failed:  # an end cannot be refused
            log.error("%s", failed)

    # Start

    def _end_previous(self, record: FleetRecord | None) -> None:
        if record is None:
            return
        if not daemon_alive(record):
            self._report(f"the fleet of pid {record.pid} did not end cleanly: removing its leftovers")
        pids_left = end_leftovers(self.home, record.fleet, LEFTOVERS_DEADLINE_S)
        if pids_left:
            pids = ", ".join(map(str, pids_left))
            raise Failed("leftover-processes", f"processes of an earlier fleet do not exit: {pids}", "kill them")
        self.home.forget_fleet()
        self.home.prepare()

    def _start(self) -> FleetRecord:
        """Start Ray, then the controller with the replicas, then the gateway. Returns the fleet's record as written."""
        os.environ[FLEET_VARIABLE] = self._fleet
        os.environ["COREWRIGHT_HOME"] = str(self.home.path)
        admin_port = self.options.admin_port or free_port()
        record = self._new_record(admin_port)
        self.home.write_record(record)  # before any process starts, so that the next `up` finds leftovers
        if len(self.hosts) == 1:
            self._start_warm_processes()
        self._report("starting Ray")
        with self._report.waiting(lambda: "Ray"):
            addresses = self._start_ray()
        dashboard = addresses.get("webui_url")
        dashboard_url = f"http://{dashboard}" if dashboard else None
        record = msgspec.structs.replace(record, ray_address=addresses["gcs_address"], dashboard_url=dashboard_url)
        self.home.write_record(record)
        self._raise_if_requested()
        self._report("starting the controller and the replicas")
        with self._report.waiting(lambda: "the controller"):
            self._start_controller(record.token, admin_port)
        self._in_background(self._follower.narrate)
        self._raise_if_requested()
        self._report("starting the gateway")
        with self._report.waiting(lambda: ", ".join(("the gateway", *self._follower.narration.unready[:MOST_NAMED]))):
            self._start_gateway()
        return record

    def _start_warm_processes(self) -> None:
        """Start those of the only host already, whose actor takes them over: they import while Ray starts."""
        with (self.home.logs / "daemon.log").open("ab") as output:
            processes = WarmProcesses(self.home.sockets, output=output.fileno())
            processes.keep(self.warm)
        os.environ[HANDED_OVER] = processes.handed_over()

    def _new_record(self, admin_port: int) -> FleetRecord:
        gateway = self.options.gateway
        started = this_host.process_start(self._pid)
        assert started is not None
        return FleetRecord(
            fleet=self._fleet,
            name=self.name,
            url=gateway_url(gateway),
            listens=gateway.host,
            admin_url=f"http://127.0.0.1:{admin_port}",
            token=secrets.token_urlsafe(32),
            dashboard_url=None,
            ray_address="",
            pid=self._pid,
            started=started,
            version=corewright_version(),
            console_url=self.options.console_url,
        )

    def _start_ray(self) -> dict[str, Any]:
        """Returns Ray's addresses."""
        self._ray_up = True
        try:
            addresses = self._ray.start(self._raise_if_requested)
            self._listen_to_signals()  # Ray has handlers of its own
        except (_Interrupted, Failed):
            raise
        except Exception as error:  # Ray raises many types, with pages of text
            log.exception("Ray does not start")
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            hint = f"see Ray's logs under {self.home.ray}, and {self.home.logs / 'daemon.log'}"
            raise Failed("ray-not-started", f"Ray does not start: {cause}", hint) from None
        return addresses

    def _start_controller(self, token: str, admin_port: int) -> None:
        from orchestrator.access.tls import fleet_credentials
        from orchestrator.on_ray import controller_actor

        text, file, base_dir = self.spec
        credentials = fleet_credentials()
        settings = ControllerSettings(
            fleet=self._fleet,
            name=self.name,
            home=str(self.home.path),
            spec_text=text,
            spec_file=file,
            base_dir=base_dir,
            token=token,
            admin_port=admin_port,
            cpus=self._ray.cpus,
            instance=self.instance,
            devices=this_host.devices() or None,
            daemon_pid=self._pid,
            log_format=self.options.gateway.log_format,
            gateway=credentials.gateway,
            replica=credentials.replica,
            **{name: getattr(self.options, name) for name in FleetSettings.__struct_fields__},
        )
        self._follower.controller = controller_actor.start_controller(settings)
        self._in_background(self._wait_down)

    def _start_gateway(self) -> None:
        from orchestrator.on_ray import gateway_deployment

        self._serve_up = True
        try:
            gateway_deployment.start_gateway(self.options.gateway, self.name)
        except Exception as error:  # Ray Serve raises many types
            log.exception("the gateway does not start")
            hint = f"see {self.home.logs / 'gateway.log'}"
            raise Failed("gateway-not-started", f"the gateway does not start: {error}", hint) from None

    def _start_spare_gateway(self) -> None:
        from orchestrator.on_ray import gateway_deployment

        with task_boundary(log, "no gateway stands by for one that dies"):
            gateway_deployment.start_spare_gateway(self.options.gateway, self.name)

    def _in_background(self, work: Callable[[], None]) -> None:
        """Run ``work``, which calls Ray and returns after the shutdown has begun. If it raises, the fleet ends."""

        thread = threading.Thread(target=watched, args=(work, self._requests.put), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _wait_ready(self) -> None:
        while not self._follower.ready.wait(READY_POLL_S):
            self._raise_if_requested()

    def _listen_to_signals(self) -> None:
        def on_signal(number: int, _: FrameType | None) -> None:
            if self._end_requested:
                self._report("stopping immediately")
                self._mark(REPORTED)
                self._end_everything()
                self._mark(GONE)
                os._exit(1)
            self._end_requested = True
            self._requests.put(signal.Signals(number).name)

        for number in SIGNALS:
            signal.signal(number, on_signal)

    def _wait_down(self) -> None:
        self._follower.ask(lambda: self._follower.controller.wait_down.remote())
        self._requests.put("down")

    def _raise_if_requested(self) -> None:
        with contextlib.suppress(queue.Empty):
            request = self._requests.get_nowait()
            raise request if isinstance(request, Failed) else _Interrupted(request)

    # End

    def _take_down(self) -> None:
        """Drain and stop in order. ``_end_everything`` kills the processes that remain."""
        self._follower.ending = True
        if not self._ray_up:
            return
        from orchestrator.on_ray import gateway_deployment
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer, is_connected

        if not is_connected():
            return
        drain_s = self.options.drain_s
        if (controller := self._follower.controller) is not None:
            with contextlib.suppress(CallFailed, ActorUnavailable):
                answer(lambda: controller.shutdown.remote(drain_s), drain_s + SHUTDOWN_GRACE_S)
        if self._serve_up:
            stopping = threading.Thread(target=_log_errors, args=(gateway_deployment.stop_serve,), daemon=True)
            stopping.start()
            stopping.join(GATEWAY_STOP_S)
        for thread in self._threads:  # a call to Ray after its shutdown would end this process
            thread.join(STATUS_WAIT_S + CONTROLLER_RETRY_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._ray.stop()

    def _end_everything(self) -> str | None:
        """Kill the remaining processes, and remove the record. Returns what could not be removed, or None."""
        pids = end_leftovers(self.home, self._fleet, LAST_DEADLINE_S)
        if pids:
            return f"processes do not exit: {', '.join(map(str, pids))}"
        try:
            self.home.forget_fleet()
        except OSError as error:
            return f"{self.home.record_file} cannot be removed: {error.strerror}"
        return None


def gateway_url(gateway: GatewaySettings) -> str:
    """Returns the URL for clients. If the gateway listens on every address with TLS, it has a name of the certificate,
    because no certificate is for 0.0.0.0."""
    host, cert = gateway.host, gateway.tls_cert
    if cert is not None and host in WILDCARDS:
        host = certified_name(cert)
    return f"{'http' if cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{gateway.port}"
