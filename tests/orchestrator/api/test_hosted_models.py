"""SageMaker's loads and unloads on a running fleet: nothing is displaced, lost or held twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.hosted_models import HostedModels
from orchestrator.api.preview import read_spec
from orchestrator.messages.controller_replies import Hosting
from orchestrator.sagemaker.model_folder import text_of
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.searches import search

EMPTY = "version: 1\nhosts: {emulate: inf2.48xlarge}\nmodels: {}\n"
WAIT_S = 360.0


class Endpoint:
    """A fleet that SageMaker loads models into."""

    def __init__(self, home: Path, played: Played) -> None:
        self.home, self.played = home, played
        self.hosting = HostedModels(played.fleet)

    def folder(self, name: str, **fields: Any) -> str:
        folder = self.home / "models" / name / "model"
        folder.mkdir(parents=True, exist_ok=True)
        spec = {"version": 1, "models": {"any": {"engine": "echo", **fields}}}
        (folder / "corewright.yaml").write_text(yaml.safe_dump(spec))
        return str(folder)

    async def load(self, name: str, *, again: bool = False, wait_s: float = WAIT_S, **fields: Any) -> Hosting:
        return await self.hosting.host_model(name, self.folder(name, **fields), again=again, wait_s=wait_s)

    @property
    def states(self) -> dict[str, list[str]]:
        """The states of the replicas by model."""
        models = self.played.controller.status().models
        return {model.name: [replica.state for replica in model.replicas] for model in models}

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.hosting.hosted()]


def on_endpoint(
    home: Path, test: Callable[[Endpoint], Awaitable[None]], spec: str = EMPTY, load_s: float = 30.0
) -> None:
    async def live() -> None:
        cluster = FakeCluster()
        cluster.load_s = load_s
        async with Played(home, cluster, spec) as played:
            await played.settled()
            await test(Endpoint(home, played))
        assert cluster.violations == []

    virtually(live)


def test_a_model_serves_when_its_load_ends(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        assert (await endpoint.load("a", tp_degree=8)).status == 200
        assert endpoint.states == {"a": ["ready"]}
        assert endpoint.hosting.hosted() == [("a", endpoint.folder("a"))]

    on_endpoint(tmp_path, test)


def test_a_loaded_model_is_not_loaded_again(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.load("a")
        assert (await endpoint.load("a")).status == 409

    on_endpoint(tmp_path, test)


def test_two_callers_wait_for_the_same_load(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        both = await asyncio.gather(endpoint.load("a"), endpoint.load("a"))
        assert [each.status for each in both] == [200, 200]
        assert endpoint.states == {"a": ["ready"]}

    on_endpoint(tmp_path, test)


def test_a_load_that_takes_long_is_asked_for_again(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        assert (await endpoint.load("a", wait_s=10)).status == 202
        assert (await endpoint.load("a", wait_s=60, again=True)).status == 200

    on_endpoint(tmp_path, test)


def test_a_model_that_does_not_fit_displaces_nothing(tmp_path: Path) -> None:
    """SageMaker then unloads another one, and asks again."""

    async def test(endpoint: Endpoint) -> None:
        for name in "abc":
            await endpoint.load(name, tp_degree=8)
        refused = await endpoint.load("d", tp_degree=8)
        assert (refused.status, "no room" in refused.message) == (507, True)
        assert endpoint.states == {"a": ["ready"], "b": ["ready"], "c": ["ready"]}
        assert (await endpoint.hosting.unhost_model("b")).status == 200
        assert (await endpoint.load("d", tp_degree=8)).status == 200

    on_endpoint(tmp_path, test)


def test_free_cores_that_are_not_contiguous_are_no_room(tmp_path: Path) -> None:
    """No loaded model is interrupted for another one."""

    async def test(endpoint: Endpoint) -> None:
        for name in "abcdef":
            await endpoint.load(name, tp_degree=4)
        for name in "bdf":
            await endpoint.hosting.unhost_model(name)
        await endpoint.played.settled()
        refused = await endpoint.load("wide", tp_degree=8)
        assert (refused.status, "longest free run" in refused.message) == (507, True)
        assert endpoint.states == {"a": ["ready"], "c": ["ready"], "e": ["ready"]}

    on_endpoint(tmp_path, test)


def test_replicas_beyond_the_least_make_room(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.load("a", tp_degree=8, replicas={"min": 1, "max": 3})
        await endpoint.played.operator.scale("a", 3, by="test")
        await endpoint.played.settled()
        assert endpoint.states == {"a": ["ready"] * 3}
        assert (await endpoint.load("b", tp_degree=8)).status == 200
        assert endpoint.states == {"a": ["ready"] * 2, "b": ["ready"]}

    on_endpoint(tmp_path, test)


def test_cordoned_cores_are_no_room(tmp_path: Path) -> None:
    """An empty host of that type would have it."""

    async def test(endpoint: Endpoint) -> None:
        await endpoint.played.operator.cordon("inf2.48xlarge/0", "0-15", True, by="test")
        assert (await endpoint.load("a", tp_degree=12)).status == 507
        assert endpoint.names == []

    on_endpoint(tmp_path, test)


def test_a_model_that_does_not_start_is_removed_with_its_reason(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.load("good")
        endpoint.played.cluster.refuses_start = RuntimeError("no such driver")
        failed = await endpoint.load("bad")
        assert (failed.status, "no such driver" in failed.message) == (500, True)
        assert endpoint.names == ["good"]
        assert endpoint.states["good"] == ["ready"]

    on_endpoint(tmp_path, test)


def test_a_failed_load_undoes_no_other(tmp_path: Path) -> None:
    """An update that fails would else bring an earlier revision back."""

    async def test(endpoint: Endpoint) -> None:
        await endpoint.load("good")
        slow = asyncio.ensure_future(endpoint.load("slow"))
        await asyncio.sleep(5)  # virtual: it is starting
        endpoint.played.cluster.refuses_start = RuntimeError("no such driver")
        assert (await endpoint.load("bad")).status == 500
        assert (await slow).status == 200
        assert {row["cause"] for row in endpoint.played.operator.revisions()["revisions"]} == {"up", "apply"}

    on_endpoint(tmp_path, test)


def test_loads_at_the_same_time_keep_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have read the spec without the other's model."""

    async def slow_read(*args: Any, **kwargs: Any) -> Any:
        result = await read_spec(*args, **kwargs)
        await asyncio.sleep(1)  # virtual
        return result

    monkeypatch.setattr("orchestrator.api.hosted_models.read_spec", slow_read)

    async def test(endpoint: Endpoint) -> None:
        loads = await asyncio.gather(*[endpoint.load(name) for name in "abc"])
        assert [load.status for load in loads] == [200] * 3
        assert sorted(endpoint.names) == ["a", "b", "c"]

    on_endpoint(tmp_path, test)


