"""The measurements of `corewright verify` with real processes: the CPU engine on an emulated host, and each way to
refute a claim."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest

from orchestrator.cli import main as cli
from orchestrator.cli.app import CHANGES
from orchestrator.control.resolve.spec_file import examine, this_machine
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.process.speed_record import SpeedRecord
from orchestrator.verify import answers, parts
from orchestrator.verify.claims import Verdict
from orchestrator.verify.stand import Placed, Stand
from orchestrator.verify.trials import Extent, trials_for
from placements.facts.cpu_layout import LAYOUTS
from placements.facts.topology import TOPOLOGIES, Host
from placements.spec.problems import Problem
from tests.doubles.machine import Machine, build_machine
from workers.host.core_claims import CoreClaim
from workers.host.facts.machine import HostFacts
from workers.host.facts.neuron_ls import Device
from workers.host.facts.tools import Versions
from workers.messages.status import Failure

SMALL = Extent(kills=2, rounds=2, every_start=False, longest=512)
INSTANCE = "inf2.24xlarge"
HOST = Host(f"{INSTANCE}/0", TOPOLOGIES[INSTANCE], (0, 1), emulated=True)
NAMES = ("base", "long", "too-large", "family-llama", "family-mistral-window", "draft-model", "draft", "degree-2-0")


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    home, folder = Home(tmp_path_factory.mktemp("home")), tmp_path_factory.mktemp("verify")
    home.prepare()
    trials = [trial for trial in trials_for("cpu", HOST, range(12), SMALL) if trial.name in NAMES]
    return Stand(home, folder, "cpu", trials, {"emulate": INSTANCE}, None)


def refuted(verdicts: Iterator[Verdict]) -> list[str]:
    return [f"{verdict.claim} {verdict.subject}".strip() for verdict in verdicts if verdict.result == "refuted"]


def readings(devices: int) -> HostFacts:
    found = tuple(Device(index=i, cores=(2 * i, 2 * i + 1)) for i in range(devices))
    fields: dict[str, Any] = {"processes": (), "versions": Versions(), "runtimes": (), "problems": ()}
    return HostFacts(instance_type=INSTANCE, devices=found, **fields)


# -- Facts


def test_a_machine_that_differs_from_its_type_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=380 * 2**30)
    monkeypatch.setattr(parts, "READ_BYTES", 2**22)
    monkeypatch.setattr(parts, "read_rate", lambda folder: 2e9)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(resource, "getrlimit", lambda name: (1024, 1_048_576))
    real, record = replace(HOST, emulated=False), SpeedRecord(tmp_path / "speeds.json", "0.1.0", 0.0)
    assert refuted(parts.facts([], readings(6), real, tmp_path, record)) == []
    problem = Problem("driver-missing", "error", "", "no driver", "load it")
    assert refuted(parts.facts([problem], readings(5), real, tmp_path, record)) == ["doctor", "devices"]
    memory.total = 256 * 2**30
    monkeypatch.setattr(resource, "getrlimit", lambda name: (1024, 4096))
    monkeypatch.setattr(parts, "read_rate", lambda folder: 2e8)
    assert refuted(parts.facts([], readings(6), real, tmp_path, record)) == ["host-memory", "open-files", "disk-rate"]
    assert record.constants()["inf2.24xlarge"].read_bytes_s == 2e8
    results = {verdict.claim: verdict.result for verdict in parts.facts([], readings(5), HOST, tmp_path, record)}
    assert {results[claim] for claim in ("devices", "host-memory", "cpu-layout")} == {"not run"}


def test_a_layout_of_cpus_that_aws_does_not_publish_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "read_rate", lambda folder: 2e9)
    facts = msgspec.structs.replace(readings(12), instance_type="inf2.48xlarge")
    record = SpeedRecord(tmp_path / "speeds.json", "0.1.0", 0.0)
    published = LAYOUTS["inf2.48xlarge"]
    for layout, result in (
        (published, "proved"),
        (replace(published, nodes=(0,) * len(published.nodes)), "refuted"),
        (None, "not run"),
    ):
        host = Host("h/0", TOPOLOGIES["inf2.48xlarge"], tuple(range(192)), layout=layout)
        results = {verdict.claim: verdict.result for verdict in parts.facts([], facts, host, tmp_path, record)}
        assert results["cpu-layout"] == result


def test_as_many_cpus_of_other_nodes_are_chosen() -> None:
    layout = LAYOUTS["inf2.48xlarge"]
    host = Host("h/0", TOPOLOGIES["inf2.48xlarge"], tuple(range(192)), layout=layout)
    own = (48, 144, 49, 145)  # on node 2
    far = parts.on_other_nodes(host, own)
    node_of = {cpu: node for core, node in zip(layout.cores, layout.nodes, strict=True) for cpu in core}
    assert len(far) == 4
    assert {node_of[cpu] for cpu in far} & {node_of[cpu] for cpu in own} == set()
    assert parts.on_other_nodes(host, tuple(range(192))) == ()


def test_the_rate_of_the_disk_is_that_of_a_file_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "READ_BYTES", 2**24)
    assert 1e6 < parts.read_rate(tmp_path) < 1e12
    assert list(tmp_path.iterdir()) == []


# -- Runtime


@pytest.mark.live
def test_claims_and_degrees_are_proved_on_an_emulated_host(stand: Stand) -> None:
    every = list(parts.runtime(stand, SMALL))
    assert [verdict.subject for verdict in every if verdict.result == "not run"] == ["tp 1", "tp 4", "tp 8"]
    verdicts = {verdict.claim: verdict for verdict in every if verdict.result != "not run"}
    assert {claim: verdict.result for claim, verdict in verdicts.items()} == dict.fromkeys(verdicts, "proved")
    assert list(verdicts) == ["claim", "double-claim", "claim-after-kill", "degrees"]
    assert verdicts["double-claim"].finding.startswith("cores-taken: nrt_allocate_neuron_cores NeuronCore(s)")
    assert 0.0 < verdicts["claim-after-kill"].values["max_s"] < parts.MAX_FREE_S


@pytest.mark.live
def test_cores_that_another_process_holds_refute_the_claim_and_the_degree(stand: Stand) -> None:
    placed = stand.placed("base")
    assert placed.config.place.claims is not None
    held = CoreClaim(Path(placed.config.place.claims), placed.config.place.cores)
    try:
        assert refuted(parts.runtime(stand, SMALL)) == ["claim"]
        (verdict,) = (each for each in parts.degrees_at_their_starts(stand) if each.result != "not run")
        assert (verdict.result, verdict.finding.split(":")[0]) == ("refuted", "cores-taken")
    finally:
        held.release()


@pytest.mark.live
def test_cores_that_two_processes_can_claim_refute_the_second_claim(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The claim of the second process is made elsewhere, as if the runtime granted the cores to both processes."""
    claiming, calls = Stand.claiming, iter(range(100))

    @contextlib.contextmanager
    def elsewhere(self: Stand, config: Any, limit_s: float = 0.0) -> Iterator[Any]:
        if next(calls) == 1:
            place = msgspec.structs.replace(config.place, claims=str(tmp_path))
            config = msgspec.structs.replace(config, place=place)
        with claiming(self, config, limit_s) as process:
            yield process

    monkeypatch.setattr(Stand, "claiming", elsewhere)
    monkeypatch.setattr(parts, "MAX_FREE_S", 0.0)
    monkeypatch.setattr(parts, "degrees_at_their_starts", lambda stand: iter(()))
    assert refuted(parts.runtime(stand, SMALL)) == ["double-claim", "claim-after-kill"]


