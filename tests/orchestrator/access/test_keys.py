"""API keys: nothing of a secret is kept, nothing but the whole key opens anything, and no writer undoes another."""

from __future__ import annotations

import hmac
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.access import keys as keys_module
from orchestrator.access.keys import MAX_PRIORITY, TEXT_LENGTH, Allowance, KeyFile, KeyRing, read_expiry, read_limit
from orchestrator.cli.main import run
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from tests.orchestrator.fleet_records import fleet_record
from workers.host import host_facts as this_host

NOW = 1_795_183_685.0  # 2026-11-20 14:08:05 UTC
KEY = re.compile(r"cw-[0-9a-f]{8}-[\w-]{43}", re.ASCII)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def failed(work: object, *arguments: object, **named: object) -> Failed:
    with pytest.raises(Failed) as raised:
        work(*arguments, **named)  # type: ignore[operator]
    return raised.value


def test_a_key_is_recognized_by_its_complete_text_only(file: KeyFile) -> None:
    """In the documented form."""
    key, text = file.create("ci")
    other, _ = file.create("other")
    ring = file.read()
    assert KEY.fullmatch(text)
    assert len(text) == TEXT_LENGTH
    assert ring.authenticate(text, NOW) == key
    assert ring.authenticate(text.replace(key.id, other.id), NOW) is None
    assert ring.authenticate(text.replace(key.id, "00000000"), NOW) is None


_A_KEY: tuple[KeyRing, str] | None = None


