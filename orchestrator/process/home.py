"""The home folder `$COREWRIGHT_HOME`, the record of the running fleet, and the fleet's leftover processes."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path

import msgspec
import psutil

from orchestrator.process.failure import Failed
from workers.host import file_lock, lifetime, private_file

FLEET_VARIABLE = "COREWRIGHT_FLEET"  # in the environment of every process of a fleet, set before Ray starts

SOCKET_BYTES = 107  # the longest path of a unix socket
LONGEST_SOCKET = "gateways/999999-999.999999"  # longer than any name in the sockets folder

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard addresses, and the loopback address that each includes."""


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of `fleet.json`: the addresses of the fleet, and its process."""

    fleet: str  # a random id, new for each `up`
    name: str  # of the spec
    url: str  # the OpenAI-compatible address
    admin_url: str
    token: str
    dashboard_url: str | None
    ray_address: str
    pid: int
    started: float  # start time of the daemon, by `lifetime.process_start`
    version: str
    listens: str = ""  # the address that the gateway listens on
    on_cluster: bool = False  # a Ray cluster that others started: the process is the controller, which may move
    boot: str = msgspec.field(default_factory=lifetime.boot)  # the boot id that ``started`` belongs to
    console_url: str | None = None  # of the console behind a proxy
    ending: bool = False  # `up` ends the fleet

    @property
    def console(self) -> str:
        """The address of the web console."""
        return self.console_url or f"{self.admin_url}/console/"

    @property
    def nearby(self) -> str | None:
        """The loopback address of a gateway of this machine that listens on every address; else None."""
        return None if self.on_cluster else WILDCARDS.get(self.listens)


class _Below:
    """The path of a file or folder in a home."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, home: Home, owner: type[Home]) -> Path:
        return home.path / self._name


@dataclass(frozen=True)
class Home:
    """The folders under `$COREWRIGHT_HOME` (default `~/.corewright`). ``prepare`` creates them."""

    path: Path

    record_file = _Below("fleet.json")
    logs = _Below("logs")
    store = _Below("store")  # fetched models, and the small files of remote models
    compiled = _Below("compiled")  # compiled artifacts of all models
    seats = _Below("gateways")  # the lock files of gateways; not beside their sockets, which may be removed
    journal = _Below("journal")  # of the controller; outlives a fleet
    speeds = _Below("speeds.json")  # measured ones; outlives a fleet, too, but may be deleted
    keys = _Below("keys.json")  # the digests of API keys
    received = _Below("received")  # on a machine of a joined cluster: what its gateways have from the controller
    traces = _Below("traces")  # lengths of recorded requests, which `corewright trace export` reads
    audit = _Below("audit.log")  # of this home's fleets
    ray_token_file = _Below("ray-token")  # Ray's ports are not bound to loopback, and its dashboard requires the token

    @classmethod
    def from_environment(cls) -> Home:
        """Returns the home of this process. Raises Failed if other users can write to it, and it cannot be trusted."""
        path = Path(os.environ.get("COREWRIGHT_HOME") or Path.home() / ".corewright").absolute()
        refuse_shared(path)
        return cls(path)

    @property
    def temporary(self) -> Path:
        """A folder of this home below /tmp, with a short path."""
        return Path(f"/tmp/cw-{os.getuid()}") / self._digest

    @property
    def ray(self) -> Path:
        """Ray's files: sockets and logs. Not below XDG_RUNTIME_DIR, which is in memory and may be small."""
        return self.temporary / "ray"

    @property
    def sockets(self) -> Path:
        """The folder of the unix sockets: below XDG_RUNTIME_DIR, which is not cleaned like /tmp, or ``temporary`` if
        that is not a folder of this user, or its path is too long."""
        runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
        folder = runtime / "cw" / self._digest
        if len(os.fsencode(folder / LONGEST_SOCKET)) > SOCKET_BYTES or not runtime.is_absolute():
            return self.temporary
        try:
            usable = runtime.is_dir() and runtime.stat().st_uid == os.getuid()
        except OSError:
            usable = False
        return folder if usable else self.temporary

    @property
    def _digest(self) -> str:
        return blake2s(str(self.path).encode(), digest_size=4).hexdigest()

    def secure_ray(self) -> None:
        """Enable token authentication for the Ray cluster that this process starts, unless the environment sets a mode.
        Must be called before Ray is imported."""
        if "RAY_AUTH_MODE" in os.environ:
            return
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            with written(self.ray_token_file), os.fdopen(private_file.create(self.ray_token_file), "w") as file:
                file.write(secrets.token_hex(32))
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(self.ray_token_file)

    def claims(self, host_index: int) -> Path:
        return self.path / "emulated" / f"emu-{host_index}"

    def log(self, model: str, replica: int) -> Path:
        return self.logs / f"{model}-{replica}.log"

    def prepare(self) -> None:
        """Create the folders, for this user only. Raises Failed for a folder that cannot be created, or that others
        can write to."""
        short = (self.temporary.parent, self.temporary, self.sockets.parent, self.sockets)
        for folder in (self.path, self.logs, *short):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise Failed("home-unusable", f"{folder} cannot be created: {error.strerror}", remedy(error)) from None
            refuse_shared(folder)

    def lock(self) -> int | None:
        """Lock the home for this daemon until the process ends. Returns the descriptor to keep open; None if another
        daemon holds the lock. Raises Failed if the home cannot be written."""
        path = self.path / "daemon.lock"
        with written(path):
            return file_lock.take(path)

    def read_record(self) -> FleetRecord | None:
        """Returns the record of the last `up`, running or not; None if there is none, or it cannot be read. Without the
        home, it is the copy that commands need to end its fleet."""
        for file in (self.record_file, self._record_copy):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if file == self.record_file or file.lstat().st_uid == os.getuid():  # anybody can write to /tmp
                    return msgspec.json.decode(file.read_bytes(), type=FleetRecord)
        return None

    @property
    def _record_copy(self) -> Path:
        """A copy of the record, outside the home."""
        return self.temporary / "fleet.json"

    def write_record(self, record: FleetRecord) -> None:
        """Write the record atomically, for this user only (it holds the token). Raises Failed."""
        content = msgspec.json.format(msgspec.json.encode(record), indent=2)
        with written(self.record_file):
            private_file.replace(self.record_file, content)
        with contextlib.suppress(OSError):
            private_file.replace(self._record_copy, content)

    def forget_fleet(self) -> None:
        """Remove the record, the sockets and what gateways have received of a fleet that has ended."""
        self.record_file.unlink(missing_ok=True)
        for folder in (self.sockets, self.temporary, self.received):
            shutil.rmtree(folder, ignore_errors=True)


