"""What `up` prints."""

from __future__ import annotations

from pathlib import Path

from orchestrator.cli.up import first_map
from orchestrator.control.resolve.spec_file import load
from placements.planner.plan import plan

SPEC = """
version: 1
hosts: {emulate: inf2.48xlarge, min: 1, max: 4}
models:
  m: {source: m, engine: echo, tp_degree: 24, replicas: 2}
"""


def test_the_first_map_has_the_hosts_that_the_plan_uses(tmp_path: Path) -> None:
    """Not the two that the fleet could add."""
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    file = load(str(path), folders="ignore")
    assert file.spec is not None
    placed = plan(file.spec, file.hosts, file.checkpoints)
    assert len(file.hosts) == 4
    drawn = first_map(file, placed)
    assert [name for host in file.hosts if (name := host.name) in drawn] == [host.name for host in file.hosts[:2]]
