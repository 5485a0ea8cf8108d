from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.access.source_policy import SourcePolicy
from orchestrator.control.resolve.checkpoint_reader import CheckpointFacts
from orchestrator.control.resolve.spec_file import Folders, examine, load, start_problems
from placements.facts.topology import Machine
from placements.spec.problems import Problem
from tests.stubs import stub_checkpoint

LAPTOP = Machine(cpus=(0, 1))
MODELS = "models: {a: {engine: echo}}\n"


def refused(hosts: str) -> list[tuple[str, str, str]]:
    file = examine(f"hosts: {hosts}\n{MODELS}", "f.yaml", ".", LAPTOP)
    return [(problem.id, problem.where, problem.hint) for problem in start_problems(file)]


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("{instance: inf2.xlarge, count: 2}", [("f.yaml:1:32", "set count: 1")]),
        ("[{instance: inf2.xlarge}, {instance: trn1.2xlarge}]", [("f.yaml:1:34", "use one entry with count: 1")]),
        ("[{instance: inf2.xlarge}]", []),
        ("{emulate: inf2.xlarge, count: 256}", []),
        ("{emulate: inf2.xlarge, count: 257}", [("f.yaml:1:31", "set count: 256 or less")]),
        (
            "[{emulate: inf2.xlarge, count: 200}, {emulate: trn1.2xlarge, count: 57}]",
            [("f.yaml:1:45", "set count: 256 or less")],
        ),
    ],
)
def test_up_reports_how_many_hosts_it_can_start(hosts: str, expected: list[tuple[str, str]]) -> None:
    """One machine, or a sensible number of emulated ones, which are Ray nodes; planning accepts any."""
    problems = [(where, hint) for id, where, hint in refused(hosts) if id == "hosts-not-served"]
    assert problems == expected


@pytest.mark.parametrize(
    ("hosts", "part"),
    [
        ("{instance: inf2.xlarge}", "hosts: {emulate: inf2.xlarge}"),
        ("[{instance: inf2.xlarge}, {instance: trn1.2xlarge}]", "emulate in place of instance, in each entry"),
    ],
)
def test_a_spec_for_other_machines_can_be_emulated(hosts: str, part: str) -> None:
    """The hint has the change."""
    (hint,) = [hint for id, _, hint in refused(hosts) if id == "host-differs"]
    assert part in hint


def test_hosts_of_several_emulated_types_can_be_started() -> None:
    """Nothing is refused."""
    assert refused("[{emulate: inf2.xlarge}, {emulate: trn2.3xlarge, lnc: 1}]") == []


@pytest.mark.parametrize("joined", [False, True])
def test_several_machines_need_a_cluster(joined: bool) -> None:
    """Also if they come and go."""
    expected = [] if joined else ["hosts-not-served"]
    for bounds in ("min: 1, max: 2", "count: 2"):
        text = f"hosts: {{instance: inf2.xlarge, {bounds}}}\nmodels: {{a: {{engine: echo}}}}\n"
        for machine, by_caller in (
            (Machine((0, 1), "inf2.xlarge", joined), False),
            (Machine((0, 1), "inf2.xlarge"), joined),
        ):
            problems = start_problems(examine(text, "f.yaml", ".", machine), joined=by_caller)
            assert sorted({problem.id for problem in problems}) == expected


@pytest.mark.parametrize(
    ("instance", "target", "recorded_target"), [("inf2.xlarge", "trn1", "trn2"), ("trn2.3xlarge", "trn2", "trn1")]
)
def test_a_folder_that_optimum_compiled_is_compared_with_the_spec(
    instance: str, target: str, recorded_target: str, tmp_path: Path
) -> None:
    """Its settings, and the machines that it was compiled for, before anything is loaded."""
    stub_checkpoint(tmp_path / "m")
    recorded = {"_serialized_key": "NxDNeuronConfig", "batch_size": 4, "sequence_length": 256, "tp_degree": 1}
    more = {"torch_dtype": "bfloat16", "on_device_sampling": False, "continuous_batching": True}
    (tmp_path / "m" / "neuron_config.json").write_text(json.dumps(recorded | more | {"target": recorded_target}))
    for name in ("model.pt", "checkpoint/weights/tp0_sharded_checkpoint.safetensors"):
        (tmp_path / "m" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / name).touch()
    text = f"hosts: {{instance: {instance}}}\n"
    text += "models: {a: {source: ./m, engine: optimum-neuron, tp_degree: 2, max_len: 256, allow_pickle: true}}\n"
    file = examine(text, "f.yaml", str(tmp_path), Machine((0, 1), instance), folders="plan")
    (problem,) = [problem for problem in file.problems if problem.id == "artifacts-mismatch"]
    differences = f"needs 2, found 1; target of the machines: needs {target}, found {recorded_target}"
    assert f"tp_degree (tp_degree): {differences}" in problem.what


@pytest.mark.parametrize("megabytes", [5, 50, 5000])
def test_a_huge_file_is_rejected_without_being_read(megabytes: int, tmp_path: Path) -> None:
    """At most the allowed size is read from an endless file."""
    path = tmp_path / "f.yaml"
    path.touch()
    os.truncate(path, megabytes * 1_000_000)  # sparse
    begun = time.process_time()
    (problem,) = load(str(path)).problems
    assert time.process_time() - begun < 2
    assert (problem.id, "is larger than" in problem.what) == ("spec-unreadable", True)


def unread(source: str, folder: Path) -> Problem:
    text = f"hosts: {{emulate: inf2.xlarge}}\nmodels: {{a: {{source: {source}}}}}\n"
    (problem,) = examine(text, "f.yaml", str(folder), LAPTOP, folders="plan").problems
    return problem


