"""What a new spec changes about the processes of its models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.control.decisions.changes import Tag, difference, interpreters, tag_of, version_of
from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.resolved_revision import ResolvedRevision, replica_config
from orchestrator.process.home import Home
from placements.engines.registry import Engine
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.plan import plan
from placements.spec.parse import parse
from placements.spec.schema import REACHES, ModelSpec, Reach, Spec
from tests import replica_configs
from workers.messages.replica_config import ReplicaConfig

MODEL = "models: {a: {source: ./a, engine: ENGINE}}\n"


def read(text: str) -> Spec:
    parsed = parse(text, "f.yaml", "/specs")
    assert parsed.ok
    assert parsed.spec is not None
    return parsed.spec


def changed(before: str, after: str, engine: Engine) -> list[tuple[Tag, list[str]]]:
    old, new = (read(text + MODEL.replace("ENGINE", engine)) for text in (before, after))
    return [(c.tag, [field.field for field in c.fields]) for c in difference(old, new, {"a": engine})]


NXDI = "engines: {nxd-inference: {python: PATH}}\n"


@pytest.mark.parametrize(
    ("engine", "before", "after", "expected"),
    [
        ("nxd-inference", "", NXDI, (Tag.RESTART, ["engines.nxd-inference.python"])),
        ("nxd-inference", NXDI, "", (Tag.RESTART, ["engines.nxd-inference.python"])),
        ("auto", "", NXDI, (Tag.RESTART, ["engines.nxd-inference.python"])),
        ("transformers-neuronx", "", NXDI, (Tag.NONE, [])),
        ("cpu", "", NXDI, (Tag.NONE, [])),
        ("vllm", "", "engines: {vllm: {command: [x]}}\n", (Tag.RESTART, ["engines.vllm.command"])),
        ("nxd-inference", NXDI, NXDI.replace("PATH", "/specs/PATH"), (Tag.NONE, [])),
    ],
)
def test_another_interpreter_restarts_the_models_of_its_engine(
    engine: Engine, before: str, after: str, expected: tuple[Tag, list[str]]
) -> None:
    """And no others; the same path in another notation is equal."""
    assert changed(before, after, engine) == [expected]


def test_the_interpreter_is_a_part_of_the_version() -> None:
    """Replicas of two interpreters are not interchangeable; without one the version is as it was."""
    text = MODEL.replace("ENGINE", "auto")
    specs = [read(text), read(NXDI + text), read(NXDI.replace("PATH", "/p") + text)]
    versions = [version_of(spec.models[0].resolved("auto", None), interpreters(spec, "auto")) for spec in specs]
    assert len(set(versions)) == 3
    assert versions[0] == version_of(specs[0].models[0].resolved("auto", None))


@pytest.mark.parametrize(
    ("engine", "tag"), [("auto", Tag.RECOMPILE), ("nxd-inference", Tag.RECOMPILE), ("cpu", Tag.RESTART)]
)
def test_another_shape_is_a_recompile_on_engines_that_compile(engine: Engine, tag: Tag) -> None:
    """An unresolved `auto` counts as a Neuron engine."""
    old, new = (read(f"models: {{a: {{source: ./a, max_batch: {n}}}}}\n") for n in (2, 4))
    (change,) = difference(old, new, {"a": engine})
    assert change.tag is tag


OTHERWISE: dict[str, object] = {  # for each field another value than the default
    "source": "./b",
    "server": {"command": ["serve", "--port", "{port}"], "slots": 2},
    "revision": "v1",
    "engine": "transformers-neuronx",
    "kind": "rerank",
    "dtype": "fp16",
    "tp_degree": 2,
    "max_batch": 8,
    "max_len": 64,
    "cores": ["0"],
    "replicas": 2,
    "neff_cache": "./cache",
    "priority": 1,
    "max_wait_ms": 5,
    "max_queue": 1,
    "max_queue_bytes": 1,
    "max_wait_s": 1.0,
    "queue_order": "deadline",
    "objectives": {"ttft_ms": 1.0},
    "scaling": {"idle_s": 1.0},
    "aliases": {"other": {"temperature": 0.5}},
    "request_defaults": {"top_k": 3},
    "adapters": {"b": "./b"},
    "managed_by": "sagemaker",
    "response_template": "hermes",
    "threads": 3,
    "allow_head_padding": True,
    "allow_degrees": [3],
    "hbm_overhead_gib": 1.0,
    "allow_pickle": True,
    "trust_remote_code": True,
    "draft": {"source": "./d"},
    "update": {"max_swap_s": 1.0},
    "deadlines": {"start_s": 1.0},
    "spread": "host",
    "host_memory_gib": 1.0,
    "quantize": "int8",
    "quantize_kv": "fp8",
    "buckets": {"prefill": [128, 256]},
    "sampling": "device",
    "fuse_qkv": True,
    "compiler": {"workers": 2},
    "group_query_attention": "shard-over-heads",
    "engine_options": {"unroll": 1},
}
HOST = Host("inf2.48xlarge/0", TOPOLOGIES["inf2.48xlarge"], cpus=tuple(range(64)))


def configured(fields: dict[str, object]) -> tuple[ModelSpec, ReplicaConfig]:
    """One model of the engine NxD Inference, and the configuration of its first replica without a version."""
    given = {"source": "./a", "engine": "nxd-inference", **fields}
    spec = read(json.dumps({"models": {"a": given}}))
    revision = Revision(number=1, cause="up", by="", text="", file="f", base_dir="/", of=None, plan={})
    generation = ResolvedRevision(revision, spec, (HOST,), {}, {"a": ""})
    (first, *_) = plan(spec, (HOST,)).placements
    return spec.models[0], replica_configs.changed(replica_config(generation, first, Home(Path("/h"))), version="")


def test_every_field_of_a_model_has_a_reach() -> None:
    """Otherwise a new field would count as without effect."""
    assert REACHES.keys() == ModelSpec.model_fields.keys() - {"name", "base_dir", "broken"}
    assert REACHES.keys() == OTHERWISE.keys()
    assert all(
        sum(isinstance(reach, Reach) for reach in ModelSpec.model_fields[name].metadata) == 1 for name in REACHES
    )


@pytest.mark.parametrize("field", OTHERWISE)
def test_a_replica_gets_each_field_that_needs_a_new_process(field: str) -> None:
    """The replica gets the whole model; its version changes with the fields that need a new process, and not with those
    that only reach the planner or the gateway."""
    (before, _), (after, configuration) = configured({}), configured({field: OTHERWISE[field]})
    live = REACHES[field] is Reach.LIVE

    assert (before.started_with == after.started_with) == live
    assert getattr(configuration.model, field) == getattr(after.resolved(after.engine, None), field)
    assert (
        tag_of(field, "nxd-inference")
        is {
            Reach.LIVE: Tag.RECONFIGURE,
            Reach.PROCESS: Tag.RESTART,
            Reach.SHAPE: Tag.RECOMPILE,
        }[REACHES[field]]
    )
    assert tag_of(field, "cpu") is (Tag.RECONFIGURE if live else Tag.RESTART)