def test_a_folder_that_cannot_be_served_changes_nothing(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        refused = await endpoint.load("a", tp_degree=7)
        assert (refused.status, "tp_degree" in refused.message) == (400, True)
        missing = await endpoint.hosting.host_model("b", str(tmp_path / "nothing"), again=False, wait_s=WAIT_S)
        assert (missing.status, "nothing" in missing.message) == (400, True)
        for impossible in ("/a\0", "/" + "a" * 256):
            assert (await endpoint.hosting.host_model("z", impossible, again=False, wait_s=0)).status == 400
        folder = Path(endpoint.folder("b"))
        (folder / "corewright.yaml").write_text(f"{EMPTY[:-3]}{{any: {{engine: echo}}}}\n")  # with hosts
        own = await endpoint.hosting.host_model("b", str(folder), again=False, wait_s=WAIT_S)
        assert (own.status, "hosts" in own.message) == (400, True)
        assert endpoint.states == {}

    on_endpoint(tmp_path, test)


def test_a_refused_load_leaves_no_folder_to_a_later_model_of_its_name(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.load("wide", tp_degree=24)
        assert (await endpoint.load("a", tp_degree=8)).status == 507
        text = text_of({**yaml.safe_load(EMPTY), "models": {"a": {"engine": "echo", "managed_by": "sagemaker"}}})
        await endpoint.played.operator.apply(text, "spec.yaml", "/", by="test")
        assert endpoint.hosting.hosted() == [("a", "echo")]

    on_endpoint(tmp_path, test)


def test_only_models_that_sagemaker_has_loaded_are_unloaded(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        await endpoint.load("a")
        assert (await endpoint.hosting.unhost_model("own")).status == 404
        assert (await endpoint.hosting.unhost_model("b")).status == 404
        assert endpoint.names == ["a"]
        assert set(endpoint.states) == {"own", "a"}

    on_endpoint(tmp_path, test, EMPTY.replace("models: {}", "models: {own: {engine: echo}}"))


@pytest.mark.parametrize("name", ["a" * 64, "with:colon", "with/slash"])
def test_a_name_beyond_the_rules_of_the_spec_is_an_alias(name: str, tmp_path: Path) -> None:
    """SageMaker's names are opaque, such as hashes of 64 digits."""

    async def test(endpoint: Endpoint) -> None:
        folder = endpoint.folder("x")
        assert (await endpoint.hosting.host_model(name, folder, again=False, wait_s=WAIT_S)).status == 200
        (model,) = endpoint.played.controller.state.current.spec.models
        assert name in model.aliases
        assert endpoint.hosting.hosted() == [(name, folder)]
        assert (await endpoint.hosting.unhost_model(name)).status == 200

    on_endpoint(tmp_path, test)


def test_a_folders_aliases_keep_their_defaults_beside_a_name_beyond_the_rules(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        folder = endpoint.folder("x", aliases={"small": {"temperature": 0.5}})
        assert (await endpoint.hosting.host_model("with:colon", folder, again=False, wait_s=WAIT_S)).status == 200
        (model,) = endpoint.played.controller.state.current.spec.models
        assert list(model.aliases) == ["with:colon", "small"]
        assert list(model.alias_defaults) == ["small"]

    on_endpoint(tmp_path, test)


def test_a_model_is_unloaded_while_it_loads(tmp_path: Path) -> None:
    async def test(endpoint: Endpoint) -> None:
        load = asyncio.ensure_future(endpoint.load("a"))
        await asyncio.sleep(5)
        assert (await endpoint.hosting.unhost_model("a")).status == 200
        assert (await load).status == 404
        assert endpoint.states.get("a", []) in ([], ["stopping"])

    on_endpoint(tmp_path, test)


@search(10, cost=3)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_storm_of_loads_and_unloads_ends_with_what_was_accepted(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Callers load and unload at random, as SageMaker does for five models on cores for three."""
    chance = random.Random(seed)
    widths = {name: chance.choice([4, 8, 8, 12]) for name in "abcde"}

    async def test(endpoint: Endpoint) -> None:
        async def caller() -> None:
            for _ in range(4):
                await asyncio.sleep(chance.random() * 60)
                name = chance.choice("abcde")
                if chance.random() < 0.4:
                    assert (await endpoint.hosting.unhost_model(name)).status in (200, 404)
                    continue
                loaded = await endpoint.load(name, tp_degree=widths[name])
                assert loaded.status in (200, 404, 409, 507), loaded

        await asyncio.gather(*[caller() for _ in range(4)])
        await endpoint.played.settled()
        assert endpoint.states == {name: ["ready"] for name in endpoint.names}
        assert sum(widths[name] for name in endpoint.names) <= 24

    on_endpoint(tmp_path_factory.mktemp("storm"), test)
