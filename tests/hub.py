"""A server that speaks what huggingface_hub asks of the hub: real sockets, a commit for each revision, and faults."""

from __future__ import annotations

import base64
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
SIGNED = (  # the query of an address to which the hub leads for large files
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAHUBMARKED%2F20261122%2Fus-east-1%2Fs3%2Faws4_request"
    f"&X-Amz-Date=20261122T000000Z&X-Amz-Expires=3600&X-Amz-Security-Token=hubmarkedsession&{SIGNATURE}"
)
LFS_SUFFIXES = (".safetensors", ".bin", ".pt")


@dataclass
class Repo:
    """Files by name, by commit; and what branches and tags stand at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    private: bool = False  # only who has the token sees it
    gated: bool = False  # its terms are accepted by nobody
    expired: bool = False  # signed addresses are refused
    uploaded: dict[str, bytes] = field(default_factory=dict)  # by sha256: what waits for the commit that names it

    def commit(self, files: Mapping[str, bytes], *names: str) -> str:
        """A further commit, at which ``names`` stand then; main if there are none."""
        content = repr((len(self.commits), sorted(files.items()))).encode()
        made = hashlib.sha1(content).hexdigest()
        self.commits[made] = dict(files)
        self.names.update(dict.fromkeys(names or ("main",), made))
        return made

    @property
    def files(self) -> dict[str, bytes]:
        """Of main, as it stands."""
        return self.commits[self.names["main"]]

    def resolve(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.names.get(revision)


@dataclass
class Asked:
    method: str
    path: str
    token: str  # of the Authorization header
    sent: int = 0  # bytes of the body


class HubServer:
    """``HF_ENDPOINT`` is its ``url``. Large files come from a signed address of another host, and go to one."""

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
        server = _Server(("127.0.0.1", self.port), _handler(self))
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
        return sum(request.sent for request in self.asked)

    def take(self, counts: dict[str, int], name: str) -> bool:
        """Returns whether one more of the faults is due."""
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
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": tag_of(name, data)}
    if name.endswith(LFS_SUFFIXES):
        entry |= {"blobId": "0" * 40, "lfs": {"sha256": tag_of(name, data), "size": len(data), "pointerSize": 130}}
    return entry


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no news."""


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        owner = hub

    return Handler


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: HubServer

    def setup(self) -> None:
        super().setup()
        self.owner.connections.add(self.connection)

    def finish(self) -> None:
        self.owner.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *args: object) -> None:
        pass

    # What is asked

    def do_any(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.noted = Asked(self.command, self.path, token)
        self.owner.asked.append(self.noted)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.owner.is_busy():
            self.answer(503)
        elif parts[0] == "cdn":
            self.cdn(parts[1:])
        elif self.command == "POST":
            self.post(parts, token)
        else:
            self.get(parts, token)

    do_GET = do_HEAD = do_POST = do_PUT = do_any

    def get(self, parts: list[str], token: str) -> None:
        if parts[:2] == ["api", "models"] and "tree" in parts:
            at = parts.index("tree")
            self.with_repo("/".join(parts[2:at]), parts[at + 1], token, self.tree)
        elif parts[:2] == ["api", "models"]:
            named, _, revision = "/".join(parts[2:]).partition("/revision/")
            self.with_repo(named, revision or "main", token, self.info)
        elif "resolve" in parts:
            at = parts.index("resolve")
            named, name = "/".join(parts[:at]), "/".join(parts[at + 2 :])
            self.with_repo(named, parts[at + 1], token, lambda repo, made: self.resolve(named, repo, made, name))
        else:
            self.answer(404)

    def post(self, parts: list[str], token: str) -> None:
        """Of who writes: with the token only."""
        if token != TOKEN:
            self.answer(401)
        elif parts == ["api", "repos", "create"]:
            request = json.loads(self.body)
            named = "/".join(filter(None, (request.get("organization"), request["name"])))
            if named not in self.owner.repos:
                self.owner.repos[named] = Repo(private=True)
                self.owner.repos[named].commit({})
            self.answer_json({"url": f"{self.owner.url}/{named}", "id": named, "name": named})
        elif parts[-3:] == ["lfs", "objects", "batch"]:
            self.batch("/".join(parts[:-4]).removesuffix(".git"))
        elif parts[:2] == ["api", "models"] and parts[-2] == "preupload":
            self.preupload()
        elif parts[:2] == ["api", "models"] and parts[-2] == "commit":
            self.commit("/".join(parts[2:-2]))
        elif parts == ["api", "validate-yaml"]:
            self.answer_json({"errors": [], "warnings": []})
        else:
            self.answer(404)

    def with_repo(self, named: str, revision: str, token: str, then: Callable[[Repo, str], None]) -> None:
        repo = self.owner.repos.get(named)
        if repo is None or (repo.private and token != TOKEN):
            self.answer(401, {"X-Error-Code": "RepoNotFound"})
        elif repo.gated and "resolve" in self.path:
            self.answer(403, {"X-Error-Code": "GatedRepo"})
        elif (made := repo.resolve(revision)) is None:
            self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            then(repo, made)

    # Reading

    def info(self, repo: Repo, made: str) -> None:
        files = repo.commits[made].items()
        siblings = [_sibling(name, data) for name, data in sorted(files)]
        self.answer_json({"id": "x/y", "sha": made, "siblings": siblings})

    def tree(self, repo: Repo, made: str) -> None:
        entries = []
        for name, data in sorted(repo.commits[made].items()):
            entry = {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
            lfs = {"oid": tag_of(name, data), "size": len(data), "pointerSize": 130}
            entries.append(entry | ({"lfs": lfs} if name.endswith(LFS_SUFFIXES) else {"oid": tag_of(name, data)}))
        self.answer_json(entries)

    def resolve(self, named: str, repo: Repo, made: str, name: str) -> None:
        data = repo.commits[made].get(name)
        headers = {"X-Repo-Commit": made}
        if data is None:
            self.answer(404, headers | {"X-Error-Code": "EntryNotFound"})
        elif not name.endswith(LFS_SUFFIXES):
            self.content(name, data, headers | {"ETag": f'"{tag_of(name, data)}"'})
        else:
            headers |= {"X-Linked-ETag": f'"{tag_of(name, data)}"', "X-Linked-Size": str(len(data))}
            self.answer(302, headers | {"Location": self.signed(f"{named}/{made}/{name}")})

    def cdn(self, parts: list[str]) -> None:
        """The other host, which knows no token: who has a signed address may read, or write."""
        repo = self.owner.repos["/".join(parts[:2])]
        if SIGNATURE not in self.path or repo.expired:
            self.answer(403, {}, f"<Error><Code>AccessDenied</Code><Resource>{self.path}</Resource></Error>".encode())
        elif self.command == "PUT":
            repo.uploaded[parts[-1]] = self.body
            self.answer(200)
        else:
            self.content(name := "/".join(parts[3:]), repo.commits[parts[2]][name], {})

    def signed(self, path: str) -> str:
        return f"http://localhost:{self.owner.port}/cdn/{path}?{SIGNED}"

    def content(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        """From where the range begins that is asked for, with the faults that are due."""
        hub = self.owner
        if self.command == "GET" and hub.take(hub.flips, name):
            data = bytes([data[0] ^ 0xFF]) + data[1:]
        begin, status = 0, 200
        if (wanted := self.headers.get("Range", "")).startswith("bytes=") and data:
            begin, status = int(wanted[6:].split("-")[0]), 206
            headers |= {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"}
        rest = data[begin:]
        self.head(status, headers | {"Content-Length": str(len(rest))})
        if self.command != "HEAD":
            self.send_body(name, rest)

    def send_body(self, name: str, data: bytes) -> None:
        """All of it; or a half, where it is held or cut."""
        hub = self.owner
        half = hub.held.get(name) or (hub.take(hub.cuts, name) and threading.Event())
        if half:
            data = data[: len(data) // 2]
        self.noted.sent += len(data)
        self.wfile.write(data)
        if half:
            self.wfile.flush()
            half.set()
            if name in hub.held:
                hub.wait_for_the_end()
            self.close_connection = True

    # Writing

    def preupload(self) -> None:
        answers = []
        for file in json.loads(self.body)["files"]:
            mode = "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular"
            answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
        self.answer_json({"files": answers})

    def batch(self, named: str) -> None:
        """Where large files are to be put: a signed address for each."""
        answers = []
        for object in json.loads(self.body)["objects"]:
            upload = {"href": self.signed(f"{named}/{object['oid']}")}
            answers.append({"oid": object["oid"], "size": object["size"], "actions": {"upload": upload}})
        self.answer_json({"transfer": "basic", "objects": answers})

    def commit(self, named: str) -> None:
        repo = self.owner.repos[named]
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(repo.files)
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = repo.uploaded[value["oid"]]
        made = repo.commit(files)
        self.answer_json({"success": True, "commitUrl": f"{self.owner.url}/{named}/commit/{made}", "commitOid": made})

    # Answering

    def answer_json(self, answer: Any) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def answer(self, status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> None:
        self.head(status, {**(headers or {}), "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
