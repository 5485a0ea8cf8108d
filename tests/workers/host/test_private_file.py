"""Files that only this user can read or write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.host import private_file


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def disk_full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_an_append_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is on disk completely or not at all."""
    path = tmp_path / "journal"
    file = private_file.open_to_append(path)
    private_file.append(file, b"one\n", sync=True)
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        private_file.append(file, b"two\n", sync=True)
    os.close(file)
    assert (path.read_bytes(), mode(path)) == (b"one\n", 0o600)


def test_a_truncated_last_line_is_detected(tmp_path: Path) -> None:
    """An empty file is complete."""
    file = private_file.create(tmp_path / "journal")
    completeness = [private_file.ends_whole(file)]
    for data in (b"one\ntw", b"o\n"):
        private_file.write_all(file, data)
        completeness.append(private_file.ends_whole(file))
    os.close(file)
    assert completeness == [True, False, True]


def test_created_files_replace_old_ones_and_their_permissions(tmp_path: Path) -> None:
    """A link in the place is replaced, not followed."""
    (target := tmp_path / "target").write_text("kept")
    (path := tmp_path / "file").symlink_to(target)
    os.close(private_file.create(path))
    assert (path.is_symlink(), mode(path), path.read_text(), target.read_text()) == (False, 0o600, "", "kept")


def test_links_are_not_opened_to_append(tmp_path: Path) -> None:
    """They could lead to a file of another user."""
    (link := tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic link"):
        private_file.open_to_append(link)


def test_rotation_keeps_a_limited_number_of_files(tmp_path: Path) -> None:
    """The newest has the number 1; gaps are no error."""
    path = tmp_path / "log"
    for content in "abcd":
        path.write_text(content)
        private_file.rotate(path, 2)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"log.1": "d", "log.2": "c"}
    assert private_file.rotated(path, 0) == path


@pytest.mark.parametrize("sync", [False, True])
def test_a_replaced_file_is_complete_and_private(tmp_path: Path, sync: bool) -> None:
    """Nothing else is left in the folder."""
    path = tmp_path / "state.json"
    for content in (b"old", b"new"):
        private_file.replace(path, content, sync=sync)
    assert (path.read_bytes(), mode(path), list(tmp_path.iterdir())) == (b"new", 0o600, [path])


def test_a_failed_replacement_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no draft."""
    path = tmp_path / "state.json"
    private_file.replace(path, b"old")
    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="No space"):
        private_file.replace(path, b"new", sync=True)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
