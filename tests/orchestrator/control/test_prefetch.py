"""What is fetched and compiled before a process is asked for, and before an old replica goes for a new one."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins
from msgspec.structs import replace

from orchestrator.cli.views import status_text
from orchestrator.cluster.follower import progress
from orchestrator.control.start_steps import PROCESS_S, RemainingTime, lead_of
from orchestrator.messages.fleet_status import FetchProgress, ReplicaInFleet
from tests.orchestrator.elsewhere import alone as alone
from tests.orchestrator.fakefleet import STATUS, replica, status_of
from tests.orchestrator.fakes import FakeCluster, Played, play, starting_fleet
from tests.replica_configs import changed
from tests.stubs import stub_checkpoint
from tests.workers.artifacts.test_artifact_fetcher import CONFIG
from workers.artifacts.fetch.progress import FetchStatus
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
    values = {"source": source, "replicas": replicas, "degree": degree, "batch": batch, "strategy": strategy}
    return SPEC.format(**values, hosts=hosts) + ("    engine_options: {compile: true}\n" if compiles else "")


@starting_fleet(spec(), fetch_s=150.0, load_s=15.0)
async def test_artifacts_are_fetched_before_the_process_is_requested(played: Played) -> None:
    """The status shows the progress, and the start deadline does not run; then the replica loads the folder."""
    await played.until(lambda: played.replica("m/0").get("fetch"), "it is fetched", 60.0)
    replica = played.replica("m/0")
    assert replica["state"] == "fetching"
    assert replica["fetch"] == {
        "source": "s3://models/one",
        "phase": "fetching",
        "bytes": 30,
        "total": 100,
        "bytes_per_s": 10,
        "left_s": 7.0,
        "trouble": None,
    }
    assert played.host()["fetches"] == [replica["fetch"]]
    assert played.cluster.started == []
    await played.settled()
    assert [config.source for config in played.cluster.started] == ["/store/s3://models/one@1"]
    assert played.replica("m/0")["load_s"] == pytest.approx(15.0)
    assert [r for r in played.happened() if r in ("Starting", "Fetching", "Fetched", "Ready", "Failed")] == [
        "Starting",
        "Fetching",
        "Fetched",
        "Ready",
    ]


@starting_fleet(spec(), unfetchable={"s3://models/one": Failure("s3-unreachable", "no answer")})
async def test_a_failed_fetch_is_retried_unless_its_error_is_permanent(played: Played) -> None:
    """The cause is that of the replica, with its id; no process is requested."""
    await played.until(lambda: played.replica("m/0").get("failures") == 3, "it failed three times", 60.0)
    assert played.replica("m/0")["reason"] == "s3-unreachable: no answer"
    assert played.happened().count("FetchFailed") == 3
    played.cluster.unfetchable["s3://models/one"] = Failure("pickle-refused", "pickled", reaction=Reaction.STOP)
    await played.until(lambda: played.replica("m/0")["stopped"], "it is given up", 60.0)
    assert played.cluster.started == []


@starting_fleet(spec(), fetch_s=1000.0)
async def test_a_fetch_without_a_waiting_replica_is_stopped(played: Played) -> None:
    """By an unload, or by its deadline, after which it is retried."""
    await played.until(lambda: played.cluster.stopped_fetches, "its deadline ended it", 2000.0)
    await played.until(lambda: len(played.cluster.fetches) == 2, "it is tried again", 100.0)
    assert "fetch-deadline: the fetch did not end within 200 s" in played.replica("m/0")["reason"]
    await played.operator.unload("m", "tester")
    await played.until(lambda: len(played.cluster.stopped_fetches) == 2, "stopped", 100.0)
    await played.until(lambda: not played.model("m")["replicas"], "forgotten", 100.0)
    assert (played.cluster.fetching, played.cluster.started) == ([], [])


@starting_fleet(spec(), fetch_s=30.0)
async def test_cores_taken_by_another_process_during_a_fetch_are_not_used(played: Played) -> None:
    """They are detected while the replica waits, and the replica starts elsewhere without a failure."""
    await played.until(lambda: played.cluster.fetching, "it is fetched", 60.0)
    played.cluster.held[3] = 7  # a stranger's
    await played.until(lambda: played.host()["quarantine"], "it is seen", 20.0)
    assert played.replica("m/0")["state"] == "fetching"
    await played.settled()
    assert [config.place.cores for config in played.cluster.started] == [list(range(8, 16))]
    assert len(played.cluster.fetches) == 1
    assert "Failed" not in played.happened()


@pytest.mark.parametrize("with_progress", [False, True])
@pytest.mark.parametrize("strategy", ["in_place", "hold", "surge"])
def test_the_old_replica_serves_until_the_new_artifacts_are_complete(
    tmp_path: Path, strategy: str, with_progress: bool
) -> None:
    """An update on a full host stops nothing for a model that is still being fetched."""
    cluster = FakeCluster()
    cluster.load_s, cluster.reports_progress = 5.0, with_progress
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

    play(tmp_path, spec(degree=degree, strategy=strategy), story, cluster=cluster)


@starting_fleet(spec(degree=24), unfetchable={"s3://models/two": Failure("s3-denied", "no s3:GetObject")})
async def test_an_update_with_unavailable_artifacts_is_rolled_back_without_an_interruption(played: Played) -> None:
    """After as many failures as failed starts; the status reports them meanwhile."""
    await played.settled()
    await played.apply(spec("s3://models/two", degree=24))
    await played.until(
        lambda: any(preparation["failures"] for preparation in played.model("m")["preparing"]), "reported", 60.0
    )
    waiting = played.model("m")["preparing"][0]
    assert (waiting["host"], waiting["reason"]) == (HOST, "s3-denied: no s3:GetObject")
    await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600.0)
    await played.settled()
    assert (played.cluster.drained, len(played.cluster.started)) == ([], 1)
    assert played.model("m")["preparing"] == []


@starting_fleet(spec(degree=24))
async def test_undoing_an_update_stops_its_fetch(played: Played) -> None:
    """Fetched files stay in the store; the old replica is not affected."""
    await played.settled()
    played.cluster.fetch_s = 100.0
    await played.apply(spec("s3://models/two", degree=24))
    await played.until(lambda: played.cluster.fetching, "it is fetched", 60.0)
    await played.operator.undo(None, "tester")
    await played.until(lambda: played.cluster.stopped_fetches, "stopped", 60.0)
    await played.settled()
    assert (played.cluster.drained, len(played.cluster.started)) == ([], 1)


@starting_fleet(spec(degree=24))
async def test_replicas_of_one_version_load_the_same_content_until_a_manual_restart(played: Played) -> None:
    """The source has new content: a restarted replica does not load it, a replaced one does."""
    await played.settled()
    played.cluster.contents["s3://models/one"] = "2"
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: len(played.cluster.started) == 2, "again", 60.0)
    await played.settled()
    await played.operator.restart("m", "tester")
    await played.until(lambda: len(played.cluster.started) == 3, "replaced", 60.0)
    assert [config.source for config in played.cluster.started] == [f"/store/s3://models/one@{n}" for n in (1, 1, 2)]


@starting_fleet(spec())
async def test_changed_content_of_a_version_is_reported(played: Played) -> None:
    """The content that the version loaded first is gone from the host, and the source has changed."""
    await played.settled()
    played.cluster.contents["s3://models/one"] = "2"
    played.cluster.store.clear()
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: "SourceChanged" in played.happened(), "reported", 60.0)
    await played.settled()
    assert [config.source for config in played.cluster.started] == [f"/store/s3://models/one@{n}" for n in (1, 2)]


@starting_fleet(spec(), fetch_s=100.0)
async def test_a_restarted_controller_resumes_a_fetch(played: Played, tmp_path: Path) -> None:
    """Its replica gets the next epoch, and starts once all files have arrived."""
    await played.until(lambda: played.cluster.fetching, "it is fetched", 60.0)
    await played.kill()
    async with Played(tmp_path, played.cluster, spec(), journal=played.journal) as second:
        await second.settled()
        assert [config.run.epoch for config in played.cluster.started] == [2]
        await second.kill()


def test_a_model_is_compiled_ahead_before_a_core_is_claimed(tmp_path: Path) -> None:
    """The event has the reason; compiling has its own deadline and does not count towards the start."""
    cluster = FakeCluster()
    cluster.compile_s = 150.0

    async def story(played: Played) -> None:
        version = played.model("m")["version"]
        assert version in cluster.uncompiled
        await played.until(lambda: played.replica("m/0").get("state") == "compiling", "it compiles", 60.0)
        assert cluster.started == []
        await played.settled()
        assert cluster.compiles == [version]
        messages = {event.reason: event.message for event in played.journal.events()}
        assert messages["WillCompile"] == "the model is not compiled as it is now"
        assert messages["Compiled"] == "ahead, in 150 s"

    async def begun(played: Played) -> None:
        cluster.uncompiled = {played.controller.state.current.versions["m"]}
        await story(played)

    play(tmp_path, spec("./m", compiles=True), begun, cluster=cluster)


@starting_fleet(spec(compiles=True), uncompilable=Failure("compile-failed", "the compiler crashed"))
async def test_a_failed_compilation_fails_the_start_unless_it_needs_a_device(played: Played) -> None:
    """Graphs that need a device are compiled by the start itself."""
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.until(lambda: played.replica("m/0").get("failures") == 1, "it fails", 60.0)
    assert played.replica("m/0")["reason"] == "compile-failed: the compiler crashed"
    played.cluster.uncompilable = Failure("compile-needs-device", "on its cores only")
    await played.settled()


@starting_fleet(spec(compiles=True), uncompilable=Failure("compile-failed", "an unknown crash", reaction=Reaction.STOP))
async def test_a_failed_compilation_is_not_repeated_before_an_operator_acts(played: Played) -> None:
    """A compile may take an hour of all CPUs, and would fail again."""
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.until(lambda: played.replica("m/0").get("stopped"), "it is given up", 60.0)
    await asyncio.sleep(7200.0)  # of virtual time
    assert played.happened().count("WillCompile") == 1


@starting_fleet(spec(degree=24, compiles=True, strategy="in_place"), compile_s=150.0, load_s=5.0)
async def test_an_update_in_place_is_compiled_while_the_old_replica_serves(played: Played) -> None:
    """The outage is a load, not a compile."""
    await played.settled()
    old = set(played.controller.state.current.versions.values())
    await played.apply(spec(degree=24, batch=4, compiles=True, strategy="in_place"))
    played.cluster.uncompiled = set(played.controller.state.current.versions.values()) - old
    await played.settled()
    assert played.happened().index("Compiled") < played.happened().index("Draining")
    assert len(played.cluster.compiles) == 1


@pytest.mark.parametrize("cache", ["s3://models/neffs", None])
@starting_fleet(
    lambda cache: spec(compiles=True, hosts=2, replicas=2, degree=24) + (f"    neff_cache: {cache}\n" if cache else ""),
    compile_s=150.0,
)
async def test_one_host_compiles_for_all_that_share_a_cache(played: Played, cache: str | None) -> None:
    """The others wait and fetch what it pushes. Without a cache in S3, each compiles."""
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.settled()
    assert {config.place.host for config in played.cluster.started} == set(played.cluster.host_names)
    took = sorted(event.message for event in played.journal.events() if event.reason == "Compiled")
    assert took == (["ahead, in 1 s", "ahead, in 150 s"] if cache else ["ahead, in 150 s"] * 2)
    waits = [(event.host, event.message) for event in played.journal.events() if event.reason == "WaitsForCompile"]
    message = f"{played.cluster.started[0].place.host} compiles the same and pushes it to {cache}"
    assert waits == ([(played.cluster.started[1].place.host, message)] if cache else [])


@starting_fleet(
    spec(compiles=True, hosts=2, replicas=2, degree=24) + "    neff_cache: s3://models/neffs\n", compile_s=150.0
)
async def test_a_host_that_waits_for_a_compilation_compiles_if_that_fails(played: Played) -> None:
    """Whatever the reason: the compiling host may be lost."""
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.until(lambda: "WaitsForCompile" in played.happened(), "one waits", 60.0)
    first = next(event.host for event in played.journal.events() if event.reason == "WillCompile")
    played.cluster.lost_now = {str(first)}
    await played.until(lambda: played.ready("m"), "the other one serves", 200.0)
    assert [config.place.host for config in played.cluster.started] == [
        name for name in played.cluster.host_names if name != first
    ]


@starting_fleet(spec(hosts=2), store={"inf2.48xlarge/1": {"s3://models/one@1"}})
async def test_among_equal_hosts_the_one_with_the_model_is_chosen(played: Played) -> None:
    """The replica starts without a transfer."""
    await played.settled()
    assert ([config.place.host for config in played.cluster.started], played.cluster.fetches) == (
        ["inf2.48xlarge/1"],
        [],
    )
    fetched = next(event.message for event in played.journal.events() if event.reason == "Fetched")
    assert fetched == "0 bytes: 100 bytes were here"


@starting_fleet(spec(compiles=True))
async def test_a_replica_that_has_served_restarts_without_a_compile_check(played: Played) -> None:
    """The check takes the engine's package some seconds, during which the model does not serve."""
    await played.settled()
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: len(played.cluster.started) == 2, "again", 60.0)
    await played.settled()
    assert played.cluster.compiles == []


