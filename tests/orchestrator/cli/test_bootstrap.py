"""`corewright doctor --bootstrap`: the steps from an image of AWS to a fleet.

The texts are golden files: UPDATE_GOLDEN=1 writes them anew; read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from orchestrator.cli import main as cli
from orchestrator.cli.bootstrap import MachineSituation, ModelReading, bootstrap
from placements.engines.evidence import ModelVariant, releases_reported
from placements.engines.registry import ENGINES, Engine
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import family_of
from placements.spec.parse import parse
from tests.docs.pages import EXAMPLES
from tests.doubles.machine import build_machine, make_interpreter
from tests.published_configs import PUBLISHED

GOLDEN = Path(__file__).parents[2] / "golden" / "bootstrap"


def reading(name: str, engine: Engine, family: str | None, kind: str = "generate") -> ModelReading:
    variant = None if family is None else ModelVariant(family)
    return ModelReading(name, engine, kind, variant, f"fleet.yaml:9:{len(name)}")


ON_2_28 = {"/opt/aws_neuronx_venv_pytorch_2_9_nxd_inference": "2.28"}
ON_UBUNTU_22 = {"/opt/aws_neuronx_venv_pytorch_2_8_nxd_inference": "2.27", "/opt/aws_neuronx_venv_jax_0_7": "2.27"}
MIXED = (
    reading("chat", "auto", "llama"),
    reading("old", "transformers-neuronx", "opt"),
    reading("small", "auto", "gpt2"),
    reading("tuned", "cpu", "qwen2"),
)
SITUATIONS = {
    "without-devices": MachineSituation("0.1.0", None),
    "inf2-with-a-spec": MachineSituation(
        "0.1.0", "inf2.48xlarge", ON_2_28, spec="fleet.yaml", models=(reading("search", "auto", "bert", "embedding"),)
    ),
    "two-engines": MachineSituation("0.1.0", "inf2.48xlarge", ON_2_28, spec="fleet.yaml", models=MIXED),
    "two-engines-on-2.28": MachineSituation("0.1.0", "inf2.48xlarge", ON_2_28, "2.28", "fleet.yaml", models=MIXED),
    "ubuntu-22": MachineSituation("0.1.0", "trn1.32xlarge", ON_UBUNTU_22),
    "sdk-2.21": MachineSituation("0.1.0", "inf2.xlarge", sdk="2.21"),
    "transformers-neuronx": MachineSituation(
        "0.1.0", "inf2.xlarge", models=(reading("old", "transformers-neuronx", "opt"),)
    ),
    "vllm": MachineSituation("0.1.0", "inf2.xlarge", models=(reading("chat", "vllm", None),)),
    "sdk-2.25.0": MachineSituation("0.1.0", None, sdk="2.25.0", instance="trn1.32xlarge"),
    "trn2": MachineSituation("0.1.0", "trn2.48xlarge"),
    "trn2-with-vllm": MachineSituation("0.1.0", "trn2.48xlarge", models=(reading("chat", "vllm", "llama"),)),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_steps_are_as_recorded(name: str) -> None:
    """With the problems after them."""
    steps = bootstrap(SITUATIONS[name])
    actual = "\n".join([steps.text, *(f"{item.id}: {item.what}\n    hint: {item.hint}" for item in steps.problems), ""])
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual)
    assert actual == path.read_text()


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(SITUATIONS)


@pytest.mark.parametrize("name", SITUATIONS)
def test_json_has_the_content_of_the_text(name: str) -> None:
    """Each command, remark, engine and model."""
    steps = bootstrap(SITUATIONS[name])
    answer = msgspec.to_builtins(steps.as_dict())
    for step in answer["steps"]:
        for line in (step["title"], *step["commands"], *step["remarks"]):
            assert line in steps.text
    shown = [line.split()[0] for line in steps.text.splitlines() if line and not line.startswith(" ")]
    for row in (*answer["engines"], *answer["models"]):
        assert row.get("name", row["engine"]) in shown


@pytest.mark.parametrize(
    ("sdk", "here", "id"),
    [
        ("9.9", None, "sdk-unknown"),
        ("2.32", "inf2.48xlarge", "sdk-without-engine"),
        ("2.33", None, "sdk-without-engine"),
    ],
)
def test_a_release_that_leads_to_no_fleet_is_an_error(sdk: str, here: str | None, id: str) -> None:
    """Without steps, and with the releases that would."""
    steps = bootstrap(MachineSituation("0.1.0", here, sdk=sdk))
    (problem,) = steps.problems
    assert (problem.id, problem.severity, steps.steps) == (id, "error", ())
    assert "2.28" in problem.hint


def test_a_model_that_the_image_does_not_serve_is_a_warning() -> None:
    """At its place in the spec."""
    (problem, other) = bootstrap(SITUATIONS["two-engines-on-2.28"]).problems
    assert (problem.id, problem.severity, problem.where) == ("sdk-without-engine", "warning", "fleet.yaml:9:3")
    assert problem.what.startswith("old: ")
    assert other.what.startswith("small: ")


FOLDERS = {
    "/models/zephyr-7b-beta": "HuggingFaceH4/zephyr-7b-beta",
    "/models/llama-3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "/models/tinyllama-1.1b-chat": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}
"""The checkpoints of docs/on-inf2.md."""


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_example_has_a_known_failure_that_it_does_not_name(path: Path) -> None:
    """The release is that of the steps and of the first comment, or any release of an engine that AWS's images do not
    have."""
    text = path.read_text()
    spec = parse(text, path.name, str(path.parent)).spec
    assert spec is not None
    variants: dict[str, ModelVariant] = {}
    for model in spec.models:
        config = PUBLISHED.get(FOLDERS.get(model.source, model.source))
        if config is not None:
            variants[model.name] = ModelVariant.of(Checkpoint.from_config(config, model.kind))
    models = tuple(
        ModelReading(model.name, model.engine, model.kind, variants.get(model.name), "", model.tp_degree)
        for model in spec.models
    )
    instance = spec.hosts[0].instance or "inf2.48xlarge"
    steps = bootstrap(MachineSituation("0.1.0", None, spec=path.name, instance=instance, models=models))
    found = [entry.evidence for entry in steps.models if entry.evidence]
    for model in spec.models:
        if model.name in variants and ENGINES.get(model.engine, ENGINES["cpu"]).absent:
            found += releases_reported(variants[model.name], model.engine, family_of(instance))
    unexplained = [each for each in found if each.status == "failed" and not all(name in text for name in each.sources)]
    assert unexplained == []
    named = re.search(r"with Neuron SDK (\d\.\d+)", text.partition("version:")[0].replace("\n# ", " "))
    if named and not path.stem.startswith(("inf2-48xlarge", "two-types")):  # of models whose reports are not known
        assert steps.sdk is not None
        assert steps.sdk.series == named[1]


MISTRAL = ModelVariant("mistral", 7_248_023_552)
TINYLLAMA = ModelVariant("llama", 1_100_048_384)
QWEN = ModelVariant("qwen2", 1_543_714_304)


@pytest.mark.parametrize(
    ("variants", "installed", "sdk", "statuses"),
    [
        ((MISTRAL,), {}, "2.24", ["served"]),
        ((MISTRAL,), ON_2_28, "2.28", ["not reported"]),  # the release of this machine, as nothing fails there
        ((TINYLLAMA,), {}, "2.28", ["served"]),
        ((TINYLLAMA, MISTRAL), {}, "2.24", ["served", "served"]),
        ((QWEN,), {}, "2.27", ["not reported"]),
        ((QWEN,), ON_2_28, "2.27", ["not reported"]),  # not that of this machine, on which it is known to fail
    ],
)
def test_the_release_is_one_on_which_the_models_were_served_and_none_fails(
    variants: tuple[ModelVariant, ...], installed: dict[str, str], sdk: str, statuses: list[str]
) -> None:
    models = tuple(ModelReading(f"m{i}", "auto", "generate", each, "", 2) for i, each in enumerate(variants))
    here = "inf2.48xlarge" if installed else None
    steps = bootstrap(
        MachineSituation("0.1.0", here, installed, spec="f.yaml", instance="inf2.48xlarge", models=models)
    )
    assert steps.sdk is not None
    assert steps.sdk.series == sdk
    assert [model.evidence and model.evidence.status for model in steps.models] == statuses


def test_the_command_reads_the_machine_and_the_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An environment of AWS's image on the machine, and a model's family from its config.json."""
    machine = build_machine(tmp_path / "machine", "inf2.24xlarge")
    folder = machine.root / "opt" / "aws_neuronx_venv_pytorch_2_9_nxd_inference"
    make_interpreter(folder, instead={"neuronx_cc": "2.23.6484.0"})
    model = tmp_path / "models" / "small"
    model.mkdir(parents=True)
    tiny = Path(__file__).parents[3] / "placements" / "examples" / "models" / "tiny" / "config.json"
    (model / "config.json").write_text(tiny.read_text())
    (tmp_path / "spec.yaml").write_text(
        "hosts: {instance: inf2.24xlarge}\nmodels: {a: {source: ./models/small, engine: auto, tp_degree: 2}}\n"
    )
    for name, value in {**machine.env, "COREWRIGHT_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)

    assert cli.run(["doctor", "--bootstrap", str(tmp_path / "spec.yaml"), "-o", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["machine"] == {"instance": "inf2.24xlarge", "this": "inf2.24xlarge"}
    assert answer["steps"][0]["title"] == "The image: this machine has Neuron SDK 2.28"
    family = json.loads(tiny.read_text())["model_type"]
    (model,) = answer["models"]
    assert (model["name"], model["family"], model["engine"], model["reason"]) == ("a", family, "nxd-inference", None)
    assert model["evidence"] == {
        "status": "not reported",
        "sdk": "2.28",
        "sources": [],
        "confidence": None,
    }

    assert cli.run(["doctor", "-o", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["sdk"] == ["2.28"]
    assert [(item["python"], item["sdk"]) for item in report["environments"]] == [(f"{folder}/bin/python", "2.28")]
    engines = {item["engine"]: item for item in report["engines"]}
    assert engines["nxd-inference"]["python"] == f"{folder}/bin/python"
    assert engines["vllm"]["reason"] == "the last image with it: SDK 2.28, Ubuntu 24.04"


def test_a_release_without_bootstrap_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["doctor", "--sdk", "2.28"]) == 64
    assert "--sdk needs --bootstrap" in capsys.readouterr().err
