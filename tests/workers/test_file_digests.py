"""The digest of a checkpoint: of all that its files hold, read once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from workers.engines import checkpoint_digests
from workers.engines.checkpoint_digests import digest_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    return folder


def test_a_single_byte_makes_another_digest(source: Path, tmp_path: Path) -> None:
    """Wherever it stands: a fine-tuned layer may be a small part of a file."""
    before = digest_of(source, tmp_path)
    with (source / "model.safetensors").open("r+b") as weights:
        weights.seek(777_777)
        weights.write(b"1")
    assert digest_of(source, tmp_path) != before


def test_names_count_and_times_do_not(source: Path, tmp_path: Path) -> None:
    """A checkpoint that was fetched again is the same; one with its files exchanged is not."""
    again = Path(shutil.copytree(source, tmp_path / "again"))
    os.utime(again / "config.json", (1, 1))
    assert digest_of(again, tmp_path) == digest_of(source, tmp_path)
    (again / "config.json").rename(again / "other.json")
    assert digest_of(again, tmp_path) != digest_of(source, tmp_path)


def test_what_has_not_changed_is_not_read_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inode, size and time; a second start is fast."""
    read: list[str] = []
    really = checkpoint_digests._read
    monkeypatch.setattr(checkpoint_digests, "_read", lambda path: (read.append(path.name), really(path))[1])
    first = digest_of(source, tmp_path)
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert digest_of(source, tmp_path) == first
    assert len(read) == 2

    os.utime(source / "config.json")
    assert digest_of(source, tmp_path) == first
    assert read[2:] == ["config.json"]


def test_a_file_that_changes_while_it_is_read_is_not_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is of neither state."""
    really = checkpoint_digests._read

    def growing(path: Path) -> str:
        found = really(path)
        if path.name == "config.json":
            path.write_text("{...}")
        return found

    monkeypatch.setattr(checkpoint_digests, "_read", growing)
    before = digest_of(source, tmp_path)
    monkeypatch.setattr(checkpoint_digests, "_read", really)
    assert digest_of(source, tmp_path) != before


def test_kept_digests_that_cannot_be_read_are_made_anew(source: Path, tmp_path: Path) -> None:
    """A full disk may have cut them off."""
    before = digest_of(source, tmp_path)
    for broken in ("{", "[]", '{"' + str(source / "config.json") + '": 3}'):
        (tmp_path / checkpoint_digests.KEPT).write_text(broken)
        assert digest_of(source, tmp_path) == before
