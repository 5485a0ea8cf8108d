"""The places of compiled artifacts have one order, which starts, commands and predictions share."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.replica_configs import replica_config
from workers.compiled import shared_sets
from workers.compiled.host_sets import Buildable, entry
from workers.compiled.places import CachedGraphs, HostSets, SharedSets, ShippedGraphs, find, places_for
from workers.messages.replica_config import ReplicaConfig

MANIFEST: dict[str, Any] = {"engine": "transformers-neuronx", "lengths": [64]}


@pytest.fixture
def config(tmp_path: Path) -> ReplicaConfig:
    """A replica whose model came with NEFFs, on a host with Neuron's cache and a shared cache."""
    source = tmp_path / "model"
    (source / "compiled").mkdir(parents=True)
    (source / "compiled" / "a.neff").touch()
    cache = {"NEURON_COMPILE_CACHE_URL": str(tmp_path / "neuron")}
    return replica_config(
        engine="transformers-neuronx",
        source=str(source),
        compiled=str(tmp_path / "host"),
        neff_cache=str(tmp_path / "shared"),
        env=cache,
    )


def unit(config: ReplicaConfig) -> Buildable:
    return Buildable(source=Path(str(config.source)), manifest=MANIFEST, make=lambda held, tell: None)


def test_a_start_looks_here_first_and_in_the_cache_of_neuron_last(config: ReplicaConfig) -> None:
    """A compilation ahead of time does not use what came with the model."""
    order = [HostSets, SharedSets, ShippedGraphs, CachedGraphs]
    assert [type(place) for place in places_for(unit(config), config)] == order
    assert [type(place) for place in places_for(unit(config), config, ahead=True)] == [
        place for place in order if place is not ShippedGraphs
    ]


def test_a_set_is_found_where_it_is(config: ReplicaConfig, tmp_path: Path) -> None:
    """The set is on no host, then on this one, then only in the shared cache."""
    root = Path(str(config.run.compiled))
    assert not find(unit(config), config, ahead=True).hit
    with entry(root, MANIFEST) as held:
        (held.path / "a.neff").write_bytes(b"neff")
        held.finish("a model")
    shared_sets.push(held, str(config.model.neff_cache))
    here = find(unit(config), config, ahead=True)
    shutil.rmtree(root)
    there = find(unit(config), config, ahead=True)
    assert [(each.hit, each.where) for each in (here, there)] == [(True, "compiled"), (True, "elsewhere")]


def test_no_later_place_is_read_once_one_has_the_set(config: ReplicaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shared cache may be remote and slow."""
    with entry(Path(str(config.run.compiled)), MANIFEST) as held:
        (held.path / "a.neff").write_bytes(b"neff")
        held.finish("a model")
    monkeypatch.setattr(SharedSets, "candidates", lambda *_: pytest.fail("the shared cache was read"))
    assert find(unit(config), config).where == "compiled"
