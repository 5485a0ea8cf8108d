"""A source that is a mapping of names to contents, and the processes of tests that fetch it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Listing, RemoteFile, Stopped

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
BLOCK = 1 << 16


def _nothing(name: str) -> None:
    pass


class FakeRemote:
    """Keeps `Remote`: resumes by whole files, weights last. ``moved`` is what was fetched, in that order."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        source: str = "s3://models/one",
        revision: str = "",
        *,
        before: Callable[[str], None] = _nothing,  # called with the name of each file before its last bytes are written
        checksums: bool = False,
    ) -> None:
        self.files = dict(files)
        self.source = source
        self.revision = revision
        self.before = before
        self.checksums = checksums
        self.moved: list[str] = []
        self.listings = 0

    def listing(self) -> Listing:
        self.listings += 1
        files = [
            RemoteFile(
                name=name,
                size=len(content),
                tag=f"etag-{sha256(content).hexdigest()[:16]}",
                checksum=f"sha256:{sha256(content).hexdigest()}" if self.checksums else "",
            )
            for name, content in sorted(self.files.items())
        ]
        return Listing(source=self.source, revision=self.revision, files=tuple(files))

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: threading.Event) -> None:
        here = {file.name for file in listing.files if (folder / file.name).exists()}
        progress.expect(listing.bytes, sum(file.size for file in listing.files if file.name in here))
        for file in sorted(listing.files, key=lambda file: (file.name.endswith(".safetensors"), file.name)):
            if file.name in here:
                continue
            content = self.files[file.name]
            part = folder / f"{file.name}.part"
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as out:
                out.write(content[:BLOCK])
                out.flush()
                self.before(file.name)
                if stop.is_set():
                    raise Stopped(f"{listing.source} is not wanted any more")
                out.write(content[BLOCK:])
            self.moved.append(file.name)
            progress.transferred(len(content))
            progress.add(len(content))
            part.replace(folder / file.name)


# Fetches what the job says. Stops before a file of that name until a line comes; then says what it fetched.
PROCESS = """
import json, sys
from pathlib import Path
from tests.workers.fake_remote import FakeRemote
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.store.store import Store
from workers.artifacts.store.artifact_uses import using

job = json.loads(sys.stdin.readline())

def before(name):
    if name == job["gate"]:
        print("gate", flush=True)
        sys.stdin.readline()

class Told(Progress):
    def enter(self, phase):
        super().enter(phase)
        if phase == "waiting":
            print("waiting", flush=True)

remote = FakeRemote({name: text.encode("latin1") for name, text in job["files"].items()}, before=before)
store = Store(Path(job["root"]), budget=job["budget"])
artifact = store.get(remote, Told(remote.source))
print(json.dumps({"moved": remote.moved, "folder": artifact.folder}), flush=True)
if job["use"]:
    with using(artifact.folder):
        print("using", flush=True)
        sys.stdin.readline()
"""


class Fetcher:
    """A process that gets ``files`` into the store of ``root``."""

    def __init__(
        self, root: Path, files: Mapping[str, bytes], *, gate: str = "", use: bool = False, budget: int | None = None
    ) -> None:
        texts = {name: content.decode("latin1") for name, content in files.items()}
        job = {"root": str(root), "files": texts, "gate": gate, "use": use, "budget": budget}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        self._say(json.dumps(job))

    def line(self) -> str:
        """What it says next; empty: it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        self._say("")

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def end(self) -> None:
        """Whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
