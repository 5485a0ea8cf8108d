"""The doctor finds what is wrong with a machine, and says nothing of what is well."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import convert

from orchestrator.cli import doctor as doctor_command
from orchestrator.cli import main as cli
from orchestrator.cli.diagnosis import FleetReading, InterpreterReading, Readings, Report, report
from orchestrator.cli.doctor import text
from orchestrator.control.resolve.spec_file import examine
from orchestrator.messages.fleet_status import ReplicaInFleet
from placements.engines.vllm.capabilities import release_for
from placements.facts.topology import Machine as WholeMachine
from tests.contracts import PACKAGES
from tests.doubles import Neuron
from tests.doubles.machine import Machine, build_machine, make_interpreter
from tests.orchestrator.fakefleet import LiveAdmin, replica
from tests.published_configs import PUBLISHED
from tests.readable import is_readable
from workers.engines.package_contract import Drift
from workers.host.facts.machine import HostFacts, NeuronProcess
from workers.host.facts.neuron_ls import Device
from workers.host.facts.tools import Versions
from workers.host.interpreter import FleetVersions, Interpreter, vllm_refusal

DEADLINE_S = 30
WHOLE = WholeMachine(cpus=tuple(range(192)), instance="inf2.48xlarge")
PAGE = Path(__file__).parents[3] / "docs" / "cli.md"
FOLDER = "/opt/fleet/lib/python3.12/site-packages"
DEVICES = tuple(Device(index=index, cores=(2 * index, 2 * index + 1)) for index in range(6))
FACTS = HostFacts(
    instance_type="inf2.24xlarge",
    devices=DEVICES,
    processes=(),
    versions=Versions(driver="2.26.5.0", runtime="2.30.51.0", tools="2.28.23.0"),
    runtimes=(),
    problems=(),
)
OWN = Interpreter(
    python="/opt/fleet/bin/python",
    version="3.12.3",
    executable="/opt/fleet/bin/python",
    ray="2.60.0",
    corewright="0.1.0",
    folders={name: f"{FOLDER}/{name}" for name in ("placements", "workers", "orchestrator")},
)
NXD = msgspec.structs.replace(
    OWN,
    python="/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference/bin/python",
    packages={"neuronx-distributed-inference": "0.8.16251", "neuronx-cc": "2.23.6484.0+3b612583"},
)
VLLM = Interpreter(
    python="/opt/aws_neuronx_venv_pytorch_inference_vllm_0_13/bin/python",
    version="3.12.3",
    packages={"vllm": "0.13.0", "vllm-neuron": "0.4.1", "neuronx-cc": "2.23.6484.0+3b612583"},
)
NXD_DRIFT = Drift("nxd-inference", "neuronx_distributed_inference", "0.8.16251", "0.8")
WELL = Readings(
    versions=FleetVersions("0.1.0", "3.12.3", "2.60.0"),
    package_folder=FOLDER,
    dev=tuple(range(6)),
    facts=FACTS,
    interpreters=(
        InterpreterReading(OWN),
        InterpreterReading(NXD, ("nxd-inference",), "fleet.yaml:4:27", drifts=(NXD_DRIFT,)),
    ),
    spec="fleet.yaml",
)
HOLDER = NeuronProcess(pid=71, devices=(2, 3), cores=(4, 5, 6, 7), command="python serve.py", runtime_version="2.22")
FLEET = FleetReading(
    "chat", "http://127.0.0.1:8080", False, (convert(replica("chat/0", "4-7", pid=71), ReplicaInFleet),)
)


def problems_of(**changes: Any) -> list[tuple[str, str, str]]:
    """Id, severity and place of each finding."""
    problems = report(dataclasses.replace(WELL, **changes)).problems
    return [(problem.id, problem.severity, problem.where) for problem in problems]


def facts(**changes: Any) -> HostFacts:
    return msgspec.structs.replace(FACTS, **changes)


def with_second(**changes: Any) -> tuple[InterpreterReading, ...]:
    """The interpreters, the second one changed."""
    return (WELL.interpreters[0], dataclasses.replace(WELL.interpreters[1], **changes))


def test_a_healthy_machine_has_no_findings() -> None:
    """Devices match the instance type, no foreign process uses cores, interpreters agree, engines are as recorded."""
    assert problems_of() == []


def test_a_laptop_has_no_findings() -> None:
    """Without Neuron devices."""
    assert problems_of(dev=(), facts=facts(instance_type=None, devices=(), versions=Versions()), spec=None) == []


def test_a_foreign_package_of_the_same_name_is_reported() -> None:
    """`workers` is a common word; the replicas would import the other package."""
    folders = {**OWN.folders, "workers": "/home/ada/project/workers"}
    own = InterpreterReading(msgspec.structs.replace(OWN, folders=folders))
    assert problems_of(interpreters=(own,)) == [("package-elsewhere", "error", "")]


@pytest.mark.parametrize(("beside", "ids"), [("4.47.1", []), ("5.0.0", ["rotary-misread"])])
def test_a_transformers_that_hides_rope_theta_is_a_warning(beside: str, ids: list[str]) -> None:
    """Beside transformers-neuronx, if a model needs that engine."""
    tnx = msgspec.structs.replace(OWN, packages={"transformers-neuronx": "0.13.380", "transformers": beside})
    interpreters = (WELL.interpreters[0], InterpreterReading(tnx, ("transformers-neuronx",), "fleet.yaml:4:27"))
    assert problems_of(interpreters=interpreters) == [(id, "warning", "fleet.yaml:4:27") for id in ids]


@pytest.mark.parametrize(("dev", "listed"), [(range(5), 5), (range(6), 5)], ids=["instance", "neuron-ls"])
def test_missing_devices_are_reported(dev: range, listed: int) -> None:
    """Fewer in /dev than the instance type has, or than neuron-ls lists."""
    assert problems_of(dev=tuple(dev), facts=facts(devices=DEVICES[:listed])) == [("devices-differ", "warning", "")]


@pytest.mark.parametrize(
    ("packages", "count"),
    [({"neuronx-cc": "2.23.6484.0"}, 1), ({"neuronx-cc": "2.22.12471.0"}, 0), ({}, 1)],
    ids=["installed", "older", "unknown"],
)
def test_known_failures_are_judged_by_the_packages_of_the_engines_interpreter(
    packages: dict[str, str], count: int, tmp_path: Path
) -> None:
    """If it has no compiler, the planned release decides."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text(json.dumps(PUBLISHED["Qwen/Qwen3-8B"]))
    text = "hosts: {instance: inf2.48xlarge}\nmodels: {a: {source: ./a, engine: nxd-inference, tp_degree: 8}}\n"
    file = examine(text, "f.yaml", str(tmp_path), WHOLE, folders="ignore")
    reading = InterpreterReading(msgspec.structs.replace(NXD, packages=packages), ("nxd-inference",))
    problems = list(doctor_command._file_problems(file, [reading]))
    assert [problem.id for problem in problems] == ["known-failure"] * count


