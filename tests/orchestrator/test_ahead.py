"""What is fetched and compiled before a process is asked for, and before an old replica goes for a new one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from orchestrator.cli.tables import status_text
from orchestrator.daemon.daemon import _progress
from orchestrator.fleet.effects import Fetched, OnPartialFetch, PartialFetch
from orchestrator.fleet.progress_text import fetch_text
from orchestrator.rollout.preparation import PROCESS_S, lead_of, prepare
from tests.orchestrator.elsewhere import nobody_is_asked
from tests.orchestrator.fakefleet import STATUS
from tests.orchestrator.fakes import FakeCluster, Played, play, virtually
from tests.stubs import stub_checkpoint
from tests.workers.test_bringing import CONFIG
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Reaction

HOST = "inf2.48xlarge/0"
SPEC = """\
version: 1
hosts: {{emulate: inf2.48xlarge, count: {hosts}}}
models:
  m:
    engine: cpu
    source: {source}
    tp_degree: {degree}
    replicas: {replicas}
    max_batch: {batch}
    update: {{strategy: {strategy}}}
    deadlines: {{start_s: 20, fetch_s: 200, compile_s: 200}}
"""


def spec(
    source: str = "s3://models/one",
    *,
    replicas: int = 1,
    degree: int = 8,
    batch: int = 2,
    strategy: str = "auto",
    hosts: int = 1,
    compiles: bool = False,
) -> str:
    told = {"source": source, "replicas": replicas, "degree": degree, "batch": batch, "strategy": strategy}
    return SPEC.format(**told, hosts=hosts) + ("    engine_options: {compile: true}\n" if compiles else "")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nobody_is_asked(monkeypatch, tmp_path)


def test_a_replica_is_fetched_for_before_its_process_is_asked_for(tmp_path: Path) -> None:
    """Meanwhile the status tells how far it is, and its start deadline does not run; then it loads the folder."""
    cluster = FakeCluster()
    cluster.fetch_s, cluster.load_s = 150.0, 15.0

    async def story(played: Played) -> None:
        await played.until(lambda: played.replica("m/0").get("fetch"), "it is fetched", 60.0)
        told = played.replica("m/0")
        assert told["state"] == "fetching"
        assert told["fetch"] == {
            "source": "s3://models/one",
            "phase": "fetching",
            "bytes": 30,
            "total": 100,
            "bytes_per_s": 10,
            "left_s": 7.0,
            "trouble": None,
        }
        assert played.host()["fetches"] == [told["fetch"]]
        assert cluster.started == []
        await played.settled()
        assert [config.source for config in cluster.started] == ["/store/s3://models/one@1"]
        assert played.replica("m/0")["load_s"] == pytest.approx(15.0)
        assert [r for r in played.happened() if r in ("Starting", "Fetching", "Fetched", "Ready", "Failed")] == [
            "Starting",
            "Fetching",
            "Fetched",
            "Ready",
        ]

    play(tmp_path, cluster, spec(), story)


def test_a_fetch_that_fails_is_tried_again_and_one_without_hope_is_not(tmp_path: Path) -> None:
    """The cause is the replica's, with its id; no process was ever asked for."""
    cluster = FakeCluster()
    cluster.unfetchable["s3://models/one"] = Failure("s3-unreachable", "nobody answers")

    async def story(played: Played) -> None:
        await played.until(lambda: played.replica("m/0").get("failures") == 3, "it failed three times", 60.0)
        assert played.replica("m/0")["reason"] == "s3-unreachable: nobody answers"
        assert played.happened().count("FetchFailed") == 3
        cluster.unfetchable["s3://models/one"] = Failure("pickle-refused", "pickled", reaction=Reaction.STOP)
        await played.until(lambda: played.replica("m/0")["stopped"], "it is given up", 60.0)
        assert cluster.started == []

    play(tmp_path, cluster, spec(), story)


def test_a_fetch_that_nobody_wants_any_more_is_stopped(tmp_path: Path) -> None:
    """By an unload, or by its deadline, after which it is tried again."""
    cluster = FakeCluster()
    cluster.fetch_s = 1000.0

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.stopped_fetches, "its deadline ended it", 2000.0)
        await played.until(lambda: len(cluster.fetches) == 2, "it is tried again", 100.0)
        assert "fetch-deadline: the fetch did not end within 200 s" in played.replica("m/0")["reason"]
        await played.operator.unload("m", "tester")
        await played.until(lambda: len(cluster.stopped_fetches) == 2, "stopped", 100.0)
        await played.until(lambda: not played.model("m")["replicas"], "forgotten", 100.0)
        assert (cluster.fetching, cluster.started) == ([], [])

    play(tmp_path, cluster, spec(), story)


