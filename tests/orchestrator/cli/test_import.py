"""`corewright import lmi` writes the spec to standard output, and what became of each setting to standard error."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from placements.spec.parse import parse

SETTINGS = "option.model_id=org/{name}\noption.tensor_parallel_degree=8\n"


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "serving.properties").write_text(text)
    return folder


def test_a_folder_of_models_is_one_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LMI's layout of several models; a folder without properties is none."""
    for name in ("chat", "code"):
        write(tmp_path / name, SETTINGS.format(name=name))
    (tmp_path / "notes").mkdir()
    assert cli.run(["import", "lmi", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    spec = parse(out, "spec").spec
    assert spec is not None
    assert [(model.name, model.source) for model in spec.models] == [("chat", "org/chat"), ("code", "org/code")]
    assert f"{tmp_path}/code/serving.properties:2: option.tensor_parallel_degree: mapped to tp_degree" in err


def test_a_checkpoint_beside_the_properties_is_the_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "chat", "option.tensor_parallel_degree=8\n")
    for given in (folder, folder / "serving.properties"):
        assert cli.run(["import", "lmi", str(given)]) == 0
        spec = parse(capsys.readouterr().out, "spec").spec
        assert spec is not None
        assert [model.source for model in spec.models] == [str(folder)]


def test_models_to_load_are_those_of_the_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SERVING_LOAD_MODELS names them, with folders that have properties of their own."""
    folder = write(tmp_path / "a", "option.model_id=org/a\n")
    env = tmp_path / "env.json"
    env.write_text(json.dumps({"SERVING_LOAD_MODELS": f"chat::Python={folder},s3://models/b", "OPTION_DTYPE": "bf16"}))
    assert cli.run(["import", "lmi", "--env", str(env)]) == 0
    out, err = capsys.readouterr()
    spec = parse(out, "spec").spec
    assert spec is not None
    assert err.count("SERVING_LOAD_MODELS: mapped to models") == 2  # once a model
    models = [(model.name, model.source, model.dtype) for model in spec.models]
    assert models == [("chat", "org/a", "bf16"), ("b", "s3://models/b", "bf16")]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_not_part_of_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], encoding: str
) -> None:
    """As Windows editors and PowerShell write them."""
    (tmp_path / "serving.properties").write_text("option.model_id=org/m\n", encoding=encoding)
    (tmp_path / "env").write_text("OPTION_N_POSITIONS=512\n", encoding=encoding)
    assert cli.run(["import", "lmi", str(tmp_path / "serving.properties"), "--env", str(tmp_path / "env")]) == 0
    spec = parse(capsys.readouterr().out, "spec").spec
    assert spec is not None
    assert [(model.source, model.max_len) for model in spec.models] == [("org/m", 512)]


def test_json_has_the_spec_and_the_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("option.model_id=gpt2\noption.entryPoint=model.py\n"))
    assert cli.run(["import", "lmi", "-", "-o", "json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert parse(result["spec"], "spec").spec is not None
    assert [(line["where"], line["fate"]) for line in result["report"]] == [
        ("stdin:1", "mapped"),
        ("stdin:2", "refused"),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 64, "nothing to import"),
        (["missing"], 1, "lmi-unreadable: missing: No such file"),
        (["a" * 300], 1, "File name too long"),
        (["."], 1, "lmi-unreadable: .: no serving.properties"),
        (["missing", "--instance", "inf1.xlarge"], 64, "'inf1.xlarge' is not one of"),
        (["missing", "--lmi-version", "new"], 64, "not a version like 0.28"),
        (["missing", "--engine", "djl"], 64, "'djl' is not one of"),
    ],
)
def test_what_cannot_be_imported_is_an_error(
    arguments: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["import", "lmi", *arguments]) == code
    assert message in capsys.readouterr().err
