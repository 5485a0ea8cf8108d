"""Garbage collection of a process that runs for long and creates few cycles."""

from __future__ import annotations

import gc


def settle_collector() -> None:
    """Freezes the existing objects and makes garbage collection rare.

    For processes with one task, the gateway and the controller: what they allocate rarely has cycles, and each
    collection of the oldest generation visits all objects. Saves 2 us per request of the gateway, and a fifth of the
    controller's CPU time with 2,400 replicas.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
