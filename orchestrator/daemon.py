"""`corewright up` on one machine: the process that owns a Ray, and takes everything down when it ends."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from orchestrator.failure import Failed
from orchestrator.fleet import DRAIN_S, FleetSettings
from orchestrator.gateway.server import listen
from orchestrator.home import FLEET_VARIABLE, FleetRecord, Home, daemon_alive, end_leftovers
from orchestrator.version import corewright_version
from placements.topology import Host
from workers import host as this_host

log = logging.getLogger(__name__)

LEFTOVERS_DEADLINE_S = 8.0
LAST_DEADLINE_S = 5.0
STATUS_WAIT_S = 5.0
READY_POLL_S = 0.5  # between looks at whether a signal has come


class _Interrupted(Exception):
    """A signal, or `down`, while the fleet was still starting."""


@dataclass(frozen=True)
class UpOptions:
    """What the command line says about this `up`."""

    host: str
    port: int
    dashboard: bool = True


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
        self._options = options
        self._spec = spec
        self._name = name
        self._hosts = hosts
        self._instance = instance
        self._tell = tell
        self._fleet = secrets.token_hex(8)
        self._asked: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._seen = 0  # version of the status that was told last
        self._told: dict[str, str] = {}
        self._ending = False
        self._controller: Any = None
        self._asking = False
        self._ray_up = False
        self._serve_up = False

    def run(self, on_ready: Callable[[FleetRecord], None]) -> int:
        """Start the fleet, call ``on_ready`` once, and stay until a signal or `down`. Must run on the main thread.

        Gives the exit code. Raises Failed when the fleet cannot start.
        """
        self._home.prepare()
        lock = self._home.lock()
        record = self._home.read_record()
        if lock is None:
            where = f" at {record.url} (pid {record.pid})" if record is not None else ""
            raise Failed("fleet-already-running", f"a fleet of {self._home.path} runs{where}", "corewright down")
        self._end_previous(record)
        _check_port(self._options.host, self._options.port)
        previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        try:
            record = self._start()
            self._wait_ready()
            on_ready(record)
            threading.Thread(target=self._narrate, name="narrate", daemon=True).start()
            reason = self._asked.get()
            self._tell(f"{reason}: draining for at most {DRAIN_S:.0f} s (once more ends at once)")
            return 0
        except _Interrupted as reason:
            self._tell(f"{reason}: ended before the fleet was ready")
            return 1
        finally:
            self._take_down()
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(lock)

    # Start

    def _end_previous(self, record: FleetRecord | None) -> None:
        if record is None:
            return
        if not daemon_alive(record):
            self._tell(f"the fleet of pid {record.pid} did not end cleanly: removing what it left")
        left = end_leftovers(self._home, record.fleet, LEFTOVERS_DEADLINE_S)
        if left:
            pids = ", ".join(map(str, left))
            raise Failed("leftover-processes", f"processes of an earlier fleet do not die: {pids}", "end them by hand")
        self._home.forget_fleet()
        self._home.prepare()

    def _start(self) -> FleetRecord:
        self._home.secure_ray()  # before Ray is imported: it reads its settings then
        from orchestrator import cluster

        os.environ[FLEET_VARIABLE] = self._fleet
        os.environ["COREWRIGHT_HOME"] = str(self._home.path)
        token = secrets.token_urlsafe(32)
        admin_port = _free_port()
        started = this_host.process_start(os.getpid())
        assert started is not None
        record = FleetRecord(
            fleet=self._fleet,
            name=self._name,
            url=f"http://{_in_url(self._options.host)}:{self._options.port}",
            admin_url=f"http://127.0.0.1:{admin_port}",
            token=token,
            dashboard_url=None,
            ray_address="",
            pid=os.getpid(),
            started=started,
            version=corewright_version(),
        )
        self._home.write_record(record)  # before any process is started, so that the next `up` finds what is left
        self._tell("starting Ray")
        cpus = this_host.usable_cpus()
        cores = max((host.cores for host in self._hosts), default=0)
        self._ray_up = True
        try:
            addresses = cluster.start_ray(
                self._home.ray, cores=cores, cpus=len(cpus), dashboard=self._options.dashboard
            )
        except Exception as error:  # of many kinds, with pages of text
            log.exception("Ray does not start")
            cause = str(error).strip().splitlines()[0]
            hint = f"its logs are under {self._home.ray}; ours is {self._home.logs / 'daemon.log'}"
            raise Failed("ray-not-started", f"Ray does not start: {cause}", hint) from None
        self._listen_to_signals()
        dashboard = addresses.get("webui_url")
        record = record_with(
            record, ray_address=addresses["gcs_address"], dashboard_url=f"http://{dashboard}" if dashboard else None
        )
        self._home.write_record(record)
        self._raise_if_asked()

        from orchestrator import actors

        text, file, base_dir = self._spec
        settings = FleetSettings(
            fleet=self._fleet,
            home=str(self._home.path),
            spec_text=text,
            spec_file=file,
            base_dir=base_dir,
            token=token,
            admin_port=admin_port,
            cpus=cpus,
            instance=self._instance,
        )
        self._tell("starting the controller and the replicas")
        self._controller = actors.start_controller(settings)
        threading.Thread(target=self._wait_down, name="wait-down", daemon=True).start()
        self._tell("starting the gateway")
        self._serve_up = True
        actors.start_gateway(self._options.host, self._options.port, str(self._home.logs))
        return record

    def _wait_ready(self) -> None:
        while not self._narrate_once(READY_POLL_S):
            self._raise_if_asked()

    def _narrate(self) -> None:
        """Go on telling what becomes of the replicas, until Ray is gone."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            while not self._ending:
                self._narrate_once(STATUS_WAIT_S)

    def _narrate_once(self, wait_s: float) -> bool:
        """Tell what has changed, waiting for at most ``wait_s``. Gives whether the fleet has become ready."""
        import ray

        try:
            self._seen, status = ray.get(self._controller.status.remote(self._seen, wait_s))
        except ray.exceptions.RayTaskError as error:
            what = f"the controller has ended: {error.cause}"
            raise Failed("controller-failed", what, f"see {self._home.logs / 'controller.log'}") from None
        except ray.exceptions.RayActorError:
            self._seen = 0  # Ray starts it again
            return False
        for model in status["models"]:
            lines = {replica["id"]: _progress(replica) for replica in model["replicas"]}
            if not lines and model["reason"]:
                lines[model["name"]] = f"{model['name']} {model['state']}: {model['reason']}"
            for id, line in lines.items():
                if self._told.get(id) != line and not self._ending:
                    self._told[id] = line
                    self._tell(line)
        return bool(status["ready"])

    def _listen_to_signals(self) -> None:
        def asked(number: int, _: FrameType | None) -> None:
            if self._asking:
                self._tell("ending at once")
                self._end_everything()
                os._exit(1)
            self._asking = True
            self._asked.put(signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, asked)

    def _wait_down(self) -> None:
        import ray

        while True:
            try:
                ray.get(self._controller.wait_down.remote())
            except ray.exceptions.RayActorError:
                time.sleep(0.2)  # Ray starts it again
                continue
            except ray.exceptions.RayError:
                return
            self._asked.put("down")
            return

    def _raise_if_asked(self) -> None:
        with contextlib.suppress(queue.Empty):
            raise _Interrupted(self._asked.get_nowait())

    # End

    def _take_down(self) -> None:
        import ray

        from orchestrator import actors, cluster

        self._ending = True
        if self._ray_up and ray.is_initialized():
            if self._controller is not None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(self._controller.shutdown.remote(DRAIN_S), timeout=DRAIN_S + LAST_DEADLINE_S)
            if self._serve_up:
                with contextlib.suppress(ray.exceptions.RayError, RuntimeError):
                    actors.stop_gateway()
            cluster.stop_ray()
        self._end_everything()
        self._tell("stopped")

    def _end_everything(self) -> None:
        left = end_leftovers(self._home, self._fleet, LAST_DEADLINE_S)
        if not left:
            self._home.forget_fleet()


def record_with(record: FleetRecord, **changes: str | None) -> FleetRecord:
    import msgspec.structs

    return msgspec.structs.replace(record, **changes)


def _progress(replica: dict[str, Any]) -> str:
    cores = f" on cores {replica['cores']}" if replica["cores"] is not None else ""
    reason = f": {replica['reason']}" if replica["reason"] else ""
    return f"{replica['id']} {replica['state']}{cores}{reason}"


def _check_port(host: str, port: int) -> None:
    """Bind without SO_REUSEPORT first: with it a second fleet would share the port, silently."""
    try:
        listen(host, port, shared=False).close()
    except OSError as error:
        raise Failed(
            "port-in-use", f"{host}:{port} cannot be bound: {error.strerror}", "choose another --port"
        ) from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
