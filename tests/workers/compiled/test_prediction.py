"""What is told of a start follows from what it needs and what is there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.tnx_runs import config
from workers.compiled.host_sets import Buildable
from workers.compiled.manifest import decoded, encoded, name_of, record_of
from workers.compiled.neuron_cache import URL
from workers.compiled.places import find
from workers.compiled.prediction import ArtifactCandidate, Difference, differences, flat, predict

WANTED: dict[str, Any] = {
    "engine": "transformers-neuronx",
    "versions": {"neuronx-cc": "2.16", "torch": "2.5"},
    "environment": {"NEURON_CC_FLAGS": "-O1"},
    "target": "trn1",
    "lnc": 1,
    "model": "digest",
    "options": {
        "constructor": {
            "batch_size": 4,
            "amp": "bf16",
            "tp_degree": 8,
            "n_positions": [1024, 2048],
            "context_length_estimate": [128, 2048],
        },
        "neuron": {"attention_layout": "BSH"},
    },
    "speculation": [],
}
HERE = ArtifactCandidate("compiled", "/home/compiled/a", WANTED)
CACHED = ArtifactCandidate("neff-cache", "/cache", WANTED)


def changed(path: str, value: Any) -> dict[str, Any]:
    """Returns another manifest."""
    made = copy.deepcopy(WANTED)
    *above, last = path.split(".")
    place = made
    for name in above:
        place = place[name]
    place[last] = value
    return made


def beside(manifest: dict[str, Any] | None, *missing: str) -> ArtifactCandidate:
    return ArtifactCandidate("source", "/model/compiled", manifest, missing=missing)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("versions.neuronx-cc", "2.17", "compiler version"),
        ("environment.NEURON_CC_FLAGS", "-O2", "compiler flags"),
        ("options.constructor.tp_degree", 4, "tp_degree"),
        ("options.constructor.amp", "f32", "dtype"),
        ("options.constructor.batch_size", 8, "batch_size"),
        ("options.constructor.n_positions", [4096], "n_positions"),
        ("options.neuron.attention_layout", "HSB", "attention_layout"),
        ("target", "trn2", "target"),
        ("lnc", 2, "lnc"),
        ("speculation", [5], "speculation lengths"),
        ("model", "another", "config.json"),
    ],
)
def test_a_predicted_compile_names_the_field_that_differs(path: str, value: Any, field: str) -> None:
    """With both values."""
    there = [ArtifactCandidate("compiled", "/a", changed(path, value), source="/model")]
    prediction = predict(WANTED, there, "/model")
    assert prediction.outcome == "compile"
    assert [(item.field, item.found) for item in prediction.why] == [(field, value)]
    assert str(prediction.why[0]).startswith(f"{field}: needs ")


def test_an_unavailable_cache_is_named_beside_the_reason() -> None:
    """Once, and only if something is compiled."""
    silent = ArtifactCandidate("neff-cache", "s3://neffs", None, silent="the cache at s3://neffs does not answer")
    elsewhere = ArtifactCandidate("elsewhere", "s3://neffs", None, silent="the cache at s3://neffs does not answer")
    prediction = predict(WANTED, [silent, elsewhere])
    assert prediction.reason == "this model has not been compiled; the cache at s3://neffs does not answer"
    prediction = predict(
        WANTED, [silent, ArtifactCandidate("compiled", "/a", changed("lnc", 2), source="/model")], "/model"
    )
    assert prediction.reason == "it was compiled differently; the cache at s3://neffs does not answer"
    assert len(prediction.why) == 1
    for there in (HERE, CACHED):
        assert predict(WANTED, [silent, there]).hit


def test_the_nearest_candidate_gives_the_reason() -> None:
    """Candidates of other models do not count."""
    near, far = changed("lnc", 2), changed("lnc", 2) | {"target": "trn2"}
    there = [ArtifactCandidate("compiled", "/far", far), ArtifactCandidate("compiled", "/near", near)]
    assert predict(WANTED, there, "/model").place == "/near"
    other = ArtifactCandidate("compiled", "/other", changed("model", "another"), source="/another model")
    assert predict(WANTED, [other], "/model").reason == "this model has not been compiled"


@pytest.mark.parametrize(
    ("there", "outcome", "where"),
    [
        ([], "compile", "nothing"),
        ([HERE, CACHED], "hit", "compiled"),
        ([beside(None), HERE], "hit", "compiled"),
        ([beside(None), CACHED], "fail", "source"),
        ([beside(WANTED), CACHED], "hit", "source"),
        ([beside(WANTED, "a.neff"), CACHED], "fail", "source"),
        ([beside(changed("lnc", 2))], "fail", "source"),
        ([ArtifactCandidate("compiled", "/a", WANTED, missing=("a.neff",)), CACHED], "hit", "neff-cache"),
        ([ArtifactCandidate("elsewhere", "s3://a", WANTED), beside(None)], "hit", "elsewhere"),
        ([ArtifactCandidate("neff-cache", "/cache", WANTED, missing=("MODULE_a",))], "compile", "neff-cache"),
        ([ArtifactCandidate("neff-cache", "/cache", WANTED, missing=("a",), failed=("a",))], "fail", "neff-cache"),
    ],
)
def test_candidates_are_checked_in_the_order_of_a_start(
    there: list[ArtifactCandidate], outcome: str, where: str
) -> None:
    """Local artifacts, those of other hosts, those beside the model, the cache."""
    prediction = predict(WANTED, there, "/model")
    assert (prediction.outcome, prediction.where) == (outcome, where)


def test_neffs_beside_the_model_do_not_matter_to_a_compile_ahead(tmp_path: Path) -> None:
    """It is the way out for who has them and cannot prove them."""
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled" / "a.neff").touch()
    unit = Buildable(source=tmp_path, manifest=WANTED)
    replica_config = config(tmp_path, compiled=str(tmp_path / "root"), env={URL: str(tmp_path)})
    outcomes = [find(unit, replica_config, ahead).outcome for ahead in (False, True)]
    assert outcomes == ["fail", "compile"]


def test_an_engine_that_compiles_nothing_is_a_hit() -> None:
    """Whatever candidates exist."""
    assert predict(None, [HERE]).hit


@pytest.mark.parametrize(
    ("kept", "hit"),
    [
        ({"context_length_estimate": [128, 512, 2048]}, True),
        ({"n_positions": [512, 1024, 2048]}, True),
        ({"n_positions": [1024, 2048, 4096]}, False),  # the KV cache of every graph is longer
        ({"n_positions": [2048]}, False),
        ({"context_length_estimate": [128, 512, 2048], "tp_degree": 4}, False),
    ],
)
def test_graphs_of_more_buckets_include_those_of_fewer(kept: dict[str, Any], hit: bool) -> None:
    """In a cache of graphs; a folder of artifacts is for one manifest."""
    constructor = {**WANTED["options"]["constructor"], **kept}
    made = changed("options.constructor", constructor)
    assert predict(WANTED, [ArtifactCandidate("neff-cache", "/cache", made)]).hit == hit
    assert not predict(WANTED, [ArtifactCandidate("compiled", "/a", made)]).hit


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
MANIFESTS = st.dictionaries(st.sampled_from(["engine", "options", "shapes", "versions", "dtype", "lnc"]), PLAIN)


@given(MANIFESTS, MANIFESTS)
def test_manifests_differ_exactly_in_their_fields(first: dict[str, Any], other: dict[str, Any]) -> None:
    """A start is a hit only without a difference."""
    result = differences(first, other)
    ours, theirs = flat(first), flat(other)
    assert bool(result) == any(ours.get(path) != theirs.get(path) for path in ours | theirs)
    assert differences(other, first) == tuple(Difference(why.field, why.found, why.wanted) for why in result)
    assert differences(first, first) == ()
    if predict(first, [ArtifactCandidate("compiled", "/a", other)]).hit:
        assert first == other


@given(MANIFESTS)
def test_a_record_of_any_manifest_round_trips(manifest: dict[str, Any]) -> None:
    """Its name is that of the manifest."""
    record = record_of(manifest)
    assert decoded(encoded(record)) == record
    assert record.name == name_of(manifest) == name_of(record.manifest)


def test_a_record_repeats_the_main_fields_of_its_manifest() -> None:
    """Compiler, flags, shapes, degree, dtype, layout."""
    record = record_of(WANTED, "/model")
    assert (record.compiler, record.flags, record.target, record.lnc) == ("2.16", "-O1", "trn1", 1)
    assert (record.tp_degree, record.dtype, record.layout) == (8, "bf16", {"attention_layout": "BSH"})
    assert record.shapes == {"batch_size": 4, "n_positions": [1024, 2048], "context_length_estimate": [128, 2048]}