def test_cores_that_another_takes_during_the_fetch_are_not_started_on(tmp_path: Path) -> None:
    """It is seen as taken although a replica waits for it, and the replica goes elsewhere: nothing has failed."""
    cluster = FakeCluster()
    cluster.fetch_s = 30.0

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.fetching, "it is fetched", 60.0)
        cluster.held[3] = 7  # a stranger's
        await played.until(lambda: played.host()["quarantine"], "it is seen", 20.0)
        assert played.replica("m/0")["state"] == "fetching"
        await played.settled()
        assert [config.cores for config in cluster.started] == [list(range(8, 16))]
        assert len(cluster.fetches) == 1
        assert "Failed" not in played.happened()

    play(tmp_path, cluster, spec(), story)


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("strategy", ["in_place", "hold", "surge"])
def test_the_old_replica_serves_until_the_new_ones_artifacts_are_there(
    tmp_path: Path, strategy: str, tells: bool
) -> None:
    """An update on a full host: nothing is taken down for a model that is still on its way."""
    cluster = FakeCluster()
    cluster.load_s, cluster.tells = 5.0, tells
    degree = 8 if strategy == "surge" else 24

    async def story(played: Played) -> None:
        await played.settled()
        cluster.fetch_s = 100.0
        await played.apply(spec("s3://models/two", degree=degree, strategy=strategy))
        await played.until(lambda: cluster.fetching, "the new one is fetched", 60.0)
        began = asyncio.get_running_loop().time()
        await played.until(lambda: not cluster.fetching, "it is there", 1000.0)
        assert asyncio.get_running_loop().time() - began >= 90.0
        assert cluster.drained == []
        assert played.model("m")["replicas"][0]["state"] == "ready"
        await played.settled()
        assert cluster.started[-1].source == "/store/s3://models/two@1"
        assert len(cluster.fetches) == 2

    play(tmp_path, cluster, spec(degree=degree, strategy=strategy), story)


def test_an_update_whose_artifacts_cannot_be_had_is_rolled_back_and_nothing_old_goes(tmp_path: Path) -> None:
    """As many failures as failed starts would be; the status tells of them meanwhile."""
    cluster = FakeCluster()
    cluster.unfetchable["s3://models/two"] = Failure("s3-denied", "no s3:GetObject")

    async def story(played: Played) -> None:
        await played.settled()
        await played.apply(spec("s3://models/two", degree=24))
        await played.until(lambda: any(one["failures"] for one in played.model("m")["preparing"]), "told", 60.0)
        told = played.model("m")["preparing"][0]
        assert (told["host"], told["reason"]) == (HOST, "s3-denied: no s3:GetObject")
        await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600.0)
        await played.settled()
        assert (cluster.drained, len(cluster.started)) == ([], 1)
        assert played.model("m")["preparing"] == []

    play(tmp_path, cluster, spec(degree=24), story)


def test_an_update_that_is_undone_stops_its_fetch(tmp_path: Path) -> None:
    """What has arrived stays in the store; the old replica never heard of it."""
    cluster = FakeCluster()

    async def story(played: Played) -> None:
        await played.settled()
        cluster.fetch_s = 100.0
        await played.apply(spec("s3://models/two", degree=24))
        await played.until(lambda: cluster.fetching, "it is fetched", 60.0)
        await played.operator.undo(None, "tester")
        await played.until(lambda: cluster.stopped_fetches, "stopped", 60.0)
        await played.settled()
        assert (cluster.drained, len(cluster.started)) == ([], 1)

    play(tmp_path, cluster, spec(degree=24), story)