# Started while the rest arrives


# Fetches report their progress.
ARRIVING: dict[str, Any] = {"reports_progress": True, "fetch_s": 100.0, "process_s": 5.0, "load_s": 3.0}


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_process_starts_during_the_last_seconds_of_its_fetch(tmp_path: Path) -> None:
    """Not earlier than needed. Its start time counts from the end of the fetch; until then the status shows the
    progress of the fetch.
    """
    took = {}
    for with_progress in (False, True):

        async def story(played: Played, with_progress: bool = with_progress) -> None:
            cluster = played.cluster
            await played.until(lambda: cluster.started, "its process is asked for", 200.0)
            assert now() == pytest.approx(95.0 if with_progress else 100.0, abs=1.5)
            if with_progress:
                await played.until(lambda: played.replica("m/0")["state"] == "loading", "loading", 3.0)
                assert played.replica("m/0")["fetch"]["source"] == "s3://models/one"
            await played.settled()
            took[with_progress] = now()
            assert played.replica("m/0")["fetch"] is None
            assert played.replica("m/0")["load_s"] == pytest.approx(8.0, abs=0.2)
            expected = ["Starting", "Fetching", *(["StartsEarly"] if with_progress else []), "Fetched", "Ready"]
            assert [reason for reason in played.happened() if reason in {*expected, "Failed"}] == expected
            assert len(cluster.started) == len(cluster.fetches) == 1

        play(tmp_path / str(with_progress), spec(), story, **(ARRIVING | {"reports_progress": with_progress}))
    assert took[False] - took[True] == pytest.approx(5.0, abs=1.5)


