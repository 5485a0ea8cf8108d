"""docs/errors.md has an entry for each problem id and error code, and each is produced by a test."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import NamedTuple
from unittest.mock import patch

import pytest

from orchestrator.control.resolve.spec_file import examine, load
from placements.planner.plan import plan
from placements.spec.problems import Problem, has_errors, render
from tests.docs.pages import API, ERRORS, LARGE, blocks, rows, section, words
from tests.docs.problem_ids import codes_in_source, ids_in_source
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.sources.listing import Listing, RemoteFile
from workers.artifacts.sources.open_source import SourceQuery
from workers.artifacts.sources.source_metadata import SourceMetadata


def entries() -> list[str]:
    return re.findall(r"^### `(.+)`$", ERRORS.read_text(), re.MULTILINE)


def test_every_problem_id_has_an_entry() -> None:
    """Problems, causes of a failed replica, and codes of HTTP errors."""
    assert sorted((ids_in_source() | codes_in_source()) - set(entries())) == []


def test_every_entry_is_of_an_id_that_exists() -> None:
    """Once, and nothing that is gone from the code."""
    assert sorted(set(entries()) - ids_in_source() - codes_in_source()) == []
    assert len(entries()) == len(set(entries()))


def unreadable(folder: Path) -> list[Problem]:
    return list(load(str(folder / "no-such.yaml")).problems)


def pin_in_quarantine(folder: Path) -> list[Problem]:
    file = examine("models: {chat: {engine: echo, cores: ['5']}}\n", "spec.yaml", str(folder), LARGE)
    assert file.spec is not None
    drawn = plan(file.spec, file.hosts, blocked={file.hosts[0].name: frozenset({5})})
    return [problem for missing in drawn.unplaced for problem in missing.problems]


def only_host_of_a_type_lost(folder: Path) -> list[Problem]:
    text = (
        "hosts: [{emulate: inf2.48xlarge}, {emulate: trn1.32xlarge}]\nmodels: {chat: {engine: echo, tp_degree: 32}}\n"
    )
    file = examine(text, "spec.yaml", str(folder), LARGE)
    assert file.spec is not None
    assert not has_errors(file.problems)
    drawn = plan(file.spec, file.hosts[:1])
    return [problem for missing in drawn.unplaced for problem in missing.problems]


def source_away(folder: Path) -> list[Problem]:
    config = (folder / "models" / "tiny" / "config.json").read_bytes()
    sizes = {"config.json": len(config), "tokenizer.json": 2}
    files = tuple(RemoteFile(name=name, size=size, tag="") for name, size in sizes.items())
    listing = Listing(source="org/model", files=files)
    with patch.dict(os.environ, {"COREWRIGHT_HOME": str(folder / "home")}):
        heads = SourceMetadata(folder / "home" / "store" / "heads", lambda *_: KnownRemote(listing, config))
        heads.refresh(SourceQuery(source="org/model"))
        return list(examine("models: {chat: {source: org/model}}\n", "spec.yaml", str(folder), LARGE).problems)


class KnownRemote(NamedTuple):
    known: Listing
    config: bytes

    def listing(self) -> Listing:
        return self.known

    def fetch(self, listing: Listing, folder: Path, progress: Progress, stop: Event) -> None:
        (folder / "config.json").write_bytes(self.config)
        (folder / "tokenizer.json").write_bytes(b"{}")


BESIDE_A_SPEC: dict[str, Callable[[Path], list[Problem]]] = {  # what no text alone can give
    "spec-unreadable": unreadable,
    "pin-taken": pin_in_quarantine,
    "source-away": source_away,
    "no-suitable-host": only_host_of_a_type_lost,
}


@pytest.mark.parametrize("id", BESIDE_A_SPEC)
def test_what_no_example_can_show_happens_too(id: str, folder: Path) -> None:
    """As the entry shows it, to the letter."""
    (problem,) = BESIDE_A_SPEC[id](folder)
    (shown,) = [block.text for block in blocks(ERRORS) if block.section == id]
    assert render([problem]).replace(f"{folder}/", "") == shown
    assert (problem.id, problem.severity) == (id, section(ERRORS, id).split()[0].rstrip("."))


def test_every_problem_of_a_spec_or_a_plan_is_produced() -> None:
    """By the example of an entry, which another test runs, or by the functions above."""
    shown = {id for block in blocks(ERRORS) if block.language == "yaml" for id in block.marked("problems")}
    shown |= {id for block in blocks(ERRORS) if block.language == "yaml" for id in block.marked("up refuses")}
    made = (
        ids_in_source("placements/")
        | ids_in_source("orchestrator/control/resolve/spec_file.py")
        | ids_in_source("orchestrator/control/resolve/checkpoint_reader.py")
    )
    assert sorted(made - shown - BESIDE_A_SPEC.keys()) == []
    assert len(made) > 60


def test_an_entry_of_a_spec_or_a_plan_has_an_example_of_its_own() -> None:
    """In its section, and it gives the entry's problem."""
    own = {block.section for block in blocks(ERRORS) if block.section in block.marked("problems")}
    own |= {block.section for block in blocks(ERRORS) if block.section in block.marked("up refuses")}
    made = ids_in_source("placements/") | ids_in_source("orchestrator/control/resolve/spec_file.py")
    assert sorted(made - own - BESIDE_A_SPEC.keys()) == []


def test_no_id_goes_without_a_test() -> None:
    """Each is given by an example of errors.md, or named by a test that expects it."""
    shown = {id for block in blocks(ERRORS) for mark in ("problems", "up refuses") for id in block.marked(mark)}
    here = Path(__file__).parent
    tests = "\n".join(path.read_text() for path in here.parent.rglob("*.py") if path.parent != here)
    tests += "\n".join(path.read_text() for path in (here.parent / "golden").rglob("*.txt"))
    others = set(entries()) - shown - BESIDE_A_SPEC.keys()
    assert sorted(others - set(re.findall(r"[\w-]+", tests))) == []


def test_the_collection_finds_ids_of_every_kind() -> None:
    """Made by a class, by a helper, looked up in a mapping, written into a text; and codes."""
    assert ids_in_source() >= {"max-never-fits", "pin-length", "no-room", "bad-range", "no-fleet", "start-deadline"}
    assert ids_in_source() >= {"vcpus-short", "spread-blocks", "host-memory-exceeded"}
    assert codes_in_source() >= {"model_loading", "queue_full", "invalid_json", "invalid_token"}


OF_THE_ADMIN_API = {"invalid_token", "invalid_request", "wrong_host", "foreign_origin", "gateway_unreachable"}


def test_each_codes_status_is_that_of_its_entry() -> None:
    """The table of statuses in api.md agrees with the entries of errors.md."""
    table = {code: row[0] for row in rows(section(API, "Errors")) if row[0].isdigit() for code in words(row[2])}
    assert table.keys() == codes_in_source() - OF_THE_ADMIN_API
    assert {code: section(ERRORS, code).split()[0].rstrip(".") for code in table} == table