def refuse_shared(folder: Path) -> None:
    """Raises Failed for a folder, or a link to one, of another user or that other users can write to. A folder that
    does not exist or is not visible passes, because its use will fail."""
    try:
        status = folder.stat()
        owners = {folder.lstat().st_uid, status.st_uid} - {os.getuid()}
    except OSError:
        return
    if owners:
        raise Failed(
            "home-unusable",
            f"{folder} belongs to user {owners.pop()}",
            "run the command as that user, or set COREWRIGHT_HOME",
        )
    if stat.S_ISDIR(status.st_mode) and status.st_mode & 0o022:
        fact = f"{folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        raise Failed("home-unusable", fact, f"check its contents, then run chmod go-w {shlex.quote(str(folder))}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """Converts an OSError while the file at ``path`` is written to Failed."""
    try:
        yield
    except OSError as error:
        raise Failed("home-unusable", f"{path} cannot be written: {error.strerror}", remedy(error)) from None


def remedy(error: OSError) -> str:
    """Returns the hint for a home that cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free some space, or inodes (df -h, df -i)" if full else "make it writable for this user"
    return f"{first}; or set COREWRIGHT_HOME to another folder"


def fleet_processes(home: Home, fleet: str) -> list[psutil.Process]:
    """Returns every running process of that fleet except this one.

    They are found by a variable in their environment or, if a process title has overwritten that (Ray's agents), by a
    file under the home's Ray folder that they can write to. A list of pids would never be complete, because Ray starts
    and replaces processes on its own.
    """
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid == os.getpid() or process.uids().real != os.getuid():
                continue
            if process.environ().get(FLEET_VARIABLE) == fleet or _writes_under(process.pid, home.temporary):
                processes.append(process)
    return processes


def _writes_under(pid: int, folder: Path) -> bool:
    prefix = f"{folder}/"
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(descriptor.readlink()).startswith(prefix):
                continue
            flags = Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text().split("flags:")[1].split()[0]
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:  # a process that only reads a log is not ours
                return True
    return False


def end_leftovers(home: Home, fleet: str, deadline_s: float) -> list[int]:
    """Kill the processes of a fleet and wait for them. Returns the pids that remain at the deadline."""
    deadline = time.monotonic() + deadline_s
    while (processes := fleet_processes(home, fleet)) and time.monotonic() < deadline:
        for process in processes:  # a killed raylet can leave a worker that it was forking, hence the loop
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
    return [process.pid for process in processes]


def find_leftovers(home: Home, record: FleetRecord) -> str | None:
    """Returns a description of what a fleet left after its daemon has ended, or None."""
    current = home.read_record()
    pids = ", ".join(str(process.pid) for process in fleet_processes(home, record.fleet))
    parts = [f"processes remain ({pids})"] if pids else []
    if current is not None and current.fleet == record.fleet:
        parts.append(f"{home.record_file} remains")
    return " and ".join(parts) or None


def daemon_alive(record: FleetRecord) -> bool:
    """Returns whether the daemon that wrote the record is still running; of a fleet on a cluster, the record itself
    says so."""
    return record.on_cluster or (record.boot == lifetime.boot() and lifetime.is_alive(record.pid, record.started))
