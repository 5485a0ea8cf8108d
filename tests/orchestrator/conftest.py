from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from orchestrator.process.home import Home, end_leftovers
from tests.orchestrator.fakefleet import LiveAdmin
from tests.orchestrator.gateways import LiveGateway
from tests.served import Served


@pytest.fixture(scope="module")
def gateway() -> Iterator[LiveGateway]:
    """A gateway whose routes the test sets."""
    live = LiveGateway()
    yield live
    live.close()


@pytest.fixture
def fresh_gateway() -> Iterator[LiveGateway]:
    """A gateway that has never been ready."""
    live = LiveGateway()
    yield live
    live.close()


@pytest.fixture
def replica() -> Iterator[Callable[..., Served]]:
    """Makes replicas, and ends them after the test."""
    made: list[Served] = []

    def make(**options: float) -> Served:
        made.append(Served(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def admin() -> Iterator[LiveAdmin]:
    """A fleet that the test plays, behind the real admin API."""
    live = LiveAdmin()
    yield live
    live.close()


@contextmanager
def temporary_home() -> Iterator[Path]:
    """Yields a temporary home; ends the processes that a test leaves in it."""
    with tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp") as folder:
        yield Path(folder)
        record = Home(Path(folder)).read_record()
        if record is not None and psutil.pid_exists(record.pid):
            psutil.Process(record.pid).kill()
        end_leftovers(Home(Path(folder)), record.fleet if record is not None else "none", 10.0)


@pytest.fixture
def home() -> Iterator[Path]:
    """A temporary home of one test."""
    with temporary_home() as folder:
        yield folder
