"""What corewright keeps on disk: `$COREWRIGHT_HOME`, the record of the running fleet, and the processes it left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
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
from workers.host import lifetime

FLEET_VARIABLE = "COREWRIGHT_FLEET"  # in the environment of every process of a fleet, set before Ray starts

SOCKET_BYTES = 107  # the longest path of a unix socket
LONGEST_SOCKET = "gateways/999999-999.999999"  # longer than any name in the folder of the sockets

WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that stand for every address of the machine, and the one of loopback among these."""


class FleetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`fleet.json`: how to speak to the fleet, and which process it is."""

    fleet: str  # a name that is new for each `up`
    name: str  # the spec's
    url: str  # the OpenAI-compatible address
    admin_url: str
    token: str
    dashboard_url: str | None
    ray_address: str
    pid: int
    started: float  # the daemon's start, by `lifetime.process_start`
    version: str
    listens: str = ""  # the address that the gateway listens on
    boot: str = msgspec.field(default_factory=lifetime.boot)  # the run of the kernel that ``started`` is of

    @property
    def nearby(self) -> str | None:
        """Where this machine finds a gateway that listens on every address, whatever name ``url`` has; else None."""
        return WILDCARDS.get(self.listens)


@dataclass(frozen=True)
class Home:
    """The folders under `$COREWRIGHT_HOME` (default `~/.corewright`). Nothing is made before ``prepare``."""

    path: Path

    @classmethod
    def from_environment(cls) -> Home:
        """The home of this process. Raises Failed where others can write to it: nothing in it can be trusted then."""
        path = Path(os.environ.get("COREWRIGHT_HOME") or Path.home() / ".corewright").absolute()
        refuse_shared(path)
        return cls(path)

    @property
    def record_file(self) -> Path:
        return self.path / "fleet.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def store(self) -> Path:
        """What was fetched of models, and the small files of those that are elsewhere."""
        return self.path / "store"

    @property
    def compiled(self) -> Path:
        """Where compiled artifacts are kept, of all models."""
        return self.path / "compiled"

    @property
    def temporary(self) -> Path:
        """A short folder of this home's own below /tmp."""
        return Path(f"/tmp/cw-{os.getuid()}") / self._digest

    @property
    def ray(self) -> Path:
        """Ray's files: sockets and logs. Not below XDG_RUNTIME_DIR, which is memory and may be small."""
        return self.temporary / "ray"

    @property
    def sockets(self) -> Path:
        """Where the unix sockets are: below XDG_RUNTIME_DIR, which no cleaner of temporary folders visits, or
        ``temporary`` where that is not this user's folder, or too long."""
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
    def seats(self) -> Path:
        """What the gateways of a fleet lock; not beside their sockets, which may be removed."""
        return self.path / "gateways"

    @property
    def _digest(self) -> str:
        return blake2s(str(self.path).encode(), digest_size=4).hexdigest()

    @property
    def journal(self) -> Path:
        """What the controller must not forget, from one fleet to the next."""
        return self.path / "journal"

    @property
    def keys(self) -> Path:
        """The API keys: only their digests."""
        return self.path / "keys.json"

    @property
    def traces(self) -> Path:
        """What was asked of the models, in lengths: `corewright trace export` reads it."""
        return self.path / "traces"

    @property
    def audit(self) -> Path:
        """What was asked of the fleets of this home, and by whom."""
        return self.path / "audit.log"

    @property
    def ray_token_file(self) -> Path:
        """Ray's own token: its ports are not bound to loopback, and its dashboard asks for it."""
        return self.path / "ray-token"

    def secure_ray(self) -> None:
        """Have the Ray that this process starts demand a token, unless the environment already says how. Must come
        before Ray is imported."""
        if "RAY_AUTH_MODE" in os.environ:
            return
        os.environ["RAY_AUTH_MODE"] = "token"
        if not os.environ.keys() & {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}:
            with written(self.ray_token_file), os.fdopen(create_anew(self.ray_token_file), "w") as file:
                file.write(secrets.token_hex(32))
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(self.ray_token_file)

    def claims(self, host_index: int) -> Path:
        return self.path / "emulated" / f"emu-{host_index}"

    def log(self, model: str, replica: int) -> Path:
        return self.logs / f"{model}-{replica}.log"

    def prepare(self) -> None:
        """Make the folders, for this user only. Raises Failed naming the one that cannot be made or that others can
        write to."""
        short = (self.temporary.parent, self.temporary, self.sockets.parent, self.sockets)
        for folder in (self.path, self.logs, *short):
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise Failed("home-unusable", f"{folder} cannot be made: {error.strerror}", remedy(error)) from None
            refuse_shared(folder)

    def lock(self) -> int | None:
        """Become the one daemon of this home until the process ends; None when another one is. Keep the descriptor.
        Raises Failed where the home cannot be written."""
        flags, path = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, self.path / "daemon.lock"
        with written(path):
            descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def read_record(self) -> FleetRecord | None:
        """The record of the last `up`, whether or not it still runs; None without one, or when it cannot be read."""
        try:
            return msgspec.json.decode(self.record_file.read_bytes(), type=FleetRecord)
        except (OSError, msgspec.MsgspecError):
            return None

    def write_record(self, record: FleetRecord) -> None:
        """Publish the record whole, for this user only (it holds the token). Raises Failed where it cannot be."""
        draft = self.record_file.with_suffix(".new")
        try:
            with written(self.record_file):
                with os.fdopen(create_anew(draft), "wb") as file:
                    file.write(msgspec.json.format(msgspec.json.encode(record), indent=2))
                draft.rename(self.record_file)
        except Failed:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise

    def forget_fleet(self) -> None:
        """Remove the record and the sockets of a fleet that has ended."""
        self.record_file.unlink(missing_ok=True)
        for folder in (self.sockets, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)


