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
import time
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from types import FrameType
from typing import Any

import msgspec.structs

from orchestrator.access.audit_log import Audit, AuditLine, caller
from orchestrator.access.tls import certified_name
from orchestrator.daemon.narration import MOST_NAMED, Narration
from orchestrator.daemon.ray_connection import JoinedRay, OwnRay, RayConnection
from orchestrator.daemon.spec_watch import SpecWatch
from orchestrator.daemon.start_checks import check_host_root, check_port
from orchestrator.fleet.controller_settings import ControllerSettings, FleetSettings
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.process.addresses import free_port
from orchestrator.process.awake_clock import LATE_S
from orchestrator.process.child_process import Ended, apart
from orchestrator.process.failure import Failed
from orchestrator.process.home import FLEET_VARIABLE, WILDCARDS, FleetRecord, Home, daemon_alive, end_leftovers
from orchestrator.process.version import corewright_version
from orchestrator.process.waiting_notice import WaitingNotice
from placements.facts.topology import Host
from placements.spec.problems import render
from workers.host import host_facts as this_host
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Shutdown: 20 s of drain by default, and all processes gone within 30 s.
SHUTDOWN_GRACE_S = 2.0  # for replicas to stop after the drain
GATEWAY_STOP_S = 3.0
LAST_DEADLINE_S = 3.0  # for killed processes to exit
LEFTOVERS_DEADLINE_S = 8.0  # for processes of an earlier, killed daemon; the documented limit is 10 s
STATUS_WAIT_S = 1.0  # longest background call to Ray, which the shutdown waits for
CONTROLLER_AWAY_S = 30.0  # a restart takes 2 s
CONTROLLER_RETRY_S = 0.2
CONTROLLER_THERE_S = 5.0  # a call that lasted this long had a controller: without one it fails immediately
WATCH_POLL_S = 0.5  # a change is applied once two readings agree
READY, REPORTED, GONE = b"r", b"t", b"g"  # marks of the child: was ready, has reported its end, has left nothing
READY_POLL_S = 0.5  # between checks for a signal


def _log_errors(stop: Callable[[], None]) -> None:
    with task_boundary(log, "the gateway did not stop cleanly"):
        stop()


