"""The reports of others for a model: served, compiled, failed, or none."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from placements.engines.evidence import (
    REPORTS,
    SERVED_WITH,
    Evidence,
    ModelReport,
    ModelVariant,
    evidence_of,
    releases_reported,
    served_on,
)
from placements.engines.registry import NAMES, sdks_with
from placements.facts.checkpoints import Checkpoint
from placements.facts.known_failures import Confidence
from placements.facts.neuron_releases import sdk_named
from placements.facts.topology import DEGREES, TOPOLOGIES, family_of
from tests.published_configs import PUBLISHED

MISTRAL, TINYLLAMA = ModelVariant("mistral", 7_248_023_552), ModelVariant("llama", 1_100_048_384)
QWEN_7B, LLAMA_32 = ModelVariant("qwen2", 7_615_616_512), ModelVariant("llama", 1_235_814_400, "llama3")
LLAMA_31 = ModelVariant("llama", 8_030_261_248, "llama3")
NXD, OPTIMUM = "nxd-inference", "optimum-neuron"


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: f"{report.model}-{report.sdk}-{report.source}")
def test_every_report_names_things_that_exist(report: ModelReport) -> None:
    """A misspelt engine, release or machine would match nothing."""
    assert report.engines
    assert set(report.engines.split()) <= set(NAMES)
    assert sdk_named(report.sdk)
    assert any(name.startswith(report.instance) for name in TOPOLOGIES)
    assert not report.tp_degree or int(report.tp_degree) in {*DEGREES[family_of(report.instance)], 16}
    assert report.seen in ("served", "compiled")
    assert report.confidence in get_args(Confidence)
    assert re.fullmatch(r"[\w.-]+/[\w.-]+(#\d+|:\S+)", report.source)
    assert re.fullmatch(r"20\d\d(-\d\d){0,2}", report.date)


@pytest.mark.parametrize(
    ("model", "engine", "sdk", "instance", "status"),
    [
        (MISTRAL, NXD, "2.24", "inf2.48xlarge", "served"),
        (MISTRAL, NXD, "2.24", "trn1.32xlarge", "not reported"),
        (MISTRAL, NXD, "2.28", "inf2.48xlarge", "not reported"),
        (TINYLLAMA, NXD, "2.28", "inf2.xlarge", "served"),
        (TINYLLAMA, "vllm", "2.28", "inf2.xlarge", "served"),
        (TINYLLAMA, OPTIMUM, "2.28", "inf2.xlarge", "not reported"),
        (QWEN_7B, NXD, "2.28", "inf2", "compiled"),
        (QWEN_7B, NXD, "2.31", "inf2", "support ended"),
        (QWEN_7B._replace(parameters=1_543_714_304), NXD, "2.28", "inf2", "failed"),
        (QWEN_7B._replace(parameters=8_400_000_000), NXD, "2.28", "inf2", "not reported"),
        (QWEN_7B._replace(parameters=None), NXD, "2.28", "inf2", "not reported"),
        (LLAMA_32, NXD, "2.28", "inf2", "failed"),
        (LLAMA_31, OPTIMUM, "2.26", "inf2", "served"),
        (LLAMA_31._replace(rope=""), OPTIMUM, "2.26", "inf2", "not reported"),
    ],
)
def test_a_report_applies_to_its_model_engine_release_and_machines(
    model: ModelVariant, engine: str, sdk: str, instance: str, status: str
) -> None:
    """The size and the rotary positions distinguish models of a family."""
    release = sdk_named(sdk)
    assert release is not None
    evidence = evidence_of(model, engine, release, instance)
    assert evidence.status == status
    assert bool(evidence.sources) == (status in ("served", "compiled", "failed"))


def test_each_release_with_a_report_is_listed_newest_first() -> None:
    assert [(each.sdk, each.status) for each in releases_reported(TINYLLAMA, NXD, "inf2")] == [
        ("2.28", "served"),
        ("2.24", "served"),
    ]


def test_the_text_has_every_source_and_the_best_confidence() -> None:
    release = sdk_named("2.28")
    assert release is not None
    text = evidence_of(TINYLLAMA, NXD, release, "inf2").text
    assert text == "served (reproduced: helixml/helix#2724, kubernetes-sigs/wg-serving#71)"
    assert Evidence("not reported", "2.28").text == "not reported"


@pytest.mark.parametrize(
    ("source", "rope"), [("meta-llama/Llama-3.1-8B-Instruct", "llama3"), ("mistralai/Mistral-7B-Instruct-v0.3", "")]
)
def test_a_checkpoint_is_identified_by_its_size_and_its_rotary_positions(source: str, rope: str) -> None:
    checkpoint = Checkpoint.from_config(PUBLISHED[source])
    assert ModelVariant.of(checkpoint) == (checkpoint.model_type, checkpoint.parameters, rope)


@pytest.mark.parametrize("machines", DEGREES)
def test_recommended_models_were_served_on_one_release_with_the_engine(machines: str) -> None:
    """Nothing is recommended that fails there."""
    reports = served_on(machines)
    assert len({report.sdk for report in reports}) <= 1
    for report in reports:
        release = sdk_named(report.sdk)
        assert release is not None
        assert release in sdks_with(SERVED_WITH, machines)
        assert int(report.tp_degree) in DEGREES[machines]  # `init` writes it
        assert evidence_of(report.variant, SERVED_WITH, release, machines).status == "served"


def test_three_models_are_recommended_for_inf2() -> None:
    """The page docs/on-inf2.md serves them."""
    assert [(report.family, report.billions, report.sdk) for report in served_on("inf2")] == [
        ("mistral", "7.2", "2.24"),
        ("llama", "8.0", "2.24"),
        ("llama", "1.1", "2.24"),
    ]