def refuse_shared(folder: Path) -> None:
    """Raises Failed for a folder, or a link to one, that is another user's or that others can write to. A folder that
    does not exist, or that this process cannot see, passes: its use fails then."""
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
        what = f"{folder} can be written by other users (mode {stat.S_IMODE(status.st_mode):04o})"
        raise Failed("home-unusable", what, f"check what is in it; then chmod go-w {shlex.quote(str(folder))}")


@contextlib.contextmanager
def written(path: Path) -> Iterator[None]:
    """What is done within it writes the file at ``path`` of a home. Raises Failed for an OSError."""
    try:
        yield
    except OSError as error:
        raise Failed("home-unusable", f"{path} cannot be written: {error.strerror}", remedy(error)) from None


def remedy(error: OSError) -> str:
    """What helps where a home cannot be written."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    first = "free some space, or inodes (df -h, df -i)" if full else "make it writable for this user"
    return f"{first}; or set COREWRIGHT_HOME to another folder"


def create_anew(path: Path) -> int:
    """A descriptor of a new file that only this user can read, in place of what had that name. Raises OSError."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def fleet_processes(home: Home, fleet: str) -> list[psutil.Process]:
    """Every living process of that fleet but this one.

    Found by the mark in its environment, or, where a process title has overwritten that (Ray's agents), by a file under
    the home's Ray folder that it can write to. Not by a list of pids: Ray starts and replaces processes on its own, so
    that a list is never complete.
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
            if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:  # someone who only reads a log is none of ours
                return True
    return False


def end_leftovers(home: Home, fleet: str, deadline_s: float) -> list[int]:
    """Kill what is left of a fleet and wait until it is gone. Gives the pids that are still there at the deadline."""
    deadline = time.monotonic() + deadline_s
    while (processes := fleet_processes(home, fleet)) and time.monotonic() < deadline:
        for process in processes:  # a killed raylet can leave a worker that was just being forked: hence the loop
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=max(0.0, deadline - time.monotonic()))
    return [process.pid for process in processes]


def left_behind(home: Home, record: FleetRecord) -> str | None:
    """What is left of a fleet whose daemon has ended, in words; None: nothing."""
    now = home.read_record()
    pids = ", ".join(str(process.pid) for process in fleet_processes(home, record.fleet))
    parts = [f"processes are left ({pids})"] if pids else []
    if now is not None and now.fleet == record.fleet:
        parts.append(f"{home.record_file} is left")
    return " and ".join(parts) or None


def daemon_alive(record: FleetRecord) -> bool:
    """Whether the daemon that wrote the record still runs."""
    return record.boot == lifetime.boot() and lifetime.is_alive(record.pid, record.started)