def test_unreadable_facts_are_reported_with_the_readers_remedy() -> None:
    fact = "neuron-ls: found neither in /opt/aws/neuron/bin nor on PATH; install aws-neuronx-tools"
    (problem,) = report(dataclasses.replace(WELL, facts=facts(problems=(fact,)))).problems
    assert (problem.id, problem.hint) == ("host-unread", "install aws-neuronx-tools")


def test_a_foreign_process_on_the_cores_is_reported() -> None:
    """With a fleet that does not have the process, and with a spec for the machine."""
    expected = [("cores-foreign", "warning", "")]
    assert problems_of(facts=facts(processes=(HOLDER,))) == expected
    fleet = dataclasses.replace(FLEET, replicas=())
    assert problems_of(facts=facts(processes=(HOLDER,)), fleet=fleet, spec=None) == expected


def test_a_replica_on_its_cores_is_not_reported() -> None:
    """Its pid is the fleet's."""
    assert problems_of(facts=facts(processes=(HOLDER,)), fleet=FLEET) == []


def test_a_process_is_only_listed_without_a_fleet_and_a_spec() -> None:
    result = dataclasses.replace(WELL, facts=facts(processes=(HOLDER,)), spec=None)
    drawn = report(result)
    assert drawn.problems == ()
    assert [held["cores"] for held in drawn.as_dict()["held"]] == ["4-7"]


def test_a_replica_without_cores_is_reported() -> None:
    """It is ready, but neuron-ls shows its process on no device."""
    assert problems_of(fleet=FLEET) == [("cores-unheld", "warning", "")]