@given(data=st.data())
def test_no_other_text_is_a_key(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No random text, and no key with a change in one place, however small."""
    global _A_KEY
    if _A_KEY is None:
        made = KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")
        _, text = made.create("ci")
        _A_KEY = (made.read(), text)
    ring, text = _A_KEY
    at = data.draw(st.integers(0, len(text) - 1))
    changed = data.draw(
        st.one_of(
            st.text(max_size=80),
            st.characters().map(lambda letter: text[:at] + letter + text[at + 1 :]),
            st.just(text[:at]),
            st.text(min_size=1, max_size=3).map(lambda more: text + more),
        )
    )
    assert (ring.authenticate(changed, NOW) is None) == (changed != text)


def test_a_digest_is_compared_in_constant_time_also_for_unknown_ids(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown id costs the same comparison, so that ids cannot be guessed from response times."""
    _, text = file.create("ci")
    ring, compared = file.read(), list[tuple[int, int]]()

    class Watched:
        @staticmethod
        def compare_digest(first: str, other: str) -> bool:
            compared.append((len(first), len(other)))
            return hmac.compare_digest(first, other)

    monkeypatch.setattr(keys_module, "hmac", Watched)
    ring.authenticate(text, NOW)
    ring.authenticate("cw-00000000-" + text[-43:], NOW)
    assert compared == [(64, 64), (64, 64)]


def test_no_secret_is_in_the_file_and_only_its_owner_can_read_it(file: KeyFile) -> None:
    """Mode 0600 for any umask; beside it only the lock."""
    _, text = file.create("ci")
    kept = file.path.read_text()
    assert text[12:] not in kept
    assert not any(text[start : start + 8] in kept for start in range(12, len(text) - 8))
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["keys.json", "keys.lock"]


def test_an_expired_key_is_rejected(file: KeyFile) -> None:
    """From its expiry on."""
    key, text = file.create("ci", expires=NOW + 60, now=NOW)
    ring = file.read()
    assert ring.authenticate(text, NOW + 59.9) == key
    assert ring.authenticate(text, NOW + 60) is None
    assert (ring.usable(NOW, "inference"), ring.usable(NOW + 60, "inference")) == (1, 0)


def test_a_key_has_its_scopes_and_models(file: KeyFile) -> None:
    """Without models it is for all."""
    ops, _ = file.create("ops", scopes=("admin",))
    own, _ = file.create("one", models=("chat",))
    both, _ = file.create("both", scopes=("admin", "inference"))
    assert [key.has_scope("admin") for key in (ops, own, both)] == [True, False, True]
    assert [key.models for key in (ops, own, both)] == [(), ("chat",), ()]
    assert file.read().keys == (ops, own, both)


@pytest.mark.parametrize("by", ["id", "name"])
def test_a_revoked_key_is_rejected(by: str, file: KeyFile) -> None:
    """By id or by name; the others stay. Without the last one keys are still required."""
    key, text = file.create("ci")
    kept, other = file.create("other")
    assert file.revoke(getattr(key, by)) == key
    assert file.read().authenticate(text, NOW) is None
    assert file.read().authenticate(other, NOW) == kept
    file.revoke("other")
    assert (len(file.read()), file.read().requires_key(NOW)) == (0, True)


def test_without_a_file_no_key_is_required(file: KeyFile) -> None:
    """In a home that never had one."""
    assert (len(file.read()), file.read().requires_key(NOW)) == (0, False)


@pytest.mark.parametrize("name", ["", "-x", "a b", "ä", "a" * 64, "0123abcd", "x\n"])
def test_an_invalid_name_is_rejected(name: str, file: KeyFile) -> None:
    """And one that could be mistaken for an id."""
    assert failed(file.create, name).problem.id == "key-name-wrong"


def test_a_name_is_unique_and_an_unknown_one_is_not_revoked(file: KeyFile) -> None:
    """With the remedy; a complete key as the argument is not repeated."""
    _, text = file.create("ci")
    assert failed(file.create, "ci").problem.id == "key-name-taken"
    assert failed(file.create, "ops", models=("no model",)).problem.id == "key-name-wrong"
    unknown = failed(file.revoke, text)
    assert unknown.problem.id == "key-unknown"
    assert text[-43:] not in str(unknown)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 4, "keys": []}',
        '{"version": 3, "keys": [], "keyless_until": 1e999}',
        '{"version": 3, "keys": [], "keyless_until": "never"}',
        '{"version": 2, "keys": [{"weight": 0, "id": "0123abcd", "name": "a", "digest": "%s", "scopes": ["admin"], '
        '"models": [], "created": 0, "expires": null}]}' % ("0" * 64),
        '{"version": 1, "keys": [{"id": "x"}]}',
        '{"version": 1, "keys": [], "more": 1}',
        "[" * 100_000,
        '{"version": 1, "keys": [{"id": "0123abcd", "name": "a", "digest": "00", "scopes": ["admin"], "models": [], '
        '"created": 0, "expires": null}]}',
    ],
)
def test_a_broken_file_is_logged_and_the_last_valid_keys_stay(text: str, file: KeyFile) -> None:
    """An editing error locks no client out, and lets none in; the file is not overwritten either."""
    key, secret = file.create("ci")
    watching = KeyFile(file.path)
    assert watching.current().authenticate(secret, NOW) == key
    file.path.write_text(text)
    file.path.chmod(0o600)

    assert failed(file.read).problem.id == "keys-broken"
    assert failed(file.create, "new").problem.id == "keys-broken"
    assert watching.current().authenticate(secret, NOW) == key
    assert file.path.read_text() == text


def test_a_file_that_was_never_read_opens_nothing(file: KeyFile) -> None:
    """A gateway that starts while the file is broken rejects all clients until the file is repaired."""
    key, secret = file.create("ci")
    good = file.path.read_bytes()
    file.path.write_bytes(b"[]")
    watching = KeyFile(file.path)
    assert watching.current().requires_key(NOW)
    assert watching.current().authenticate(secret, NOW) is None
    file.path.write_bytes(good)
    assert watching.current().authenticate(secret, NOW) == key


def test_a_file_that_others_can_write_is_not_trusted(file: KeyFile) -> None:
    """They could create keys for themselves."""
    file.create("ci")
    file.path.chmod(0o622)
    assert failed(file.read).problem.id == "keys-unreadable"
    file.path.unlink()
    file.path.mkdir()
    assert failed(file.read).problem.id == "keys-unreadable"


