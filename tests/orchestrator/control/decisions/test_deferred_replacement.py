"""A serving replica stops for another model only when that model can start at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.orchestrator.elsewhere import alone as alone
from tests.orchestrator.fakes import Played, settled_fleet
from tests.stubs import stub_checkpoint
from workers.messages.status import Failure

LOW = """\
version: 1
hosts: {emulate: inf2.48xlarge}
models:
  low: {engine: cpu, source: s3://models/low, tp_degree: 8, replicas: {min: 1, max: 3}}
"""
HIGH = LOW + "  high: {engine: cpu, source: s3://models/high, tp_degree: 8, priority: 10}\n"
LOCAL = LOW + "  high: {engine: echo, tp_degree: 8, priority: 10}\n"
FETCH_S = 500.0


async def take_all_cores(played: Played) -> None:
    """Three replicas of `low` hold them; from now on a fetch takes ``FETCH_S``."""
    await played.operator.scale("low", 3, "tester")
    await played.until(lambda: len(played.ready("low")) == 3, "three serve", 60.0)
    played.cluster.fetch_s = FETCH_S


@settled_fleet(LOW)
async def test_a_replica_serves_until_the_model_that_takes_its_cores_is_fetched(played: Played) -> None:
    """A model of higher priority joins a full host: its fetch is shown, and no replica drains before it is complete."""
    await take_all_cores(played)
    await played.apply(HIGH)
    await played.until(lambda: played.cluster.fetching, "it is fetched", 30.0)
    await asyncio.sleep(FETCH_S - 60.0)
    assert len(played.ready("low")) == 3
    assert played.cluster.drained == []
    assert [row["state"] for row in played.model("high")["preparing"]] == ["fetching"]
    await played.until(lambda: played.ready("high"), "it took the cores of one", 120.0)
    assert (len(played.ready("low")), len(played.cluster.drained)) == (2, 1)
    assert len([row for row in played.cluster.fetches if row[1] == "s3://models/high"]) == 1


@pytest.mark.parametrize("source", ["s3://models/high", "FOLDER"])
@settled_fleet(LOW)
async def test_a_replica_serves_while_the_model_that_takes_its_cores_cannot_be_loaded(
    played: Played, tmp_path: Path, source: str
) -> None:
    """The model is on its host, and a check without cores shows why it would not start."""
    await take_all_cores(played)
    played.cluster.fetch_s = 0.0
    text = HIGH.replace("s3://models/high", source.replace("FOLDER", str(stub_checkpoint(tmp_path))))
    _, generation = await played.operator.read(text, "spec.yaml", str(tmp_path), by="x", cause="apply")
    played.cluster.unloadable[generation.versions["high"]] = Failure("bad-tokenizer", "it is cut off")
    await played.apply(text)
    await played.until(lambda: any(row["failures"] > 1 for row in played.model("high")["preparing"]), "twice", 60.0)
    assert (len(played.ready("low")), played.cluster.drained) == (3, [])


@settled_fleet(LOW)
async def test_a_replica_serves_while_the_model_that_takes_its_cores_cannot_be_fetched(played: Played) -> None:
    """It stops once the model can be fetched."""
    await take_all_cores(played)
    played.cluster.unfetchable["s3://models/high"] = Failure("s3-unreachable", "no answer")
    await played.apply(HIGH)
    await played.until(lambda: "PreparationFailed" in played.happened(), "it cannot be fetched", 60.0)
    assert (len(played.ready("low")), played.cluster.drained) == (3, [])
    played.cluster.unfetchable.clear()
    await played.until(lambda: played.ready("high"), "it is there", FETCH_S + 700.0)
    assert len(played.ready("low")) == 2


@settled_fleet(LOW)
async def test_a_model_that_needs_no_preparation_takes_the_cores_at_once(played: Played) -> None:
    await take_all_cores(played)
    await played.apply(LOCAL)
    await played.until(lambda: played.ready("high"), "it is there", 30.0)
    assert len(played.ready("low")) == 2


@settled_fleet(LOW)
async def test_an_unloaded_replica_does_not_stay_for_the_fetch_of_another(played: Played) -> None:
    """It stops although the model that takes its cores is still being fetched."""
    await take_all_cores(played)
    await played.apply(HIGH)
    await played.until(lambda: played.cluster.fetching, "it is fetched", 30.0)
    await played.operator.unload("low", "tester")
    await played.until(lambda: not played.model("low")["replicas"], "all of them are gone", 60.0)
    await played.until(lambda: played.ready("high"), "it is there", FETCH_S + 60.0)
