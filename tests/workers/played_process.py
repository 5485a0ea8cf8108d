"""The process that checks, predicts and compiles for a replica, played by its replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from workers.compiled.orders import Order, Reply, Working
from workers.messages.status import Trouble


def process_of(replies: Callable[..., Iterator[Reply]]) -> Callable[..., Any]:
    """Takes the place of `preparation.run_process`; ``replies`` gets its first arguments."""

    def run(command: str, order: Order, stop: threading.Event, limit_s: float | None = None, **options: Any) -> Any:
        for reply in replies(command, order, stop, limit_s):
            if not isinstance(reply, Working):
                return reply.failure if isinstance(reply, Trouble) else reply
            if "tell" in options:
                options["tell"](reply)
        raise AssertionError("a process always has a result")

    return run
