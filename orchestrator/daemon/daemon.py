"""`corewright up` on one machine: the process that owns a Ray, and takes everything down when it ends."""

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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from orchestrator.access.audit_log import Audit, AuditLine, caller
from orchestrator.access.tls import certified_name
from orchestrator.fleet.controller_settings import DRAIN_S, ControllerSettings
from orchestrator.fleet.progress_text import fetch_text, hold_text, tenths
from orchestrator.gateway.http.listener import bind
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
from workers.artifacts.store.store_settings import StoreSettings
from workers.host import host_facts as this_host

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# The end: drain 20 s, and all gone within 30 s.
DRAIN_GRACE_S = 2.0  # to end the replicas after the drain
GATEWAY_STOP_S = 3.0
LAST_DEADLINE_S = 3.0  # for what is killed at last
LEFTOVERS_DEADLINE_S = 8.0  # for what a killed daemon left: the promise is 10 s
STATUS_WAIT_S = 1.0  # a background call to Ray lasts no longer, so that the end need not wait for it
CONTROLLER_AWAY_S = 30.0  # a restart takes 2 s
CONTROLLER_RETRY_S = 0.2
CONTROLLER_THERE_S = 5.0  # whoever has kept a call for so long was there: without a controller it fails at once
WATCH_POLL_S = 0.5  # a change is applied once two readings agree
READY, TOLD, GONE = b"r", b"t", b"g"  # marks of the child: it was ready, has reported its end, has left nothing
MOST_NAMED = 4  # replicas in a line that says what is waited for
READY_POLL_S = 0.5  # between looks at whether a signal has come


def _quietly(stop: Callable[[], None]) -> None:
    try:
        stop()
    except Exception:
        log.exception("the gateway did not stop in order")


