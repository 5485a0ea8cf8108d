"""Walks from an exception to its causes."""

from __future__ import annotations

from collections.abc import Iterator


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its cause or context, and so on, each once."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
