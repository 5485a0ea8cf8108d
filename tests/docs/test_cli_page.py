"""docs/cli.md describes each command, option, setting and file; its sessions are what happens."""

from __future__ import annotations

import ast
import re
import time
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from orchestrator.cluster.settings import SETTINGS
from orchestrator.control.scaling_loop import KINDS
from tests.docs.pages import CLI, COMMANDS, SIMULATE, SOURCES, blocks, named, options, rows, section, words
from tests.orchestrator.fakefleet import SPEC as SHOWN_SPEC
from tests.orchestrator.fakefleet import LiveAdmin


def test_every_command_and_option_is_described() -> None:
    """In a section of its first word, with a synopsis of its own, and no option that does not exist."""
    names = {name.split()[0] for name in COMMANDS}
    assert names == set(re.findall(r"^### `corewright ([\w-]+)`$", CLI.read_text(), re.MULTILINE))
    for name, command in COMMANDS.items():
        lines = section(CLI, f"corewright {name.split()[0]}").splitlines()
        (synopsis,) = [line for line in lines if re.match(rf"`corewright {name}( .*)?`$", line)]
        shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", synopsis))
        assert shown - {"-o"} == options(command) - {"--output", "-o"}, name
        assert ("-o" in shown) == ("-o" in options(command)), name
    assert "`-o` (`--output`)" in CLI.read_text()


def test_every_option_is_explained() -> None:
    """Beside its synopsis, in the section of its command."""
    for name, command in COMMANDS.items():
        text = section(CLI, f"corewright {name.split()[0]}")
        for option in options(command) - {"--output", "-o"}:
            assert text.count(option) > 1, (name, option)


LEVELS = {"info", "warning", "error"}


def event_reasons() -> set[str]:
    """The reasons of events in the sources: words that follow a level, and those that are passed by name."""
    reasons = set(KINDS)
    for path in SOURCES:
        text = path.read_text()
        reasons |= set(re.findall(r'"(Rollout[A-Z]\w+|CanaryPromoted)"', text))
        if not any(f'"{level}"' in text for level in LEVELS):
            continue
        for node in ast.walk(ast.parse(text)):
            values = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Event":
                reasons |= {word for each in node.keywords if each.arg == "reason" for word in texts(each.value)}
            for level, reason in pairwise(values):
                if LEVELS & set(texts(level)):
                    reasons |= {word for word in texts(reason) if re.fullmatch("([A-Z][a-z]+)+", word)}
    return reasons


def texts(node: ast.AST) -> list[str]:
    """The texts in an expression."""
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def test_every_reason_of_an_event_is_described() -> None:
    """And no other."""
    table = [word for row in rows(section(CLI, "corewright events")) for word in words(row[0])]
    assert sorted(table) == sorted(event_reasons())


def first_line(value: object) -> str:
    return str(value).partition("\n")[0]


ALONE = [*(f"corewright {name}" for name in ("validate", "plan", "explain", "generate", "node-resources", "version"))]
ALONE.append("A window of cores")


def sessions(alone: bool) -> list[tuple[str, str, int]]:
    """Each command of a console block with what it prints, and its exit code where the block asks for it. ``alone``:
    those without a fleet."""
    shown_commands: list[tuple[str, str, int]] = []
    for block in blocks(CLI):
        if block.language == "console" and block.section != "corewright status" and (block.section in ALONE) == alone:
            for part in block.text.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                if command == "echo $?":
                    shown_commands[-1] = (*shown_commands[-1][:2], int(output))
                else:
                    shown_commands.append((command, output, -1))
    return shown_commands


@pytest.mark.parametrize(("command", "output", "code"), sessions(alone=True), ids=first_line)
def test_a_session_is_what_happens(
    command: str,
    output: str,
    code: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Output to the letter (stderr first, as a terminal shows it), and the exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COREWRIGHT_HOME", str(folder / "home"))
    monkeypatch.delenv("COREWRIGHT_URL", raising=False)
    result = cli.run(command.split()[1:])
    printed = capsys.readouterr()
    assert printed.err + printed.out == output
    assert code in (result, -1)


def test_the_simulators_first_run_is_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the letter, with the two files that the page shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    config, spec, shown = (block for block in blocks(SIMULATE) if block.section == "A first run")
    assert (config.language, shown.language) == ("json", "console")
    checkpoint = tmp_path / "models" / "llama-2-7b"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(config.text)
    (tmp_path / named(spec)).write_text(spec.text)
    command, _, output = shown.text.removeprefix("$ ").partition("\n")
    assert cli.run(command.split()[1:]) == 0
    printed = capsys.readouterr()
    assert printed.err + printed.out == output


@pytest.mark.parametrize(("command", "output", "code"), sessions(alone=False), ids=first_line)
def test_a_session_with_a_fleet_is_what_happens(
    command: str,
    output: str,
    code: int,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """To the letter, of a fleet that is played behind the real admin API."""
    monkeypatch.chdir(folder)
    for setting in SETTINGS:
        monkeypatch.delenv(setting.env, raising=False)
    admin = LiveAdmin()
    environment = {"HOME": "/home/ada", "TZ": "UTC", "COREWRIGHT_URL": admin.url, "COREWRIGHT_TOKEN": "secret"}
    environment["COREWRIGHT_HOME"] = "/home/ada/.corewright"
    try:
        with monkeypatch.context() as changed:
            for name, value in environment.items():
                changed.setenv(name, value)
            time.tzset()
            result = cli.run(command.split()[1:])
    finally:
        admin.close()
        time.tzset()
    printed = capsys.readouterr()
    assert printed.err + printed.out == output
    assert code in (result, -1)


def test_the_shown_spec_is_the_played_fleets() -> None:
    """But for the length that its text names."""
    (block,) = [block for block in blocks(CLI) if block.language == "yaml" and named(block) == "new.yaml"]
    assert block.text.partition("\n")[2] == SHOWN_SPEC.replace("512", "1024")


def test_every_setting_is_described() -> None:
    """With its variable, its default and its values."""
    table = [row for row in rows(section(CLI, "Settings")) if words(row[0])]
    documented = [(words(row[0])[0], words(row[1])[0], words(row[2])[0]) for row in table]
    switches = {"True": "true", "False": "false", "None": "unset", "()": "none"}
    assert documented == [
        (setting.name, setting.env, switches.get(str(setting.default), str(setting.default))) for setting in SETTINGS
    ]
    assert all(row[3].startswith(setting.kind.rule) for row, setting in zip(table, SETTINGS, strict=True))


def test_every_environment_variable_is_described() -> None:
    """Every COREWRIGHT_... of the sources."""
    used = {name for path in SOURCES for name in re.findall(r"_?COREWRIGHT_[A-Z]+(?:_[A-Z]+)*", path.read_text())}
    used |= {setting.env for setting in SETTINGS}
    assert used <= set(words(section(CLI, "Environment variables")))