@pytest.mark.parametrize("more", ["    engine_options: {compile: true}\n", "    trust_remote_code: true\n"])
@starting_fleet(lambda more: spec() + more, **ARRIVING)
async def test_a_start_that_cannot_wait_for_files_follows_the_fetch(played: Played, more: str) -> None:
    """A compilation ahead of the start, and code of a checkpoint, which may read any file."""
    await played.settled()
    assert "StartsEarly" not in played.happened()


@starting_fleet(spec(), stall_s=50.0, broken_fetch=Failure("s3-unreachable", "no answer"), **ARRIVING)
async def test_a_broken_fetch_fails_the_waiting_replica(played: Played) -> None:
    """With the cause of the fetch. Its process ends before the next one, which resumes the fetch, is requested."""
    await played.until(lambda: played.replica("m/0").get("failures") == 1, "it failed", 300.0)
    assert played.replica("m/0")["reason"] == "s3-unreachable: no answer"
    assert [config.run.epoch for config in played.cluster.started] == [1]
    await played.until(lambda: played.cluster.ended, "its process is ended", 10.0)
    played.cluster.broken_fetch = None
    await played.settled()
    assert [config.run.epoch for config in played.cluster.started] == [1, 2]
    assert (len(played.cluster.living()), played.cluster.ended) == (1, ["m/0.1"])