def _report_if_possible(report: Callable[[str], None], line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not stop the fleet
        report(line)


class _Interrupted(Exception):
    """A signal or `down` while the fleet was still starting."""


class UpOptions(FleetSettings, frozen=True, kw_only=True):
    """The options of one `up`."""

    gateway: GatewaySettings
    dashboard: bool = True
    watch: bool = False  # apply the spec's file when it changes
    ray_address: str | None = None  # of the Ray cluster to join; None: start one on this machine


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

    def __post_init__(self, report: Callable[[str], None]) -> None:
        self._audit = Audit(self.home.audit)
        self._report = WaitingNotice(functools.partial(_report_if_possible, report))
        self._fleet = secrets.token_hex(8)
        self._pid = os.getpid()
        self._mark: Callable[[bytes], object] = lambda mark: None
        self._requests: queue.SimpleQueue[str | Failed] = queue.SimpleQueue()  # to end: a signal, `down` or a failure
        self._threads: list[threading.Thread] = []
        self._status_version = 0  # of the last status that was reported
        self._narration = Narration()
        self._ready = threading.Event()
        self._ending = False
        self._controller: Any = None
        self._end_requested = False
        self._ray_up = False
        address = self.options.ray_address
        self._ray: RayConnection = (
            OwnRay(self.home, self.name, self.hosts, self.options.dashboard)
            if address is None
            else JoinedRay(address, self.hosts, self._fleet, self.name, self._report)
        )
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
        if lock is None:
            where = f" at {record.url} (pid {record.pid})" if record is not None else ""
            raise Failed(
                "fleet-already-running",
                f"a fleet of {self.home.path} is already running{where}",
                "change it with `corewright apply SPEC`, or stop it with `corewright down`",
            )
        self._end_previous(record)
        if record is not None:
            self._ray.previous = record.fleet
        gateway = self.options.gateway
        check_port(gateway.host, gateway.port)
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
            with self._report.waiting(self._narration.waited_for):
                self._wait_ready()
            self._audit_end(written, "ready")
            written = None
            mark(READY)
            with contextlib.suppress(OSError):  # as in `_report_if_possible`
                on_ready(record)
            if self.options.watch:
                self._in_background(self._watch_spec)
            request = self._requests.get()
            if isinstance(request, Failed):
                raise request
            outcome = request
            self._end_requested = True
            drain_s = self.options.drain_s
            self._report(f"{request}: draining for at most {drain_s:.0f} s (a second signal stops immediately)")
            code = 0
        except (_Interrupted, SystemExit) as reason:  # SystemExit: Ray's own handler, while Ray starts
            self._report(f"{reason}: ended before the fleet was ready")
        except Exception as error:  # noqa: BLE001 - it is reported
            failed = _as_failed(error)
            outcome = failed.problem.id
            self._report(render([failed.problem]).rstrip("\n"))
        finally:
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
        admin_port = free_port()
        record = self._new_record(admin_port)
        self.home.write_record(record)  # before any process starts, so that the next `up` finds leftovers
        self._report("joining the Ray cluster" if self._ray.joined else "starting Ray")
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
        self._in_background(self._narrate)
        self._raise_if_requested()
        self._report("starting the gateway")
        with self._report.waiting(lambda: ", ".join(("the gateway", *self._narration.unready[:MOST_NAMED]))):
            self._start_gateway()
        return record

    def _new_record(self, admin_port: int) -> FleetRecord:
        gateway = self.options.gateway
        started = this_host.process_start(self._pid)
        assert started is not None
        return FleetRecord(
            fleet=self._fleet,
            name=self.name,
            url=_url(gateway),
            listens=gateway.host,
            admin_url=f"http://127.0.0.1:{admin_port}",
            token=secrets.token_urlsafe(32),
            dashboard_url=None,
            ray_address="",
            pid=self._pid,
            started=started,
            version=corewright_version(),
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
        from orchestrator.access.authority import fleet_credentials
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
            joined=self._ray.joined,
            instance=self.instance,
            daemon_pid=self._pid,
            log_format=self.options.gateway.log_format,
            gateway=credentials.gateway,
            replica=credentials.replica,
            **{name: getattr(self.options, name) for name in FleetSettings.__struct_fields__},
        )
        self._controller = controller_actor.start_controller(settings)
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

    def _in_background(self, work: Callable[[], None]) -> None:
        """Run ``work``, which calls Ray and returns after the shutdown has begun. If it raises, the fleet ends."""

        thread = threading.Thread(target=watched, args=(work, self._requests.put), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask_controller(self, call: Callable[[], Any]) -> Any:
        """Returns the result of ``call``, retried while the controller restarts; None during shutdown.

        Raises Failed if the controller does not come back."""
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer

        away_s, failed_at = 0.0, float("inf")
        while not self._ending:
            started = time.monotonic()
            try:
                return answer(call)
            except CallFailed as error:
                raise self._controller_failed(f"the controller failed: {error}") from None
            except ActorUnavailable as error:
                now = time.monotonic()
                # a longer gap is a pause of this process, in which the controller was paused too
                away_s += min(max(0.0, now - failed_at), LATE_S)
                if now - started > CONTROLLER_THERE_S:
                    away_s = 0.0
                failed_at = now
                if away_s > CONTROLLER_AWAY_S:
                    raise self._controller_failed(f"the controller does not come back: {error}") from None
                self._status_version = 0  # a restarted controller counts from the start
                time.sleep(CONTROLLER_RETRY_S)
        return None

    def _controller_failed(self, what: str) -> Failed:
        return Failed("controller-failed", what, f"see {self.home.logs / 'controller.log'}")

    def _wait_ready(self) -> None:
        while not self._ready.wait(READY_POLL_S):
            self._raise_if_requested()

    def _narrate(self) -> None:
        """Report changes of replicas until the fleet ends."""
        while not self._ending:
            reply = self._ask_controller(lambda: self._controller.status.remote(self._status_version, STATUS_WAIT_S))
            if reply is None:
                return
            self._status_version, status = reply
            for line in self._narration.news(status):
                self._report_unless_ending(line)
            if status["ready"]:
                self._ready.set()

    def _report_unless_ending(self, line: str) -> None:
        if not self._ending:
            self._report(line)

    def _watch_spec(self) -> None:
        """Apply the spec's file when it changes, until the fleet ends."""
        watch = SpecWatch(self.spec, self._audit, self._apply_watched, self._report_unless_ending)
        while not self._ending:
            time.sleep(WATCH_POLL_S)
            watch.poll()

    def _apply_watched(self, text: str, file: str, base_dir: str) -> Any:
        apply = self._controller.apply
        return self._ask_controller(lambda: apply.remote(text, file, base_dir, "up --watch", "watch"))

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
        self._ask_controller(lambda: self._controller.wait_down.remote())
        self._requests.put("down")

    def _raise_if_requested(self) -> None:
        with contextlib.suppress(queue.Empty):
            request = self._requests.get_nowait()
            raise request if isinstance(request, Failed) else _Interrupted(request)

    # End

    def _take_down(self) -> None:
        """Drain and stop in order. ``_end_everything`` kills the processes that remain."""
        self._ending = True
        if not self._ray_up:
            return
        from orchestrator.on_ray import gateway_deployment
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer, is_connected

        if not is_connected():
            return
        drain_s = self.options.drain_s
        if self._controller is not None:
            controller = self._controller
            with contextlib.suppress(CallFailed, ActorUnavailable):
                answer(lambda: controller.shutdown.remote(drain_s), drain_s + SHUTDOWN_GRACE_S)
        if self._serve_up:
            stop = functools.partial(gateway_deployment.stop_gateway, self.name, shared=self._ray.joined)
            stopping = threading.Thread(target=_log_errors, args=(stop,), daemon=True)
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


def _url(gateway: GatewaySettings) -> str:
    """Returns the URL for clients. If the gateway listens on every address with TLS, it has a name of the certificate,
    because no certificate is for 0.0.0.0."""
    host, cert = gateway.host, gateway.tls_cert
    if cert is not None and host in WILDCARDS:
        host = certified_name(cert)
    return f"{'http' if cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{gateway.port}"
