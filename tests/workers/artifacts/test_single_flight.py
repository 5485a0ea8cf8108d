"""What a host does once for all that wait for it, and for no longer than somebody does."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from workers.artifacts.fetch.progress import FetchStatus, Progress
from workers.artifacts.fetch.single_flight import FAILED_HINT, LEASE_S, SingleFlight
from workers.artifacts.sources.listing import SourceError, Stopped
from workers.messages.status import Failure, Reaction

DEADLINE_S = 10.0


class Played:
    """Work that ends when the test releases it; counts its starts."""

    def __init__(self) -> None:
        self.begun = 0
        self.running = threading.Event()
        self.go_on = threading.Event()
        self.stopped = threading.Event()

    def __call__(self, progress: Progress, stop: threading.Event) -> str:
        self.begun += 1
        progress.enter("fetching")
        self.running.set()
        while not self.go_on.wait(0.005):
            if stop.is_set():
                self.stopped.set()
                raise Stopped("asked to")
        return f"end {self.begun}"


def joined(
    flights: SingleFlight[str], caller: str, work: Callable[[Progress, threading.Event], str]
) -> str | Failure | FetchStatus:
    return flights.join(caller, "key", "s3://models/one", work, DEADLINE_S)


def test_a_job_runs_once_and_each_waiter_gets_its_outcome() -> None:
    """A later call starts it anew."""
    work, flights = Played(), SingleFlight[str]()
    messages: list[str | Failure | FetchStatus] = []
    threads = [
        threading.Thread(target=lambda caller=caller: messages.append(joined(flights, caller, work)))
        for caller in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    assert work.running.wait(DEADLINE_S)
    for caller in ("a", "b"):  # both wait from here on, whenever their threads run
        status = flights.join(caller, "key", "s3://models/one", work, 0.0)
        assert isinstance(status, FetchStatus)
        assert (status.source, status.phase) == ("s3://models/one", "fetching")
    work.go_on.set()
    for thread in threads:
        thread.join(DEADLINE_S)

    assert messages == ["end 1", "end 1"]
    assert joined(flights, "c", work) == "end 2"


def test_a_job_without_waiters_is_stopped() -> None:
    """Not before the last one has left."""
    work, flights = Played(), SingleFlight[str]()
    for caller in ("a", "b"):
        assert isinstance(flights.join(caller, "key", "one", work, 0.0), FetchStatus)
    assert work.running.wait(DEADLINE_S)
    messages: list[str | Failure | FetchStatus] = []
    late = threading.Thread(target=lambda: messages.append(joined(flights, "b", work)))
    late.start()
    flights.leave("a")
    assert not work.stopped.wait(0.05)
    flights.leave("b")
    assert work.stopped.wait(DEADLINE_S)
    late.join(DEADLINE_S)
    assert messages == [Failure("fetch-cancelled", "one was cancelled: no replica needs it any longer")]


def test_a_waiter_that_stops_polling_is_dropped() -> None:
    """Such as a killed controller; one that polls in time keeps waiting for the same job."""
    now = [0.0]
    work, flights = Played(), SingleFlight[str](clock=lambda: now[0])
    assert isinstance(flights.join("a", "key", "one", work, 0.0), FetchStatus)
    now[0] = LEASE_S - 1
    assert isinstance(flights.join("a", "key", "one", work, 0.0), FetchStatus)
    now[0] = 2 * LEASE_S - 2
    flights.drop_expired_waiters()
    assert (work.begun, work.stopped.is_set()) == (1, False)
    now[0] = 3 * LEASE_S
    flights.drop_expired_waiters()
    assert work.stopped.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (SourceError("s3-denied", "no s3:GetObject", "a hint"), Failure("s3-denied", "no s3:GetObject", "a hint")),
        (SourceError("pickle-refused", "pickled"), Failure("pickle-refused", "pickled", reaction=Reaction.STOP)),
        (OSError("the disk"), Failure("fetch-failed", "s3://models/one: OSError: the disk", FAILED_HINT)),
    ],
)
def test_a_failed_job_is_reported_and_starts_anew(error: Exception, failure: Failure) -> None:
    """Errors that only a change of the spec fixes are not retried."""
    begun = []

    def fail(progress: Progress, stop: threading.Event) -> str:
        begun.append(1)
        raise error

    flights = SingleFlight[str]()
    assert joined(flights, "a", fail) == failure
    assert joined(flights, "a", fail) == failure
    assert len(begun) == 2


class Panic(BaseException):
    """Raised like PyO3's exception when a Rust library panics."""


def test_a_panic_ends_a_job() -> None:
    """Its waiters get an outcome."""

    def panics(progress: Progress, stop: threading.Event) -> str:
        raise Panic("index out of bounds")

    ended = joined(SingleFlight[str](), "a", panics)
    assert isinstance(ended, Failure)
    assert ended.id == "fetch-failed"
