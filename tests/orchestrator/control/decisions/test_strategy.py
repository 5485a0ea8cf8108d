"""The strategy of an update, and the reason that `plan` gives for it."""

from __future__ import annotations

import pytest

from orchestrator.control.decisions.replica_view import ReplicaView
from orchestrator.control.decisions.rollout_step import DesiredModel, Situation, compute_goal
from orchestrator.control.decisions.update_strategy import UpdateStrategy, choose_strategy
from orchestrator.messages.replica_states import State
from placements.facts.core_range import CoreRange
from placements.facts.topology import TOPOLOGIES, Host
from placements.spec.parse import parse

HOSTS = tuple(Host(f"inf2.48xlarge/{i}", TOPOLOGIES["inf2.48xlarge"], cpus=(0,), emulated=True) for i in range(2))


def situation(models: str, *, hosts: int = 1, mixes: bool = True, **lying: str) -> Situation:
    """A fleet whose models are all to be updated. ``lying`` has the core ranges of each model's ready replicas."""
    parsed = parse(f"defaults: {{engine: echo}}\nmodels: {{{models}}}", "f.yaml", "/")
    assert parsed.spec is not None, parsed.problems
    desired_models = {m.name: DesiredModel(m, m.replicas.min, "new", mixes=mixes) for m in parsed.spec.models}
    views = tuple(
        ReplicaView(name, i, 1, HOSTS[0].name, CoreRange.parse(cores), State.READY, 0.0, version="old", load_s=8.0)
        for name, text in lying.items()
        for i, cores in enumerate(text.split())
    )
    for name in desired_models.keys() - {"a"}:  # only `a` changes
        desired_models[name] = DesiredModel(desired_models[name].model, desired_models[name].count, "old")
    return Situation(parsed.spec, HOSTS[:hosts], {}, desired_models, views)


def way(models: str, **more: object) -> UpdateStrategy:
    return choose_strategy(situation(models, **more), "a")  # type: ignore[arg-type]


PINNED = "a: {tp_degree: 8, cores: ['0-7']}"


def test_an_update_of_a_pinned_model_shows_the_pin_the_free_cores_and_the_remedy() -> None:
    """Cores are free, but the pin keeps the new replica from them."""
    assert way(PINNED, a="0-7") == UpdateStrategy(
        "hold",
        8.2,
        "its pin 0-7 is taken and 16 cores are free: with a further range in `cores`, such as 8-15, or without "
        "the pin, the new replica would start beside the old one; requests wait while the replica is swapped",
        predicted_s=8.2,
    )


def test_the_predicted_time_is_that_of_all_swaps() -> None:
    """Replicas that are replaced one at a time take as many swaps as there are: a load of 8 s, and 0.2 s to end."""
    each = way("a: {tp_degree: 8, replicas: 2, update: {strategy: in_place}}", a="0-7 8-15")
    assert (each.strategy, each.outage_s, each.predicted_s) == ("in_place", 0.0, 16.4)


def test_on_several_hosts_the_suggested_range_has_its_host() -> None:
    """In the notation of `cores`."""
    strategy = way("a: {tp_degree: 24, cores: ['0-23']}", hosts=2, a="0-23")
    assert strategy.strategy == "surge"
    strategy = way("a: {tp_degree: 24, cores: ['inf2.48xlarge/0:0-23']}", hosts=2, a="0-23")
    assert "its pin inf2.48xlarge/0:0-23 is taken and 24 cores are free" in strategy.why
    assert "such as inf2.48xlarge/1:0-23," in strategy.why


def test_a_pin_is_not_blamed_if_no_other_cores_would_suffice() -> None:
    """The numbers of what is missing are shown instead."""
    strategy = way(PINNED + ", b: {tp_degree: 12}", a="0-7", b="8-19")
    assert strategy.why == (
        "its pin 0-7 is taken, and without the pin a/1 needs 8 contiguous cores, the longest free run on "
        "inf2.48xlarge/0 is 4 (20-23); requests wait while the replica is swapped"
    )


def test_a_spare_range_lets_the_new_replica_of_a_pinned_model_start_first() -> None:
    """The advice holds: with a second range, or without the pin, the update surges, and starts on the free range."""
    assert way("a: {tp_degree: 8}", a="0-7").strategy == "surge"
    spare = situation("a: {tp_degree: 8, cores: ['0-7', '8-15']}", a="0-7")
    assert choose_strategy(spare, "a").strategy == "surge"
    (placement,) = compute_goal(spare).plan.placements
    assert str(placement.cores) == "8-15"


@pytest.mark.parametrize(
    ("models", "lying", "why"),
    [
        (
            "a: {tp_degree: 8}, b: {tp_degree: 12}",
            {"a": "0-7", "b": "8-19"},
            "a/1 needs 8 contiguous cores, the longest free run on inf2.48xlarge/0 is 4 (20-23); "
            "requests wait while the replica is swapped",
        ),
        (
            "a: {tp_degree: 8, update: {strategy: hold}}",
            {"a": "0-7"},
            "update.strategy is hold; requests wait while the replica is swapped",
        ),
        (
            "a: {tp_degree: 8, update: {strategy: in_place}}",
            {"a": "0-7"},
            "update.strategy is in_place; the replica stops before the new one starts",
        ),
        (
            "a: {tp_degree: 24, update: {strategy: surge}}",
            {"a": "0-23"},
            "a/1 needs 24 contiguous cores, but none is free on inf2.48xlarge/0",
        ),
    ],
)
def test_the_reason_of_a_strategy_shows_what_rules_out_better_ones(
    models: str, lying: dict[str, str], why: str
) -> None:
    """With the numbers; a strategy of the spec is its own reason."""
    assert way(models, **lying).why == why


def test_versions_that_do_not_mix_need_a_free_range_for_each_replica() -> None:
    """One spare pin is enough for one replica, and not for two."""
    pins = "a: {replicas: 2, cores: ['0', '1', '2']}"
    assert way(pins, a="0 1").strategy == "surge"
    strategy = way(pins, a="0 1", mixes=False)
    assert (strategy.strategy, strategy.possible) == ("hold", True)
    assert "its pins 0, 1, 2 are taken and 22 cores are free" in strategy.why
