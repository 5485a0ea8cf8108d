"""Sources that NxD Inference's own code has compiled or sharded elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from placements.facts.engines import reaches
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.closed.test_nxdi import nxd as nxd
from tests.closed.test_nxdi import pytestmark as pytestmark
from tests.doubles import Neuron
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.engines import test_nxd_precompiled as double
from tests.workers.engines.test_nxd_precompiled import Checkpoints
from tests.workers.engines.test_nxd_precompiled import llama as llama
from workers.engines.nxd_inference.package import import_package

test_a_folder_compiled_by_the_package_alone = double.test_a_folder_compiled_by_the_package_alone_is_loaded
test_fields_without_effect_on_graphs_may_differ = double.test_fields_without_effect_on_graphs_may_differ
test_all_fields_that_differ_are_reported_at_once = double.test_all_fields_that_differ_are_reported_at_once
test_a_missing_or_truncated_shard_is_reported = double.test_a_missing_or_truncated_shard_is_reported


def test_weights_that_were_not_saved_are_divided_again(nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """From the original beside the graphs."""
    if not reaches(import_package().version, "0.7"):
        pytest.skip("earlier versions read the folder of the compiling host")
    double.test_weights_that_were_not_saved_are_divided_again(nxd, checkpoint, tmp_path)


def test_a_source_compiled_elsewhere_is_loaded(
    nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled, and the original weights are not needed."""
    double.test_a_source_compiled_elsewhere_is_loaded("", nxd, checkpoint, tmp_path, monkeypatch)


def test_shards_are_the_weights_of_an_own_compile(
    nxd: Neuron, checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are neither divided again nor copied."""
    double.test_shards_are_the_weights_of_an_own_compile("", nxd, checkpoint, tmp_path, monkeypatch)
