"""An engine is added by two folders and one line of the registry, as CONTRIBUTING.md shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CAPABILITIES = re.search(r"```python\n(CAPABILITIES = .+?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
RULES = """
from placements.rules.case import EngineRules

def short(case):
    if case.model.max_len and case.model.max_len > 64:
        yield case.problem("out-of-range", ("max_len",), "toys are short")

RULES = EngineRules(rules=(short,))
"""
MEMORY = """
from placements.engines.memory import EngineCosts

class ToyCosts(EngineCosts):
    def step_s(self, model):
        return 0.25

COSTS = ToyCosts()
"""
RUNNER = """
from workers.engines.echo.engine import EchoEngine
from workers.engines.runner import Runner

RUNNER = Runner(generate=lambda config: EchoEngine(slots=config.model.max_batch, max_len=config.max_len))
"""
SPEC = """
hosts: {emulate: inf2.24xlarge}
engines: {toy: {python: /opt/toy/bin/python}}
models:
  a: {engine: toy, source: ./a, replicas: 2, max_len: 64}
  b: {engine: toy, source: ./b, max_len: 128, quantize: int8}
  c: {engine: toys, source: ./c}
"""
PROGRAM = """
import json, sys
from placements.planner.plan import plan
from placements.resources.calibration import speed_rows
from placements.rules.checks import check
from placements.spec.json_schema import json_schema
from placements.spec.parse import parse
from tests.placements.fleets import host
from workers.engines.open_engine import open_engine
from workers.messages.json_form import decoded, encoded
from workers.messages.replica_config import ReplicaConfig

parsed = parse(sys.stdin.read())
hosts = [host("inf2.24xlarge", emulated=True)]
drawn = plan(parsed.spec, hosts, wanted={"a": 2})
config = ReplicaConfig(model=parsed.spec.models[0].resolved("toy", None))
engine = open_engine(decoded(encoded(config), ReplicaConfig))
engine.load()
print(json.dumps({
    "problems": [f"{each.where} {each.id}: {each.what}" for each in (*parsed.problems, *check(parsed.spec, hosts))],
    "placed": [each.model for each in drawn.placements if each.cores is not None],
    "step_ms": [row["step_ms"] for row in speed_rows(parsed.spec, hosts, {})][0],
    "slots": engine.spec.slots,
    "schema": [*json_schema()["properties"]["engines"]["properties"]][-1],
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a process sees whose packages have the engine."""
    folder = tmp_path_factory.mktemp("toy")
    for package in ("placements", "workers"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("examples", "__pycache__"))
    registry = folder / "placements" / "engines" / "registry.py"
    registry.write_text(registry.read_text().replace('    "torch-neuronx",\n', '    "torch-neuronx",\n    "toy",\n', 1))
    toy = folder / "placements" / "engines" / "toy"
    toy.mkdir()
    assert CAPABILITIES is not None
    head = "from placements.engines.capabilities import ON_CPUS, Capabilities\n"
    files = {"__init__.py": "", "capabilities.py": head + CAPABILITIES[1], "rules.py": RULES, "memory.py": MEMORY}
    for name, text in files.items():
        (toy / name).write_text(text)
    runner = folder / "workers" / "engines" / "toy"
    runner.mkdir()
    (runner / "__init__.py").touch()
    (runner / "runner.py").write_text(RUNNER)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=SPEC,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "PATH": "/usr/bin:/bin"},
        cwd=folder,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_spec_with_the_engine_is_validated(seen: Any) -> None:
    """By its name, the settings that it does not use, and its own rules."""
    assert seen["problems"] == [
        '<spec>:7:7 unknown-value: engine is "toys"; it must be one of auto, cpu, echo, transformers-neuronx, '
        "nxd-inference, vllm, server, optimum-neuron, torch-neuronx, toy",
        "<spec>:6:33 out-of-range: toys are short",
        "<spec>:6:47 quantize-unsupported: quantize has no effect on the engine toy",
    ]


def test_a_spec_with_the_engine_is_planned(seen: Any) -> None:
    """On the cores of an emulated host, as those of any engine."""
    assert seen["placed"].count("a") == 2


def test_its_speed_and_the_schema_are_read_from_its_folder(seen: Any) -> None:
    """Nothing else knows the engine."""
    assert (seen["step_ms"], seen["schema"]) == (250.0, "toy")


def test_a_replica_opens_the_engine(seen: Any) -> None:
    """By its runner, with the model of the spec."""
    assert seen["slots"] == 4