def test_replicas_of_one_version_load_the_same_until_somebody_restarts_them(tmp_path: Path) -> None:
    """The source has new content: a replica that is started again does not get it, one that is replaced does."""
    cluster = FakeCluster()

    async def story(played: Played) -> None:
        await played.settled()
        cluster.contents["s3://models/one"] = "2"
        await cluster.find("m/0").die("killed")
        await played.until(lambda: len(cluster.started) == 2, "again", 60.0)
        await played.settled()
        await played.operator.restart("m", "tester")
        await played.until(lambda: len(cluster.started) == 3, "replaced", 60.0)
        assert [config.source for config in cluster.started] == [f"/store/s3://models/one@{n}" for n in (1, 1, 2)]

    play(tmp_path, cluster, spec(degree=24), story)


def test_other_content_of_one_version_is_told(tmp_path: Path) -> None:
    """What a version loaded first is gone from the host, and the source has something else by now."""
    cluster = FakeCluster()

    async def story(played: Played) -> None:
        await played.settled()
        cluster.contents["s3://models/one"] = "2"
        cluster.store.clear()
        await cluster.find("m/0").die("killed")
        await played.until(lambda: "SourceChanged" in played.happened(), "told", 60.0)
        await played.settled()
        assert [config.source for config in cluster.started] == [f"/store/s3://models/one@{n}" for n in (1, 2)]

    play(tmp_path, cluster, spec(), story)


def test_a_controller_that_comes_back_in_mid_fetch_goes_on_with_it(tmp_path: Path) -> None:
    """Its replica gets the next epoch, and starts once everything is there."""
    cluster = FakeCluster()
    cluster.fetch_s = 100.0

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.fetching, "it is fetched", 60.0)
        await played.kill()
        async with Played(tmp_path, cluster, spec(), journal=played.journal) as second:
            await second.settled()
            assert [config.epoch for config in cluster.started] == [2]
            await second.kill()

    play(tmp_path, cluster, spec(), story)


def test_what_can_be_compiled_ahead_is_compiled_before_a_core_is_claimed(tmp_path: Path) -> None:
    """With the reason as an event; its time has a deadline of its own, and does not count to the start."""
    cluster = FakeCluster()
    cluster.compile_s = 150.0

    async def story(played: Played) -> None:
        version = played.model("m")["version"]
        assert version in cluster.uncompiled
        await played.until(lambda: played.replica("m/0").get("state") == "compiling", "it compiles", 60.0)
        assert cluster.started == []
        await played.settled()
        assert cluster.compiles == [version]
        told = {event.reason: event.message for event in played.journal.events()}
        assert told["WillCompile"] == "the model is not compiled as it is now"
        assert told["Compiled"] == "ahead, in 150 s"

    async def begun(played: Played) -> None:
        cluster.uncompiled = {played.controller.state.current.versions["m"]}
        await story(played)

    play(tmp_path, cluster, spec("./m", compiles=True), begun)


def test_a_compiler_that_fails_fails_the_start_unless_only_a_device_could_do_it(tmp_path: Path) -> None:
    """What needs a device is compiled by the start itself."""
    cluster = FakeCluster()
    cluster.uncompilable = Failure("compile-failed", "the compiler crashed")

    async def story(played: Played) -> None:
        cluster.uncompiled = {played.controller.state.current.versions["m"]}
        await played.until(lambda: played.replica("m/0").get("failures") == 1, "it fails", 60.0)
        assert played.replica("m/0")["reason"] == "compile-failed: the compiler crashed"
        cluster.uncompilable = Failure("compile-needs-device", "on its cores only")
        await played.settled()

    play(tmp_path, cluster, spec(compiles=True), story)


def test_an_update_in_place_is_compiled_while_the_old_replica_serves(tmp_path: Path) -> None:
    """The outage is a load, not a compile."""
    cluster = FakeCluster()
    cluster.compile_s, cluster.load_s = 150.0, 5.0

    async def story(played: Played) -> None:
        await played.settled()
        old = set(played.controller.state.current.versions.values())
        await played.apply(spec(degree=24, batch=4, compiles=True, strategy="in_place"))
        cluster.uncompiled = set(played.controller.state.current.versions.values()) - old
        await played.until(lambda: "Compiled" in played.happened(), "compiled", 2000.0)
        assert cluster.drained == []
        await played.settled()
        assert len(cluster.compiles) == 1

    play(tmp_path, cluster, spec(degree=24, compiles=True, strategy="in_place"), story)


