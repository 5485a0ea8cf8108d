"""Answers groups of requests and reports when each token arrived: ``python -m workers.serving.timed_answers``.

A ``TimedJob`` is read as JSON from standard input. JSON lines go to standard output: one ``TimedAnswer`` for each
request in the order in which they end, and ``Finished``; or the ``Trouble`` that ended the process. It loads the model
and batches as a replica does, without Ray, and keeps its cores until it is killed. `corewright verify` runs it.
"""

from __future__ import annotations

import queue
import resource
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from workers.host.json_process import ChildRequest, answering, read_request, set_variables
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import GenerateRequest, TokenEvent
from workers.messages.status import Trouble
from workers.serving.backend import Backend, failure_of, opened

KIB = 1024


class TimedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request and the condition on which it is sent."""

    request: GenerateRequest
    after: int = 0  # events of the first request of its group that come before it


class TimedJob(ChildRequest, frozen=True, kw_only=True):
    """A model, and groups of requests: each group begins when the one before has ended."""

    config: ReplicaConfig
    groups: list[list[TimedRequest]] = msgspec.field(default_factory=list)


class TimedAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """The answer to a request."""

    id: str
    token_ids: list[int] = []
    logprobs: list[float] = []  # of the tokens, where they were requested
    at: list[float] = []  # seconds from the request's submission to each of its events with tokens
    finish: str = ""  # FinishReason
    error: str = ""


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """All requests have ended."""

    load_s: float  # claim, weights, graphs, warm-up
    peak_gib: float  # host memory: the largest resident set of the process so far


Reply = TimedAnswer | Finished | Trouble


class _TimedRun:
    """The requests of one job. ``emit`` is called on the backend's thread, the rest on the main thread."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[tuple[float, TokenEvent] | Exception] = queue.SimpleQueue()

    def emit(self, events: list[TokenEvent]) -> None:
        now = time.monotonic()
        for event in events:
            self.events.put((now, event))

    def step(self, backend: Backend) -> None:
        """Runs the backend until it is closed."""
        try:
            backend.run()
        except Exception as error:  # noqa: BLE001 - it is raised on the main thread
            self.events.put(error)

    def group(self, backend: Backend, requests: Sequence[TimedRequest], send: Callable[[Reply], None]) -> None:
        """Answers one group. Raises the engine's error."""
        sent: dict[str, float] = {}
        events: dict[str, list[tuple[float, TokenEvent]]] = {each.request.id: [] for each in requests}
        first = requests[0].request.id
        ended = 0
        while ended < len(requests):
            for each in requests:
                id = each.request.id
                if id not in sent and (len(events[first]) >= each.after or _ended(events[first])):
                    sent[id] = time.monotonic()
                    backend.submit(each.request)
            received = self.events.get()
            if isinstance(received, Exception):
                raise received
            own = events[received[1].id]
            own.append(received)
            if _ended(own):
                ended += 1
                send(_answer(received[1].id, sent[received[1].id], own))


def _ended(events: Sequence[tuple[float, TokenEvent]]) -> bool:
    return bool(events) and events[-1][1].finish is not None


def _answer(id: str, sent_at: float, events: Sequence[tuple[float, TokenEvent]]) -> TimedAnswer:
    last = events[-1][1]
    return TimedAnswer(
        id=id,
        token_ids=[token for _, event in events for token in event.token_ids],
        logprobs=[each.logprob for _, event in events for each in event.logprobs if each.logprob is not None],
        at=[at - sent_at for at, event in events if event.token_ids],
        finish="" if last.finish is None else last.finish.value,
        error=last.error or "",
    )


def run(job: TimedJob, send: Callable[[Reply], None]) -> None:
    """Loads the model, answers, and sends the results. Never raises for faults of the model or the machine."""
    began, activity, id, timed = time.monotonic(), "the load", "load-failed", _TimedRun()
    try:
        with opened(job.config, timed.emit) as backend:
            load_s = time.monotonic() - began
            activity, id = "a step of the engine", "engine-failed"
            threading.Thread(target=timed.step, args=(backend,), daemon=True).start()
            for group in job.groups:
                timed.group(backend, group, send)
            peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB / 2**30
            send(Finished(load_s=load_s, peak_gib=peak_gib))
            threading.Event().wait()
    except Exception as error:  # noqa: BLE001 - it is sent as the failure
        send(Trouble(failure_of(id, error, activity, job.config)))


def main() -> None:
    """Read the job and answer it."""
    job = read_request(TimedJob)
    set_variables({})
    run(job, answering())


if __name__ == "__main__":
    main()
