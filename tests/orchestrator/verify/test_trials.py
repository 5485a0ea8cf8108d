"""The tiny models of `corewright verify`: legal on every machine and engine that the command supports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.control.resolve.spec_file import examine, this_machine
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.verify.trials import FULL, QUICK, Extent, degrees, settings_of, spec_text, starts, trials_for
from orchestrator.verify.verification import engine_of, host_of, machine_of
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host, Machine
from placements.planner.plan import plan
from workers.host.core_claims import CoreClaim
from workers.host.facts.reading import read_host_facts

NAMES = ("cpu", "transformers-neuronx", "nxd-inference", "optimum-neuron")


def host(instance: str, *, emulated: bool = False) -> Host:
    return Host(f"{instance}/0", TOPOLOGIES[instance], tuple(range(8)), emulated=emulated)


@pytest.mark.parametrize("engine", NAMES)
def test_each_tiny_model_has_a_place_except_the_one_that_is_too_large(engine: str, tmp_path: Path) -> None:
    """Its checkpoint does not exist yet, so the rules about checkpoints do not apply."""
    machine = host("inf2.48xlarge", emulated=engine == "cpu")
    hosts = {"emulate" if engine == "cpu" else "instance": "inf2.48xlarge"}
    for trial in trials_for(engine, machine, range(24), QUICK):
        text = spec_text(trial, tmp_path, engine, hosts, None)
        file = examine(text, "verify.yaml", str(tmp_path), this_machine(), folders="ignore")
        errors = [problem for problem in file.problems if problem.severity == "error"]
        assert errors == [], trial.name
        assert file.spec is not None
        assert [each.cores for each in plan(file.spec, file.hosts, file.checkpoints).placements] == [trial.cores]


def test_a_degree_is_tried_on_its_first_and_last_preferred_start_or_on_every_legal_one() -> None:
    inf2 = TOPOLOGIES["inf2.48xlarge"]
    assert degrees(inf2) == [1, 2, 4, 8, 24]
    assert starts(inf2, 8, range(24), every=False) == [CoreRange(0, 7), CoreRange(16, 23)]
    assert [each.first for each in starts(inf2, 8, range(24), every=True)] == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    assert starts(inf2, 24, range(24), every=False) == [CoreRange(0, 23)]


def test_cores_that_a_process_holds_are_not_used() -> None:
    free = [core for core in range(24) if core not in (0, 1, 9)]
    inf2 = TOPOLOGIES["inf2.48xlarge"]
    assert starts(inf2, 8, free, every=False) == [CoreRange(16, 23)]
    assert starts(inf2, 24, free, every=False) == []
    trials = trials_for("cpu", host("inf2.48xlarge", emulated=True), free, FULL)
    taken = {core for trial in trials if trial.cores is not None for core in trial.cores}
    assert taken <= set(free)
    assert trials_for("cpu", host("inf2.48xlarge", emulated=True), [], QUICK) == []


@pytest.mark.parametrize("extent", [QUICK, FULL])
def test_the_full_extent_has_what_the_quick_one_has(extent: Extent) -> None:
    names = {trial.name for trial in trials_for("cpu", host("inf2.24xlarge", emulated=True), range(12), extent)}
    assert {"base", "long", "draft", "compiled", "too-large", "family-llama", "degree-2-0"} <= names


def test_without_a_spec_this_machine_or_an_emulated_one_is_verified() -> None:
    assert settings_of(None, devices=True) == (None, None)
    assert settings_of(None, devices=False) == ({"emulate": "inf2.48xlarge"}, None)
    text = "hosts: {instance: trn1.32xlarge}\nengines: {cpu: {warm: false}}\nmodels: {}\n"
    assert settings_of(text, devices=False) == ({"instance": "trn1.32xlarge"}, {"cpu": {"warm": False}})
    several = "hosts: [{instance: trn2.48xlarge}, {instance: inf2.48xlarge, reserve: {cores: [0]}}]\nmodels: {}\n"
    own = {"instance": "inf2.48xlarge", "reserve": {"cores": [0]}}
    assert settings_of(several, devices=True, host=host("inf2.48xlarge")) == (own, None)


def test_the_hosts_of_this_machine_are_verified_if_a_spec_has_several_types() -> None:
    text = "hosts: [{instance: trn2.48xlarge}, {instance: inf2.48xlarge}]\nmodels: {m: {engine: echo}}\n"
    file = examine(text, "spec.yaml", "/", Machine((0, 1), "inf2.48xlarge"), folders="ignore")
    assert host_of(file).name == "inf2.48xlarge/0"


@pytest.mark.parametrize("instance", [None, "trn1.2xlarge"])
def test_a_spec_for_other_machines_is_refused(instance: str | None) -> None:
    """The cores of the spec do not exist here."""
    text = "hosts: {instance: inf2.48xlarge}\nmodels: {m: {engine: echo}}\n"
    with pytest.raises(Failed, match="host-differs") as refused:
        host_of(examine(text, "spec.yaml", "/", Machine((0, 1), instance), folders="ignore"))
    assert "emulate: inf2.48xlarge" in refused.value.problem.hint


@pytest.mark.parametrize("engine", ["echo", "server", "torch-neuronx"])
def test_an_engine_whose_answers_cannot_be_compared_is_refused(engine: str) -> None:
    with pytest.raises(Failed) as refused:
        engine_of(None, host("inf2.48xlarge"), engine)
    assert (refused.value.problem.id, refused.value.problem.hint) == ("verify-refused", "name one with --engine")


def test_the_engine_is_that_of_the_specs_first_model_that_generates(tmp_path: Path) -> None:
    text = "hosts: {instance: trn1.32xlarge}\nmodels:\n  v: {engine: echo, kind: embedding}\n"
    text += "  m: {engine: transformers-neuronx, source: ./m, tp_degree: 2}\n"
    file = examine(text, "spec.yaml", str(tmp_path), Machine((0, 1), "trn1.32xlarge"), folders="ignore")
    assert host_of(file).topology == TOPOLOGIES["trn1.32xlarge"]
    assert engine_of(file, host_of(file), None) == "transformers-neuronx"
    assert engine_of(file, host_of(file), "cpu") == "cpu"
    assert engine_of(None, host("inf2.48xlarge", emulated=True), None) == "cpu"
    assert engine_of(None, host("inf2.48xlarge"), None) == "nxd-inference"


def test_cores_that_are_claimed_or_reserved_are_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path / "home")
    home.prepare()
    text = "hosts: {emulate: inf2.24xlarge, reserve: {cores: [11]}}\nmodels: {m: {engine: cpu, source: ./m}}\n"
    file = examine(text, "spec.yaml", str(tmp_path), this_machine(), folders="ignore")
    held = CoreClaim(home.claims(0), [0, 1])
    try:
        machine = machine_of(file, None, home, read_host_facts(), (), {})
    finally:
        held.release()
    assert machine.free == tuple(range(2, 11))
    assert machine.busy == dict.fromkeys((0, 1), f"pid {os.getpid()}")