def test_of_equal_hosts_the_one_that_holds_the_model_gets_its_replica(tmp_path: Path) -> None:
    """It starts without a transfer."""
    cluster = FakeCluster()
    cluster.store["inf2.48xlarge/1"] = {"s3://models/one@1"}

    async def story(played: Played) -> None:
        await played.settled()
        assert ([config.host for config in cluster.started], cluster.fetches) == (["inf2.48xlarge/1"], [])
        fetched = next(event.message for event in played.journal.events() if event.reason == "Fetched")
        assert fetched == "0 bytes: 100 bytes were here"

    play(tmp_path, cluster, spec(hosts=2), story)


def test_a_replica_that_had_served_is_started_again_without_asking_what_it_would_compile(tmp_path: Path) -> None:
    """That takes the engine's package some seconds, in which nobody serves."""
    cluster = FakeCluster()

    async def story(played: Played) -> None:
        await played.settled()
        cluster.uncompiled = {played.controller.state.current.versions["m"]}
        await cluster.find("m/0").die("killed")
        await played.until(lambda: len(cluster.started) == 2, "again", 60.0)
        await played.settled()
        assert cluster.compiles == []

    play(tmp_path, cluster, spec(compiles=True), story)


# Started while the rest arrives


def arriving(fetch_s: float = 100.0) -> FakeCluster:
    """One whose fetches tell how far they are."""
    cluster = FakeCluster()
    cluster.tells, cluster.fetch_s, cluster.process_s, cluster.load_s = True, fetch_s, 5.0, 3.0
    return cluster


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_process_is_started_while_the_last_seconds_of_its_model_arrive(tmp_path: Path) -> None:
    """Not sooner than it needs. Its start is shorter by what it does before it wants weights, and is told as if it had
    begun when all was there; until then the status tells how far the fetch is."""
    took = {}
    for tells in (False, True):
        cluster = arriving()
        cluster.tells = tells

        async def story(played: Played, cluster: FakeCluster = cluster, tells: bool = tells) -> None:
            await played.until(lambda: cluster.started, "its process is asked for", 200.0)
            assert now() == pytest.approx(95.0 if tells else 100.0, abs=1.5)
            if tells:
                await played.until(lambda: played.replica("m/0")["state"] == "loading", "loading", 3.0)
                assert played.replica("m/0")["fetch"]["source"] == "s3://models/one"
            await played.settled()
            took[tells] = now()
            assert played.replica("m/0")["fetch"] is None
            assert played.replica("m/0")["load_s"] == pytest.approx(8.0, abs=0.2)
            expected = ["Starting", "Fetching", *(["StartsEarly"] if tells else []), "Fetched", "Ready"]
            assert [one for one in played.happened() if one in {*expected, "Failed"}] == expected
            assert len(cluster.started) == len(cluster.fetches) == 1

        play(tmp_path / str(tells), cluster, spec(), story)
    assert took[False] - took[True] == pytest.approx(5.0, abs=1.5)


@pytest.mark.parametrize("more", ["    engine_options: {compile: true}\n", "    trust_remote_code: true\n"])
def test_who_could_not_wait_for_files_is_started_when_all_is_there(tmp_path: Path, more: str) -> None:
    """A compiler ahead of the start, and code of the checkpoint, which reads what it likes."""
    cluster = arriving()

    async def story(played: Played) -> None:
        await played.settled()
        assert "StartsEarly" not in played.happened()

    play(tmp_path, cluster, spec() + more, story)


def test_a_fetch_that_breaks_fails_the_replica_that_waits_for_it(tmp_path: Path) -> None:
    """With the cause of the fetch. Its process is ended before the next one is asked for, which goes on with it."""
    cluster = arriving()
    cluster.stall_s, cluster.broken_fetch = 50.0, Failure("s3-unreachable", "nobody answers")

    async def story(played: Played) -> None:
        await played.until(lambda: played.replica("m/0").get("failures") == 1, "it failed", 300.0)
        assert played.replica("m/0")["reason"] == "s3-unreachable: nobody answers"
        assert [config.epoch for config in cluster.started] == [1]
        await played.until(lambda: cluster.ended, "its process is ended", 10.0)
        cluster.broken_fetch = None
        await played.settled()
        assert [config.epoch for config in cluster.started] == [1, 2]
        assert (len(cluster.living()), cluster.ended) == (1, ["m/0.1"])

    play(tmp_path, cluster, spec(), story)


