"""A replica has no variable that would make its engine another one than was planned."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import msgspec.structs
import pytest

from orchestrator.cli import generate
from tests.workers.tnx_runs import config
from workers.messages.replica_config import NEVER_SET
from workers.serving import replica

DEADLINE_S = 30


@pytest.fixture(autouse=True)
def set_by_somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a profile or an image may do it."""
    for name in NEVER_SET:
        monkeypatch.setenv(name, "2")


@pytest.mark.parametrize(
    "name",
    [
        "NEURON_RT_NUM_CORES",
        "NEURON_RANK_ID",
        "NEURON_LOCAL_TP",
        "NEURON_PP_STAGES",
        "CPU_COMM_ID",
        "NEURON_VOCAB_PAD_DIVISOR",
    ],
)
def test_a_replica_drops_what_is_for_models_over_several_hosts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything reads it."""
    monkeypatch.setattr(replica, "NEURON_MODULES", frozenset())  # torch is there already in this process
    replica.check_environment({})
    assert name not in os.environ


def test_an_answer_without_a_fleet_does_not_have_them_either(tmp_path: Path) -> None:
    """Its process begins without; the rest of the environment, and the placement's, is there."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))\n")
    python.chmod(0o755)
    told = msgspec.structs.replace(
        config(tmp_path), python=str(python), log=str(tmp_path / "log"), env={"NEURON_RT_VISIBLE_CORES": "0-1"}
    )
    with generate._process(told) as process:
        output, _ = process.communicate(timeout=DEADLINE_S)
    found = json.loads(output)
    assert found["NEURON_RT_VISIBLE_CORES"] == "0-1"
    assert found["PATH"] == os.environ["PATH"]
    assert not set(NEVER_SET) & set(found)
