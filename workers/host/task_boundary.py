"""The boundary of a task that must go on after an error: logs the traceback, and nothing else."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def task_boundary(
    log: logging.Logger,
    message: str,
    *arguments: object,
    level: int = logging.ERROR,
    on_error: Callable[[Exception], object] | None = None,
) -> Iterator[None]:
    """Logs any Exception of its body with the message, and calls ``on_error``; what follows the body runs in each
    case."""
    try:
        yield
    except Exception as error:
        log.log(level, message, *arguments, exc_info=True)
        if on_error is not None:
            on_error(error)
