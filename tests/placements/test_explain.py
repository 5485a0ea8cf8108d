"""Why a model lies where it does or has no place, and what would help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from placements.explain.explain import explain
from placements.explain.explanation import Explanation, Question, Suggestion
from placements.explain.remedies import remedies
from placements.facts.checkpoints import Checkpoint
from placements.facts.core_range import CoreRange
from placements.facts.topology import Host
from placements.planner.plan import Running, plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.schema import HostsSpec, Replicas, Spec, Spread
from tests.placements.fleets import BIG, LAPTOP, LLAMA_2_7B, PLAIN, model, spec
from tests.published_configs import PUBLISHED

HOST = "inf2.48xlarge/0"
PROBLEMS = Path(__file__).parent.parent / "golden" / "problems"
OPT = Checkpoint("opt", 32, 32, 24, 2048, 8192, 64, 50272, 2048, True, 1_315_758_080)
LLAMA_70B = Checkpoint("llama", 64, 8, 80, 8192, 28672, 128, 32000, 4096, False, 68_976_648_192)


def explained(wish: Spec, name: str = "a", checkpoint: Checkpoint | None = None, **more: Any) -> Explanation:
    checkpoints = {} if checkpoint is None else {name: checkpoint}
    return explain(question(wish, hosts_for(wish, LAPTOP), name, checkpoints=checkpoints, **more))


def question(wish: Spec, hosts: tuple[Host, ...], name: str = "a", **more: Any) -> Question:
    named = wish.model(name)
    assert named is not None
    return Question(named, wish, hosts, **more)


def failed(explanation: Explanation) -> list[str]:
    return [constraint.id for constraint in explanation.failed]


def kinds(explanation: Explanation) -> list[str]:
    return [suggestion.trial.id for suggestion in explanation.suggestions]


def change(explanation: Explanation, kind: str) -> Suggestion:
    return next(suggestion for suggestion in explanation.suggestions if suggestion.trial.id == kind)


def running(name: str, *firsts: int, size: int = 1) -> list[Running]:
    return [Running(name, i, HOST, CoreRange.of_length(first, size)) for i, first in enumerate(firsts)]


def reasons(explanation: Explanation) -> Sequence[str]:
    return explanation.places[0].why


def test_a_model_with_its_replicas_has_places_and_no_problems() -> None:
    """The places, the reasons, and the numbers; exit code 0 of the command."""
    explanation = explained(spec(model("a", 8, replicas=2)), checkpoint=LLAMA_2_7B)
    assert (explanation.fits, explanation.failed, explanation.suggestions) == (True, (), ())
    assert [str(place.placement.cores) for place in explanation.places] == ["0-7", "8-15"]
    assert reasons(explanation)[0] == "devices 0 to 3; begins at a multiple of 8, preferred for tp_degree 8"
    assert {constraint.id for constraint in explanation.holds} == {
        "degree",
        "heads",
        "memory",
        "host memory",
        "threads",
        "cores",
    }


def test_a_known_failure_is_among_the_facts_of_its_model() -> None:
    """It has the workaround. Other models do not have it."""
    parsed = parse(
        "hosts: {instance: inf2.48xlarge}\nmodels:\n"
        "  a: {source: ./a, engine: nxd-inference, tp_degree: 8}\n  b: {source: ./b, engine: nxd-inference}\n",
        "f.yaml",
    )
    assert parsed.spec is not None
    hosts, checkpoints = hosts_for(parsed.spec, LAPTOP), {"a": Checkpoint.from_config(PUBLISHED["Qwen/Qwen3-8B"])}
    problems = check(parsed.spec, hosts, checkpoints)
    shown = {
        name: [
            each.details
            for each in explain(question(parsed.spec, hosts, name, checkpoints=checkpoints), problems).holds
            if each.id == "known-failure"
        ]
        for name in ("a", "b")
    }
    [known] = [problem for problem in problems if problem.id == "known-failure"]
    assert shown == {"a": [(known.hint,)], "b": []}


def test_running_and_pinned_replicas_have_that_reason() -> None:
    explanation = explained(spec(model("a", 8, "8-15")), running=running("a", 8, size=8))
    assert list(reasons(explanation))[:2] == ["it runs there already; running replicas stay", 'pinned to "8-15"']


def test_a_model_shows_whom_it_displaces() -> None:
    """A running replica of a lower priority, and its new place."""
    wish = spec(model("a", 24, priority=1), model("b"))
    explanation = explained(wish, running=running("b", 3))
    assert "it displaces b/0 (priority 0) from 3: stopped" in reasons(explanation)


def test_a_model_shows_which_replicas_it_prevents() -> None:
    """Those without a place because of it."""
    explanation = explained(spec(model("a", 24, priority=1), model("b", replicas=2)))
    assert "without this model 2 replicas of b would have a place" in reasons(explanation)


def test_no_room_shows_the_models_on_the_cores() -> None:
    """With priorities, and unusable cores."""
    wish = spec(model("a", 8), model("b", 4, replicas=4, priority=3), cores=[23])
    blocked = {HOST: frozenset({16, 17, 22})}
    explanation = explained(wish, blocked=blocked, cordoned={HOST: frozenset({16, 17})})
    (constraint,) = explanation.failed
    assert constraint.id == "no-room"
    assert constraint.what.startswith("a/0 needs 8 contiguous cores")
    assert "b (priority 3) holds 16 cores with 4 replicas" in constraint.details
    assert f"1 core is reserved: 23 of {HOST}" in constraint.details
    assert f"2 cores are cordoned: 16-17 of {HOST}" in constraint.details
    assert f"1 core is quarantined: 22 of {HOST}" in constraint.details


def test_every_failing_constraint_is_reported() -> None:
    """Too little HBM, too little host memory, and no cores: each separately."""
    wish = spec(model("a", 8, max_batch=64, max_len=4096, host_memory_gib=9000.0), model("b", 24, priority=1))
    explanation = explained(wish, checkpoint=LLAMA_70B)
    assert failed(explanation)[0] == "hbm-exceeded"
    assert "no-room" in failed(explanation)
    assert any(id.startswith("host-memory") for id in failed(explanation))
    assert explanation.places == ()


def test_an_error_of_another_model_does_not_apply_to_this_one() -> None:
    """And does not prevent suggestions."""
    explanation = explained(spec(model("a", 8, replicas=4), model("b", 5)))
    assert failed(explanation) == ["no-room"]
    assert "replicas" in kinds(explanation)


def test_errors_of_the_models_own_lines_prevent_suggestions() -> None:
    """Those of a rival do not apply; with one of its own nothing can be tried."""
    text = "hosts: {instance: inf2.48xlarge}\nmodels:\n  a: {source: ./m, tp: 8}\n  b: {source: ./m}\n"
    parsed = parse(text, "f.yaml")
    assert parsed.spec is not None
    for name, ids in (("a", ["unknown-key"]), ("b", [])):
        explanation = explain(question(parsed.spec, hosts_for(parsed.spec, LAPTOP), name), parsed.problems)
        assert (failed(explanation), explanation.suggestions) == (ids, ())


@pytest.mark.parametrize("path", sorted(PROBLEMS.glob("*.yaml")), ids=lambda path: path.stem)
def test_any_readable_spec_can_be_explained(path: Path) -> None:
    """As far as its models could be read; on its own hosts, and on one without devices."""
    parsed = parse(path.read_text(), path.name)
    for name in [m.name for m in parsed.spec.models] if parsed.spec else []:
        assert parsed.spec is not None
        for hosts in (hosts_for(parsed.spec, LAPTOP), (PLAIN,)):
            explanation = explain(question(parsed.spec, hosts, name, checkpoints={name: LLAMA_2_7B}), parsed.problems)
            assert explanation.fits == (not explanation.failed)


def test_a_model_without_wanted_replicas_is_tried_with_one() -> None:
    """So that ``min: 0`` is explained as well."""
    explanation = explained(spec(model("a", 8, replicas=Replicas(min=0, max=2))))
    assert (explanation.fits, explanation.wanted, len(explanation.places)) == (True, 1, 1)


# Suggestions; that each works is a property test


def test_moving_one_replica_is_the_smallest_change() -> None:
    """The scattered one with the lowest cost, by its name."""
    wish = spec(model("a", 8), model("b", replicas=4))
    explanation = explained(wish, running=running("b", 3, 9, 14, 20))
    assert kinds(explanation)[0] == "move"
    first = explanation.suggestions[0]
    assert first.trial.change.startswith("move b/")
    assert len(first.plan.moves) == 1


def test_cordoned_cores_can_be_freed() -> None:
    """Quarantined ones cannot."""
    every = frozenset(range(24))
    explanation = explained(spec(model("a", 8)), blocked={HOST: every}, cordoned={HOST: frozenset(range(8))})
    assert explanation.suggestions[0].trial.change == f"corewright uncordon {HOST}"
    assert "uncordon" not in kinds(explained(spec(model("a", 8)), blocked={HOST: every}))


def test_too_much_memory_is_reduced_by_degree_slots_length_or_int8() -> None:
    """Each with the nearest value that fits."""
    wish = spec(model("a", 2, engine="transformers-neuronx", max_batch=32, max_len=4096))
    explanation = explained(wish, checkpoint=LLAMA_2_7B)
    assert failed(explanation) == ["hbm-exceeded"]
    assert change(explanation, "degree").trial.change == "tp_degree: 8"
    assert change(explanation, "slots").trial.change.startswith("max_batch: ")
    assert change(explanation, "length").trial.change.startswith("max_len: ")
    assert "GiB on each core" in change(explanation, "degree").gives


def test_weights_that_are_too_large_are_reduced_by_int8() -> None:
    """If the engine supports it."""
    wish = spec(model("a", 8, max_batch=4, max_len=2048), instance="inf2.24xlarge")
    assert "int8" in kinds(explained(wish, checkpoint=LLAMA_70B))


def test_a_suggestion_of_slots_is_the_most_that_fits() -> None:
    """One slot more does not."""
    wish = spec(model("a", 2, engine="transformers-neuronx", max_batch=32, max_len=4096))
    most = int(change(explained(wish, checkpoint=LLAMA_2_7B), "slots").trial.change.partition(": ")[2])
    for batch, ids in ((most, []), (most + 1, ["hbm-exceeded"])):
        again = wish.model_copy(update={"models": (wish.models[0].model_copy(update={"max_batch": batch}),)})
        assert failed(explained(again, checkpoint=LLAMA_2_7B)) == ids


def test_pins_in_use_can_be_removed() -> None:
    """The model goes elsewhere."""
    wish = spec(model("a", 8, "0-7"))
    explanation = explained(wish, blocked={HOST: frozenset({3})})
    assert failed(explanation) == ["pin-taken"]
    assert [suggestion.trial.change for suggestion in explanation.suggestions[:2]] == [
        'cores: "0-7" -> "4-11"',
        "without its pins",
    ]


def test_a_narrow_spread_can_be_widened() -> None:
    """Or another host added."""
    explanation = explained(spec(model("a", 4, replicas=2, spread=Spread(host=1))))
    assert failed(explanation) == ["spread-too-narrow"]
    assert change(explanation, "spread").trial.change == "spread: {host: 2}"
    assert change(explanation, "host").trial.change == "one more inf2.48xlarge"


def test_a_further_host_beyond_max_is_marked() -> None:
    """With all `max` hosts in use; while one of them is absent, it is the host that helps."""
    entry = HostsSpec.model_validate({"instance": BIG, "max": 2})
    wish = spec(model("a", 24, replicas=3)).model_copy(update={"hosts": (entry,)})
    hosts = hosts_for(wish, LAPTOP)
    assert change(explained(wish), "host").trial.change == "one more inf2.48xlarge (max reached)"
    two = wish.model_copy(update={"models": (model("a", 24, replicas=2),)})
    short = explain(question(two, hosts[1:], absent=hosts[:1]))
    assert change(short, "host").trial.change == "one more inf2.48xlarge"
    none = explain(question(two, (), absent=hosts))
    assert [constraint.id for constraint in none.failed] == ["no-room"]
    assert change(none, "host").trial.change == "2 inf2.48xlarge"


def test_a_rivals_min_is_lowered_no_further_than_needed() -> None:
    """That of the rival with the least to lose; a lower priority is not a rival."""
    wish = spec(model("a", 2), model("b", 8, replicas=2), model("c", 2, replicas=4))
    there = [*running("b", 0, 8, size=8), *running("c", 16, 18, 20, 22, size=2)]
    assert change(explained(wish, running=there), "rival").trial.change == "replicas of c: min 4 -> 3"


def test_as_many_hosts_as_are_missing() -> None:
    """Three replicas of eight fill one; five more need two."""
    explanation = explained(spec(model("a", 8, replicas=8)))
    assert change(explanation, "host").trial.change == "2 more inf2.48xlarge"


def test_a_larger_type_is_suggested_if_no_host_is_large_enough() -> None:
    """The smallest of the family with enough cores."""
    explanation = explained(spec(model("a", 24), instance="inf2.24xlarge"))
    assert failed(explanation)[0] == "degree-exceeds-host"
    assert change(explanation, "host").trial.change == "an inf2.48xlarge"


def test_two_changes_are_suggested_if_one_does_not_help() -> None:
    """A 70B model on two cores: neither a greater degree nor int8 suffices by itself."""
    wish = spec(model("a", 2, max_batch=4, max_len=2048), instance="inf2.24xlarge")
    explanation = explained(wish, checkpoint=LLAMA_70B)
    assert kinds(explanation)[0] == "degree+int8"
    assert explanation.suggestions[0].trial.change == "tp_degree: 8, and quantize: int8"


def test_in_a_fleet_with_several_types_the_fitting_one_is_enlarged() -> None:
    """Not the first."""
    wish = Spec(
        hosts=(HostsSpec(instance="inf2.xlarge"), HostsSpec(instance="inf2.48xlarge")),
        models=(model("a", 24, replicas=2),),
    )
    assert change(explained(wish), "host").trial.change == "one more inf2.48xlarge"


def test_unknown_keys_do_not_prevent_suggestions() -> None:
    """They are skipped. If they are the only errors, nothing is tried, and no missing remedy is reported."""
    text = "hosts: {instance: inf2.48xlarge}\nmodels:\n  a: {source: ./m, tp_degree: 8, replicas: 4}\ncolour: red\n"
    for word, ids, tried in (("4", ["unknown-key", "no-room"], "all"), ("3", ["unknown-key"], "nothing")):
        parsed = parse(text.replace("replicas: 4", f"replicas: {word}"), "f.yaml")
        assert parsed.spec is not None
        explanation = explain(question(parsed.spec, hosts_for(parsed.spec, LAPTOP)), parsed.problems)
        assert (failed(explanation), explanation.tried, bool(explanation.suggestions)) == (ids, tried, tried == "all")


def test_a_length_beyond_the_positions_becomes_that_of_the_positions() -> None:
    """The obvious change, alone."""
    explanation = explained(spec(model("a", 8, max_len=9999)), checkpoint=LLAMA_2_7B)
    assert failed(explanation) == ["max-len-exceeds-positions"]
    assert change(explanation, "length").trial.change == "max_len: 4096"


def test_heads_can_be_padded() -> None:
    """At the requested degree, as the first suggestion."""
    explanation = explained(spec(model("a", 24, engine="nxd-inference", max_batch=1)), checkpoint=LLAMA_70B)
    assert (failed(explanation)[0], explanation.suggestions[0].trial.change) == (
        "heads-not-divisible",
        "allow_head_padding: true",
    )


def test_a_pin_moves_to_the_nearest_legal_range() -> None:
    """Before it is removed, and before another degree."""
    explanation = explained(spec(model("a", 8, "9-16"), model("b", 2, "0-1")))
    assert [suggestion.trial.change for suggestion in explanation.suggestions[:2]] == [
        'cores: "9-16" -> "8-15"',
        "without its pins",
    ]


def test_the_pins_of_rivals_change_before_their_replicas_are_reduced() -> None:
    """Both, if one does not suffice."""
    explanation = explained(spec(model("a", 8), model("b", 8, "4-11"), model("c", 8, "14-21")))
    expected = 'cores of b: "4-11" -> "8-15", and cores of c: "14-21" -> "16-23"'
    assert change(explanation, "rival-pins").trial.change == expected
    assert kinds(explanation).index("rival-pins") < kinds(explanation).index("rival")


def test_threads_are_shared_or_fewer() -> None:
    """The greatest number with which all replicas have a place."""
    wish = spec(model("a", 8, engine="transformers-neuronx", threads=100, replicas=2))
    explanation = explained(wish)
    assert failed(explanation) == ["vcpus-short"]
    changes = [suggestion.trial.change for suggestion in explanation.suggestions if suggestion.trial.id == "threads"]
    assert changes == ["threads: 92", "threads: share"]


def test_hosts_are_added_for_all_models_of_the_same_or_a_higher_rank() -> None:
    """Of the present type, though fewer of another might suffice."""
    explanation = explained(spec(model("a", 24, replicas=3), model("b", 8, replicas=3)))
    assert change(explanation, "host").trial.change in ("2 more inf2.48xlarge", "3 more inf2.48xlarge")


@pytest.mark.parametrize("engine", ["transformers-neuronx", "nxd-inference"])
def test_new_types_are_those_that_can_serve_the_model(engine: str) -> None:
    """None that the fleet has no more of; trn2 has no transformers-neuronx, and the facts of trn2.3xlarge are few."""
    explanation = explained(spec(model("a", 64, engine=engine, max_batch=1)), checkpoint=LLAMA_70B)
    changes = [suggestion.trial.change for suggestion in explanation.suggestions if suggestion.trial.id == "host"]
    assert changes == ([] if engine == "transformers-neuronx" else ["a trn2.48xlarge"])


def test_a_search_ends_when_its_plans_are_used_up() -> None:
    """And reports it."""
    wish = spec(model("a", 8, replicas=8))
    hosts = hosts_for(wish, LAPTOP)
    overfull = question(wish, hosts, wanted={"a": 8})
    assert remedies(overfull).exhaustive
    few = remedies(overfull, plans=2)
    assert (few.exhaustive, len(few.suggestions) <= 2) == (False, True)


def test_numbers_are_those_of_suitable_hosts() -> None:
    """A type without the degree, or with too little memory, has no line; threads are those of its place."""
    hosts = (
        HostsSpec(instance="inf2.48xlarge"),
        HostsSpec(instance="trn1.32xlarge"),
        HostsSpec(instance="trn2.48xlarge", lnc=1),
        HostsSpec(instance="trn2.48xlarge"),
    )
    wish = Spec(hosts=hosts, models=(model("a", 32, engine="nxd-inference", max_batch=1, max_len=2048),))
    holds = {constraint.id: constraint for constraint in explained(wish, checkpoint=LLAMA_70B).holds}
    where = [line.rpartition(" of ")[2] for line in holds["memory"].details]
    assert where == ["trn1.32xlarge", "trn2.48xlarge lnc 1", "trn2.48xlarge lnc 2"]
    assert "on the first core (" in holds["memory"].details[0]
    assert (holds["threads"].what.endswith("on trn1.32xlarge"), holds["threads"].details) == (True, ())


def test_a_rejection_has_the_message_of_the_plan() -> None:
    """That of the first missing replica."""
    wish = spec(model("a", 8, replicas=5, threads=100, engine="transformers-neuronx"))
    hosts = hosts_for(wish, LAPTOP)
    (first, *_) = plan(wish, hosts).unplaced
    texts = {constraint.id: constraint.what for constraint in explain(question(wish, hosts)).failed}
    assert all(texts[problem.id].startswith(problem.what) for problem in first.problems)


def test_a_machine_that_the_engine_does_not_support_is_reported() -> None:
    """Beside one without the degree; NxD Inference runs there, and needs neither."""
    hosts = (HostsSpec(instance="trn2.48xlarge"), HostsSpec(instance="trn1.2xlarge"))
    old, new = (
        explained(Spec(models=(model("a", 32, engine=engine),), hosts=hosts))
        for engine in ("transformers-neuronx", "nxd-inference")
    )
    assert {line for constraint in old.failed for line in constraint.details} >= {
        "trn2.48xlarge: transformers-neuronx does not run there",
        "trn1.2xlarge has 2 cores, fewer than tp_degree 32",
    }
    assert new.fits


def test_a_machine_on_which_the_engine_lacks_the_family_is_reported() -> None:
    """opt is supported by transformers-neuronx only, which does not run on trn2."""
    hosts = (HostsSpec(instance="trn1.2xlarge"), HostsSpec(instance="trn2.48xlarge"))
    explanation = explained(Spec(models=(model("a", 32),), hosts=hosts), checkpoint=OPT)
    details = [line for constraint in explanation.failed for line in constraint.details]
    assert "trn2.48xlarge: auto does not serve opt there" in details


def test_the_memory_of_emulated_cores_is_reported_as_theirs() -> None:
    """It counts for a place, though the cpu engine never fills it."""
    wish = Spec(hosts=(HostsSpec(emulate="inf2.48xlarge"),), models=(model("a", 8, engine="cpu"),))
    holds = {constraint.id: constraint for constraint in explained(wish, checkpoint=LLAMA_2_7B).holds}
    assert holds["memory"].what.endswith("of an emulated inf2.48xlarge")
