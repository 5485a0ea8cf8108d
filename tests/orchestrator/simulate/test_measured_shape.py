"""Measured speeds apply to the shape that they were measured with, and to no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.control.resolve.spec_file import load
from orchestrator.simulate.scenario import Scenario, scenario_of
from placements.facts.topology import Host
from placements.resources.calibration import MeasuredSpeed, difference, shape_of
from placements.resources.estimate import speed
from tests.placements.fleets import LLAMA_2_7B, PLAIN, host, model

INF2, TRN1 = host(), host("trn1.32xlarge", cpus=128)
EMULATED = host(emulated=True)
CHAT: dict[str, Any] = {"engine": "nxd-inference", "max_batch": 4, "max_len": 1024}
SHAPE = shape_of(model("m", 8, **CHAT), LLAMA_2_7B, "nxd-inference", [INF2])
SPEC = (
    "hosts: {instance: inf2.48xlarge}\nmodels: {m: {engine: nxd-inference, source: org/m, tp_degree: 8, max_len: 1024}}"
)


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"max_batch": 8}, "max_batch 4 instead of 8"),
        ({"max_len": 2048}, "max_len 1024 instead of 2048"),
        ({"dtype": "fp16"}, "dtype bf16 instead of fp16"),
        ({"quantize": "int8"}, "quantize none instead of int8"),
        ({"quantize_kv": "fp8"}, "quantize_kv none instead of fp8"),
        ({"draft": {"source": "./small", "k": 2}}, "draft none instead of ./small, 2 tokens"),
        ({"engine_options": {"flash_decoding": True}}, 'engine_options none instead of {"flash_decoding": true}'),
        ({"priority": 3, "replicas": 2, "max_queue": 9}, ""),
    ],
)
def test_a_shape_is_what_the_speed_of_a_replica_depends_on(changed: dict[str, Any], first: str) -> None:
    """The first difference is named; fields of scheduling are none."""
    wanted = shape_of(model("m", 8, **{**CHAT, **changed}), LLAMA_2_7B, "nxd-inference", [INF2])
    assert difference(SHAPE, wanted) == first


@pytest.mark.parametrize(
    ("hosts", "machine"),
    [
        ([INF2, INF2], "inf2.48xlarge"),
        ([EMULATED], "emulated inf2.48xlarge"),
        ([INF2, TRN1], "inf2.48xlarge and trn1.32xlarge"),
        ([PLAIN], "CPU"),
    ],
)
def test_emulated_hosts_and_mixed_fleets_are_machines_of_their_own(hosts: list[Host], machine: str) -> None:
    """What is measured there never corrects an estimate for an instance type."""
    shape = shape_of(model("m", 8, **CHAT), LLAMA_2_7B, "nxd-inference", hosts)
    assert shape["machine"] == machine
    assert bool(difference(shape, SHAPE)) == (machine != "inf2.48xlarge")


def test_another_checkpoint_or_degree_is_another_shape() -> None:
    """Also one that could not be read."""
    other = [
        shape_of(model("m", 4, **CHAT), LLAMA_2_7B, "nxd-inference", [INF2]),
        shape_of(model("m", 8, **CHAT), None, "nxd-inference", [INF2]),
        shape_of(model("m", 8, **CHAT), LLAMA_2_7B, "transformers-neuronx", [INF2]),
    ]
    assert [difference(SHAPE, each).split()[0] for each in other] == ["tp_degree", "weights", "engine"]


def scenario(folder: Path, measured: MeasuredSpeed) -> Scenario:
    (folder / "f.yaml").write_text(SPEC)
    return scenario_of(load(str(folder / "f.yaml"), folders="plan"), measured=[measured])


def own_shape() -> dict[str, Any]:
    wanted = model("m", 8, engine="nxd-inference", max_len=1024)
    return shape_of(wanted, None, "nxd-inference", [INF2])


def test_a_measured_speed_replaces_the_estimate_and_says_how_often_it_was_measured(tmp_path: Path) -> None:
    """The rest stays estimated."""
    read = scenario(tmp_path, MeasuredSpeed("m", {"step_ms": 9.0}, 345, own_shape()))
    assert read.models[0].speed.step_s == 0.009
    assert read.models[0].speed.source.startswith("measured on 345 requests, the rest ")


def test_a_speed_of_another_shape_does_not_apply(tmp_path: Path) -> None:
    """The estimate stays, and the source names the difference."""
    read = scenario(
        tmp_path, MeasuredSpeed("m", {"step_ms": 9.0}, 345, {**own_shape(), "machine": "emulated inf2.48xlarge"})
    )
    estimated = speed(model("m", 8, engine="nxd-inference", max_len=1024), None, "nxd-inference", INF2.topology)
    assert read.models[0].speed.step_s == estimated.step_s
    assert read.models[0].speed.source.endswith(
        "measured with machine emulated inf2.48xlarge instead of inf2.48xlarge, which does not apply"
    )


def test_a_measured_time_of_tokens_includes_their_attention(tmp_path: Path) -> None:
    """No estimated time for squares is added to it, and with the other three speeds nothing is estimated."""
    line = {"prefill_base_ms": 10.0, "prefill_token_ms": 0.5}
    read = scenario(tmp_path, MeasuredSpeed("m", {**line, "step_ms": 9.0, "load_s": 41.0}, 345, own_shape()))
    assert read.models[0].prefill_s((1024,)) == pytest.approx(0.010 + 0.512)
    assert read.models[0].speed.source == "measured on 345 requests"
