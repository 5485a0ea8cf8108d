"""Which options NxD Inference is given, in each recorded version."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from placements.engines.nxd_inference.capabilities import NXD_QUANTIZED_OPTIONS, NXD_RELEASES, nxd_release
from tests.checkpoints import VOCAB_SIZE
from tests.contracts import contract
from tests.workers.nxdi_traffic import replica_config
from workers.compiled.manifest import name_of
from workers.engines.nxd_inference.artifacts import unit
from workers.engines.nxd_inference.config import (
    FIELDS,
    MOE_OPTIONS,
    OPTIONS,
    UNSERVED,
    NxdSettings,
    draft_options,
    lacks,
    lengths,
    neuron_options,
)
from workers.engines.nxd_inference.package import Package

CONTRACT = contract("nxd-inference")
VERSIONS = sorted(CONTRACT.versions)
CONFIG = "neuronx_distributed_inference.models.config."


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_of_options_is_the_recorded_one(version: str) -> None:
    """The table covers NeuronConfig in each version, and MoENeuronConfig in the recorded ones."""
    recorded = set(CONTRACT.options(f"{CONFIG}NeuronConfig", version))
    assert {option for option in OPTIONS if lacks(option, nxd_release(version)) is None} == recorded
    if version in CONTRACT.data["snapshots"]:
        module = CONTRACT.data["snapshots"][version]["modules"][CONFIG.rstrip(".")]
        record = module["classes"]["MoENeuronConfig"]
        names = {kwargs_option["name"] for kwargs_option in record["kwargs_options"]}
        init = CONTRACT.signature(f"{CONFIG}MoENeuronConfig.__init__", version).parameters
        assert names | {"capacity_factor", "glu_mlp"} == MOE_OPTIONS
        assert {"capacity_factor", "glu_mlp"} <= set(init)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("fields", [{}, {"sampling": "device"}, {"draft_source": "d", "draft_k": 2, "slots": 1}])
def test_no_option_is_used_that_a_version_lacks(
    version: str, fields: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package would only log it. With LNC, fused QKV and an fp8 cache named as well."""
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    settings = NxdSettings.of(replica_config(Path("m"), None, **fields, fuse_qkv=True, quantize_kv="fp8"))
    options = neuron_options(settings, lengths(settings), nxd_release(version), "q")
    for used in (options, draft_options(options)):
        assert set(used) <= set(CONTRACT.options(f"{CONFIG}NeuronConfig", version)) | {"torch_dtype"}
    device = set(options.get("on_device_sampling_config", {}))
    assert device <= set(CONTRACT.options(f"{CONFIG}OnDeviceSamplingConfig", version))


def test_a_draft_has_no_speculation_of_its_own() -> None:
    """It has all other options of its model."""
    settings = NxdSettings.of(replica_config(Path("m"), None, draft_source="d", draft_k=2, slots=1))
    options = neuron_options(settings, lengths(settings), (0, 8), "q")
    assert draft_options(options) == options | {"speculation_length": 0, "enable_fused_speculation": False}


@pytest.mark.parametrize("version", VERSIONS)
def test_logical_cores_are_the_runtimes(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler gets the LNC by which the runtime numbers the cores."""
    settings = NxdSettings.of(replica_config(Path("m"), None))
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    options = neuron_options(settings, lengths(settings), nxd_release(version), "q")
    assert options["logical_nc_config"] == 2


def key(engine_options: Mapping[str, Any], **fields: Any) -> str:
    """Returns the folder's name of the artifacts of two slots of 256 tokens."""
    sizes = {"slots": 2, "max_len": 256, "prefill_buckets": [128, 192, 256], "decode_buckets": [256]}
    config = replica_config(Path("m"), None, **sizes, engine_options=dict(engine_options), **fields)
    return name_of(unit(NxdSettings.of(config), Package("0.8.0", {}), None).manifest)


def test_artifacts_of_other_blocks_are_other_ones() -> None:
    """Each option of a prefix cache is compiled into the graphs."""
    more: dict[str, Any] = {"pa_num_blocks": 32}
    changes = [{}, more, {**more, "pa_block_size": 16}, {"prefix_buckets": [64, 128]}]
    keys = {key({"prefix_cache": True, **change}) for change in changes}
    assert len(keys | {key({})}) == 5


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"pa_block_size": 32, "pa_num_blocks": 16, "prefix_buckets": [128, 192]}, {}),  # the defaults
        ({"pa_block_size": None, "pa_num_blocks": None, "prefix_buckets": None}, {}),
        ({"is_prefix_caching": False, "save_sharded_checkpoint": None}, {}),
        ({}, {"replica": 1, "epoch": 2, "host": "other", "cores": [2, 3], "log": "l", "socket": "s", "token": "t"}),
    ],
)
def test_what_does_not_change_the_blocks_changes_no_artifacts(
    change: Mapping[str, Any], fields: Mapping[str, Any]
) -> None:
    """A default that is set, and what only a start needs."""
    assert key({"prefix_cache": True, **change}, **fields) == key({"prefix_cache": True})
    assert key({"prefix_cache": False}) == key({})


def test_each_series_has_its_own_options() -> None:
    """Newer and unreadable ones have those of the newest."""
    assert nxd_release("0.8.16251+f3ca5575") == (0, 8)
    assert [nxd_release(name) for name in ("0.4.7422", "0.5.9230", "0.6.10598")] == [(0, 4), (0, 5), (0, 6)]
    assert nxd_release("0.10.0") == (0, 9)
    assert nxd_release("0.0.1") == NXD_RELEASES[0]
    assert nxd_release("dev") == (0, 9)


def test_options_that_are_kept_from_the_user_exist() -> None:
    """A misspelt one would let the real one through."""
    assert set(FIELDS) | set(UNSERVED) | set(NXD_QUANTIZED_OPTIONS) <= set(OPTIONS)
    assert not set(FIELDS) & set(UNSERVED)
    assert VOCAB_SIZE > 256
