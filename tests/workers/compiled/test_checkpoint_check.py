"""What keeps a model from being loaded is found without its cores, whoever looks."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.replica_configs import changed
from tests.workers.artifacts.test_artifact_fetcher import CONFIG
from tests.workers.engines.test_cpu_engine import FAULTS, pickle_weights, truncate
from workers.compiled.orders import Checked
from workers.compiled.preparation import check
from workers.engines.weight_files import check_checkpoint
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.serving import prepare
from workers.text.tokenizer import check_tokenizer_files

SHOWN = {name for name, (id, _, _) in FAULTS.items() if id != "weights-mismatch"}  # by names, headers and small files
OF_THE_ENGINE = {"unknown family", "no family", "bad generation config", "bad eos"}
Checkpoints = Callable[[str], Path]
Spoil = Callable[[Path], Any]


def config_of(folder: Path) -> ReplicaConfig:
    return changed(CONFIG, engine="cpu", source=str(folder), draft_source=None, log=str(folder.parent / "log"), env={})


def tokenizer_cut_off(folder: Path) -> None:
    truncate(folder / "tokenizer.json")


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize("fault", sorted(SHOWN))
def test_a_check_finds_the_problems_of_a_start_without_reading_weights(
    checkpoint: Checkpoints, tmp_path: Path, fault: str
) -> None:
    """With the same id as the start. The engine's own problems are left to its own check."""
    id, _, spoil = FAULTS[fault]
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    check_checkpoint(copy)
    spoil(copy)
    if fault not in OF_THE_ENGINE:
        with pytest.raises(EngineLoadError) as caught:
            check_checkpoint(copy)
        assert caught.value.id == id
    with pytest.raises(EngineLoadError) as caught:
        prepare.check(config_of(copy))
    assert caught.value.id == id


@pytest.mark.parametrize(("spoil", "id"), [(tokenizer_cut_off, "bad-tokenizer"), (no_tokenizer, "no-tokenizer")])
def test_a_check_finds_an_unreadable_tokenizer(checkpoint: Checkpoints, tmp_path: Path, spoil: Spoil, id: str) -> None:
    """By its files, as `validate`, and by loading it."""
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    check_tokenizer_files(copy)
    spoil(copy)
    for look in (lambda: check_tokenizer_files(copy), lambda: prepare.check(config_of(copy))):
        with pytest.raises(EngineLoadError) as caught:
            look()
        assert caught.value.id == id


def test_the_source_of_a_server_is_left_to_its_command(tmp_path: Path) -> None:
    """A folder without config.json and tokenizer passes."""
    assert prepare.check(changed(config_of(tmp_path), engine="server")) == Checked()


def test_allowed_pickles_pass_the_check(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """A missing file of one does not."""
    copy = pickle_weights(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    check_checkpoint(copy, allow_pickle=True)
    index = {"weight_map": {"a": "pytorch_model.bin", "b": "gone.bin"}}
    (copy / "pytorch_model.bin").rename(copy / "pytorch_model-1.bin")
    (copy / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(EngineLoadError, match=r"weights-missing.*is missing gone\.bin, pytorch_model\.bin"):
        check_checkpoint(copy, allow_pickle=True)


def tensors(file: Path, size: int = 4, *, whole: bool = True) -> None:
    """Returns a safetensors file with one tensor of ``size`` bytes."""
    header = json.dumps({"__metadata__": {"a": "b"}, "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(size if whole else size - 1))


@pytest.mark.parametrize(
    "file",
    [
        "checkpoint/model.safetensors",
        "weights/tp0_sharded_checkpoint.safetensors",
        "pytorch_model.bin/w.safetensors",
        "model.safetensors",
    ],
)
def test_the_weights_of_each_layout_are_checked(tmp_path: Path, file: str) -> None:
    """Of Optimum Neuron, NxD Inference, split by transformers-neuronx, and the usual one."""
    (tmp_path / "config.json").write_text("{}")
    tensors(tmp_path / file)
    if file.startswith("checkpoint/"):
        (tmp_path / "checkpoint" / "config.json").write_text("{}")
    if file.startswith("pytorch_model.bin/"):
        (tmp_path / "pytorch_model.bin" / "key_to_filename.json").write_text(json.dumps({"w": "w.safetensors"}))
    check_checkpoint(tmp_path)
    tensors(tmp_path / file, whole=False)
    with pytest.raises(EngineLoadError, match="weights-broken"):
        check_checkpoint(tmp_path)


def test_a_compiled_model_may_contain_its_weights(tmp_path: Path) -> None:
    """NxD Inference saves them separately only if it is set to."""
    for name in ("config.json", "neuron_config.json", "model.pt"):
        (tmp_path / name).write_text("{}")
    check_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_only_regular_files_are_opened(tmp_path: Path, name: str) -> None:
    """Opening a pipe would block."""
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    look = check_checkpoint if name == "model.safetensors" else check_tokenizer_files
    with pytest.raises(EngineLoadError) as caught:
        look(tmp_path)
    assert caught.value.id in ("config-unreadable", "no-tokenizer")


@pytest.mark.slow
def test_a_check_in_a_process_of_its_own_returns_the_cause_it_finds(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """No cause for a sound model, one for damaged weights, and one when the process dies at an import."""
    copy = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    assert isinstance(check(config_of(copy), threading.Event()), Checked)
    truncate(copy / "model.safetensors")
    result = check(config_of(copy), threading.Event())
    assert isinstance(result, Failure)
    assert result.id == "weights-broken"
    (tmp_path / "broken" / "transformers").mkdir(parents=True)
    (tmp_path / "broken" / "transformers" / "__init__.py").write_text("import os; os._exit(3)")
    broken = changed(config_of(copy), env={"PYTHONPATH": str(tmp_path / "broken")})
    died = check(broken, threading.Event())
    assert died == Failure(
        "start-failed", "the process that checked m ended without a result", f"its log is {tmp_path / 'log'}"
    )
