"""Locks of files between descriptors and between processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from workers.host import file_lock

Open = Callable[[], int]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def opened(path: Path) -> Iterator[Open]:
    """Opens the lock file, and closes all descriptors after the test."""
    descriptors: list[int] = []

    def open_lock() -> int:
        descriptors.append(file_lock.opened(path))
        return descriptors[-1]

    yield open_lock
    for descriptor in descriptors:
        os.close(descriptor)


def test_an_exclusive_lock_excludes_all_others(opened: Open, path: Path) -> None:
    """Of the same process, too: locks belong to descriptors."""
    first, second = opened(), opened()
    assert file_lock.try_lock(first)
    assert not file_lock.try_lock(second)
    assert not file_lock.try_lock(second, shared=True)
    assert (file_lock.is_locked(path), file_lock.is_locked(path, shared=True)) == (True, True)
    file_lock.unlock(first)
    assert file_lock.try_lock(second)


def test_shared_locks_exclude_only_exclusive_ones(opened: Open, path: Path) -> None:
    """A shared lock is not in the way of another one."""
    assert file_lock.try_lock(opened(), shared=True)
    assert file_lock.try_lock(opened(), shared=True)
    assert not file_lock.try_lock(opened())
    assert (file_lock.is_locked(path), file_lock.is_locked(path, shared=True)) == (True, False)


def test_a_missing_file_is_not_locked(path: Path) -> None:
    """And is not created by the check."""
    assert not file_lock.is_locked(path)
    assert not path.exists()


def test_a_lock_file_is_private_and_never_a_link(path: Path) -> None:
    """A link could lead to a file of another user."""
    os.close(file_lock.opened(path))
    assert path.stat().st_mode & 0o777 == 0o600
    (link := path.with_name("link")).symlink_to(path)
    with pytest.raises(OSError, match="symbolic link"):
        file_lock.opened(link)


def test_take_holds_the_lock_until_it_is_closed(path: Path) -> None:
    """None while another descriptor holds it."""
    descriptor = file_lock.take(path)
    assert descriptor is not None
    assert file_lock.take(path) is None
    os.close(descriptor)
    again = file_lock.take(path)
    assert again is not None
    os.close(again)


def test_a_wait_for_a_lock_has_a_deadline(opened: Open) -> None:
    """It returns False soon after the deadline, and True as soon as the lock is free."""
    holder, waiter = opened(), opened()
    file_lock.lock(holder)
    began = time.monotonic()
    assert not file_lock.lock_within(waiter, 0.02, 0.001)
    assert time.monotonic() - began >= 0.02
    file_lock.unlock(holder)
    assert file_lock.lock_within(waiter, 0.0, 0.001)


def test_a_removed_or_replaced_file_is_not_at_its_path(opened: Open, path: Path) -> None:
    """A process that opens the path gets another file, and its lock."""
    descriptor = opened()
    assert file_lock.is_at(descriptor, path)
    path.unlink()
    assert not file_lock.is_at(descriptor, path)
    opened()
    assert not file_lock.is_at(descriptor, path)