@starting_fleet(spec(), stall_s=90.0, **ARRIVING)
async def test_a_slow_fetch_does_not_count_towards_the_start(played: Played) -> None:
    """Within the fetch deadline: `start_s` is 20 here. No second process is started."""
    await played.settled()
    assert now() == pytest.approx(193.0, abs=2.0)
    assert len(played.cluster.started) == 1
    assert "Failed" not in played.happened()
    assert played.replica("m/0")["load_s"] == pytest.approx(8.0, abs=0.2)


@starting_fleet(spec(), tidy_s=15.0, **ARRIVING)
async def test_a_replica_is_ready_only_after_its_fetch_has_ended(played: Played) -> None:
    """Even if its process reports ready earlier, since only then the content of the version is known."""
    await played.settled()
    assert now() == pytest.approx(115.0, abs=1.0)
    assert played.happened().index("Fetched") < played.happened().index("Ready")
    played.cluster.contents["s3://models/one"] = "2"
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: len(played.cluster.started) == 2, "again", 60.0)
    assert {config.source for config in played.cluster.started} == {"/store/s3://models/one@1"}


@starting_fleet(spec(), stall_s=1e6, **ARRIVING)
async def test_a_fetch_that_never_ends_is_ended_by_its_own_deadline(played: Played) -> None:
    """`fetch_s` is 200 here, and includes the time in which the process waits."""
    await played.until(lambda: played.replica("m/0").get("failures") == 1, "it failed", 300.0)
    assert now() == pytest.approx(200.0, abs=2.0)
    assert "fetch-deadline: the fetch did not end within 200 s" in played.replica("m/0")["reason"]
    await played.until(lambda: played.cluster.ended == ["m/0.1"], "its process is ended", 10.0)
    assert played.cluster.stopped_fetches == [(HOST, "s3://models/one")]


