from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from orchestrator.specfile import examine, load, start_problems
from placements.hosts import Machine
from placements.problems import Problem

LAPTOP = Machine(cpus=(0, 1))
MODELS = "models: {a: {engine: echo}}\n"


def refused(hosts: str) -> list[tuple[str, str, str]]:
    file = examine(f"hosts: {hosts}\n{MODELS}", "f.yaml", ".", LAPTOP)
    return [(problem.id, problem.where, problem.hint) for problem in start_problems(file)]


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ("{instance: inf2.xlarge, count: 2}", [("f.yaml:1:32", "count: 1")]),
        ("[{instance: inf2.xlarge}, {instance: trn1.2xlarge}]", [("f.yaml:1:34", "one entry with count: 1")]),
        ("[{instance: inf2.xlarge}]", []),
        ("{emulate: inf2.xlarge, count: 256}", []),
        ("{emulate: inf2.xlarge, count: 257}", [("f.yaml:1:31", "count: 256 or less")]),
        (
            "[{emulate: inf2.xlarge, count: 200}, {emulate: trn1.2xlarge, count: 57}]",
            [("f.yaml:1:45", "count: 256 or less")],
        ),
    ],
)
def test_up_says_how_many_hosts_it_can_start(hosts: str, found: list[tuple[str, str]]) -> None:
    """One machine, or as many emulated ones as Ray nodes are sensible; planning takes any."""
    told = [(where, hint) for id, where, hint in refused(hosts) if id == "hosts-not-served"]
    assert told == found


@pytest.mark.parametrize(
    ("hosts", "part"),
    [
        ("{instance: inf2.xlarge}", "hosts: {emulate: inf2.xlarge}"),
        ("[{instance: inf2.xlarge}, {instance: trn1.2xlarge}]", "emulate in place of instance, in each entry"),
    ],
)
def test_a_spec_for_other_machines_can_be_emulated(hosts: str, part: str) -> None:
    """The hint says what to write."""
    (hint,) = [hint for id, _, hint in refused(hosts) if id == "host-differs"]
    assert part in hint


def test_hosts_of_several_emulated_types_can_be_started() -> None:
    """Nothing is refused."""
    assert refused("[{emulate: inf2.xlarge}, {emulate: trn2.3xlarge, lnc: 1}]") == []


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        ("cpu", []),
        ("auto", []),  # on a real host it is chosen there, at the start
        ("transformers-neuronx", []),
        ("nxd-inference", []),
        ("optimum-neuron", ["engine-not-served"]),
        ("torch-neuronx", ["engine-not-served"]),
    ],
)
@pytest.mark.parametrize("hosts", ["instance", "emulate"])
def test_up_starts_every_engine_that_this_version_has(engine: str, found: list[str], hosts: str) -> None:
    """On the machine that the spec means, or emulated."""
    text = f"hosts: {{{hosts}: inf2.xlarge}}\nmodels: {{a: {{source: /m, engine: {engine}}}}}\n"
    file = examine(text, "f.yaml", ".", Machine((0, 1), "inf2.xlarge"))
    assert [problem.id for problem in start_problems(file)] == found


@pytest.mark.parametrize("megabytes", [5, 50, 5000])
def test_a_huge_file_is_refused_without_being_read(megabytes: int, tmp_path: Path) -> None:
    """Of a file without an end no more is read than a spec may have."""
    path = tmp_path / "f.yaml"
    path.touch()
    os.truncate(path, megabytes * 1_000_000)  # sparse
    begun = time.process_time()
    (problem,) = load(str(path)).problems
    assert time.process_time() - begun < 2
    assert (problem.id, "is larger than" in problem.what) == ("spec-unreadable", True)


def unread(source: str, folder: Path) -> Problem:
    text = f"hosts: {{emulate: inf2.xlarge}}\nmodels: {{a: {{source: {source}}}}}\n"
    (problem,) = [one for one in examine(text, "f.yaml", str(folder), LAPTOP).problems if one.severity == "warning"]
    return problem


@pytest.mark.parametrize(
    ("source", "begins"), [("./m", True), ("../m", True), ("/no-such/m", False), ("~/no-m", False)]
)
def test_where_a_path_begins_is_told_for_relative_ones_only(source: str, begins: bool, tmp_path: Path) -> None:
    """And of each, that its config.json alone would do."""
    problem = unread(source, tmp_path)
    assert problem.id == "checkpoint-unreadable"
    assert ("a relative path begins at the spec file" in problem.hint) == begins
    assert "config.json alone is enough" in problem.hint