@pytest.mark.parametrize(
    ("source", "begins"), [("./m", True), ("../m", True), ("/no-such/m", False), ("~/no-m", False)]
)
def test_the_base_of_a_path_is_reported_for_relative_ones_only(source: str, begins: bool, tmp_path: Path) -> None:
    """And for each, that its config.json alone is enough."""
    problem = unread(source, tmp_path)
    assert problem.id == "checkpoint-unreadable"
    assert ("relative paths start at the folder of the spec file" in problem.hint) == begins
    assert "config.json alone is enough" in problem.hint


BROKEN: dict[str, Callable[[Path], Any]] = {
    "model-not-found": shutil.rmtree,
    "config-missing": lambda m: (m / "config.json").unlink(),
    "config-unreadable": lambda m: (m / "config.json").write_text("{"),
    "weights-missing": lambda m: (m / "model.safetensors").unlink(),
    "weights-broken": lambda m: (m / "model.safetensors").write_bytes(b"cut off"),
    "no-tokenizer": lambda m: (m / "tokenizer.json").unlink(),
    "bad-tokenizer": lambda m: (m / "tokenizer.json").write_text("{"),
}
HOST = Machine((0, 1), "inf2.48xlarge")


def judged(
    folder: Path, hosts: str, machine: Machine = LAPTOP, folders: Folders = "load"
) -> list[tuple[str, str, str]]:
    text = f"hosts: {hosts}\nmodels:\n  a: {{source: ./m, engine: cpu}}\n"
    problems = examine(text, "f.yaml", str(folder), machine, folders=folders).problems
    return [(problem.id, problem.severity, problem.where) for problem in problems]


@pytest.mark.parametrize("id", BROKEN)
def test_a_folder_that_cannot_be_loaded_is_an_error_where_it_will_be_loaded(tmp_path: Path, id: str) -> None:
    """On emulated hosts, which are this machine, and on the spec's type: with the id of a failed start."""
    stub_checkpoint(tmp_path / "m")
    assert judged(tmp_path, "{emulate: inf2.48xlarge, count: 2}") == judged(tmp_path, "{instance: inf2.48xlarge}") == []
    BROKEN[id](tmp_path / "m")
    expected = [(id, "error", "f.yaml:3:7")]
    assert judged(tmp_path, "{emulate: inf2.48xlarge, count: 2}") == expected
    assert judged(tmp_path, "{instance: inf2.48xlarge}", HOST) == expected


@pytest.mark.parametrize("id", BROKEN)
def test_elsewhere_and_offline_such_a_folder_is_a_warning(tmp_path: Path, id: str) -> None:
    """Another machine will load it, and was not checked."""
    BROKEN[id](stub_checkpoint(tmp_path / "m"))
    expected = [("checkpoint-unreadable", "warning", "f.yaml:3:7")]
    assert judged(tmp_path, "{instance: inf2.48xlarge}") == expected
    assert judged(tmp_path, "{instance: inf2.8xlarge}", HOST) == expected
    assert judged(tmp_path, "{emulate: inf2.48xlarge}", folders="plan") == expected
    (problem,) = examine("models: {a: {source: ./m}}", "f.yaml", str(tmp_path), LAPTOP, folders="plan").problems
    assert problem.what.endswith("; the machine that will load it was not checked")


def test_a_draft_needs_no_separate_tokenizer(tmp_path: Path) -> None:
    """It uses the tokens of its model; it needs its weights."""
    stub_checkpoint(tmp_path / "m")
    (stub_checkpoint(tmp_path / "d") / "tokenizer.json").unlink()
    text = "hosts: {emulate: inf2.48xlarge}\nmodels: {a: {source: ./m, engine: cpu, draft: {source: ./d}}}\n"
    assert examine(text, "f.yaml", str(tmp_path), LAPTOP).problems == ()
    (tmp_path / "d" / "model.safetensors").unlink()
    (problem,) = examine(text, "f.yaml", str(tmp_path), LAPTOP).problems
    assert (problem.id, problem.severity, problem.where) == ("weights-missing", "error", "f.yaml:2:40")


@pytest.mark.parametrize(
    ("model", "hint", "where"),
    [
        ("{source: models/tiny}", "write source: ./models/tiny ", "f.yaml:1:14"),
        (
            "{source: s3://models/m, draft: {source: models/tiny}}",
            "write draft.source: ./models/tiny ",
            "f.yaml:1:37",
        ),
    ],
)
def test_a_hub_id_that_is_also_a_folder_beside_the_spec_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, hint: str, where: str
) -> None:
    """The hub gets no request; the hint has the path of the folder."""
    monkeypatch.setattr("orchestrator.control.resolve.spec_file.read_facts", None)
    (tmp_path / "models").mkdir()
    stub_checkpoint(tmp_path / "models" / "tiny")
    (problem,) = examine(f"models: {{a: {model}}}", "f.yaml", str(tmp_path), LAPTOP).problems
    assert (problem.id, problem.severity, problem.where) == ("source-ambiguous", "error", where)
    assert problem.hint.startswith(hint)


@pytest.mark.parametrize("readable", [False, True])
def test_a_disallowed_folder_is_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """Its existence is not revealed to a client of the admin API."""
    monkeypatch.setattr(
        "orchestrator.control.resolve.spec_file.read_facts", lambda *_, **__: CheckpointFacts({}, {}, ())
    )
    (tmp_path / "models").mkdir()
    stub_checkpoint(tmp_path / "models" / "tiny")
    allowed = SourcePolicy(prefixes=("hub:models", *([str(tmp_path)] if readable else [])))
    problems = examine("models: {a: {source: models/tiny}}", "f.yaml", str(tmp_path), LAPTOP, allowed).problems
    assert [problem.id for problem in problems] == (["source-ambiguous"] if readable else [])
