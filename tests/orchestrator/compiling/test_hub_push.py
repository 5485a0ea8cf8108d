"""Compiled artifacts are uploaded to a hub: whole entries, one commit each, by a server that speaks its API."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.compiling.hub_push import push_to_hub
from orchestrator.process.failure import Failed
from workers.compiled.host_sets import MANIFEST, entry
from workers.compiled.pruning import Removed, prune_compiled

TOKEN = "hf_marked-secret"


class Hub(ThreadingHTTPServer):
    """Keeps what is committed; ``refuses``: the status that every request gets."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.made: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.refuses = 0
        self.before_commit: Callable[[], object] = lambda: None


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        names = self.server.files
        if "/tree/" in self.path:
            self._answer([{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names])
        else:
            self._answer({"id": "me/neffs", "sha": "0" * 40, "siblings": [{"rfilename": name} for name in names]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = f"http://127.0.0.1:{self.server.server_port}/me/neffs"
        if self.path.endswith("/repos/create"):
            self.server.made.append(json.loads(body))
            self._answer({"url": url, "id": "me/neffs", "name": "me/neffs"})
        elif "/preupload/" in self.path:
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            self._answer({"files": [file | {"shouldIgnore": False, "oid": None} for file in files]})
        elif "/commit/" in self.path:
            self.server.before_commit()
            values = [line["value"] for line in map(json.loads, body.splitlines()) if line["key"] == "file"]
            self.server.files |= {value["path"]: base64.b64decode(value["content"]) for value in values}
            self.server.commits.append([value["path"] for value in values])
            self._answer({"success": True, "commitUrl": f"{url}/commit/{'1' * 40}", "commitOid": "1" * 40})
        else:
            self._answer({})

    def _answer(self, answer: Any) -> None:
        self.server.tokens.add(self.headers.get("Authorization", ""))
        data = json.dumps({"error": "no"} if self.server.refuses else answer).encode()
        self.send_response(self.server.refuses or 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment says otherwise, which huggingface_hub reads once."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete entry."""
    with entry(tmp_path, {"engine": "e"}) as held:
        (held.path / "code").mkdir()
        (held.path / "code" / "a.so").write_bytes(b"program")
        held.finish()
    return held.path


def test_an_entry_is_one_commit_with_the_layout_of_a_neff_cache(hub: Hub, folder: Path) -> None:
    """In a private repository, with the token of the environment."""
    (place,) = push_to_hub("me/neffs", [folder])
    assert place == f"corewright/compiled/{folder.name}"
    assert hub.files[f"{place}/code/a.so"] == b"program"
    assert f"{place}/{MANIFEST}" in hub.files
    assert (len(hub.commits), hub.tokens) == (1, {f"Bearer {TOKEN}"})
    assert hub.made[0].get("private") is True or hub.made[0].get("visibility") == "private"


def test_an_existing_entry_is_not_sent_again(hub: Hub, folder: Path) -> None:
    """Its manifest identifies it."""
    push_to_hub("me/neffs", [folder])
    push_to_hub("me/neffs", [folder])
    assert len(hub.commits) == 1


def test_an_entry_is_locked_while_it_is_sent(
    hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cache prune` does not remove it meanwhile; one that was removed before is reported."""
    monkeypatch.setattr(hub, "before_commit", lambda: gone.extend(prune_compiled(tmp_path, -1.0)))
    gone: list[Removed] = []
    push_to_hub("me/neffs", [folder])
    assert (len(hub.commits), gone) == (1, [])
    assert [Path(pruned.path) for pruned in prune_compiled(tmp_path, -1.0)] == [folder]
    hub.files.clear()
    with pytest.raises(Failed, match="was deleted meanwhile"):
        push_to_hub("me/neffs", [folder])


@pytest.mark.parametrize("status", [401, 403])
def test_a_rejection_has_the_missing_permission_and_no_token(hub: Hub, folder: Path, status: int) -> None:
    """Write access of the account."""
    hub.refuses = status
    with pytest.raises(Failed) as caught:
        push_to_hub("me/neffs", [folder])
    message = str(caught.value.problem)
    assert caught.value.problem.id == "hub-push-failed"
    assert "HF_TOKEN" in message
    assert TOKEN not in message


def test_an_unreachable_hub_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server listens at that port."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(Failed, match="hub-push-failed"):
        push_to_hub("me/neffs", [folder])
