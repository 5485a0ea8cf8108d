"""CPU time of a call with cold caches."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from typing import Any


def cold_ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU milliseconds of one call, and what it returned.

    Every `lru_cache` of the planner's modules is emptied and all garbage collected before; the collector stays on
    during the call, as in a command or in the daemon.
    """
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "placements":
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    gc.collect()
    began = time.process_time()
    result = call()
    return (time.process_time() - began) * 1e3, result
