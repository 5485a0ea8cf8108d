"""The commands of `advise`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from placements.spec.parse import parse
from tests.orchestrator.advise.test_advice import LLAMA

TRACE = "time,model,prompt_tokens,output_tokens\n0,a,100,5\n1,b,3000,5\n2,a,300,5\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("orchestrator.advise.advice.BATCHES", (4,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "trace.csv").write_text(TRACE)
    return tmp_path


def test_the_spec_of_a_line_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "./llama", "--instance", "inf2.48xlarge", "--rps", "1", "--write", "out.yaml", "--line", "2"]
    assert cli.run([*arguments, "-o", "json"]) == 0
    line = json.loads(capsys.readouterr().out)["lines"][1]
    text = (folder / "out.yaml").read_text()
    assert text == line["spec"]
    spec = parse(text, "out.yaml", str(folder)).spec
    assert spec is not None
    (model,) = spec.models
    assert (model.tp_degree, model.max_batch) == (line["tp_degree"], line["max_batch"])


def test_a_relative_folder_is_found_wherever_the_spec_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "specs").mkdir()
    assert cli.run(["advise", "./llama", "--instance", "inf2.8xlarge", "--write", "specs/out.yaml"]) == 0
    spec = parse((folder / "specs" / "out.yaml").read_text(), "out.yaml", str(folder / "specs")).spec
    assert spec is not None
    assert Path(spec.models[0].source_path or "") == folder / "llama"


def test_a_family_is_all_its_types(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", "./llama", "--instance", "trn1", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    names = {each["instance"] for each in (*result["lines"], *result["left_out"])}
    assert names == {"trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge"}


def test_only_the_given_degrees_and_batches_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["advise", "./llama", "--instance", "inf2.48xlarge", "--degree", "4", "--degree", "8", "--batch", "16"]
    assert cli.run([*arguments, "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    compared = {(each["tp_degree"], each["max_batch"]) for each in (*result["lines"], *result["left_out"])}
    assert compared <= {(4, 16), (8, 16)}
    assert result["compared"] == 4  # each with both types of weights


def test_what_others_report_of_the_model_is_shown_with_its_sources(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine that may serve it is shown. Reports of models with other rotary positions do not apply."""
    arguments = ["advise", "./llama", "--instance", "inf2.48xlarge", "--degree", "8"]
    assert cli.run(arguments) == 0
    text = capsys.readouterr().out
    source = "gonsoomoon-ml/lab:12-neuron-vllm-nxd-inference/README.md"
    assert f"Reports on inf2 with nxd-inference: SDK 2.24 served (one report: {source}).\n" in text
    assert "Reports on inf2 with transformers-neuronx: none of this model.\n" in text
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA | {"model_type": "qwen2"}))
    assert cli.run(arguments) == 0
    named = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("Reports on")]
    assert named == ["Reports on inf2 with nxd-inference"]  # the other engine does not serve the family
    (folder / "llama" / "config.json").write_text(json.dumps(LLAMA | {"rope_scaling": {"rope_type": "llama3"}}))
    assert cli.run([*arguments, "--engine", "optimum-neuron", "-o", "json"]) == 0
    (reported,) = json.loads(capsys.readouterr().out)["evidence"]
    assert (reported["machines"], reported["engine"]) == ("inf2", "optimum-neuron")
    assert [(each["sdk"], each["status"]) for each in reported["releases"]] == [
        ("2.31", "served"),
        ("2.26", "served"),
        ("2.22", "served"),
    ]


def test_a_degree_that_is_not_documented_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", "./llama", "--degree", "7"]) == 64
    assert "7 is not one of 1, 2, 4, 8, 12, 16, 24" in capsys.readouterr().err


def test_each_model_of_a_trace_gets_buckets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", "buckets", "--trace", "trace.csv", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {name: own["chosen"] for name, own in result.items()} == {"a": [128, 384], "b": [3072]}
    assert cli.run(["advise", "buckets", "--trace", "trace.csv", "--model", "b"]) == 0
    assert "buckets: {prefill: [3072]}" in capsys.readouterr().out


def test_prompts_beyond_the_last_bucket_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", "buckets", "--trace", "trace.csv", "--max-len", "512"]) == 0
    out, err = capsys.readouterr()
    assert "left out: 1 prompt of b of more than 512 tokens" in err
    assert "buckets: {prefill: [128, 512]}" in out
    assert "b:" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["./llama", "--instance", "inf1"], 64, "'inf1' is not one of inf2.xlarge"),
        (["./llama", "--engine", "cpu"], 64, "'cpu' is not an engine for Neuron cores"),
        (["./llama", "--max-len", "100"], 64, "shorter than 512 + 128 tokens"),
        (["./llama", "--instance", "inf2.8xlarge", "--line", "99"], 64, "there are"),
        (["./llama", "--prices", "missing.yaml"], 1, "prices-wrong: missing.yaml cannot be read: No such file"),
        (["./llama", "--prices", "trace.csv"], 1, "prices-wrong: trace.csv has no prices"),
        (["./nothing"], 1, "checkpoint-unreadable: nothing: "),
        (["buckets", "--trace", "missing.csv"], 1, "trace-unreadable: missing.csv cannot be read"),
        (["buckets", "--trace", "llama/config.json"], 1, "trace-wrong"),
        (["buckets", "--trace", "trace.csv", "--model", "c"], 1, "no request is for a model"),
        (["buckets", "--trace", "trace.csv", "--max-len", "64"], 1, "trace-unreadable: trace.csv has no prompt"),
    ],
)
def test_what_cannot_be_answered_is_an_error(
    arguments: list[str], code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["advise", *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inf2.48xlarge: -3", "the price of inf2.48xlarge is -3"),
        ("inf2.48xlarge: true", "the price of inf2.48xlarge is True"),
        ("p4d: 3", "p4d is not one of"),
        ("trn1.2xlarge: 3", "no price of inf2.xlarge"),
        ("a: [", "cannot be read"),
    ],
)
def test_wrong_prices_are_an_error(text: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prices.yaml").write_text(text)
    assert cli.run(["advise", "./llama", "--prices", "prices.yaml"]) == 1
    err = capsys.readouterr().err
    assert "prices-wrong" in err
    assert message in err


def test_the_help_has_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", "--help"]) == 0
    out = capsys.readouterr().out
    assert "model " in out
    assert "buckets " in out
