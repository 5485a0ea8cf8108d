"""What is found out and compiled before a start has its own times, its own log, and is never silent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.orchestrator.control.test_prefetch import spec
from tests.orchestrator.elsewhere import alone as alone
from tests.orchestrator.fakes import Played, starting_fleet
from workers.messages.status import Failure


@pytest.mark.parametrize("source", ["s3://models/one", "/models/one"])
@starting_fleet(lambda source: spec(source, compiles=True), fetch_s=100.0, look_s=190.0)
async def test_a_long_compile_check_is_not_a_late_start(played: Played, source: str) -> None:
    """Importing an engine's package on a busy host takes longer than a start may, and longer than the rest of the
    fetch.
    """
    await played.settled(900.0)
    assert "Failed" not in played.happened()


@starting_fleet(spec(compiles=True), look_s=1e9)
async def test_an_endless_compile_check_is_a_failed_start(played: Played) -> None:
    """After ten minutes."""
    await played.until(lambda: played.replica("m/0").get("failures"), "it failed", 700.0)
    assert played.replica("m/0")["reason"].startswith("start-deadline: its needs were not determined within 60")


@starting_fleet(
    spec(degree=24, compiles=True),
    unforeseeable=Failure("foresee-failed", "what m would compile is unknown: ImportError"),
)
async def test_a_failed_compile_check_is_an_event(played: Played) -> None:
    """It says that compiling on the cores cannot be predicted, and the start continues."""
    await played.settled()
    (message,) = [event.message for event in played.journal.events() if event.reason == "ForeseeFailed"]
    assert "ImportError" in message
    played.cluster.unforeseeable = Failure("foresee-failed", "the host does not reply")
    await played.apply(spec("s3://models/two", degree=24, compiles=True))
    await played.settled()
    message = [event.message for event in played.journal.events() if event.reason == "ForeseeFailed"][-1]
    assert "the host does not reply" in message


@starting_fleet(spec(degree=24, compiles=True))
async def test_the_compilation_of_an_update_does_not_write_to_the_log_of_the_serving_replica(played: Played) -> None:
    """Its last lines would be attributed to the replica."""
    new = spec("s3://models/two", degree=24, compiles=True)
    await played.settled()
    serving = played.cluster.started[0].run.log
    await played.apply(new)
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    await played.settled()
    (log,) = played.cluster.compile_logs
    assert (Path(log).name, Path(log).parent) == ("compile-m.log", Path(serving).parent)
    assert played.cluster.started[-1].run.log == serving


@starting_fleet(spec(degree=24, compiles=True))
async def test_a_slow_compilation_of_an_update_is_reported_as_such(played: Played) -> None:
    """The time of the fetch does not count towards it; meanwhile the status shows the progress."""
    new = spec("s3://models/two", degree=24, compiles=True)
    await played.settled()
    played.cluster.fetch_s, played.cluster.look_s, played.cluster.compile_s = 150.0, 30.0, 1e9
    await played.apply(new)
    played.cluster.uncompiled = {played.controller.state.current.versions["m"]}
    for at_s, phase in ((100.0, "fetching"), (70.0, "looking"), (30.0, "compiling")):
        await asyncio.sleep(at_s)
        assert [entry["state"] for entry in played.model("m")["preparing"]] == [phase]
    await played.until(lambda: "PreparationFailed" in played.happened(), "it is given up", 300.0)
    (message,) = [event.message for event in played.journal.events() if event.reason == "PreparationFailed"]
    assert message.startswith("compile-deadline: it has been compiling for 200 s on inf2.48xlarge/0")
    assert played.cluster.drained == []


@starting_fleet(spec(degree=24, compiles=True), tick_s=10.0)
async def test_an_endless_compile_check_of_an_update_is_given_up(played: Played) -> None:
    """After ten minutes, reported as a check: nothing is left to fetch. The old replica serves."""
    await played.settled()
    played.cluster.look_s = 1e9
    await played.apply(spec("s3://models/two", degree=24, compiles=True))
    await played.until(lambda: "PreparationFailed" in played.happened(), "it is given up", 700.0)
    (message,) = [event.message for event in played.journal.events() if event.reason == "PreparationFailed"]
    assert message.startswith("start-deadline: it has been looking for 600 s on inf2.48xlarge/0")
    assert played.cluster.drained == []