def test_emulated_cores_are_not_searched_for_on_the_machine() -> None:
    """They are locks: no Neuron tool shows them, and processes on real cores do not conflict with them."""
    assert problems_of(fleet=dataclasses.replace(FLEET, emulated=True)) == []
    assert problems_of(emulates=True, facts=facts(processes=(HOLDER,))) == []


@pytest.mark.parametrize(
    ("changes", "id"),
    [
        ({"trouble": "missing", "error": "/opt/x is not there"}, "interpreter-missing"),
        ({"ray": "2.44.0"}, "interpreter-ray-differs"),
        ({"version": "3.10.1"}, "interpreter-python-differs"),
        ({"corewright": None}, "interpreter-corewright-differs"),
        ({"packages": {}}, "engine-not-installed"),
    ],
)
def test_an_unsuitable_interpreter_is_reported(changes: dict[str, Any], id: str) -> None:
    """At its place in the spec, before a core is claimed."""
    changed = msgspec.structs.replace(NXD, **changes)
    assert problems_of(interpreters=with_second(interpreter=changed, drifts=())) == [(id, "error", "fleet.yaml:4:27")]


@pytest.mark.parametrize(
    ("packages", "ids"),
    [({"vllm": "0.13.0", "vllm-neuron": "0.4.1"}, []), ({"vllm": "0.13.0"}, ["engine-not-installed"])],
)
def test_the_interpreter_of_vllm_is_checked_for_its_release(packages: dict[str, str], ids: list[str]) -> None:
    """It needs no Ray and no corewright."""
    vllm = Interpreter(python="/opt/vllm", version="3.9.1", packages=packages)
    reading = InterpreterReading(vllm, ("vllm",), "fleet.yaml:2:18", release_for("inf2"))
    assert [id for id, *_ in problems_of(interpreters=(WELL.interpreters[0], reading))] == ids


@pytest.mark.parametrize(
    ("installed", "planned", "hint"),
    [
        ("0.24.0.1.1.0", "0.29", 'set engines.vllm.plugin: "0.24"'),
        ("0.33.0.1.4.0", "0.29", 'set engines.vllm.plugin: "0.33"'),  # not known
        ("0.33.0.1.4.0", "0.33", None),
        ("0.1.0", "0.29", "install vllm-neuron 0.29"),
    ],
)
def test_another_release_of_the_plugin_can_be_planned(installed: str, planned: str, hint: str | None) -> None:
    """It may be unknown to corewright. The first releases are not supported."""
    packages = {"vllm": installed[:6], "vllm-neuron": installed}
    refused = vllm_refusal(Interpreter(python="/p", version="3.14.0", packages=packages), release_for("trn2", planned))
    assert (refused and refused.hint) == hint


def test_engine_auto_without_an_installed_engine_is_reported() -> None:
    """Neither in the command's own interpreter nor in those of the spec."""
    own = dataclasses.replace(WELL.interpreters[0], needed_for=("auto",))
    assert problems_of(interpreters=(own,)) == [("engine-not-installed", "error", "")]
    assert problems_of(interpreters=(own, WELL.interpreters[1])) == []


def test_drift_is_reported_for_engines_in_use() -> None:
    """In one finding for each engine; the JSON report has every line."""
    changes = tuple((f"f{index}", "has another signature") for index in range(5))
    drifts = (dataclasses.replace(NXD_DRIFT, changed=changes),)
    interpreters = with_second(drifts=drifts)
    (problem,) = report(dataclasses.replace(WELL, interpreters=interpreters)).problems
    assert (problem.id, problem.severity, problem.what.endswith("; and 2 more")) == ("engine-drift", "warning", True)
    assert problems_of(interpreters=with_second(drifts=drifts, needed_for=())) == []


