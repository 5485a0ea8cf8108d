"""docs/from-vllm-and-lmi.md agrees with the code: its flags, properties, request fields and routes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from typer.main import get_command

from orchestrator.cli import main as cli
from orchestrator.gateway.openai import body_reader, protocol
from orchestrator.gateway.openai.errors import ApiError
from orchestrator.gateway.routes import ROUTES
from orchestrator.process.home import Home
from placements.engines.registry import ENGINES
from placements.engines.vllm.flags import FIELDS, FLAGS, REFUSED, VERSIONS
from placements.spec.parse import parse
from placements.spec.schema import ModelSpec
from tests.docs.pages import blocks

PAGE = Path(__file__).parent.parent.parent / "docs" / "from-vllm-and-lmi.md"
TUTORIAL = PAGE.parent / "tutorials" / "from-lmi.md"


def table(mark: str) -> list[list[str]]:
    """The rows below a mark, without their heading."""
    text = PAGE.read_text().partition(f"<!-- {mark} -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    assert len(rows) > 3
    return rows[1:]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


NAMES = [
    (name.removeprefix("--").replace("-", "_"), words(here)[0])
    for vllm, lmi, here in table("aliases")
    for name in [*words(vllm), *words(lmi)]
]


@pytest.mark.parametrize(("name", "field"), NAMES)
def test_a_name_of_theirs_is_told_to_be_our_field(name: str, field: str) -> None:
    """By the finding of `validate`, where the name is not the same."""
    *above, last = field.split(".")
    body = f"{name}: 1"
    for key in above:
        body = f"{key}: {{{body}}}"
    parsed = parse(f"models: {{m: {{source: ./m, {body}}}}}\n".encode(), "spec.yaml", "/")

    hints = [problem.hint for problem in parsed.problems if problem.id == "unknown-key"]

    assert hints == ([] if name == last else [f'did you mean "{last}"?'])


REQUEST_FIELDS = [(name, here) for fields, here in table("refused") for name in words(fields)]


@pytest.mark.parametrize(("name", "here"), REQUEST_FIELDS)
def test_a_request_field_of_theirs_is_refused_with_ours(name: str, here: str) -> None:
    """In the message, whose parameter is the field."""
    body = {"model": "m", "messages": [{"role": "user"}], name: {}}
    with pytest.raises(ApiError) as refused:
        body_reader.read_chat(json.dumps(body).encode())

    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    assert str(refused.value).startswith(f"{name} is not supported; here: ")
    instead = words(here)[0].partition(" ")[0] if words(here) else f"here: {here}"
    assert instead in str(refused.value)


def test_every_field_with_an_answer_is_on_the_page() -> None:
    """And no other."""
    assert {name for name, _ in REQUEST_FIELDS} == {name for name in body_reader.REPLACEMENTS if "." not in name}


COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]
UP_OPTIONS = {option for parameter in COMMANDS["up"].params for option in parameter.opts}
HERE = table("here")


def is_accepted(fields: str) -> bool:
    """Returns whether a model on the engine `cpu` may have these fields."""
    read = parse(f"models: {{m: {{source: ./m, engine: cpu, {fields}}}}}\n".encode(), "spec.yaml", "/")
    if read.spec is None or read.problems:
        return False
    return read.spec.models[0].engine_options.keys() <= ENGINES["cpu"].options.keys()


@pytest.mark.parametrize("row", HERE, ids=lambda row: (words(row[0]) + words(row[1]))[0])
def test_what_stands_for_a_flag_exists(row: list[str], tmp_path: Path) -> None:
    """As an option of `up`, a field of a model with a value that it takes, a folder of the home, or a command. Those
    that begin with `corewright` are checked for all pages in test_links.py."""
    for code in words(row[2]):
        if code.startswith("corewright "):
            continue
        if code.startswith("--"):
            assert code in UP_OPTIONS
        elif code.endswith("/"):
            assert code.rstrip("/") == getattr(Home(tmp_path), code.rstrip("/")).name
        elif ":" in code:
            assert is_accepted(code)
        else:
            assert code in {*ModelSpec.model_fields, *COMMANDS, "cpu"}


THEIRS = [
    (name.removeprefix("--").replace("-", "_").lower(), row[2]) for row in HERE for name in words(row[0] + row[1])
]


@pytest.mark.parametrize(("name", "here"), THEIRS)
def test_a_name_of_theirs_without_a_field_of_that_name_is_answered(name: str, here: str) -> None:
    """With a code of the row, or with why there is none."""
    parsed = parse(f"models: {{m: {{source: ./m, {name}: x}}}}\n".encode(), "spec.yaml", "/")
    hints = [problem.hint for problem in parsed.problems if problem.id == "unknown-key"]
    assert not any("nearest" in hint for hint in hints)
    codes = {word for code in words(here) for word in re.findall(r"[\w-]+", code)}
    assert all(hint.startswith("remove it: ") or codes & set(re.findall(r"[\w-]+", hint)) for hint in hints)
    assert hints or name in ModelSpec.model_fields


NONE = [name for row in HERE if row[2].startswith("none") for name in words(row[0])]


@pytest.mark.parametrize("name", NONE)
def test_a_flag_that_has_nothing_here_has_no_field_and_no_option(name: str) -> None:
    """By its own name; a row that says "none" fails once there is one."""
    assert name not in UP_OPTIONS
    assert name.removeprefix("--").replace("-", "_") not in ModelSpec.model_fields


def flag_rows() -> list[str]:
    """One row for each field and each reason, and for the versions of flags that are passed on."""
    here = {f"`{field}`": [name for name in FIELDS if FIELDS[name] == field] for field in FIELDS.values()}
    here |= {f"refused: {why}": [name for name in REFUSED if REFUSED[name] == why] for why in REFUSED.values()}
    for name in sorted(FLAGS.keys() - FIELDS.keys() - REFUSED.keys()):
        first, last = FLAGS[name].first or VERSIONS[0], FLAGS[name].last or VERSIONS[-1]
        versions = first if first == last else f"{first} to {last}"
        here.setdefault(f"`engine_options`, vLLM {versions}", []).append(name)
    flags = {text: ", ".join(f"`--{name.replace('_', '-')}`" for name in names) for text, names in here.items()}
    return ["| vLLM | here |", "|---|---|", *(f"| {names} | {text} |" for text, names in flags.items())]


def test_every_flag_of_vllm_is_set_passed_on_or_refused() -> None:
    """The table has each recorded flag; UPDATE_GOLDEN=1 writes it anew."""
    above, mark, rest = PAGE.read_text().partition("<!-- flags -->\n")
    shown, end, below = rest.partition("<!-- end -->")
    if os.environ.get("UPDATE_GOLDEN"):
        shown = "\n".join(flag_rows()) + "\n"
        PAGE.write_text(above + mark + shown + end + below)
    assert shown.splitlines() == flag_rows()
    assert sorted(re.findall(r"`--([a-z0-9-]+)`", shown)) == sorted(name.replace("_", "-") for name in FLAGS)


def test_the_request_fields_of_vllm_are_fields() -> None:
    """Also those that are refused unless empty."""
    text = PAGE.read_text().partition("## Requests")[2].partition("<!-- refused -->")[0]
    kinds = (protocol.ChatRequest, protocol.CompletionRequest)
    assert len(words(text)) > 10
    assert set(words(text)) <= {name for kind in kinds for name in kind.__struct_fields__}


def test_the_routes_that_are_the_same_are_the_gateways() -> None:
    """All of them, and no other; a route that answers "none" is not there."""
    there: set[str] = set()
    missing: set[str] = set()
    for vllm, lmi, here in table("routes"):
        theirs = {*words(vllm), *words(lmi)}
        if here.startswith("none"):
            missing |= theirs
        else:
            assert here.startswith("the same")
            there |= theirs
        there |= {word for word in words(here) if word.startswith("/")}
    assert there == {route.path for route in ROUTES}
    assert len(missing) >= 5
    assert not missing & there


def test_the_migration_of_the_tutorial_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report, then the spec."""
    monkeypatch.chdir(tmp_path)
    properties, session = (block.text for block in blocks(TUTORIAL)[:2])
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama/serving.properties").write_text(properties)
    command, *shown = session.splitlines()
    assert cli.run(command.removeprefix("$ corewright ").partition(" >")[0].split()) == 0
    spec, report = capsys.readouterr()
    assert [*report.splitlines(), "$ cat fleet.yaml", *spec.splitlines()] == shown
