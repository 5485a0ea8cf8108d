"""Whatever happens to a store, it holds only what is whole, within its budget, and loads what its sources have."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from tests.searches import search
from tests.workers.fake_remote import FakeRemote
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.artifacts.store import manifest
from workers.artifacts.store.artifact_uses import using
from workers.artifacts.store.contents import digest_of
from workers.artifacts.store.manifest import Artifact
from workers.artifacts.store.store import Store

BUDGET = 2500
SOURCES = st.sampled_from(["s3://m/one", "s3://m/two", "org/three"])
CONTENTS = st.sampled_from([b"", b"a" * 400, b"b" * 700, b"c" * 1100, b"d" * 2600])
FILES = st.dictionaries(st.sampled_from(["config.json", "x.safetensors", "sub/y.safetensors"]), CONTENTS, min_size=1)


class Stores(RuleBasedStateMachine):
    """One store, in whose budget there is never room for all that is asked for."""

    used = Bundle("used")

    @initialize(checksums=st.booleans())
    def begin(self, checksums: bool) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder, budget=BUDGET, grace_s=0)
        self.checksums = checksums
        self.holds: dict[str, tuple[contextlib.ExitStack, dict[str, bytes]]] = {}

    def remote(self, source: str, files: dict[str, bytes]) -> FakeRemote:
        return FakeRemote(files, source, checksums=self.checksums)

    def get(self, remote: FakeRemote) -> Artifact | None:
        """None: no room. That is never said of what the store has room for when all that is not held goes."""
        artifact = refused = None
        try:
            artifact = self.store.get(remote)
        except SourceError as error:
            refused = error.id
        if artifact is None:
            assert refused == "store-full"
            held = {data for _, files in self.holds.values() for data in files.values()}
            wanted = sum(map(len, remote.files.values()))
            assert wanted + sum(map(len, held)) > BUDGET
            return None
        files = {name: (Path(artifact.folder) / name).read_bytes() for name in artifact.files}
        assert files == remote.files
        return artifact

    @rule(source=SOURCES, files=FILES)
    def load(self, source: str, files: dict[str, bytes]) -> None:
        """And again: nothing is fetched."""
        remote = self.remote(source, files)
        if self.get(remote) is not None:
            remote.moved.clear()
            self.get(remote)
            assert remote.moved == []

    @rule(target=used, source=SOURCES, files=FILES)
    def use(self, source: str, files: dict[str, bytes]) -> str:
        artifact = self.get(self.remote(source, files))
        if artifact is None or artifact.folder in self.holds:
            return ""
        stack = contextlib.ExitStack()
        stack.enter_context(using(artifact.folder))
        self.holds[artifact.folder] = stack, files
        return artifact.folder

    @rule(folder=consumes(used))
    def release(self, folder: str) -> None:
        if folder:
            self.holds.pop(folder)[0].close()

    @rule(source=SOURCES, files=FILES, count=st.integers(0, 2))
    def begin_and_stop(self, source: str, files: dict[str, bytes], count: int) -> None:
        """A fetch that ends too early, as one that dies."""
        stop, remote = threading.Event(), self.remote(source, files)
        remote.before = lambda name: stop.set() if len(remote.moved) >= count else None
        with contextlib.suppress(Stopped, SourceError):
            self.store.get(remote, None, stop)

    @rule(number=st.integers(0, 9))
    def flip(self, number: int) -> None:
        """A bit of a content that nobody holds, found by `verify`."""
        held = {digest for folder in self.holds for digest in manifest_digests(folder)}
        blobs = [blob for blob in sorted((self.folder / "blobs").glob("*")) if blob.stat().st_size]
        blobs = [blob for blob in blobs if blob.name not in held]
        if blobs:
            blob = blobs[number % len(blobs)]
            blob.chmod(0o644)
            blob.write_bytes(b"?" + blob.read_bytes()[1:])
            keys = [
                artifact.key
                for artifact in self.store.artifacts()
                if blob.name in {f.digest for f in artifact.files.values()}
            ]
            for key in keys:
                with contextlib.suppress(SourceError):  # a brother of it was verified, which took it from this one
                    assert self.store.verify(key) or key not in {artifact.key for artifact in self.store.artifacts()}

    @rule()
    def prune(self) -> None:
        self.store.prune()
        assert {artifact.folder for artifact in self.store.artifacts()} == set(self.holds)

    @invariant()
    def what_is_there_is_whole(self) -> None:
        for artifact in self.store.artifacts():
            for name, file in artifact.files.items():
                path = Path(artifact.folder) / name
                assert (path.stat().st_size, digest_of(path)) == (file.size, file.digest)

    @invariant()
    def the_budget_is_kept(self) -> None:
        files = [
            path for path in self.folder.glob("artifacts/**/*") if path.is_file() and path.name not in manifest.OURS
        ]
        inodes = {path.stat().st_ino: path.stat().st_size for path in files}
        assert sum(inodes.values()) <= BUDGET

    @invariant()
    def what_is_held_is_there(self) -> None:
        for folder, (_, files) in self.holds.items():
            assert {name: (Path(folder) / name).read_bytes() for name in files} == files

    def teardown(self) -> None:
        for stack, _ in self.holds.values():
            stack.close()
        shutil.rmtree(self.folder)


def manifest_digests(folder: str) -> list[str]:
    files = manifest.published(Path(folder))
    return [file.digest for file in files.files.values()] if files is not None else []


Stores.TestCase.settings = search(8, cost=10, stateful_step_count=15)
TestStores = Stores.TestCase
