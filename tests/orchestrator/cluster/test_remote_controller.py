"""A gateway's calls of the controller actor: an exception that it raises is told from its absence."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from orchestrator.cluster.gateways import RemoteController
from orchestrator.gateway.controller_client import ControllerAway, ControllerFailed


def raised_by(error: Exception) -> ControllerAway:
    """Returns what a call raises if the actor's method raises ``error``."""

    async def hosted() -> None:
        raise error

    controller = RemoteController("fleet")
    controller._actor = SimpleNamespace(hosted=SimpleNamespace(remote=hosted))
    with pytest.raises(ControllerAway) as raised:
        asyncio.run(controller.hosted())
    return raised.value


@pytest.mark.parametrize("cause", [KeyError("m"), ValueError("m"), asyncio.TimeoutError("m")], ids=repr)
def test_an_exception_of_the_controllers_method_is_a_failure(cause: Exception) -> None:
    error = RayTaskError("hosted", "the traceback", cause).as_instanceof_cause()
    assert isinstance(raised_by(error), ControllerFailed)


def test_a_controller_that_restarts_is_away() -> None:
    assert type(raised_by(ActorUnavailableError("it restarts", None))) is ControllerAway