def test_a_key_revoked_while_no_file_can_be_opened_ends_soon_after(file: KeyFile) -> None:
    """The file is read again once there are descriptors, though it has not changed since."""
    key, text = file.create("alice")
    reader = KeyFile(file.path)
    assert reader.current().authenticate(text, NOW)
    file.revoke(key.name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert reader.current().authenticate(text, NOW)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert reader.current().authenticate(text, NOW) is None


def test_a_removed_file_opens_nothing(file: KeyFile) -> None:
    """Removing it under a running gateway does not open the gateway."""
    key, text = file.create("ci")
    watching = KeyFile(file.path)
    watching.current()
    file.path.unlink()
    assert watching.current().requires_key(NOW)
    assert watching.current().authenticate(text, NOW) == key


def test_changes_are_detected_and_nothing_is_read_twice(file: KeyFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a restart; an unchanged file is not read."""
    watching = KeyFile(file.path)
    assert not watching.current().requires_key(NOW)
    _, text = file.create("ci")
    assert watching.current().authenticate(text, NOW) is not None
    assert watching.current() is watching.current()
    file.revoke("ci")
    assert watching.current().authenticate(text, NOW) is None
    monkeypatch.setattr(watching, "read", lambda: pytest.fail("it was read again"))
    watching.current()


def test_an_unwritable_home_is_reported(tmp_path: Path) -> None:
    """Nothing is half done."""
    (tmp_path / "file").write_text("")
    assert failed(KeyFile(tmp_path / "file" / "keys.json").create, "ci").problem.id == "keys-unwritable"


def test_a_keys_allowance_changes_without_a_new_key(file: KeyFile) -> None:
    """Fields that are not given stay, and the key is the same."""
    key, text = file.create("ci", allowance=Allowance(weight=3.0, tokens_per_minute=100))
    assert (key.weight, key.tokens_per_minute, key.requests_per_minute, key.limited) == (3.0, 100, None, True)
    file.create("other")
    changed = file.change("ci", tokens_per_minute=None, max_concurrent=4)
    assert (changed.weight, changed.tokens_per_minute, changed.max_concurrent) == (3.0, None, 4)
    assert file.read().authenticate(text, NOW) == changed
    assert not file.change(key.id, max_concurrent=None).limited
    assert [key.name for key in file.read().keys] == ["ci", "other"]
    assert failed(file.change, "nobody", weight=2.0).problem.id == "key-unknown"


@pytest.mark.parametrize(
    "allowance",
    [
        {"weight": 0.0},
        {"weight": float("nan")},
        {"weight": 100.1},
        {"priority": MAX_PRIORITY + 1},
        {"priority": -MAX_PRIORITY - 1},
        {"requests_per_minute": 0},
        {"requests_per_minute": 10**6 + 1},
        {"tokens_per_minute": 10**9 + 1},
        {"max_concurrent": 0},
    ],
)
def test_an_allowance_out_of_range_is_rejected_with_the_range(allowance: dict[str, Any], file: KeyFile) -> None:
    """Nothing is created or changed."""
    assert failed(file.create, "new", allowance=Allowance(**allowance)).problem.id == "key-limit-wrong"
    key, _ = file.create("ci")
    wrong = failed(file.change, "ci", **allowance)
    assert (wrong.problem.id, "is not between" in str(wrong)) == ("key-limit-wrong", True)
    assert file.read().keys == (key,)


def test_the_file_has_the_oldest_sufficient_version(file: KeyFile) -> None:
    """An older corewright can read it as long as no key has newer fields; a newer file is reported as such."""

    def version() -> int:
        stored: int = json.loads(file.path.read_text())["version"]
        return stored

    file.create("ci")
    plain = file.path.read_text()
    assert (version(), "weight" in plain, "max_concurrent" in plain) == (1, False, False)
    file.change("ci", max_concurrent=1)
    assert version() == 2
    file.change("ci", max_concurrent=None)
    assert file.path.read_text() == plain
    file.open_keyless()
    assert version() == 3
    file.close_keyless()
    assert file.path.read_text() == plain
    file.path.write_text('{"version": 4, "keys": [], "more": 1}')
    assert "its version is 4; this corewright reads versions up to 3" in str(failed(file.read))


def test_a_file_from_before_limits_is_read(file: KeyFile) -> None:
    """Its keys have none."""
    key = {"id": "0123abcd", "name": "a", "digest": "0" * 64, "scopes": ["inference"], "models": [], "created": 1.0}
    file.path.write_text(json.dumps({"version": 1, "keys": [{**key, "expires": None}]}))
    file.path.chmod(0o600)
    (read,) = file.read().keys
    assert (read.weight, read.priority, read.limited) == (1.0, 0, False)


@pytest.mark.parametrize(("text", "limit"), [("1", 1), (" 600 ", 600), ("none", None)])
def test_a_limit_is_a_number_or_none(text: str, limit: int | None) -> None:
    """None removes it."""
    assert read_limit("--max-concurrent", text) == limit


@pytest.mark.parametrize("text", ["", "-1", "1.5", "1e3", "unlimited", "١", "1_000", "9" * 13])
def test_an_invalid_limit_is_rejected(text: str) -> None:
    assert failed(read_limit, "--max-concurrent", text).problem.id == "key-limit-wrong"


def test_the_first_key_closes_the_gateway_at_the_given_time(file: KeyFile) -> None:
    """Without a time at once; a second key does not change the time, and a later time needs an open gateway."""
    file.create("ci", activate_at=NOW + 60, now=NOW)
    file.create("other", now=NOW + 1)
    assert [file.read().requires_key(NOW + at) for at in (2, 59.9, 60)] == [False, False, True]
    file.create("soon", activate_at=NOW + 30, now=NOW + 2)
    assert [file.read().requires_key(NOW + at) for at in (29.9, 30)] == [False, True]
    assert failed(file.create, "late", activate_at=NOW + 90, now=NOW + 31).problem.id == "keys-required"
    assert [key.name for key in file.read().keys] == ["ci", "other", "soon"]


def test_revoking_never_opens_the_gateway_and_open_does(file: KeyFile) -> None:
    """The last key too, and after the end of a grace period; what is reopened closes again with the next key."""
    file.create("ci", now=NOW)
    file.revoke("ci")
    assert file.read().requires_key(NOW)
    file.open_keyless()
    assert not file.read().requires_key(NOW + 1e9)
    file.create("next", now=NOW)
    assert file.read().requires_key(NOW)
    file.open_keyless(NOW + 60)
    file.revoke("next")
    assert [file.read().requires_key(NOW + at) for at in (59.9, 60)] == [False, True]
    file.close_keyless()
    assert file.read().requires_key(NOW)


def test_a_home_without_keys_cannot_be_opened(file: KeyFile) -> None:
    """A time would close it without any key."""
    assert failed(file.open_keyless, NOW + 60).problem.id == "keys-none"
    assert not file.path.exists()


def test_a_removed_file_of_an_open_gateway_keeps_its_keys(file: KeyFile) -> None:
    """They keep their limits, and the end of the grace period stays."""
    key, text = file.create("ci", activate_at=NOW + 60, now=NOW)
    watching = KeyFile(file.path)
    watching.current()
    file.path.unlink()
    assert watching.current().authenticate(text, NOW) == key
    assert watching.current().requires_key(NOW + 60)


WRITER = """
import sys
from pathlib import Path
from orchestrator.access.keys import KeyFile
file, who = KeyFile(Path(sys.argv[1])), sys.argv[2]
for number in range(25):
    file.create(f"{who}-{number}")
    if number % 5 == 0:
        file.revoke(f"{who}-{number}")
"""


def test_two_writers_lose_nothing(file: KeyFile) -> None:
    """Each key of both processes is in the file, and a reader in between always finds a valid file."""
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(file.path), writer]) for writer in ("a", "b")]
    deadline = time.monotonic() + 60
    while any(writer.poll() is None for writer in writers):
        assert time.monotonic() < deadline
        file.read()
    assert [writer.returncode for writer in writers] == [0, 0]
    expected = {f"{writer}-{number}" for writer in ("a", "b") for number in range(25) if number % 5}
    assert {key.name for key in file.read().keys} == expected


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("90s", NOW + 90),
        ("15m", NOW + 900),
        ("12h", NOW + 43_200),
        (" 30d ", NOW + 30 * 86_400),
        ("8w", NOW + 56 * 86_400),
        ("2027-01-31", 1_801_353_600.0),
        ("2027-01-31T18:00+01:00", 1_801_414_800.0),
        ("2027-01-31T17:00:00Z", 1_801_414_800.0),
    ],
)
def test_an_expiry_is_a_span_or_a_time(text: str, at: float) -> None:
    """UTC where no zone is given."""
    assert read_expiry(text, NOW) == at


@pytest.mark.parametrize("text", ["", "0d", "soon", "30", "-1d", "1.5d", "99999w", "2020-01-01", "2027-02-30", "٣d"])
def test_an_invalid_expiry_is_rejected(text: str) -> None:
    """In the past, or more than a century away, too."""
    assert failed(read_expiry, text, NOW).problem.id == "key-expiry-wrong"


@given(st.text(max_size=30))
def test_any_text_is_an_expiry_or_rejected(text: str) -> None:
    """And never another error."""
    try:
        at, id = read_expiry(text, NOW), None
    except Failed as refused:
        at, id = None, refused.problem.id
    assert id == "key-expiry-wrong" if at is None else at > NOW


# The commands


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COREWRIGHT_URL", raising=False)
    return Home(tmp_path / "home")


def test_the_commands_create_show_and_revoke_keys_without_a_fleet(
    at_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the key is on stdout, once."""
    assert run(["keys", "create", "ci", "--model", "chat", "--model", "code", "--expires", "30d"]) == 0
    text = capsys.readouterr().out.strip()
    assert KEY.fullmatch(text)
    assert KeyFile(at_home.keys).read().authenticate(text, time.time()) is not None

    assert run(["keys", "create", "ops", "--scope", "admin", "--scope", "inference", "-o", "json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["scopes"], made["models"], made["expires"]) == (["inference", "admin"], [], None)

    assert run(["keys", "list"]) == 0
    shown = capsys.readouterr().out
    assert "chat,code" in shown
    assert text not in shown
    assert run(["keys", "revoke", made["id"]]) == 0
    capsys.readouterr()
    assert run(["keys", "list", "-o", "json"]) == 0
    assert [key["name"] for key in json.loads(capsys.readouterr().out)["keys"]] == ["ci"]


def test_the_commands_set_and_change_the_limits_of_a_key(at_home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """The changes are in the audit log, also removed limits."""
    limits = ["--weight", "3", "--requests-per-minute", "600", "--tokens-per-minute", "100000", "--max-concurrent", "8"]
    assert run(["keys", "create", "ci", *limits, "--priority=-1"]) == 0
    assert run(["keys", "set", "ci", "--tokens-per-minute", "none", "--weight", "0.5"]) == 0
    assert "ci (" in capsys.readouterr().out
    assert run(["keys", "list"]) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert row[header.index("WEIGHT") : header.index("CREATED")].split() == ["0.5", "-1", "600", "-", "8"]
    assert run(["keys", "list", "-o", "json"]) == 0
    (key,) = json.loads(capsys.readouterr().out)["keys"]
    allowance = {name: key[name] for name in Allowance.__struct_fields__}
    assert Allowance(**allowance) == Allowance(weight=0.5, priority=-1, requests_per_minute=600, max_concurrent=8)

    assert run(["audit", "-o", "json"]) == 0
    made, changed = json.loads(capsys.readouterr().out)["actions"]
    assert made["arguments"]["max_concurrent"] == 8
    assert (changed["action"], changed["status"]) == ("keys set", "done")
    assert changed["arguments"] == {"key": "ci", "weight": 0.5, "tokens_per_minute": "none"}


def test_a_rejected_command_is_reported(at_home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """With its id, and without creating anything."""
    assert run(["keys", "revoke", "nobody"]) == 1
    assert "error: key-unknown: there is no key 'nobody'" in capsys.readouterr().err
    assert not at_home.path.exists()
    assert run(["keys", "create", "ci", "--expires", "yesterday"]) == 1
    assert "error: key-expiry-wrong: " in capsys.readouterr().err
    assert run(["keys", "create", "ci", "--scope", "everything"]) == 64
    assert run(["keys", "create", "ci", "--tokens-per-minute", "many"]) == 1
    assert "error: key-limit-wrong: --tokens-per-minute 'many' is not a limit" in capsys.readouterr().err
    assert run(["keys", "set", "nobody", "--weight", "2"]) == 1
    assert "error: key-unknown: " in capsys.readouterr().err
    assert run(["keys", "set", "nobody"]) == 64


class Terminal:
    """Standard input and standard error of somebody who types ``answer``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
        monkeypatch.setattr("orchestrator.cli.output.on_terminal", lambda: True)
        monkeypatch.setattr("builtins.input", lambda: answer)


@pytest.fixture
def running(at_home: Home) -> Home:
    """A home whose fleet runs: in this process, by its record."""
    record(at_home, "127.0.0.1")
    return at_home


def record(home: Home, listens: str) -> None:
    home.prepare()
    started = this_host.process_start(os.getpid())
    assert started is not None
    home.write_record(
        fleet_record(name="demo", url="http://127.0.0.1:8080", pid=os.getpid(), started=started, listens=listens)
    )


@pytest.mark.parametrize(
    ("answer", "options", "code", "demands"),
    [("n", [], 1, False), ("", [], 1, False), ("y", [], 0, True), ("n", ["--yes"], 0, True)],
)
def test_the_first_key_of_a_running_fleet_needs_a_confirmation(
    answer: str,
    options: list[str],
    code: int,
    demands: bool,
    running: Home,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It rejects every client without a key; the question says so, with the alternative."""
    Terminal(monkeypatch, answer)
    assert run(["keys", "create", "ci", *options]) == code
    output = capsys.readouterr().err
    assert "requests without a key are rejected" in output
    assert "--activate-at" in output
    assert KeyFile(running.keys).read().requires_key(time.time()) is demands


@pytest.mark.parametrize("situation", ["no terminal", "a key before", "a grace period", "no fleet", "on the network"])
def test_a_key_that_rejects_no_client_needs_no_confirmation(
    situation: str, at_home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without a terminal there is no question."""
    if situation != "no fleet":
        record(at_home, "0.0.0.0" if situation == "on the network" else "127.0.0.1")
    if situation == "a key before":
        KeyFile(at_home.keys).create("old")
    if situation != "no terminal":
        Terminal(monkeypatch, "n")
    assert run(["keys", "create", "ci", *(["--activate-at", "1h"] if situation == "a grace period" else [])]) == 0
    output = capsys.readouterr()
    assert KEY.fullmatch(output.out.strip())
    assert ("are accepted on loopback until" in output.err) is (situation == "a grace period")


def test_keys_open_and_close_are_audited_and_shown(running: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """With the time until which they apply."""
    file = KeyFile(running.keys)
    file.create("ci")
    assert run(["keys", "open", "--until", "1h"]) == 0
    assert not file.read().requires_key(time.time() + 3590)
    assert file.read().requires_key(time.time() + 3600)
    capsys.readouterr()
    assert run(["keys", "list", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["required"], shown["keyless_until"]) == (False, file.read().keyless_until)
    assert run(["keys", "close"]) == 0
    assert file.read().requires_key(time.time())
    assert run(["audit", "-o", "json"]) == 0
    actions = json.loads(capsys.readouterr().out)["actions"]
    assert [(action["action"], action["status"]) for action in actions] == [
        ("keys open", "done"),
        ("keys close", "done"),
    ]


def test_a_fleet_on_the_network_is_not_opened(at_home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Its gateways would require keys all the same."""
    record(at_home, "0.0.0.0")
    KeyFile(at_home.keys).create("ci")
    assert run(["keys", "open"]) == 1
    assert "error: keys-open-refused" in capsys.readouterr().err
    assert KeyFile(at_home.keys).read().requires_key(time.time())


def test_revoking_the_last_key_shows_how_to_reopen(at_home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway stays closed."""
    KeyFile(at_home.keys).create("ci")
    assert run(["keys", "revoke", "ci"]) == 0
    assert "corewright keys open" in capsys.readouterr().err


def test_revoking_the_last_key_of_an_open_gateway_reports_that_it_stays_open(
    at_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Until the time of `keys open`."""
    file = KeyFile(at_home.keys)
    file.create("ci")
    file.open_keyless(time.time() + 3600)
    assert run(["keys", "revoke", "ci"]) == 0
    assert "no keys are left: requests without a key are accepted on loopback until" in capsys.readouterr().err
