"""A server that speaks what huggingface_hub asks of the hub: real sockets, a commit for each revision, and faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_corewrightMarkedToken"  # recognizable, so that a test can look for it where it must not be
SIGNATURE = "X-Amz-Signature=hubmarked"
LFS_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass
class Repo:
    """Files by name, by commit; and what branches and tags stand at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    private: bool = False  # only who has the token sees it
    gated: bool = False  # its terms are accepted by nobody

    def commit(self, files: Mapping[str, bytes], *names: str) -> str:
        """A further commit, at which ``names`` stand then; main if there are none."""
        told = repr((len(self.commits), sorted(files.items()))).encode()
        made = hashlib.sha1(told).hexdigest()
        self.commits[made] = dict(files)
        self.names.update(dict.fromkeys(names or ("main",), made))
        return made

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.names.get(revision)


@dataclass
class Asked:
    method: str
    path: str
    token: str  # of the Authorization header
    sent: int = 0  # bytes of the body


class HubServer:
    """``HF_ENDPOINT`` is its ``url``. Large files are answered by a redirection to a signed address of another host."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[Asked] = []
        self.flips: dict[str, int] = {}  # file -> how many answers have a byte that is another one
        self.cuts: dict[str, int] = {}  # file -> how many answers end in the middle
        self.busy = 0  # how many answers are 503
        self.held: dict[str, threading.Event] = {}  # file -> set, once a half of it was sent; the rest never comes
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.port = 0
        self.back()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.url, "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1,localhost"}

    def away(self) -> None:
        """Nobody listens at the address, and connections are cut."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        for connection in [*self.connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def back(self) -> None:
        """Somebody does again."""
        server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        server.daemon_threads = True
        self._server, self.port = server, server.server_address[1]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._end.set()
        self.away()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def sent(self) -> int:
        """Bytes of files."""
        return sum(one.sent for one in self.asked)

    def take(self, counts: dict[str, int], name: str) -> bool:
        """Whether one more of the faults is due."""
        with self._lock:
            left = counts.get(name, 0)
            counts[name] = max(0, left - 1)
            return left > 0

    def is_busy(self) -> bool:
        with self._lock:
            self.busy, busy = max(0, self.busy - 1), self.busy > 0
            return busy

    def wait_for_the_end(self) -> None:
        self._end.wait(60)


def tag_of(name: str, data: bytes) -> str:
    if name.endswith(LFS_SUFFIXES):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    told: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": tag_of(name, data)}
    if name.endswith(LFS_SUFFIXES):
        told |= {"blobId": "0" * 40, "lfs": {"sha256": tag_of(name, data), "size": len(data), "pointerSize": 130}}
    return told


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            hub.connections.add(self.connection)

        def finish(self) -> None:
            hub.connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            self.noted = Asked(self.command, self.path, token)
            hub.asked.append(self.noted)
            parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
            if hub.is_busy():
                self.answer(503)
            elif parts[:2] == ["api", "models"] and "tree" in parts:
                at = parts.index("tree")
                self.with_repo("/".join(parts[2:at]), parts[at + 1], token, self.tree)
            elif parts[:2] == ["api", "models"]:
                named, _, revision = "/".join(parts[2:]).partition("/revision/")
                self.with_repo(named, revision or "main", token, self.info)
            elif "resolve" in parts:
                at = parts.index("resolve")
                named, name = "/".join(parts[:at]), "/".join(parts[at + 2 :])
                self.with_repo(named, parts[at + 1], token, lambda repo, made: self.resolve(named, repo, made, name))
            elif parts[0] == "cdn" and SIGNATURE in self.path:
                name = "/".join(parts[4:])
                self.content(name, hub.repos["/".join(parts[1:3])].commits[parts[3]][name], {})
            else:
                self.answer(404)

        do_HEAD = do_GET

        def with_repo(self, named: str, revision: str, token: str, then: Callable[[Repo, str], None]) -> None:
            repo = hub.repos.get(named)
            if repo is None or (repo.private and token != TOKEN):
                self.answer(401, {"X-Error-Code": "RepoNotFound"})
            elif repo.gated and "resolve" in self.path:
                self.answer(403, {"X-Error-Code": "GatedRepo"})
            elif (made := repo.resolve(revision)) is None:
                self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            else:
                then(repo, made)

        def info(self, repo: Repo, made: str) -> None:
            files = repo.commits[made].items()
            told = {"id": "x/y", "sha": made, "siblings": [_sibling(name, data) for name, data in sorted(files)]}
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

        def tree(self, repo: Repo, made: str) -> None:
            told = []
            for name, data in sorted(repo.commits[made].items()):
                one = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                lfs = {"oid": tag_of(name, data), "size": len(data), "pointerSize": 130}
                told.append(one | ({"lfs": lfs} if name.endswith(LFS_SUFFIXES) else {"oid": tag_of(name, data)}))
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

        def resolve(self, named: str, repo: Repo, made: str, name: str) -> None:
            data = repo.commits[made].get(name)
            headers = {"X-Repo-Commit": made}
            if data is None:
                self.answer(404, headers | {"X-Error-Code": "EntryNotFound"})
            elif not name.endswith(LFS_SUFFIXES):
                self.content(name, data, headers | {"ETag": f'"{tag_of(name, data)}"'})
            else:
                headers |= {"X-Linked-ETag": f'"{tag_of(name, data)}"', "X-Linked-Size": str(len(data))}
                at = f"http://localhost:{hub.port}/cdn/{named}/{made}/{name}?{SIGNATURE}"
                self.answer(302, headers | {"Location": at})

        def content(self, name: str, data: bytes, headers: dict[str, str]) -> None:
            if self.command == "GET" and hub.take(hub.flips, name):
                data = bytes([data[0] ^ 0xFF]) + data[1:]
            begin, status = 0, 200
            if (asked := self.headers.get("Range", "")).startswith("bytes=") and data:
                begin, status = int(asked[6:].split("-")[0]), 206
                headers |= {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
            rest = data[begin:]
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(rest))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            half = hub.held.get(name) or (hub.take(hub.cuts, name) and threading.Event())
            if half:
                rest = rest[: len(rest) // 2]
            self.noted.sent += len(rest)
            self.wfile.write(rest)
            if half:
                self.wfile.flush()
                half.set()
                if name in hub.held:
                    hub.wait_for_the_end()
                self.close_connection = True

        def answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
            self.send_response(status)
            for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
