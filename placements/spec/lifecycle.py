"""How the replicas of a model are replaced, and how long they may take: fields of a spec."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from placements.spec.notation import Frozen, Seconds

Strategy = Literal["auto", "surge", "in_place", "hold"]


class Update(Frozen):
    """How a model's processes are replaced when the spec changes."""

    wanted = "a mapping, like {strategy: surge}"
    strategy: Strategy = "auto"
    """How a new replica gets its cores. `auto` selects the strategy with the least predicted interruption."""
    max_swap_s: Seconds[Annotated[float, Field(ge=0, le=3600)]] = 30.0
    """The longest predicted swap, in seconds, for which `auto` selects `hold`. `scaling.hold_s` limits the wait of
    requests then."""
    progress_deadline_s: Seconds[Annotated[float, Field(gt=0, le=86_400)]] = 900.0
    """Seconds without progress after which the update fails. Progress is a new replica that becomes ready or an old one
    that stops. The start of a new replica, within its `deadlines`, does not count."""
    rollback: bool = True
    """Roll back to the last complete revision automatically if the update fails."""
    max_failures: Annotated[int, Field(ge=1, le=100)] = 3
    """Consecutive failures of a new replica after which the update fails."""


class Deadlines(Frozen):
    """Deadlines of a replica, in seconds."""

    wanted = "a mapping, like {start_s: 600}"
    start_s: Seconds[Annotated[float, Field(gt=0, le=86_400)]] = 900.0
    """Seconds from a replica's start to its first generation, without the time to fetch and compile. Then it fails with
    `start-deadline`."""
    fetch_s: Seconds[Annotated[float, Field(gt=0, le=604_800)]] = 14_400.0
    """Seconds to fetch its artifacts to its host, in addition to `start_s`. Then it fails with `fetch-deadline`.
    Partial downloads are kept."""
    compile_s: Seconds[Annotated[float, Field(gt=0, le=604_800)]] = 14_400.0
    """Seconds to compile, or to wait for another replica that compiles the same, in addition to `start_s`. Then it
    fails with `compile-deadline`."""
    step_s: Seconds[Annotated[float, Field(gt=0, le=86_400)]] = 120.0
    """Seconds for one step of the engine. Then it fails with `step-stuck`."""
    drain_s: Seconds[Annotated[float, Field(ge=0, le=86_400)]] = 300.0
    """Seconds to drain a replica that is replaced, moved or removed. Requests that still run are then aborted."""