@starting_fleet(spec(), stall_s=1e6, **ARRIVING)
async def test_removing_a_replica_stops_its_process_and_its_fetch(played: Played) -> None:
    await played.until(lambda: played.cluster.started, "it is started", 200.0)
    await played.operator.unload("m", "tester")
    await played.until(lambda: not played.model("m")["replicas"], "forgotten", 60.0)
    assert (played.cluster.fetching, played.cluster.living(), played.cluster.ended) == ([], [], ["m/0.1"])


@starting_fleet(spec(), **ARRIVING)
async def test_a_process_that_dies_while_it_waits_restarts_after_the_fetch(played: Played) -> None:
    await played.until(lambda: played.cluster.started, "it is started", 200.0)
    await played.cluster.find("m/0").die("killed")
    await played.settled()
    assert [config.run.epoch for config in played.cluster.started] == [1, 2]
    assert played.cluster.stopped_fetches == [(HOST, "s3://models/one")]


@starting_fleet(spec(), stall_s=30.0, **ARRIVING)
async def test_a_restarted_controller_requests_the_files_that_its_replica_waits_for(
    played: Played, tmp_path: Path
) -> None:
    """The replica of the former controller gets the rest, and no second one is started."""
    await played.until(lambda: played.cluster.started, "it is started", 200.0)
    await played.kill()
    played.cluster.fetch_s = 10.0
    async with Played(tmp_path, played.cluster, spec(), journal=played.journal) as second:
        await second.settled()
        assert [config.run.epoch for config in played.cluster.started] == [1]
        assert second.replica("m/0")["epoch"] == 1
        assert second.happened().count("Failed") == 0
        await second.kill()


