"""Code that a checkpoint brings: run where the spec trusts it, and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from workers.engines.cpu.engine import CpuEngine
from workers.messages.engine_protocol import EngineLoadError

CODE = """\
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).write_text("it ran")
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def answer(path: Path, trust_remote_code: bool = False) -> list[int]:
    """Greedy, eight tokens."""
    engine = CpuEngine(path, slots=1, max_len=32, trust_remote_code=trust_remote_code)
    engine.load()
    tokens, prompt = [], [5, 6, 7]
    logits = engine.prefill([0], [prompt])
    for position in range(len(prompt), len(prompt) + 8):
        tokens.append(int(logits[0].argmax()))
        logits = engine.decode([0], [tokens[-1]], [position])
    engine.close()
    return tokens


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A llama that says it is of a family of its own, whose classes it brings. They leave a mark when they are run."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = make_checkpoint(tmp_path / "own", "llama", eos=None) or tmp_path / "own"
    config = json.loads((path / "config.json").read_text())
    classes = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (path / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    (path / "own.py").write_text(CODE.format(mark=str(tmp_path / "mark")))
    return path


def test_code_that_is_trusted_computes_the_model(own: Path, tmp_path: Path) -> None:
    """The same tokens as those of the same weights by transformers' own class."""
    make_checkpoint(tmp_path / "llama", "llama", eos=None)
    assert answer(own, trust_remote_code=True) == answer(tmp_path / "llama")
    assert (tmp_path / "mark").exists()


def test_code_that_nobody_trusts_is_not_run(own: Path, tmp_path: Path) -> None:
    """Neither of a family of its own, which is refused, nor of a known one, whose own class is taken."""
    with pytest.raises(EngineLoadError) as refused:
        answer(own)
    assert refused.value.id == "unknown-family"
    config = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    assert len(answer(own)) == 8
    assert not (tmp_path / "mark").exists()
