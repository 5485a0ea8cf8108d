"""LoRA adapters of running replicas change with the spec, without a restart."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.orchestrator.elsewhere import alone as alone
from tests.orchestrator.fakes import FakeCluster, Played, play
from tests.replica_configs import changed
from workers.host.interpreter import Interpreter
from workers.messages.status import Failure

SPEC = """\
hosts: {{emulate: inf2.48xlarge, count: 2}}
engines: {{vllm: {{python: /vllm/bin/python}}}}
models:
  m:
    engine: vllm
    source: s3://models/one
    tp_degree: 8
    replicas: 2
    spread: host
    engine_options: {{{options}}}
    adapters: {{{adapters}}}
"""
SUPPORT, LEGAL = "support: s3://lora/support", "legal: s3://lora/legal"


def spec(*adapters: str, options: str = "") -> str:
    return SPEC.format(adapters=", ".join(adapters), options=options)


def folders(cluster: FakeCluster) -> list[dict[str, str]]:
    return [replica.config.adapters for replica in cluster.living()]


def routed(played: Played) -> list[str]:
    (model,) = played.controller.routes().models
    return model.adapters


def folder(name: str, content: str = "1") -> str:
    return f"/store/s3://lora/{name}@{content}"


@pytest.fixture
def cluster() -> FakeCluster:
    """One whose hosts have vLLM."""
    cluster, python = FakeCluster(), "/vllm/bin/python"
    cluster.interpreters[python] = Interpreter(python=python, packages={"vllm": "0.32.0"})
    return cluster


def test_replicas_start_with_the_adapters_of_the_spec(cluster: FakeCluster, tmp_path: Path) -> None:
    """They are fetched to each host before the process is started."""

    async def story(played: Played) -> None:
        await played.settled()
        assert folders(cluster) == [{"support": folder("support")}] * 2
        assert routed(played) == ["support"]
        assert cluster.violations == []

    play(tmp_path, spec(SUPPORT), story, cluster=cluster)


def test_adapters_are_added_removed_and_changed_without_a_restart(cluster: FakeCluster, tmp_path: Path) -> None:
    """The rollout is complete when all replicas have them."""

    async def story(played: Played) -> None:
        await played.settled()
        await played.apply(spec(SUPPORT, LEGAL))
        assert routed(played) == ["support"]  # not before all replicas have it
        await played.settled()
        assert folders(cluster) == [{"support": folder("support"), "legal": folder("legal")}] * 2
        assert routed(played) == ["support", "legal"]

        await played.apply(spec("legal: s3://lora/other"))
        assert routed(played) == ["legal"]  # at once
        await played.settled()
        assert folders(cluster) == [{"legal": folder("other")}] * 2
        assert len(cluster.started) == 2
        assert cluster.violations == []

    play(tmp_path, spec(SUPPORT), story, cluster=cluster)


def test_a_changed_adapter_is_fetched_to_all_hosts_first(cluster: FakeCluster, tmp_path: Path) -> None:
    """Until then all replicas keep the previous content."""

    async def story(played: Played) -> None:
        await played.settled()
        cluster.unfetchable["s3://lora/other"] = Failure("s3-denied", "no")
        await played.apply(spec("support: s3://lora/other"))
        await played.until(lambda: "AdaptersFailed" in played.happened(), "it fails", 60.0)
        assert folders(cluster) == [{"support": folder("support")}] * 2
        assert played.controller.status().rollout.state == "progressing"
        assert "2 with other adapters" in played.controller.status().rollout.reason
        del cluster.unfetchable["s3://lora/other"]
        await played.settled()
        assert folders(cluster) == [{"support": folder("other")}] * 2
        assert len(cluster.started) == 2

    play(tmp_path, spec(SUPPORT), story, cluster=cluster)


def test_an_adapter_that_the_server_refuses_is_tried_again(cluster: FakeCluster, tmp_path: Path) -> None:
    """The spec is applied again without waiting for the next attempt."""

    async def story(played: Played) -> None:
        await played.settled()
        cluster.bad_adapters = Failure("adapter-unusable", "its rank is 64")
        await played.apply(spec(SUPPORT, LEGAL))
        await played.until(lambda: "AdaptersFailed" in played.happened(), "it fails", 60.0)
        assert routed(played) == ["support"]
        cluster.bad_adapters = None
        await played.apply(spec(LEGAL))
        await played.settled()
        assert folders(cluster) == [{"legal": folder("legal")}] * 2

    play(tmp_path, spec(SUPPORT), story, cluster=cluster)


def test_later_replicas_load_the_same_content(cluster: FakeCluster, tmp_path: Path) -> None:
    """A source that has changed since is not read again."""

    async def story(played: Played) -> None:
        await played.settled()
        await played.apply(spec(SUPPORT, LEGAL))
        await played.settled()
        cluster.contents["s3://lora/legal"] = "2"
        await cluster.find("m/0").die("want of memory")
        await played.until(lambda: len(cluster.started) == 3, "it is started again", 60.0)
        await played.settled()
        assert folders(cluster) == [{"support": folder("support"), "legal": folder("legal")}] * 2

    play(tmp_path, spec(SUPPORT), story, cluster=cluster)


def test_new_adapters_of_a_replica_leave_the_pin_of_its_model(cluster: FakeCluster, tmp_path: Path) -> None:
    """The replica may still run content that its version has lost."""

    async def story(played: Played) -> None:
        await played.settled()
        pins, config = played.controller.state.pins, cluster.started[0]
        source = config.origins["source"]
        pins.pin(changed(config, origins={**config.origins, "source": replace(source, artifact="new", folder="")}))
        await played.apply(spec(SUPPORT, LEGAL))
        await played.settled()
        artifacts = {key: origin.artifact for key, origin in pins.of(config).origins.items()}
        assert (artifacts["source"], sorted(artifacts)) == ("new", ["adapters.legal", "adapters.support", "source"])

    play(tmp_path, spec(SUPPORT), story, cluster=cluster)


@pytest.mark.parametrize(
    ("before", "after", "action"),
    [
        ([SUPPORT], [SUPPORT, LEGAL], "update"),
        ([SUPPORT], ["support: s3://lora/other"], "update"),
        ([SUPPORT], [], "replace"),
        ([], [SUPPORT], "replace"),
    ],
)
def test_the_plan_shows_which_changes_need_new_processes(
    before: Iterable[str], after: Iterable[str], action: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    """A server is started with LoRA or without."""

    async def story(played: Played) -> None:
        await played.settled()
        (model,) = (await played.operator.propose(spec(*after), "spec.yaml", str(tmp_path)))["models"]
        assert (model["action"], model["tag"]) == (action, "restart" if action == "replace" else "reconfigure")

    play(tmp_path, spec(*before), story, cluster=cluster)


def test_max_loras_reserves_room_for_the_first_adapter(cluster: FakeCluster, tmp_path: Path) -> None:
    options = "max_loras: 2"

    async def story(played: Played) -> None:
        await played.settled()
        await played.apply(spec(SUPPORT, options=options))
        await played.settled()
        assert (routed(played), len(cluster.started)) == (["support"], 2)

    play(tmp_path, spec(options=options), story, cluster=cluster)
