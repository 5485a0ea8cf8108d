"""Untrusted files: pipes, devices, and JSON that crashes a parser."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.resolve.checkpoint_reader import tokenizer_key
from orchestrator.control.resolve.spec_file import load
from tests.checkpoints import save_tokenizer
from workers.engines.checkpoint_files import read_config
from workers.engines.weight_files import check_checkpoint
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError
from workers.text.tokenizer import load_tokenizer


def brackets(depth: int) -> str:
    return "[" * depth + "]" * depth


BAD: dict[str, tuple[Any, str]] = {
    "a pipe": (os.mkfifo, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a folder": (Path.mkdir, "not a regular file"),
    "brackets": (lambda path: path.write_text(brackets(100_000)), "nested deeper than 64 levels"),
    "fewer brackets": (lambda path: path.write_text(f'{{"hidden_size": {brackets(100)}}}'), "nested deeper than 64"),
    "too large": (lambda path: path.write_text(f'{{"x": "{"y" * 17 * 2**20}"}}'), "more than 16777216 bytes"),
    "no UTF-8": (lambda path: path.write_bytes(b'{"x": "\xff"}'), "can't decode byte 0xff"),
    "a long number": (lambda path: path.write_text(f'{{"x": {"9" * 5000}}}'), "integer string conversion"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_config_is_an_error_and_does_not_block(name: str, tmp_path: Path) -> None:
    """In `validate` and in a replica."""
    make, message = BAD[name]
    make(tmp_path / "config.json")
    spec = tmp_path / "spec.yaml"
    spec.write_text("version: 1\nname: x\nhosts: {emulate: inf2.xlarge}\nmodels: {m: {source: ., engine: cpu}}\n")

    problems = [problem for problem in load(str(spec)).problems if "config.json" in problem.what]

    assert [message in problem.what for problem in problems] == [True], problems
    with pytest.raises(EngineLoadError, match=message):
        read_config(tmp_path)


def test_a_long_value_is_shortened_and_its_control_characters_are_escaped(tmp_path: Path) -> None:
    """A checkpoint's text cannot fill a terminal or move its cursor."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "\x1b[2J\nerror: forged " + "x" * 5_000_000}))
    spec = tmp_path / "spec.yaml"
    spec.write_text("version: 1\nname: x\nhosts: {emulate: inf2.xlarge}\nmodels: {m: {source: ., engine: cpu}}\n")

    problems = [problem for problem in load(str(spec)).problems if "forged" in problem.what]

    assert problems
    for problem in problems:
        assert problem.what.isprintable()
        assert len(problem.what) < 2500


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_tokenizer_that_is_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    """transformers would block until it is written to."""
    save_tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)

    with pytest.raises(EngineLoadError, match=r"not a regular file|has no tokenizer"):
        load_tokenizer("cpu", str(tmp_path))
    assert tokenizer_key("cpu", str(tmp_path))


def test_weights_that_are_a_pipe_are_refused(tmp_path: Path) -> None:
    """This holds for each file that a library might open."""
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(EngineLoadError, match="not a regular file"):
        check_checkpoint(tmp_path)


def test_a_regular_file_is_read_through_links(tmp_path: Path) -> None:
    """The hub's cache has links. Dangling ones are ignored."""
    content = {"a": [1, {"b": "é"}], "deep": json.loads(brackets(60))}
    (tmp_path / "real").write_text(json.dumps(content))
    (tmp_path / "config.json").symlink_to("real")
    (tmp_path / "gone").symlink_to("nowhere")
    foreign_files.check_folder(tmp_path)
    assert foreign_files.read_json(tmp_path / "config.json") == content
