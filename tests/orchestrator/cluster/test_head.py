"""Ray's head while it is away: a call to it takes a thread and a bounded time of the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from ray.exceptions import RayError, RpcError

from orchestrator.cluster.calls import CRASHED, DISCONNECTED, Head, cause_of_death, retried
from orchestrator.cluster.nodes import IDLE_TERMINATION, loss_of
from orchestrator.process.awake_clock import AwakeClock

SHORT_S = 0.02
DEADLINE_S = 10.0


def test_a_call_to_an_absent_head_ends_at_its_deadline_and_its_result_comes_later() -> None:
    """Later calls wait for the one that blocks, so an absence takes one thread for each key."""

    async def story() -> None:
        head, back, made = Head(AwakeClock()), threading.Event(), []

        def nodes() -> int:
            made.append(1)
            back.wait(DEADLINE_S)
            return len(made)

        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError, match="head has not replied"):
                await head.ask(nodes, "nodes", SHORT_S)
        assert await head.ask(lambda: "another", "actors", DEADLINE_S) == "another"
        back.set()
        assert await head.ask(nodes, "nodes", DEADLINE_S) == 1
        assert await head.ask(nodes, "nodes", DEADLINE_S) == 2

    asyncio.run(story())


def test_an_error_of_a_call_is_raised_and_not_kept() -> None:
    async def story() -> None:
        head = Head(AwakeClock())
        with pytest.raises(ValueError, match="no such actor"):
            await head.ask(lambda: exec("raise ValueError('no such actor')"), "actor")
        assert await head.ask(lambda: "here", "actor") == "here"

    asyncio.run(story())


def test_the_controller_asks_again_at_its_start_until_the_head_replies() -> None:
    """An error in its constructor would end it for good."""
    failures: list[Exception] = [RpcError("unavailable"), RayError()]

    def read() -> str:
        if failures:
            raise failures.pop()
        return "stored"

    assert retried(read) == "stored"
    failures = [RpcError("unavailable")]
    with pytest.raises(RpcError):
        retried(read, -1.0)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RayError("the actor died: SYSTEM_ERROR, connection closed"), CRASHED),
        (RayError("The actor is temporarily unavailable: rpc failed"), DISCONNECTED),
        (RayError("it is not schedulable on node 1"), "its host is lost"),
        (RayError(), "RayError"),
    ],
)
def test_the_cause_of_an_actors_death_is_given_in_few_words(error: RayError, cause: str) -> None:
    assert cause_of_death(error) == cause


def test_a_node_that_the_autoscaler_has_ended_is_not_reported_as_a_failure() -> None:
    idle = loss_of(IDLE_TERMINATION, "Termination of node that's idle for 15.46 seconds.")
    assert idle.expected
    assert idle.cause == "its Ray node is gone: Termination of node that's idle for 15.46 seconds"
    missed = loss_of(2, "health check failed due to missing too many heartbeats")
    assert not missed.expected
    assert "heartbeats" in missed.cause