@starting_fleet(spec() + "    draft: {source: s3://models/draft, k: 2}\n", **(ARRIVING | {"fetch_s": 50.0}))
async def test_a_model_and_its_draft_must_both_be_almost_complete(played: Played) -> None:
    """The draft is fetched last; a process waits only for the rest of the draft."""
    await played.until(lambda: played.cluster.started, "it is started", 200.0)
    assert now() == pytest.approx(95.0, abs=1.5)
    assert played.cluster.store[HOST] == {"s3://models/one@1"}
    assert (played.cluster.started[0].source, played.cluster.started[0].draft_source) == (
        "/store/s3://models/one@1",
        "/store/s3://models/draft@1",
    )
    await played.settled()


@pytest.mark.parametrize(
    ("statuses", "estimates"),
    [
        ([(900, 0), (800, 100), (300, 600), (200, 700)], [None, 8.0, 1.0, pytest.approx(0.86, abs=0.01)]),
        ([(100, 0)], [None]),  # its rate is unknown
        ([(900, 0), (500, 0), (100, 0)], [None, None, None]),  # an earlier attempt left it on the disk
        ([(900, 0), (600, 100), (600, 100)], [None, 6.0, 12.0]),  # it has stopped
    ],
)
def test_the_remaining_time_is_estimated_from_network_traffic(
    statuses: list[tuple[int, int]], estimates: list[float | None]
) -> None:
    """Not before some time of measurement."""
    remaining = RemainingTime()
    assert [
        remaining.estimate(FetchStatus(source="", phase="fetching", total=left, moved=moved), float(second))
        for second, (left, moved) in enumerate(statuses)
    ] == estimates


def test_a_process_starts_ahead_by_its_measured_time_before_the_weights() -> None:
    """If that is known; an engine that does not wait for files never starts ahead."""
    assert lead_of(CONFIG, None) == PROCESS_S
    assert lead_of(CONFIG, 2.0) == 2.0
    assert lead_of(CONFIG, 9.0) == 9.0
    assert lead_of(changed(CONFIG, engine="transformers-neuronx"), 2.0) is None


# Local folders


@starting_fleet(lambda tmp_path: spec(str(stub_checkpoint(tmp_path / "m"))), local_contents="old")
async def test_a_replica_loads_the_files_of_its_version_until_an_operator_accepts_others(played: Played) -> None:
    """A swapped folder stops the next start; `rollout restart` loads it. Another host has files of its own."""
    await played.settled()
    played.cluster.local_contents = "new"
    await played.cluster.find("m/0").die("killed")
    await played.until(lambda: played.replica("m/0")["stopped"], "it is not loaded", 60)
    assert played.cluster.started[-1].run.contents == "old"
    assert played.replica("m/0")["reason"].startswith("source-changed")
    await played.operator.restart("m", "tester")
    await played.settled()
    (replica,) = played.ready("m")
    assert played.cluster.started[-1].run.contents == ""
    await played.cluster.find(replica["id"]).die("killed")
    await played.settled()
    assert played.cluster.started[-1].run.contents == "new"


# In words


def fetch(**changes: Any) -> FetchProgress:
    plain = {"source": "s3://models/one", "phase": "fetching", "bytes": 0, "total": None}
    return convert({**plain, "bytes_per_s": None, "left_s": None, "trouble": None, **changes}, FetchProgress)


def test_a_fetch_is_described_with_the_known_figures() -> None:
    known = fetch(bytes=1_200_000_000, total=13_500_000_000, bytes_per_s=210_000_000, left_s=58.2)
    assert known.text == "fetching s3://models/one: 1.2 GB of 13.5 GB, 210.0 MB/s, 58 s left"
    assert fetch(phase="listing").text == "listing s3://models/one"
    away = fetch(phase="listing", trouble="no answer for 12 s (ConnectTimeoutError)")
    assert away.text == "listing s3://models/one: no answer for 12 s (ConnectTimeoutError)"


