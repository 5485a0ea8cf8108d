"""The table of known failures."""

from __future__ import annotations

import re
from datetime import date
from typing import get_args

import pytest

from placements.engines.registry import NAMES
from placements.facts.checkpoints import FAMILIES
from placements.facts.known_failures import KNOWN_FAILURES, Confidence, KnownFailure, failures_of
from placements.facts.neuron_releases import sdk_named
from placements.facts.topology import TOPOLOGIES

SDK_228 = {"neuronx-cc": "2.23.6484.0+3b612583"}


@pytest.mark.parametrize("row", KNOWN_FAILURES, ids=lambda row: row.id)
def test_every_row_names_things_that_exist(row: KnownFailure) -> None:
    """A misspelt engine, machine or version would match nothing."""
    assert set(row.engines.split()) <= {*NAMES, "any"}
    assert all(any(name.startswith(machine) for name in TOPOLOGIES) for machine in row.machines.split())
    assert set(row.families.split()) <= {*FAMILIES, "convbert"}
    assert all(re.fullmatch(r"[\w-]+(>=|<)\d+\.\d+", each) for each in row.versions.split())
    assert row.confidence in get_args(Confidence)
    assert row.reaction in ("stop", "retry")
    assert (row.severity == "error") == (row.confidence == "maintainer")
    assert re.compile(row.text)
    assert row.text or row.engines
    assert row.what
    assert row.helps
    assert re.fullmatch(r"([\w.-]+/[\w.-]+(#\d+|:\S+) ?)+", row.source)
    assert date.fromisoformat(row.date) >= date(2024, 1, 1)


@pytest.mark.parametrize(
    ("instance", "family", "parameters", "versions", "id"),
    [
        ("inf2.48xlarge", "qwen3", 8_190_000_000, SDK_228, "qwen3-8b-inf2"),
        ("inf2.xlarge", "llama", 1_236_000_000, SDK_228, "llama-3.2-1b-inf2"),
        ("inf2.xlarge", "llama", 1_100_000_000, SDK_228, None),  # TinyLlama
        ("trn1.32xlarge", "qwen3", 8_190_000_000, SDK_228, None),
        ("inf2.48xlarge", "qwen2", 7_616_000_000, SDK_228, None),
        ("inf2.48xlarge", "qwen3", 8_190_000_000, {"neuronx-cc": "2.22.12471.0"}, None),
        ("inf2.48xlarge", "qwen3", 8_190_000_000, {}, None),
        ("inf2.48xlarge", "qwen3", None, SDK_228, None),
    ],
)
def test_a_row_matches_its_machines_sizes_and_versions_only(
    instance: str, family: str, parameters: int | None, versions: dict[str, str], id: str | None
) -> None:
    """A row does not match if a value that it needs is unknown."""
    rows = failures_of("nxd-inference", instance, versions, family=family, parameters=parameters)
    assert [row.id for row in rows] == ([] if id is None else [id])


def test_options_degrees_and_buckets_decide_where_a_row_names_them() -> None:
    """Each of them decides alone."""
    versions = {**SDK_228, "vllm-neuron": "0.5.0"}
    assert failures_of("vllm", "trn1.32xlarge", versions, options={"prefix_cache": True})
    assert not failures_of("vllm", "trn1.32xlarge", versions, options={"prefix_cache": False})
    assert failures_of("vllm", "trn2.48xlarge", {"vllm-neuron": "0.21.0.1.0.0"}, tp_degree=64)
    assert not failures_of("vllm", "trn2.48xlarge", {"vllm-neuron": "0.21.0.1.0.0"}, tp_degree=32)
    size, compiler = 32_760_000_000, {"neuronx-cc": "2.26.6360.0"}
    fails = [
        bool(
            failures_of("vllm", "inf2.24xlarge", compiler, family="qwen2", parameters=size, tp_degree=8, prefill=length)
        )
        for length in (8192, 16384)
    ]
    assert fails == [False, True]


def test_an_old_driver_below_a_new_runtime_fails_without_any_model() -> None:
    """The source is AWS's release notes of the runtime."""
    [row] = failures_of(None, "inf2.xlarge", {"aws-neuronx-runtime-lib": "2.32.1.0", "aws-neuronx-dkms": "2.26.5.0"})
    assert (row.id, row.severity) == ("driver-too-old", "error")
    newer = {"aws-neuronx-runtime-lib": "2.32.1.0", "aws-neuronx-dkms": "2.27.4.0"}
    assert failures_of(None, "inf2.xlarge", newer) == ()


def test_a_release_of_the_sdk_gives_the_versions_that_rows_compare() -> None:
    """The compiler's series decides the SDK, so that rows name no SDK."""
    release = sdk_named("2.28")
    assert release is not None
    assert failures_of("vllm", "inf2.xlarge", release.packages, family="qwen2", parameters=14_770_000_000)