def _tell_if_possible(tell: Callable[[str], None], line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a reader that has gone: the fleet goes on
        tell(line)


class _Interrupted(Exception):
    """A signal, or `down`, while the fleet was still starting."""


@dataclass(frozen=True)
class UpOptions:
    """What the command line says about this `up`."""

    gateway: GatewaySettings
    dashboard: bool = True
    watch: bool = False  # apply the spec's file when it changes
    drain_s: float = DRAIN_S
    config: tuple[dict[str, Any], ...] = ()  # the settings with their origins, for `GET config`
    allowed_sources: tuple[str, ...] | None = None  # what a spec may read; None: anything
    data_plane: Literal["unix", "tcp"] = "unix"
    store: StoreSettings | None = None  # what each host keeps of artifacts; None: without a limit, in the home


def watched(work: Callable[[], None], ended: Callable[[Failed], None]) -> None:
    """Run ``work``; what it raises is told to ``ended``, foreseen or not."""
    try:
        work()
    except Failed as failure:
        ended(failure)
    except Exception as error:
        log.exception("a thread of `up` has failed")
        ended(_unforeseen(error))


def _unforeseen(error: Exception) -> Failed:
    return Failed("up-failed", f"{type(error).__name__}: {error}", "this is a bug: the log has more")


class Daemon:
    """One fleet, from start to end. ``tell`` receives each progress line."""

    def __init__(
        self,
        home: Home,
        options: UpOptions,
        spec: tuple[str, str, str],
        name: str,
        hosts: tuple[Host, ...],
        instance: str | None,
        tell: Callable[[str], None],
    ) -> None:
        """``spec`` is its text, its file name and the folder that its relative paths start from; ``name``
        is the fleet's."""
        self._home = home
        self._audit = Audit(home.audit)
        self._options = options
        self._spec = spec
        self._name = name
        self._hosts = hosts
        self._instance = instance
        self._tell = WaitingNotice(functools.partial(_tell_if_possible, tell))
        self._fleet = secrets.token_hex(8)
        self._pid = os.getpid()
        self._mark: Callable[[bytes], None] = lambda mark: None
        self._asked: queue.SimpleQueue[str | Failed] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._seen = 0  # version of the status that was told last
        self._told: dict[str, str] = {}
        self._told_hold = ""  # why the fleet does nothing, as the controller said last
        self._unready: list[str] = []  # what the fleet waits for before it is ready, as the controller said last
        self._ready = threading.Event()
        self._ending = False
        self._controller: Any = None
        self._asking = False
        self._ray_up = False
        self._further: list[Any] = []  # the Ray nodes of the emulated hosts but the first
        self._serve_up = False

    def run(self, on_ready: Callable[[FleetRecord], None]) -> int:
        """Start the fleet, call ``on_ready`` once, and stay until a signal or `down`. Must run on the main thread.

        The fleet runs in a child process (`apart`), and so does ``on_ready``. Gives the exit code; what ends the fleet
        is reported there and in the audit log, by this process if the child could not. Raises Failed when nothing was
        started.
        """
        _check_host_root()
        self._home.prepare()
        lock = self._home.lock()
        record = self._home.read_record()
        if lock is None:
            where = f" at {record.url} (pid {record.pid})" if record is not None else ""
            raise Failed(
                "fleet-already-running",
                f"a fleet of {self._home.path} runs{where}",
                "corewright apply SPEC changes it, corewright down ends it",
            )
        self._end_previous(record)
        gateway = self._options.gateway
        _check_port(gateway.host, gateway.port)
        written: AuditLine | None = self._audit.begin("up", "up", self._told_to_audit(), by=caller())
        previous = {number: signal.getsignal(number) for number in SIGNALS}
        self._listen_to_signals()
        try:
            ended = apart(functools.partial(self._live, written, on_ready), SIGNALS)
            if TOLD not in ended.marks:
                self._tell_of_death(ended, None if READY in ended.marks else written)
            leftovers = None if GONE in ended.marks else self._end_everything()
            if leftovers is not None:
                self._tell(f"stopped, but {leftovers}")
            return ended.code if TOLD in ended.marks and ended.code >= 0 and leftovers is None else 1
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(lock)

    def _tell_of_death(self, ended: Ended, written: AuditLine | None) -> None:
        """Report for a child that ended without a word."""
        how = f"exit code {ended.code}" if ended.code >= 0 else signal.Signals(-ended.code).name
        what = f"the process that owns Ray ended without a word ({how}): Ray ends it when its raylet or its GCS is gone"
        failed = Failed("up-died", what, f"see {self._home.logs / 'daemon.log'}, and Ray's logs under {self._home.ray}")
        self._audit_end(written, failed.problem.id)
        log.error("%s", failed)
        self._tell(render([failed.problem]).rstrip("\n"))

    def _live(
        self, written: AuditLine | None, on_ready: Callable[[FleetRecord], None], mark: Callable[[bytes], None]
    ) -> int:
        """The fleet, from its start to its end, in the child. Gives the exit code."""
        self._mark = mark
        outcome, code = "failed", 1
        try:
            record = self._start()
            with self._tell.waiting(self._waited_for):
                self._wait_ready()
            self._audit_end(written, "ready")
            written = None
            mark(READY)
            with contextlib.suppress(OSError):  # as of `_tell_if_possible`
                on_ready(record)
            if self._options.watch:
                self._in_background(self._watch_spec)
            request = self._asked.get()
            if isinstance(request, Failed):
                raise request
            outcome = request
            self._asking = True
            self._tell(f"{request}: draining for at most {self._options.drain_s:.0f} s (a signal more ends at once)")
            code = 0
        except (_Interrupted, SystemExit) as reason:  # SystemExit: Ray's own handler, while Ray starts
            self._tell(f"{reason}: ended before the fleet was ready")
        except Exception as error:
            if not isinstance(error, Failed):
                log.exception("`up` has failed")
            failed = error if isinstance(error, Failed) else _unforeseen(error)
            outcome = failed.problem.id
            self._tell(render([failed.problem]).rstrip("\n"))
        finally:
            self._audit_end(written, outcome)  # before Ray is shut down, which may end this process
            mark(TOLD)
            try:
                with self._tell.waiting(lambda: "running requests, replicas and Ray to end"):
                    self._take_down()
            finally:
                leftovers = self._end_everything()
                if leftovers is None:
                    mark(GONE)
                    self._tell("stopped")
        return code

    def _told_to_audit(self) -> dict[str, Any]:
        text, file, base_dir = self._spec
        gateway = self._options.gateway
        fields = {"text": text, "file": file, "base_dir": base_dir, "host": gateway.host, "port": gateway.port}
        return {**fields, "insecure": gateway.insecure, "tls": gateway.tls_cert is not None}

    def _audit_end(self, line: AuditLine | None, outcome: str) -> None:
        """``line`` None: the end of a fleet that was ready."""
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
            self._tell(f"the fleet of pid {record.pid} did not end cleanly: removing what it left")
        pids_left = end_leftovers(self._home, record.fleet, LEFTOVERS_DEADLINE_S)
        if pids_left:
            pids = ", ".join(map(str, pids_left))
            raise Failed("leftover-processes", f"processes of an earlier fleet do not die: {pids}", "end them by hand")
        self._home.forget_fleet()
        self._home.prepare()

    def _start(self) -> FleetRecord:
        """Ray, then the controller with the replicas, then the gateway. Gives the fleet's record, as it is written."""
        os.environ[FLEET_VARIABLE] = self._fleet
        os.environ["COREWRIGHT_HOME"] = str(self._home.path)
        cpus, admin_port = this_host.usable_cpus(), free_port()
        record = self._new_record(admin_port)
        self._home.write_record(record)  # before any process is started, so that the next `up` finds what is left
        self._tell("starting Ray")
        with self._tell.waiting(lambda: "Ray"):
            addresses = self._start_ray(len(cpus))
        dashboard = addresses.get("webui_url")
        record = record_with(
            record, ray_address=addresses["gcs_address"], dashboard_url=f"http://{dashboard}" if dashboard else None
        )
        self._home.write_record(record)
        self._raise_if_asked()
        self._tell("starting the controller and the replicas")
        with self._tell.waiting(lambda: "the controller"):
            self._start_controller(record.token, admin_port, cpus)
        self._in_background(self._narrate)
        self._raise_if_asked()
        self._tell("starting the gateway")
        with self._tell.waiting(lambda: ", ".join(("the gateway", *self._unready[:MOST_NAMED]))):
            self._start_gateway()
        return record

    def _new_record(self, admin_port: int) -> FleetRecord:
        gateway = self._options.gateway
        started = this_host.process_start(self._pid)
        assert started is not None
        return FleetRecord(
            fleet=self._fleet,
            name=self._name,
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

    def _start_ray(self, cpus: int) -> dict[str, Any]:
        """A node for each emulated host. Gives Ray's addresses."""
        self._home.secure_ray()  # before Ray is imported: it reads its settings then
        from orchestrator.on_ray import ray_nodes

        cores = max((host.cores for host in self._hosts), default=0)
        self._ray_up = True
        self._raise_if_asked()
        try:
            addresses = ray_nodes.start_ray(self._home.ray, cores=cores, cpus=cpus, dashboard=self._options.dashboard)
            self._listen_to_signals()
            for index, host in enumerate(self._hosts[1:], start=1):
                self._raise_if_asked()
                self._further.append(ray_nodes.add_node(index, cores=host.cores, cpus=cpus))
        except _Interrupted:
            raise
        except Exception as error:  # of many kinds, with pages of text
            log.exception("Ray does not start")
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            hint = f"its logs are under {self._home.ray}; ours is {self._home.logs / 'daemon.log'}"
            raise Failed("ray-not-started", f"Ray does not start: {cause}", hint) from None
        return addresses

    def _start_controller(self, token: str, admin_port: int, cpus: tuple[int, ...]) -> None:
        from orchestrator.access.authority import fleet_credentials
        from orchestrator.on_ray import actors

        text, file, base_dir = self._spec
        credentials = fleet_credentials()
        settings = ControllerSettings(
            fleet=self._fleet,
            home=str(self._home.path),
            spec_text=text,
            spec_file=file,
            base_dir=base_dir,
            token=token,
            admin_port=admin_port,
            cpus=cpus,
            instance=self._instance,
            drain_s=self._options.drain_s,
            daemon_pid=self._pid,
            config=self._options.config,
            log_format=self._options.gateway.log_format,
            allowed_sources=self._options.allowed_sources,
            data_plane=self._options.data_plane,
            store=self._options.store,
            gateway=credentials.gateway,
            replica=credentials.replica,
        )
        self._controller = actors.start_controller(settings)
        self._in_background(self._wait_down)

    def _start_gateway(self) -> None:
        from orchestrator.on_ray import actors

        self._serve_up = True
        try:
            actors.start_gateway(self._options.gateway)
        except Exception as error:  # of Serve, of many kinds
            log.exception("the gateway does not start")
            hint = f"see {self._home.logs / 'gateway.log'}"
            raise Failed("gateway-not-started", f"the gateway does not start: {error}", hint) from None

    def _in_background(self, work: Callable[[], None]) -> None:
        """Run ``work``, which calls Ray, until it sees that the end has begun; what it raises ends the fleet."""

        thread = threading.Thread(target=watched, args=(work, self._asked.put), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _ask_controller(self, call: Callable[[], Any]) -> Any:
        """What ``call`` gives, through restarts of the controller; None at the end. Raises Failed if it stays away."""
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer

        away_s, failed_at = 0.0, float("inf")
        while not self._ending:
            started = time.monotonic()
            try:
                return answer(call)
            except CallFailed as error:
                cause = f"the controller has failed: {error}"
                raise Failed("controller-failed", cause, f"see {self._home.logs / 'controller.log'}") from None
            except ActorUnavailable as error:
                now = time.monotonic()
                # a longer gap is a pause of this process, in which the controller had no time either
                away_s += min(max(0.0, now - failed_at), LATE_S)
                if now - started > CONTROLLER_THERE_S:
                    away_s = 0.0
                failed_at = now
                if away_s > CONTROLLER_AWAY_S:
                    what = f"the controller does not come back: {error}"
                    raise Failed("controller-failed", what, f"see {self._home.logs / 'controller.log'}") from None
                self._seen = 0  # Ray starts it again, and it counts anew
                time.sleep(CONTROLLER_RETRY_S)
        return None

    def _wait_ready(self) -> None:
        while not self._ready.wait(READY_POLL_S):
            self._raise_if_asked()

    def _waited_for(self) -> str:
        named, more = self._unready[:MOST_NAMED], len(self._unready) - MOST_NAMED
        return ", ".join(named) + (f" and {more} more" if more > 0 else "") or "the controller to find the fleet ready"

    def _narrate(self) -> None:
        """Say what becomes of the replicas, from their start to the end of the fleet."""
        while not self._ending:
            if self._narrate_once(STATUS_WAIT_S):
                self._ready.set()

    def _narrate_once(self, wait_s: float) -> bool:
        """Tell what has changed, waiting for at most ``wait_s``. Gives whether the fleet has become ready."""
        answer = self._ask_controller(lambda: self._controller.status.remote(self._seen, wait_s))
        if answer is None:
            return False
        self._seen, status = answer
        self._unready = [text for model in status["models"] for text in _unready(model)]
        hold = hold_text(status)
        if hold and hold != self._told_hold and not self._ending:
            self._tell(f"error: {hold}")
        self._told_hold = hold
        for model in status["models"]:
            lines = {replica["id"]: _progress(replica) for replica in model["replicas"]}
            if not lines and model["reason"]:
                told = f"{model['name']} {model['state']}: {model['reason']}"
                lines[model["name"]] = told, told
            for one in model["preparing"]:
                told = f"{model['name']} {one['state']} on {one['host']}, for what comes next"
                lines[f"{model['name']} on {one['host']}"] = told, told
            for id, (news, line) in lines.items():
                if self._told.get(id) != news and not self._ending:
                    self._told[id] = news
                    self._tell(line)
        return bool(status["ready"])

    def _watch_spec(self) -> None:
        """Apply the spec's file when it changes; one that is refused leaves the fleet as it is."""
        _, file, base_dir = self._spec
        applied = last = self._spec[0]
        failing = False  # of itself the last apply could have succeeded: a full disk
        while not self._ending:
            time.sleep(WATCH_POLL_S)
            text = _text_of(file)
            if text is None or text == applied or text != last:  # unchanged, or still being written
                last = text or last
                continue
            result = self._apply_watched(text, file, base_dir)
            if result is None or self._ending:
                return
            before, failing = failing, result.get("status", 0) >= 500
            if not (failing and before):  # said once, tried on
                self._tell_applied(file, result)
            if not failing:
                applied = text

    def _apply_watched(self, text: str, file: str, base_dir: str) -> Any:
        try:
            line = self._audit.begin("up", "apply", {"text": text, "file": file, "base_dir": base_dir}, by="up --watch")
        except Failed as failed:
            return {"error": failed.problem, "problems": (), "status": 507}
        call = functools.partial(self._controller.apply.remote, text, file, base_dir, "up --watch", "watch")
        result = self._ask_controller(call)
        if result is not None:
            outcome = result["error"].id if "error" in result else "done"
            try:
                self._audit.finish(line, outcome, result.get("revision"))
            except Failed as failed:
                log.error("%s", failed)
        return result

    def _tell_applied(self, file: str, result: dict[str, Any]) -> None:
        if "error" in result:
            problems = [*result["problems"], result["error"]]
            self._tell(render(problems).rstrip("\n"))
            self._tell(f"{file} was refused: the fleet stays as it is")
        elif result["changed"]:
            self._tell(f"{file} has changed: revision {result['revision']}")

    def _listen_to_signals(self) -> None:
        def asked(number: int, _: FrameType | None) -> None:
            if self._asking:
                self._tell("ending at once")
                self._mark(TOLD)
                self._end_everything()
                self._mark(GONE)
                os._exit(1)
            self._asking = True
            self._asked.put(signal.Signals(number).name)

        for number in SIGNALS:
            signal.signal(number, asked)

    def _wait_down(self) -> None:
        self._ask_controller(lambda: self._controller.wait_down.remote())
        self._asked.put("down")

    def _raise_if_asked(self) -> None:
        with contextlib.suppress(queue.Empty):
            request = self._asked.get_nowait()
            raise request if isinstance(request, Failed) else _Interrupted(request)

    # End

    def _take_down(self) -> None:
        """Drain and stop in order, whatever then still lives is killed by ``_end_everything``."""
        self._ending = True
        if not self._ray_up:
            return
        from orchestrator.on_ray import actors, ray_nodes
        from orchestrator.on_ray.calls import ActorUnavailable, CallFailed, answer, is_connected

        if not is_connected():
            return
        drain_s = self._options.drain_s
        if self._controller is not None:
            controller = self._controller
            with contextlib.suppress(CallFailed, ActorUnavailable):
                answer(lambda: controller.shutdown.remote(drain_s), drain_s + DRAIN_GRACE_S)
        if self._serve_up:
            stopping = threading.Thread(target=_quietly, args=(actors.stop_gateway,), daemon=True)
            stopping.start()
            stopping.join(GATEWAY_STOP_S)
        for thread in self._threads:  # a call to Ray after its shutdown would end this process at once
            thread.join(STATUS_WAIT_S + CONTROLLER_RETRY_S)
        if not any(thread.is_alive() for thread in self._threads):
            ray_nodes.stop_ray(self._further)

    def _end_everything(self) -> str | None:
        """Kill what still lives, and remove the record. Returns what is left, in words; None: nothing."""
        pids = end_leftovers(self._home, self._fleet, LAST_DEADLINE_S)
        if pids:
            return f"processes do not die: {', '.join(map(str, pids))}"
        try:
            self._home.forget_fleet()
        except OSError as error:
            return f"{self._home.record_file} cannot be removed: {error.strerror}"
        return None


def _text_of(file: str) -> str | None:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _unready(model: dict[str, Any]) -> list[str]:
    """What a model waits for before it is ready, such as "chat/0 (loading)"."""
    replicas = [f"{one['id']} ({one['state']})" for one in model["replicas"] if one["state"] != "ready"]
    return replicas or ([f"{model['name']} ({model['state']})"] if model["wanted"] and not model["replicas"] else [])


def record_with(record: FleetRecord, **changes: str | None) -> FleetRecord:
    import msgspec.structs

    return msgspec.structs.replace(record, **changes)


def _progress(replica: dict[str, Any]) -> tuple[str, str]:
    """What is news when it changes, and the line that tells it: of a fetch, each phase and each tenth of it."""
    held, fetch = replica["cores"], replica["fetch"]
    cores = "" if held is None else f" on core{'s' if '-' in held else ''} {held}"
    reason = f": {replica['reason']}" if replica["reason"] else ""
    line = f"{replica['id']} {replica['state']}{cores}{reason}"
    if fetch is None:
        return line, line
    silent = " silent" if fetch["trouble"] else ""
    return f"{line} {fetch['phase']} {tenths(fetch)}{silent}", f"{replica['id']} {fetch_text(fetch)}"


def _check_host_root() -> None:
    given = os.environ.get(this_host.ROOT_VARIABLE)
    if given is not None and not (given.startswith("/") and Path(given).is_dir()):
        what = f"{this_host.ROOT_VARIABLE} must be the absolute path of a folder, not {given!r}"
        raise Failed("setting-wrong", what, "where the host is mounted in this container; unset it outside of one")


def _check_port(host: str, port: int) -> None:
    """Bind without SO_REUSEPORT first: with it a second fleet would share the port, silently."""
    try:
        bind(host, port, shared=False).close()
    except OSError as error:
        raise Failed(
            "port-in-use", f"{host}:{port} cannot be bound: {error.strerror}", "choose another --port"
        ) from None


def _url(gateway: GatewaySettings) -> str:
    """Where clients find it. Of one that listens on every address with a certificate: by a name that this one is for,
    since no certificate is for 0.0.0.0."""
    host, cert = gateway.host, gateway.tls_cert
    if cert is not None and host in WILDCARDS:
        host = certified_name(cert)
    return f"{'http' if cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{gateway.port}"
