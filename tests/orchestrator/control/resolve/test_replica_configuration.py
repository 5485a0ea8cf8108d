"""The configuration that a replica gets: the model of the spec, resolved, its place, and its start."""

from __future__ import annotations

import textwrap
from pathlib import Path

from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.resolved_revision import ResolvedRevision, replica_config
from orchestrator.process.home import Home
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.plan import plan
from placements.spec.parse import parse
from workers.messages.replica_config import Origin, ReplicaConfig

SMALL = Checkpoint("llama", 8, 8, 2, 256, 688, 32, 32000, 4096, False, 17_960_192)
SPEC = """\
hosts: {emulate: inf2.48xlarge}
engines: {vllm: {python: /vllm/bin/python, command: [./start, --fast]}, nxd-inference: {python: ./nxd/bin/python}}
models:
"""


def configured(model: str) -> ReplicaConfig:
    """The configuration of the only replica of a model ``a``, in a spec of the folder /specs."""
    parsed = parse(SPEC + textwrap.indent(model, "  "), "/specs/fleet.yaml", "/specs")
    assert parsed.problems == ()
    assert parsed.spec is not None
    host = Host("inf2.48xlarge/0", TOPOLOGIES["inf2.48xlarge"], tuple(range(64)), emulated=True)
    revision = Revision(number=1, cause="up", by="", text="", file="", base_dir="/specs", of=None, plan={})
    generation = ResolvedRevision(revision, parsed.spec, (host,), {"a": SMALL}, {"a": "key"})
    (placement,) = plan(parsed.spec, (host,), {"a": SMALL}).placements
    return replica_config(generation, placement, Home(Path("/home")))


def test_paths_of_the_spec_are_absolute_and_its_defaults_are_filled_in() -> None:
    """A replica has neither the folder of the spec nor the checkpoint."""
    config = configured("""\
a:
  engine: nxd-inference
  source: ./model
  draft: {source: ./draft, k: 3}
  neff_cache: ./cache
  tp_degree: 2
  engine_options: {quantized_checkpoints_path: ./int8}
  adapters: {x: ./lora, y: org/lora}
""")
    model = config.model
    assert (config.source, config.draft_source, config.draft_k) == ("/specs/model", "/specs/draft", 3)
    assert (model.neff_cache, model.engine_options) == ("/specs/cache", {"quantized_checkpoints_path": "/specs/int8"})
    assert config.adapters == {"x": "/specs/lora", "y": "org/lora"}
    assert config.origins == {"adapters.y": Origin(source="org/lora")}
    assert (model.engine, config.dtype, config.max_len, model.max_len) == ("nxd-inference", "bf16", 2048, 2048)
    assert (config.run.python, config.run.server_python) == ("/specs/nxd/bin/python", None)


def test_a_server_gets_its_interpreter_and_its_command() -> None:
    """Its own process runs in the interpreter of the fleet."""
    config = configured("a: {engine: vllm, source: ./model}")
    assert (config.run.python, config.run.server_python) == (None, "/vllm/bin/python")
    assert config.run.server_launch == ["/specs/start", "--fast"]


def test_a_replica_gets_its_cores_and_its_files_on_the_host() -> None:
    """On an emulated host it also gets the locks of its cores."""
    home, config = Home(Path("/home")), configured("a: {engine: cpu, source: ./model, tp_degree: 2}")
    assert (config.id, config.place.host, config.place.cores) == ("a/0", "inf2.48xlarge/0", [0, 1])
    assert config.place.env["NEURON_RT_VISIBLE_CORES"] == "0-1"
    assert config.place.claims == str(home.claims(0))
    assert (config.run.log, config.run.compiled) == (str(home.log("a", 0)), str(home.compiled))
    assert (config.run.tokenizer, config.run.warm) == ("key", True)
