"""The home of a fleet: only its user can write to it, and its files are never written through a link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from orchestrator.access.keys import KeyFile
from orchestrator.cli.main import run
from orchestrator.cli.output import libraries_to_log
from orchestrator.cluster.settings import resolve
from orchestrator.control.journal.journal import Journal, JournalUnwritable
from orchestrator.control.journal.journal_records import Scale
from orchestrator.gateway.telemetry import recorder
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home, daemon_alive
from tests.orchestrator.fleet_records import fleet_record
from workers.host import file_lock
from workers.host.host_facts import cut_log
from workers.host.json_process import start as start_child
from workers.host.lifetime import process_start
from workers.serving.replica import _redirect_output

RECORD = fleet_record(url="http://a", admin_url="http://b", ray_address="r")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("COREWRIGHT_HOME", str(path))
    return Home(path)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777])
def test_a_home_that_others_can_write_to_is_rejected_with_a_remedy(mode: int, home: Home) -> None:
    """Also with the sticky bit, which does not prevent adding files."""
    home.path.chmod(mode)
    with pytest.raises(Failed) as failed:
        Home.from_environment()
    problem = failed.value.problem
    assert (problem.id, problem.hint) == ("home-unusable", f"check its contents, then run chmod go-w {home.path}")
    assert f"{mode:04o}" in problem.what


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_home_that_others_can_only_read_is_used(mode: int, home: Home) -> None:
    """Read access depends on the mode of each file."""
    home.path.chmod(mode)
    assert Home.from_environment() == home


def test_a_home_of_another_user_is_rejected(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner can change everything in it at any time."""
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(Failed, match=f"home-unusable: .* belongs to user {home.path.stat().st_uid}"):
        Home.from_environment()


def test_a_link_to_a_home_that_others_can_write_to_is_rejected(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target folder counts."""
    home.path.chmod(0o777)
    (tmp_path / "link").symlink_to(home.path)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "link"))
    with pytest.raises(Failed, match="home-unusable"):
        Home.from_environment()


def test_settings_of_a_home_that_others_can_write_to_are_not_read(home: Home) -> None:
    """They have the gateway's address and the allowed source folders."""
    (home.path / "config.yaml").write_text("port: 9999\n")
    home.path.chmod(0o777)
    with pytest.raises(Failed, match="home-unusable"):
        resolve({})


@pytest.mark.parametrize(
    "command",
    [["status"], ["down"], ["keys", "list"], ["keys", "create", "ann"], ["audit"], ["config", "view"], ["cache", "ls"]],
    ids=" ".join,
)
def test_every_command_rejects_a_home_that_others_can_write_to(
    command: list[str], home: Home, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is read or written there."""
    home.path.chmod(0o777)
    assert run(command) != 0
    assert "home-unusable" in capfd.readouterr().err
    assert list(home.path.iterdir()) == []


def test_a_folder_of_the_home_that_others_can_write_to_is_rejected_by_up(home: Home) -> None:
    """Logs are written there."""
    home.logs.mkdir()
    home.logs.chmod(0o777)
    with pytest.raises(Failed, match=r"home-unusable: .*/logs can be written"):
        home.prepare()


def _secure_ray(home: Home) -> None:
    home.secure_ray()


def test_rays_token_is_private_and_new_with_each_up(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the user's own."""
    tokens = []
    for _ in range(2):
        for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.setenv(variable, "")  # restored at the end
            monkeypatch.delenv(variable)
        home.secure_ray()
        assert home.ray_token_file.stat().st_mode & 0o777 == 0o600
        tokens.append(home.ray_token_file.read_text())
    assert len(tokens[0]) == 64
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize(
    ("name", "write"),
    [("ray-token", _secure_ray), ("fleet.new", lambda home: home.write_record(RECORD))],
)
def test_a_planted_file_is_replaced_and_not_written_to(
    name: str, write: Callable[[Home], None], home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the target of a link gets the secret, nor a file that its planter still has open."""
    for variable in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(variable, "")  # restored at the end, with what secure_ray sets
        monkeypatch.delenv(variable)
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    (home.path / name).symlink_to(theirs)
    write(home)
    (home.path / name).unlink(missing_ok=True)
    os.link(theirs, home.path / name)
    write(home)
    assert theirs.read_text() == "mine"


def _append_to_journal(home: Home) -> None:
    journal = Journal(home.journal)
    journal.append(Scale(model="m", count=1, by="ann"))
    journal.close()


def _log(home: Home) -> None:
    with libraries_to_log(home.logs / "x"):
        pass


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("journal", _append_to_journal),
        ("journal.lock", _append_to_journal),
        ("daemon.lock", Home.lock),
        ("keys.lock", lambda home: KeyFile(home.keys).create("ann")),
        ("logs/x", _log),
        ("logs/x", lambda home: start_child(["json.tool"], python=None, env={}, log_file=str(home.logs / "x"))),
        ("logs/x", lambda home: _redirect_output(home.logs / "x")),
        ("logs/x", lambda home: recorder.open_file(home.logs / "x")),
        ("logs/x", lambda home: file_lock.take(home.logs / "x")),
    ],
    ids=["journal", "journal.lock", "daemon.lock", "keys.lock", "cli log", "child", "replica", "trace", "seat"],
)
def test_a_planted_link_is_never_written_through(
    name: str, write: Callable[[Home], object], home: Home, tmp_path: Path
) -> None:
    """The write fails instead."""
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    home.logs.mkdir()
    (home.path / name).symlink_to(theirs)
    with pytest.raises((OSError, JournalUnwritable, Failed)):
        write(home)
    assert theirs.read_text() == "mine"


def test_a_log_is_not_truncated_through_a_link(home: Home, tmp_path: Path) -> None:
    """The target of a planted link keeps its content, of any length."""
    theirs = tmp_path / "theirs"
    theirs.write_text("mine" * 10)
    (home.path / "x.log").symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic links"):
        cut_log(home.path / "x.log", most=5)
    assert theirs.read_text() == "mine" * 10


def test_a_draft_left_behind_is_not_written_to(home: Home, tmp_path: Path) -> None:
    """A compaction replaces a link that has its draft's name."""
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    journal = Journal(home.journal, most_bytes=100)
    (home.path / "journal.new").symlink_to(theirs)
    for count in range(5):
        journal.append(Scale(model="m", count=count, by="ann"))
    journal.close()
    assert theirs.read_text() == "mine"
    assert not home.journal.is_symlink()


def test_a_fleet_of_an_earlier_boot_is_gone_whichever_process_has_its_pid() -> None:
    """The start of a process counts from the boot, so another boot may have a process with the same pid and start."""
    started = process_start(os.getpid())
    assert started is not None
    here = msgspec.structs.replace(RECORD, pid=os.getpid(), started=started)
    assert daemon_alive(here)
    assert not daemon_alive(msgspec.structs.replace(here, boot="another"))
