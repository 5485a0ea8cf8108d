"""A replica changes the adapters that it serves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from workers.engines.server.completion_relay import CompletionRelay
from workers.serving import replica


class Refusing(CompletionRelay):
    """Its server takes no adapters."""

    def __init__(self) -> None:
        """Has no server."""

    def set_adapters(self, adapters: Any) -> None:
        raise ValueError("no adapters")


def test_a_failed_change_of_adapters_keeps_no_folder_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is retried for ever, and each use has a descriptor."""
    used: list[str] = []

    @contextlib.contextmanager
    def using(folder: str) -> Iterator[None]:
        used.append(folder)
        yield
        used.remove(folder)

    monkeypatch.setattr(replica, "using", using)
    monkeypatch.setattr(replica, "failure_of", lambda *given: given[0])
    before, after = (
        SimpleNamespace(fetched_folders=lambda folders=folders: folders, adapters={}) for folders in ({}, {"a": "/a"})
    )
    served = SimpleNamespace(_uses=contextlib.ExitStack(), _config=before, _batcher=Refusing())
    assert replica.Replica.set_adapters(served, after) == "adapter-unusable"  # type: ignore[arg-type]
    assert used == []