def test_up_reports_a_fetch_by_phases_and_tenths() -> None:
    """A line each second would hide other events."""
    plain = convert(replica("m/0", "0-7", "fetching"), ReplicaInFleet)
    steps = [("listing", 100), ("fetching", 100), ("fetching", 150), ("fetching", 200), ("verifying", 200)]
    lines = [progress(replace(plain, fetch=fetch(phase=phase, bytes=done, total=1000))) for phase, done in steps]
    assert [news for news, _ in lines] == [
        "m/0 fetching on cores 0-7 listing 1",
        "m/0 fetching on cores 0-7 fetching 1",
        "m/0 fetching on cores 0-7 fetching 1",
        "m/0 fetching on cores 0-7 fetching 2",
        "m/0 fetching on cores 0-7 verifying 2",
    ]
    away = fetch(phase="listing", trouble="no answer for 3 s")
    assert progress(replace(plain, fetch=away))[0] != progress(replace(plain, fetch=fetch(phase="listing")))[0]
    assert lines[1][1] == "m/0 fetching s3://models/one: 100 bytes of 1.0 kB"
    assert progress(plain)[1] == "m/0 fetching on cores 0-7"


def test_the_status_shows_what_an_update_waits_for() -> None:
    """With its cause and the progress of the fetch."""
    status = copy.deepcopy(STATUS)
    waits = {"host": HOST, "version": "7d40", "state": "failed", "failures": 2, "reason": "s3-denied: no"}
    status["models"][0]["replicas"][1]["fetch"] = to_builtins(fetch())
    status["models"][0]["preparing"] = [waits]
    status["hosts"][0]["fetches"] = [to_builtins(fetch(bytes=1, total=2))]
    text = status_text(status_of(status))
    assert "chat/1: fetching s3://models/one\n" in text
    assert f"chat: preparing the new version on {HOST} (failed); the old replicas keep serving\n" in text
    assert "    2 failed attempts: s3-denied: no\n    fetching s3://models/one: 1 bytes of 2 bytes" in text


UNLOADABLE = Failure("weights-broken", "model.safetensors is cut off")


@pytest.mark.parametrize("strategy", ["in_place", "hold"])
def test_an_update_that_cannot_be_loaded_is_rolled_back_without_an_interruption(tmp_path: Path, strategy: str) -> None:
    """A local source on a full host: errors that show without cores fail the update while the old replica serves."""
    cluster = FakeCluster()
    folder = str(stub_checkpoint(tmp_path))

    async def story(played: Played) -> None:
        await played.settled()
        text = spec(folder, degree=24, batch=3, strategy=strategy)
        _, generation = await played.operator.read(text, "spec.yaml", folder, by="x", cause="apply")
        cluster.unloadable[generation.versions["m"]] = UNLOADABLE
        await played.apply(text)
        await played.until(lambda: played.model("m")["preparing"], "it is prepared", 60.0)
        await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600.0)
        await played.settled()
        assert (cluster.drained, len(cluster.started), len(cluster.checks)) == ([], 1, 3)
        cause = next(event.message for event in played.journal.events() if event.reason == "RolloutFailed")
        assert "weights-broken: model.safetensors is cut off" in cause

    play(tmp_path, spec(folder, degree=24, strategy=strategy), story, cluster=cluster)


def test_an_update_continues_after_a_check_that_ends_in_time(tmp_path: Path) -> None:
    """The status shows what it waits for; the old replica serves until then."""
    cluster = FakeCluster()
    folder = str(stub_checkpoint(tmp_path))

    async def story(played: Played) -> None:
        await played.settled()
        cluster.check_s = 30.0
        await played.apply(spec(folder, degree=24, batch=3))
        await played.until(
            lambda: [preparation["state"] for preparation in played.model("m")["preparing"]] == ["checking"],
            "it is checked",
            60.0,
        )
        assert (len(played.ready("m")), cluster.drained) == (1, [])
        await played.settled()
        assert len(cluster.started) == 2

    play(tmp_path, spec(folder, degree=24), story, cluster=cluster)
