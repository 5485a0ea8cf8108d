"""Hosts that have a store each, as machines do: what a replica's place costs, by real stores before a real S3.

The emulated hosts of one machine share its store, so this cannot be seen on a live fleet of one machine: here the
controller is played, and asks the actors of two hosts, which run in this process.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from pathlib import Path

import pytest

from orchestrator.cluster.host_actor import HostActor
from tests.orchestrator.elsewhere import forbid_remote_sources
from tests.orchestrator.fakes import FakeCluster, Played, play
from tests.s3 import FaultProxy, S3Server
from workers.artifacts.fetch.artifact_fetcher import FetchedArtifact, WantedArtifact
from workers.artifacts.fetch.progress import FetchStatus
from workers.artifacts.store.store import StoreSettings
from workers.messages.status import Failure

DEADLINE_S = 60.0
HOSTS = ("inf2.48xlarge/0", "inf2.48xlarge/1")
WEIGHTS = b"weights" * 100_000
SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge, count: 2}}
models:
  m: {{engine: cpu, source: {source}, tp_degree: {degree}, replicas: {replicas}}}
"""


class OnTwoHosts(FakeCluster):
    """Replicas are played; what is asked of a host is answered by its actor's own code, with a store of its own."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        actor = HostActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
        self.actors = {
            host: actor(StoreSettings(root=str(root / f"store-{number}")), str(root / f"home-{number}"))
            for number, host in enumerate(HOSTS)
        }

    def bring(self, host: str, wanted: WantedArtifact) -> FetchedArtifact:
        landed = self.actors[host].fetch("a waiter", wanted, DEADLINE_S)
        assert isinstance(landed, FetchedArtifact), landed
        self.store.setdefault(host, set()).add(landed.folder)
        return landed

    async def fetch(
        self, wanted: WantedArtifact, host: str
    ) -> AsyncGenerator[FetchStatus | FetchedArtifact | Failure, None]:
        yield self.bring(host, wanted)

    async def held_sources(self, sources: Collection[str]) -> Mapping[str, frozenset[str]]:
        return {host: actor.stored_sources(list(sources)) for host, actor in self.actors.items()}


@pytest.fixture
def source(s3_server: S3Server, s3_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model in S3, of which the planner knows nothing."""
    forbid_remote_sources(monkeypatch, tmp_path)
    files = {"m/config.json": b"{}", "m/tokenizer.json": b"{}", "m/model.safetensors": WEIGHTS}
    return s3_server.bucket(files=files) + "/m"


def fetched(played: Played) -> list[str]:
    return sorted(event.message for event in played.journal.events() if event.reason == "Fetched")


def test_a_model_on_two_hosts_is_transferred_once_to_each(tmp_path: Path, source: str, s3_proxy: FaultProxy) -> None:
    """Four replicas, two on each host: the first of each host fetches."""
    cluster = OnTwoHosts(tmp_path)

    async def story(played: Played) -> None:
        await played.settled()
        assert sorted(config.place.host for config in cluster.started) == sorted(HOSTS * 2)
        assert s3_proxy.bytes("m/model.safetensors") == 2 * len(WEIGHTS)
        assert [message.startswith("0 bytes: ") for message in fetched(played)] == [True, True, False, False]
        assert [len({config.source for config in cluster.started if config.place.host == host}) for host in HOSTS] == [
            1,
            1,
        ]

    play(tmp_path, SPEC.format(source=source, degree=12, replicas=4), story, cluster=cluster)


@pytest.mark.parametrize("holder", HOSTS)
def test_a_replica_starts_on_the_host_whose_store_has_its_model(
    tmp_path: Path, source: str, s3_proxy: FaultProxy, holder: str
) -> None:
    """Nothing of it is transferred again."""
    cluster = OnTwoHosts(tmp_path)
    assert cluster.bring(holder, WantedArtifact(source=source)).moved > len(WEIGHTS)
    s3_proxy.forget()

    async def story(played: Played) -> None:
        await played.settled()
        assert [config.place.host for config in cluster.started] == [holder]
        assert s3_proxy.bytes() == 0

    play(tmp_path, SPEC.format(source=source, degree=8, replicas=1), story, cluster=cluster)
