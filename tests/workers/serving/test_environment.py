"""Environment variables that would change the planned engine are removed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from workers.host.json_process import NEVER_SET, ChildRequest, running
from workers.serving import replica


@pytest.fixture(autouse=True)
def set_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile or an image may set them."""
    monkeypatch.setenv("PATH", f"/opt/another/bin:{os.environ['PATH']}")
    for name in NEVER_SET:
        monkeypatch.setenv(name, "2")


@pytest.mark.parametrize(
    "name",
    [
        "NEURON_RT_NUM_CORES",
        "NEURON_RT_VIRTUAL_CORE_SIZE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_PORT",
        "NEURON_RT_ROOT_COMM_ID",
        "NXD_CPU_MODE",
        "NEURON_RANK_ID",
        "NEURON_LOCAL_TP",
        "NEURON_PP_STAGES",
        "CPU_COMM_ID",
        "NEURON_VOCAB_PAD_DIVISOR",
    ],
)
def test_a_replica_removes_variables_of_groups_of_processes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines read them at import or when they load."""
    monkeypatch.setattr(replica, "NEURON_MODULES", frozenset())  # torch is already imported in this process
    replica.set_environment({})
    assert name not in os.environ


def test_a_replica_has_the_variables_of_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may have been started for any replica."""
    monkeypatch.setattr(replica, "NEURON_MODULES", frozenset())
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-7")
    replica.set_environment({"NEURON_RT_VISIBLE_CORES": "8-15"})
    assert os.environ["NEURON_RT_VISIBLE_CORES"] == "8-15"


def test_a_replica_finds_the_commands_of_its_own_interpreter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neuron's packages call the compiler by its name."""
    monkeypatch.setattr(replica, "NEURON_MODULES", frozenset())
    replica.set_environment({})
    first, second, *_ = os.environ["PATH"].split(":")
    assert (first, second) == (str(Path(sys.executable).parent), "/opt/another/bin")


def test_a_child_process_starts_without_them(tmp_path: Path) -> None:
    """It has the rest of the environment, and the variables of its placement."""
    python, log_file = tmp_path / "python", str(tmp_path / "log")
    python.write_text(f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))\n")
    python.chmod(0o755)
    env = {"NEURON_RT_VISIBLE_CORES": "0-1"}
    with running(("any",), ChildRequest(), python=str(python), env=env, log_file=log_file) as process:
        assert process.stdout is not None
        variables = json.loads(process.stdout.read())
    assert variables["NEURON_RT_VISIBLE_CORES"] == "0-1"
    assert variables["PATH"] == os.environ["PATH"]
    assert not set(NEVER_SET) & set(variables)
