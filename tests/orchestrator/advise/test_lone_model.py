"""What is advised for a model that has a host for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.advise.advice import advised
from orchestrator.sagemaker.model_folder import examined, problems_of
from placements.facts.topology import Machine
from tests.stubs import stub_checkpoint

LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
LLAMA_70B = LLAMA_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(("config", "instance"), [(LLAMA_7B, "inf2.24xlarge"), (LLAMA_70B, "trn1.32xlarge")])
def test_what_is_advised_fits_without_padded_heads(config: dict[str, Any], instance: str, tmp_path: Path) -> None:
    source = str(stub_checkpoint(tmp_path, config))
    chosen = advised(source, instance, 2048)
    assert chosen is not None
    assert "allow_head_padding" not in chosen
    assert config["num_attention_heads"] % chosen["tp_degree"] == 0
    machine = Machine(tuple(range(96)), instance)
    assert problems_of(examined({"models": {"model": {"source": source, **chosen}}}, machine)) == []


def test_heads_are_padded_only_if_nothing_else_fits(tmp_path: Path) -> None:
    """64 heads are not divisible by the 24 cores of inf2.48xlarge, and 8 cores are too small for 70B."""
    chosen = advised(str(stub_checkpoint(tmp_path, LLAMA_70B)), "inf2.48xlarge", 1024)
    assert chosen is not None
    assert (chosen["tp_degree"], chosen["allow_head_padding"]) == (24, True)


@pytest.mark.parametrize("max_len", [2, 100])
def test_short_slots_are_no_obstacle(max_len: int, tmp_path: Path) -> None:
    assert advised(str(stub_checkpoint(tmp_path)), "inf2.xlarge", max_len) is not None


def test_nothing_is_advised_for_what_no_host_can_serve(tmp_path: Path) -> None:
    assert advised(str(stub_checkpoint(tmp_path, LLAMA_70B)), "inf2.xlarge", 2048) is None
    assert advised(str(tmp_path / "missing"), "inf2.xlarge", 2048) is None


def test_an_encoder_gets_no_advice(tmp_path: Path) -> None:
    """Its speed is not estimated."""
    config = {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 384, "num_attention_heads": 12}
    bert = config | {"num_hidden_layers": 6, "intermediate_size": 1536, "vocab_size": 30522}
    source = str(stub_checkpoint(tmp_path, bert | {"max_position_embeddings": 512}))
    assert advised(source, "inf2.xlarge", 512) is None