# -- Engines


@pytest.mark.live
def test_answers_are_those_of_the_reference(stand: Stand) -> None:
    verdicts = list(answers.engines(stand, SMALL))
    assert refuted(iter(verdicts)) == []
    proved = {verdict.claim for verdict in verdicts if verdict.result == "proved"}
    claims = {"tokens", "logprobs", "bucket-edges", "batch", "prefix-cache", "draft", "seed", "top-k-1", "long-prompt"}
    assert proved == claims


@pytest.mark.live
def test_a_model_with_other_weights_than_the_reference_is_refuted(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers come from one checkpoint, and are scored with another one."""
    other = replace(stand.trials["family-llama"], seed=1)
    only = {"family-llama": stand.trials["family-llama"]}
    monkeypatch.setattr(stand, "trials", only)
    for part in ("_long", "_again"):
        monkeypatch.setattr(answers, part, lambda *_: iter(()))
    score = stand.score

    def scored_by_another(answers: Any) -> Any:
        only["family-llama"] = other
        return score(answers)

    monkeypatch.setattr(stand, "score", scored_by_another)
    wrong = refuted(answers.engines(stand, SMALL))
    assert sorted(wrong) == ["batch llama", "bucket-edges llama", "logprobs llama", "tokens llama"]


@pytest.mark.live
def test_a_reference_that_cannot_be_computed_ends_with_its_last_lines(stand: Stand) -> None:
    with pytest.raises(Failed, match=r"ended: .*Error") as failed:
        stand.score([("base", [], [2])])
    assert failed.value.problem.id == "verify-failed"


# -- Memory, faults, pinning, speeds


@pytest.mark.live
def test_memory_beyond_the_estimate_is_refuted(stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = SpeedRecord(tmp_path / "speeds.json", "0.1.0", 0.0)
    verdicts = {verdict.claim: verdict.result for verdict in parts.memory(stand, record)}
    assert verdicts == {"host-estimate": "proved", "hbm-estimate": "not run"}
    monkeypatch.setattr(Placed, "needs_gib", 0.01)
    assert refuted(parts.memory(stand, record)) == ["host-estimate"]


@pytest.mark.live
def test_an_unrecognized_failure_is_kept_with_its_text(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand, "failures", [Failure("engine-failed", "an unknown text")])
    unknown = {verdict.claim: verdict for verdict in parts.faults(stand)}
    assert (unknown["too-large"].result, unknown["too-large"].finding.split(":")[0]) == ("proved", "hbm-exceeded")
    assert unknown["texts-known"].result == "refuted"
    assert unknown["texts-known"].values["texts"] == ["engine-failed: an unknown text"]


@pytest.mark.live
def test_speeds_of_the_specs_models_are_recorded_and_read_by_plan(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stand.folder / stand.trials["base"].folder
    path = tmp_path / "spec.yaml"
    path.write_text(
        f"hosts: {{emulate: {INSTANCE}}}\nmodels: {{own: {{source: {folder}, engine: cpu, max_len: 128}}}}\n"
    )
    file = examine(path.read_text(), str(path), str(tmp_path), this_machine(), folders="plan")
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    home = Home.from_environment()
    home.prepare()
    record = SpeedRecord(home.speeds, "0.1.0", 0.0)
    (verdict,) = parts.speeds(stand, file, record, 0.0)
    record.write(record.content(0.0))
    assert verdict.subject == "own"
    (measured,) = SpeedRecord(home.speeds, "0.1.0", 0.0).measured()
    assert measured.speeds["step_ms"] == pytest.approx(verdict.values["step_ms"])
    assert cli.run(["plan", str(path), "--offline"]) == CHANGES
    assert f"measured on {measured.requests} requests" in capsys.readouterr().out


# -- Compiles, with stand-ins of AWS's packages


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build_machine(tmp_path_factory.mktemp("machine") / "inf2")


@pytest.mark.compile
def test_claims_about_a_neuron_engine_are_proved_on_the_stand_ins_and_refuted_by_their_faults(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of a double claim is that of libnrt's stand-in."""
    for name, value in machine.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "graphs"))
    home, folder = Home(tmp_path / "home"), tmp_path / "verify"
    home.prepare()
    folder.mkdir()
    host = Host("inf2.48xlarge/0", TOPOLOGIES["inf2.48xlarge"], (0, 1))
    wanted = ("base", "compiled", "miscompiled", "degree-8-0")
    trials = [trial for trial in trials_for("nxd-inference", host, range(24), SMALL) if trial.name in wanted]
    engines = {"nxd-inference": {"python": str(machine.python)}}
    stand = Stand(home, folder, "nxd-inference", trials, {"instance": "inf2.48xlarge"}, engines)
    verdicts = [*parts.runtime(stand, SMALL), *parts.compiler(stand)]
    others = [f"{each.claim}: {each.result}, {each.subject}" for each in verdicts if each.result != "proved"]
    assert others == [f"degrees: not run, tp {tp}" for tp in (1, 2, 4, 24)]
    assert "nrt_init failed with status=4" in next(each.finding for each in verdicts if each.claim == "double-claim")
    machine.plan({"at": "load_collectives", "status": 1200, "times": 1})
    assert refuted(parts.degrees_at_their_starts(stand)) == ["degrees tp 8 at core 0"]