def test_a_fetch_that_slows_down_is_waited_for_and_not_counted_to_the_start(tmp_path: Path) -> None:
    """However long, within the deadline of the fetch: `start_s` is 20 here. Nobody is started beside it."""
    cluster = arriving()
    cluster.stall_s = 90.0

    async def story(played: Played) -> None:
        await played.settled()
        assert now() == pytest.approx(193.0, abs=2.0)
        assert len(cluster.started) == 1
        assert "Failed" not in played.happened()
        assert played.replica("m/0")["load_s"] == pytest.approx(8.0, abs=0.2)

    play(tmp_path, cluster, spec(), story)


def test_a_replica_is_ready_when_its_fetch_is_heard_to_have_ended(tmp_path: Path) -> None:
    """Not sooner, though its process says so: only then is it known what all others of its version load."""
    cluster = arriving()
    cluster.tidy_s = 15.0

    async def story(played: Played) -> None:
        await played.settled()
        assert now() == pytest.approx(115.0, abs=1.0)
        assert played.happened().index("Fetched") < played.happened().index("Ready")
        cluster.contents["s3://models/one"] = "2"
        await cluster.find("m/0").die("killed")
        await played.until(lambda: len(cluster.started) == 2, "again", 60.0)
        assert {config.source for config in cluster.started} == {"/store/s3://models/one@1"}

    play(tmp_path, cluster, spec(), story)


def test_a_fetch_that_never_ends_is_ended_by_its_own_deadline(tmp_path: Path) -> None:
    """`fetch_s` is 200 here, and what a process waits for counts to it from the beginning."""
    cluster = arriving()
    cluster.stall_s = 1e6

    async def story(played: Played) -> None:
        await played.until(lambda: played.replica("m/0").get("failures") == 1, "it failed", 300.0)
        assert now() == pytest.approx(200.0, abs=2.0)
        assert "fetch-deadline: the fetch did not end within 200 s" in played.replica("m/0")["reason"]
        await played.until(lambda: cluster.ended == ["m/0.1"], "its process is ended", 10.0)
        assert cluster.stopped_fetches == [(HOST, "s3://models/one")]

    play(tmp_path, cluster, spec(), story)


def test_a_replica_that_is_not_wanted_any_more_lets_its_fetch_go(tmp_path: Path) -> None:
    """Its process and its fetch end."""
    cluster = arriving()
    cluster.stall_s = 1e6

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.started, "it is started", 200.0)
        await played.operator.unload("m", "tester")
        await played.until(lambda: not played.model("m")["replicas"], "forgotten", 60.0)
        assert (cluster.fetching, cluster.living(), cluster.ended) == ([], [], ["m/0.1"])

    play(tmp_path, cluster, spec(), story)


def test_a_process_that_dies_while_it_waits_is_started_again(tmp_path: Path) -> None:
    """After the fetch, which is asked for again."""
    cluster = arriving()

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.started, "it is started", 200.0)
        await cluster.find("m/0").die("killed")
        await played.settled()
        assert [config.epoch for config in cluster.started] == [1, 2]
        assert cluster.stopped_fetches == [(HOST, "s3://models/one")]

    play(tmp_path, cluster, spec(), story)


def test_a_controller_that_comes_back_asks_for_what_its_replica_waits_for(tmp_path: Path) -> None:
    """The replica of its predecessor gets the rest, and is the only one."""
    cluster = arriving()
    cluster.stall_s = 30.0

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.started, "it is started", 200.0)
        await played.kill()
        cluster.fetch_s = 10.0
        async with Played(tmp_path, cluster, spec(), journal=played.journal) as second:
            await second.settled()
            assert [config.epoch for config in cluster.started] == [1]
            assert second.replica("m/0")["epoch"] == 1
            assert second.happened().count("Failed") == 0
            await second.kill()

    play(tmp_path, cluster, spec(), story)


def test_of_a_model_and_its_draft_both_must_be_nearly_there(tmp_path: Path) -> None:
    """The draft comes last: only its rest may be waited for."""
    cluster = arriving(50.0)

    async def story(played: Played) -> None:
        await played.until(lambda: cluster.started, "it is started", 200.0)
        assert now() == pytest.approx(95.0, abs=1.5)
        assert cluster.store[HOST] == {"s3://models/one@1"}
        assert (cluster.started[0].source, cluster.started[0].draft_source) == (
            "/store/s3://models/one@1",
            "/store/s3://models/draft@1",
        )
        await played.settled()

    play(tmp_path, cluster, spec() + "    draft: {source: s3://models/draft, k: 2}\n", story)