@pytest.mark.parametrize(
    ("changes", "machine", "ids"),
    [
        ({"engine": "transformers-neuronx", "installed": "0.13.798"}, "trn2.48xlarge", ["engine-unsupported-here"]),
        ({"installed": "0.9.1"}, "inf2.48xlarge", ["engine-in-maintenance"]),
        ({"installed": "0.10.18399"}, "inf2.48xlarge", ["engine-in-maintenance", "engine-version-unknown"]),
        ({"installed": "0.10.18399"}, "trn2.48xlarge", ["engine-version-unknown"]),
        ({"installed": "0.8.1"}, "inf2.48xlarge", []),
    ],
)
def test_a_version_is_compared_with_the_machine_and_the_known_ones(
    changes: dict[str, Any], machine: str, ids: list[str]
) -> None:
    """A version that may run causes a warning only."""
    drift = dataclasses.replace(NXD_DRIFT, **{"recorded": "0.9", **changes})
    facts = msgspec.structs.replace(WELL.facts, instance_type=machine)
    interpreters = with_second(drifts=(drift,), needed_for=(drift.engine,))
    reported = report(dataclasses.replace(WELL, facts=facts, interpreters=interpreters)).problems
    of_versions = {"engine-unsupported-here", "engine-in-maintenance", "engine-version-unknown"}
    assert [problem.id for problem in reported if problem.id in of_versions] == ids


def test_a_driver_that_is_too_old_for_the_runtime_is_an_error() -> None:
    """An example is a newer container on an older host."""
    versions = msgspec.structs.replace(WELL.facts.versions, runtime="2.35.30.0", driver="2.26.10.0")
    facts = msgspec.structs.replace(WELL.facts, versions=versions)
    assert problems_of(facts=facts) == [("driver-too-old", "error", "")]
    assert problems_of(facts=msgspec.structs.replace(facts, versions=Versions(runtime="2.35.30.0"))) == []


def test_an_unhealthy_device_is_reported() -> None:
    """The report has its failing components."""
    facts = msgspec.structs.replace(WELL.facts, unhealthy={3: "hbm,sram"})
    (problem,) = report(dataclasses.replace(WELL, facts=facts)).problems
    assert (problem.id, problem.what) == ("device-unhealthy", "the driver reports faults of device 3: hbm,sram")


def engines_of(*environments: Interpreter) -> dict[str, str]:
    """Engine -> why it does not work, "" if it does, with these environments beside the command's own interpreter."""
    readings = dataclasses.replace(WELL, interpreters=WELL.interpreters[:1], environments=environments)
    return {entry.engine: entry.reason or "" for entry in report(readings).engines}


def test_an_engine_in_an_environment_of_the_image_works() -> None:
    """With corewright beside it; vLLM needs none."""
    assert {engine for engine, reason in engines_of(NXD, VLLM).items() if not reason} == {"nxd-inference", "vllm"}
    bare = msgspec.structs.replace(NXD, corewright=None, ray=None)
    assert engines_of(bare)["nxd-inference"].startswith("has no corewright; `corewright doctor --bootstrap` shows")


@pytest.mark.parametrize(
    ("packages", "engine", "reason"),
    [
        ({"neuronx-distributed-inference": "0.3.5591"}, "nxd-inference", "0.3.5591 is too old"),
        ({"vllm": "0.21.0", "vllm-neuron": "0.21.0"}, "vllm", "0.21.0 does not run on inf2"),
        ({"torch-neuronx": "2.9.0.2.12.22436"}, "torch-neuronx", "has no neuronx-cc and no torch and no"),
        ({}, "transformers-neuronx", "the last image with it: SDK 2.25, Ubuntu 22.04"),
        ({}, "optimum-neuron", "not in AWS's images; see docs/engines.md"),
    ],
)
def test_an_engine_that_does_not_work_has_the_reason(packages: dict[str, str], engine: str, reason: str) -> None:
    assert engines_of(msgspec.structs.replace(NXD, packages=packages))[engine].startswith(reason)


@pytest.mark.parametrize(("target", "ids"), [("trn2", {"target-differs"}), ("inf2", set()), ("trn1", set())])
def test_a_target_of_another_machine_is_an_error(target: str, ids: set[str]) -> None:
    """The variable of the compiler is in the environment in which `up` is started."""
    own = msgspec.structs.replace(WELL.interpreters[0].interpreter, target=target)
    first = dataclasses.replace(WELL.interpreters[0], interpreter=own)
    readings = dataclasses.replace(WELL, interpreters=(first, *WELL.interpreters[1:]))
    assert {problem.id for problem in report(readings).problems} == ids


