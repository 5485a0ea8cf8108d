"""The digest of a checkpoint covers all its files, which are read once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from workers.compiled import file_states
from workers.engines.manifest_parts import KEPT, digest_of


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    return folder


def test_a_single_byte_makes_another_digest(source: Path, tmp_path: Path) -> None:
    """At any offset: a fine-tuned layer may be a small part of a file."""
    before = digest_of(source, tmp_path)
    with (source / "model.safetensors").open("r+b") as weights:
        weights.seek(777_777)
        weights.write(b"1")
    assert digest_of(source, tmp_path) != before


def test_names_change_a_digest_and_times_do_not(source: Path, tmp_path: Path) -> None:
    """A checkpoint that was fetched again is the same; one with a renamed file is not."""
    again = Path(shutil.copytree(source, tmp_path / "again"))
    os.utime(again / "config.json", (1, 1))
    assert digest_of(again, tmp_path) == digest_of(source, tmp_path)
    (again / "config.json").rename(again / "other.json")
    assert digest_of(again, tmp_path) != digest_of(source, tmp_path)


def test_unchanged_files_are_not_read_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is unchanged with the same inode, size and modification time, so a second start is fast."""
    read: list[str] = []
    digest = file_states.digest
    monkeypatch.setattr(file_states, "digest", lambda path: (read.append(path.name), digest(path))[1])
    first = digest_of(source, tmp_path)
    assert sorted(read) == ["config.json", "model.safetensors"]
    assert digest_of(source, tmp_path) == first
    assert len(read) == 2

    os.utime(source / "config.json")
    assert digest_of(source, tmp_path) == first
    assert read[2:] == ["config.json"]


def test_the_digest_of_a_file_that_changes_meanwhile_is_not_stored(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It describes neither state of the file."""
    digest = file_states.digest

    def change_after_reading(path: Path) -> str:
        content = digest(path)
        if path.name == "config.json":
            path.write_text("{...}")
        return content

    monkeypatch.setattr(file_states, "digest", change_after_reading)
    before = digest_of(source, tmp_path)
    monkeypatch.setattr(file_states, "digest", digest)
    assert digest_of(source, tmp_path) != before


def test_unreadable_stored_digests_are_computed_again(source: Path, tmp_path: Path) -> None:
    """A full disk may have truncated them."""
    before = digest_of(source, tmp_path)
    for broken in ("{", "[]", '{"' + str(source / "config.json") + '": 3}'):
        (tmp_path / KEPT).write_text(broken)
        assert digest_of(source, tmp_path) == before