class Scripted(FakeCluster):
    """A fetch that tells, second by second, what is left and what has moved."""

    def __init__(self, told: Iterable[tuple[int, int]]) -> None:
        super().__init__()
        self._told = told

    async def fetch(self, config: ReplicaConfig, arrives: OnPartialFetch | None = None) -> Fetched | Failure:
        for left, moved in self._told:
            await asyncio.sleep(1.0)
            assert arrives is not None
            arrives(PartialFetch(config, left, moved))
        return Fetched(config, bytes=0)


class Heard:
    """Notes when it might be started (`preparation.PreparationObserver`)."""

    def __init__(self) -> None:
        self.early: list[tuple[float, float]] = []

    def arrives(self, config: ReplicaConfig, left_s: float) -> None:
        self.early.append((now(), left_s))

    def fetching(self, sources: list[str]) -> None: ...
    def fetched(self, found: Fetched) -> None: ...
    def not_fetched(self, failure: Failure) -> None: ...
    def compiling(self, missing: list[str]) -> None: ...
    def compiled(self, seconds: float) -> None: ...


@pytest.mark.parametrize(
    ("told", "early"),
    [
        ([(900, 0), (800, 100), (300, 600), (200, 700)], [(3.0, pytest.approx(1.0))]),
        ([(100, 0)], []),  # nobody knows how fast it is
        ([(900, 0), (500, 0), (100, 0), (50, 1), (40, 2)], []),  # an earlier attempt had left it on the disk
        ([(900, 0), (600, 100), (600, 100), (600, 100)], []),  # it stands still
    ],
)
def test_how_long_the_rest_takes_is_told_by_what_came_over_the_network(
    told: list[tuple[int, int]], early: list[tuple[float, float]]
) -> None:
    """And not before that was seen for a while; once."""
    heard = Heard()

    async def story() -> None:
        config = msgspec.structs.replace(CONFIG, source="s3://models/one")
        await prepare(config, Scripted(told), heard, asyncio.get_running_loop().time, lead_s=5.0)

    virtually(story)
    assert heard.early == early


def test_the_lead_of_a_process_is_no_longer_than_its_last_start() -> None:
    """Where that is known; and there is none for an engine that does not wait for files."""
    assert lead_of(CONFIG, None) == PROCESS_S
    assert lead_of(CONFIG, 2.0) == 2.0
    assert lead_of(CONFIG, 60.0) == PROCESS_S
    assert lead_of(msgspec.structs.replace(CONFIG, engine="transformers-neuronx"), 2.0) is None


# In words


def fetch(**told: Any) -> dict[str, Any]:
    plain = {"source": "s3://models/one", "phase": "fetching", "bytes": 0, "total": None}
    return {**plain, "bytes_per_s": None, "left_s": None, "trouble": None, **told}


def test_a_fetch_is_told_in_words() -> None:
    """What nobody knows yet is left out."""
    known = fetch(bytes=1_200_000_000, total=13_500_000_000, bytes_per_s=210_000_000, left_s=58.2)
    assert fetch_text(known) == "fetching s3://models/one: 1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"
    assert fetch_text(fetch(phase="listing")) == "listing s3://models/one"
    away = fetch(phase="listing", trouble="no answer for 12 s (ConnectTimeoutError)")
    assert fetch_text(away) == "listing s3://models/one: no answer for 12 s (ConnectTimeoutError)"


def test_up_tells_a_fetch_by_phases_and_tenths() -> None:
    """And by phases: a line a second would hide what else happens."""
    plain = {"id": "m/0", "state": "fetching", "cores": "0-7", "reason": None}
    told = [("listing", 100), ("fetching", 100), ("fetching", 150), ("fetching", 200), ("verifying", 200)]
    lines = [_progress({**plain, "fetch": fetch(phase=phase, bytes=done, total=1000)}) for phase, done in told]
    assert [news for news, _ in lines] == [
        "m/0 fetching on cores 0-7 listing 1",
        "m/0 fetching on cores 0-7 fetching 1",
        "m/0 fetching on cores 0-7 fetching 1",
        "m/0 fetching on cores 0-7 fetching 2",
        "m/0 fetching on cores 0-7 verifying 2",
    ]
    away = fetch(phase="listing", trouble="no answer for 3 s")
    assert _progress({**plain, "fetch": away})[0] != _progress({**plain, "fetch": fetch(phase="listing")})[0]
    assert lines[1][1] == "m/0 fetching s3://models/one: 100 bytes of 1.0 kB"
    assert _progress({**plain, "fetch": None})[1] == "m/0 fetching on cores 0-7"


