"""The boundary of a task that must go on after an error: logs the traceback, and nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def task_boundary(log: logging.Logger, message: str, *arguments: object, level: int = logging.ERROR) -> Iterator[None]:
    """Logs any Exception of its body with the message; what follows the body runs in each case."""
    try:
        yield
    except Exception:
        log.log(level, message, *arguments, exc_info=True)