def test_the_release_of_the_sdk_is_recognized() -> None:
    """By the packages of all interpreters."""
    other = msgspec.structs.replace(NXD, python="/opt/old/bin/python", packages={"neuronx-cc": "2.20.9961.0"})
    assert report(dataclasses.replace(WELL, environments=(other,))).sdks == ("2.25", "2.28")


def test_a_machine_without_devices_can_go_on_with_emulated_cores() -> None:
    """No engine is judged there, unless it has the environments of an image."""
    bare = dataclasses.replace(WELL, dev=(), facts=facts(devices=(), instance_type=None))
    assert "`hosts: {emulate: inf2.48xlarge}` in a spec emulates the cores" in text(report(bare))
    assert report(bare).engines == ()
    assert report(dataclasses.replace(bare, environments=(NXD,))).engines[0].works


def shown() -> Report:
    """The example of docs/cli.md."""
    here = facts(processes=(HOLDER,))
    return report(dataclasses.replace(WELL, facts=here, fleet=FLEET, environments=(NXD, VLLM)))


def test_the_documented_example_is_the_printed_report() -> None:
    assert f"```text\n{text(shown())}\n```" in PAGE.read_text()


def test_the_report_has_the_documented_keys() -> None:
    """As the table of `corewright doctor` lists them."""
    section = PAGE.read_text().partition("### `corewright doctor`")[2].partition("\n### ")[0]
    for key in shown().as_dict():
        assert f"| `{key}` |" in section, key


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build_machine(tmp_path_factory.mktemp("machine") / "inf2", "inf2.24xlarge")


def test_a_whole_machine_is_read(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Devices, driver, a stranger on cores and an interpreter with another Ray, each found by the command itself."""
    other = make_interpreter(tmp_path / "other", neuron=False, instead={"ray": "2.44.0"})
    (tmp_path / "spec.yaml").write_text(
        f"hosts: {{instance: inf2.24xlarge}}\nengines:\n  nxd-inference: {{python: {other}}}\n"
        "models: {a: {engine: echo}}\n"
    )
    for name, value in {**machine.env, "COREWRIGHT_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    holder = subprocess.Popen(
        [
            machine.python,
            "-c",
            "from neuron_double.runtime import runtime; runtime().claim(); print(flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "NEURON_RT_VISIBLE_CORES": "4-7"},
    )
    try:
        assert holder.stdout is not None
        assert is_readable(holder.stdout, DEADLINE_S)
        ended = cli.run(["doctor", str(tmp_path / "spec.yaml"), "-o", "json"])
    finally:
        holder.kill()
        holder.communicate()

    answer = json.loads(capsys.readouterr().out)
    assert ended == 1
    assert {problem["id"] for problem in answer["problems"]} == {"cores-foreign", "interpreter-ray-differs"}
    assert (answer["machine"]["instance"], answer["machine"]["devices"]) == ("inf2.24xlarge", list(range(6)))
    assert [(held["cores"], held["pid"], held["replica"]) for held in answer["held"]] == [("4-7", holder.pid, None)]
    assert [interpreter["python"] for interpreter in answer["interpreters"]] == [sys.executable, str(other)]


def test_the_running_fleet_is_queried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name is shown; an unresponsive fleet is a finding, and the rest is checked all the same."""
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path))
    monkeypatch.setattr(doctor_command, "_interpreters", lambda file: list(WELL.interpreters[:1]))
    monkeypatch.setattr(doctor_command.orchestrator, "__file__", f"{FOLDER}/orchestrator/__init__.py")  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor_command, "fleet_versions", lambda: WELL.versions)
    admin = LiveAdmin()
    try:
        monkeypatch.setenv("COREWRIGHT_URL", admin.url)
        monkeypatch.setenv("COREWRIGHT_TOKEN", "secret")
        assert cli.run(["doctor"]) == 0
        assert f"two at {admin.url}\n" in capsys.readouterr().out
    finally:
        admin.close()

    assert cli.run(["doctor"]) == 1
    assert "error: fleet-unreachable" in capsys.readouterr().err


@pytest.mark.slow  # a test of the stand-ins
@pytest.mark.parametrize("engine", PACKAGES)
def test_the_stand_ins_have_no_drift(engine: str, machine: Machine, neuron: Neuron) -> None:
    """They have the signatures of the recorded packages."""
    assert doctor_command._drift(str(machine.python), engine, "?").lines() == []