def test_the_status_tells_what_an_update_waits_for() -> None:
    """With its cause, and how far the fetch is."""
    status = copy.deepcopy(STATUS)
    status["models"][0]["replicas"][1]["fetch"] = fetch()
    status["models"][0]["preparing"] = [{"host": HOST, "state": "failed", "failures": 2, "reason": "s3-denied: no"}]
    status["hosts"][0]["fetches"] = [fetch(bytes=1, total=2)]
    told = status_text(status)
    assert "chat/1: fetching s3://models/one\n" in told
    assert f"chat: preparing the new version on {HOST} (failed); the old replicas keep serving\n" in told
    assert "    2 failed attempts: s3-denied: no\n    fetching s3://models/one: 1 bytes of 2 bytes" in told


UNLOADABLE = Failure("weights-broken", "model.safetensors is cut off")


@pytest.mark.parametrize("strategy", ["in_place", "hold"])
def test_an_update_that_cannot_be_loaded_is_rolled_back_and_nothing_old_goes(tmp_path: Path, strategy: str) -> None:
    """A local source, on a full host: what shows without cores fails the update while the old replica serves."""
    cluster = FakeCluster()
    folder = str(stub_checkpoint(tmp_path))

    async def story(played: Played) -> None:
        await played.settled()
        text = spec(folder, degree=24, batch=3, strategy=strategy)
        _, generation = await played.operator._read(text, "spec.yaml", folder, by="x", cause="apply")
        cluster.unloadable[generation.versions["m"]] = UNLOADABLE
        await played.apply(text)
        await played.until(lambda: played.model("m")["preparing"], "it is prepared", 60.0)
        await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600.0)
        await played.settled()
        assert (cluster.drained, len(cluster.started), len(cluster.checks)) == ([], 1, 3)
        cause = next(event.message for event in played.journal.events() if event.reason == "RolloutFailed")
        assert "weights-broken: model.safetensors is cut off" in cause

    play(tmp_path, cluster, spec(folder, degree=24, strategy=strategy), story)


def test_a_check_that_ends_in_time_lets_the_update_go_on(tmp_path: Path) -> None:
    """The status says what it waits for; the old replica serves until then."""
    cluster = FakeCluster()
    folder = str(stub_checkpoint(tmp_path))

    async def story(played: Played) -> None:
        await played.settled()
        cluster.check_s = 30.0
        await played.apply(spec(folder, degree=24, batch=3))
        await played.until(
            lambda: [one["state"] for one in played.model("m")["preparing"]] == ["checking"], "it is checked", 60.0
        )
        assert (len(played.ready("m")), cluster.drained) == (1, [])
        await played.settled()
        assert len(cluster.started) == 2

    play(tmp_path, cluster, spec(folder, degree=24), story)


LENDING = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: cpu}}
models:
  m: {{source: {folder}, tp_degree: 8, max_batch: {batch}, priority: 1, update: {{strategy: borrow}}}}
  idle: {{source: {folder}, tp_degree: 8}}
  other: {{source: {folder}, tp_degree: 8}}
"""


def test_no_replica_of_another_model_is_lent_to_an_update_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Borrow ends the lender first: it stays, and serves."""
    cluster = FakeCluster()
    stub_checkpoint(tmp_path)

    async def story(played: Played) -> None:
        await played.settled()
        await cluster.find("idle/0").tell(idle_s=600.0)
        await played.until(lambda: played.controller.state.views["idle/0"].idle, "idle")
        second = LENDING.format(folder=tmp_path, batch=3)
        _, generation = await played.operator._read(second, "spec.yaml", str(tmp_path), by="x", cause="apply")
        cluster.unloadable[generation.versions["m"]] = UNLOADABLE
        await played.apply(second)
        await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600.0)
        assert (cluster.drained, len(cluster.started)) == ([], 3)

    play(tmp_path, cluster, LENDING.format(folder=tmp_path, batch=2), story)
