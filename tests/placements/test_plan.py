from __future__ import annotations

import json
from dataclasses import replace

import pytest

from placements.facts.core_range import CoreRange
from placements.planner.plan import Plan, Running, Unplaced, diff, plan
from placements.resources.environ import cpu_list
from placements.spec.problems import Problem
from placements.spec.schema import Spec
from tests.placements.fleets import PLAIN, host, model, places, planned, spec

H0, H1 = "inf2.48xlarge/0", "inf2.48xlarge/1"


def runs(name: str, replica: int, cores: str | None, on: str = H0) -> Running:
    return Running(name, replica, on, CoreRange.parse(cores) if cores else None)


def why(drawn: Plan) -> list[str]:
    return [f"{problem.id}: {problem.what}" for unplaced in drawn.unplaced for problem in unplaced.problems]


def test_largest_replicas_take_aligned_blocks_first() -> None:
    """Written smallest first, placed largest first, listed in the order of the spec."""
    wish = spec(model("one"), model("two", 2, replicas=2), model("eight", 8))
    assert places(planned(wish)) == [
        ("one/0", H0, "12"),
        ("two/0", H0, "8-9"),
        ("two/1", H0, "10-11"),
        ("eight/0", H0, "0-7"),
    ]


def test_pins_are_exact() -> None:
    """Pinned replicas get their ranges, others go around them."""
    wish = spec(model("a", 8, replicas=2), model("b", 8, "8-15"))
    assert places(planned(wish)) == [("a/0", H0, "0-7"), ("a/1", H0, "16-23"), ("b/0", H0, "8-15")]


def test_replicas_beyond_the_pins_go_anywhere() -> None:
    """Fewer pins than replicas leave the rest free."""
    wish = spec(model("a", 8, "16-23", replicas=2))
    assert places(planned(wish)) == [("a/0", H0, "16-23"), ("a/1", H0, "0-7")]


def test_pins_with_and_without_a_host() -> None:
    """A pin without a host goes where the others leave its range free."""
    wish = spec(model("a", 8, "0-7"), model("b", 8, f"{H0}:0-7"), count=2)
    assert places(planned(wish)) == [("a/0", H1, "0-7"), ("b/0", H0, "0-7")]


def test_an_unaligned_window_is_better_than_none() -> None:
    """Because of the reserve only 2-9 and 10-17 are left for two replicas of tp 8."""
    wish = spec(model("a", 8, replicas=2), cores=[0, 1, "18-23"])
    assert places(planned(wish)) == [("a/0", H0, "2-9"), ("a/1", H0, "10-17")]


def test_preferred_alignment_is_dropped_if_it_would_cost_a_replica() -> None:
    """4-7 and 8-11 are preferred for tp 4, and would leave the third without a place in 2-13."""
    wish = spec(model("a", 4, replicas=3), cores=[0, 1, "14-23"])
    assert places(planned(wish)) == [("a/0", H0, "10-13"), ("a/1", H0, "2-5"), ("a/2", H0, "6-9")]


def test_the_shortest_free_run_that_fits_is_used() -> None:
    """Two free cores between pins are used before the long run is broken."""
    wish = spec(model("a", 8, "0-7"), model("b", 4, "10-13"), model("c", 2))
    assert places(planned(wish))[2] == ("c/0", H0, "8-9")


def test_a_lower_priority_never_costs_a_higher_one() -> None:
    """The large model of lower priority waits."""
    wish = spec(model("big", 24), model("small", 1, priority=1))
    drawn = planned(wish)
    assert (places(drawn), [unplaced.model for unplaced in drawn.unplaced]) == ([("small/0", H0, "0")], ["big"])


def test_a_lower_priority_fits_around_a_higher_one() -> None:
    """The small replica of higher priority gets two cores, where the large ones still fit."""
    wish = spec(model("small", 2, priority=1), model("big", 12, replicas=1), model("more", 8))
    assert places(planned(wish)) == [("small/0", H0, "8-9"), ("big/0", H0, "12-23"), ("more/0", H0, "0-7")]


def test_inside_a_class_most_cores_served_win() -> None:
    """Three of tp 8 serve 24 cores, one of tp 12 and one of tp 8 only 20."""
    drawn = planned(spec(model("twelve", 12), model("eight", 8, replicas=3)))
    assert (len(drawn.placements), [unplaced.model for unplaced in drawn.unplaced]) == (3, ["twelve"])


def test_every_model_gets_its_first_replica_before_any_gets_its_second() -> None:
    """Three blocks for two models that want three each."""
    drawn = planned(spec(model("a", 8, replicas=3), model("b", 8, replicas=3)))
    assert [place[0] for place in places(drawn)] == ["a/0", "a/1", "b/0"]


def test_replicas_within_min_precede_those_beyond_it() -> None:
    """More replicas than min are wanted of a; b's min is served first."""
    wish = spec(model("a", 8, replicas={"min": 1, "max": 3}), model("b", 8, replicas=2))
    assert [place[0] for place in places(planned(wish, wanted={"a": 3}))] == ["a/0", "b/0", "b/1"]


def test_min_is_placed_unless_another_number_is_wanted() -> None:
    """wanted counts up to max, and min does not override it."""
    wish = spec(model("a", 2, replicas={"min": 1, "max": 3}))
    numbers = [len(planned(wish, wanted=wanted).placements) for wanted in ({}, {"a": 2}, {"a": 9}, {"a": 0}, {"a": -1})]
    assert numbers == [1, 2, 3, 0, 0]


def test_the_refusal_names_the_dimension_and_the_numbers() -> None:
    """How many cores, where the longest free run is, and how long."""
    wish = spec(model("a", 2, "0-1"), model("b", 8, "8-15"), model("c", 8, "16-23"), model("d", 8))
    assert why(planned(wish)) == [
        "no-room: d/0 needs 8 contiguous cores, the longest free run on inf2.48xlarge/0 is 6 (2-7)"
    ]


@pytest.mark.parametrize(
    ("wish", "text"),
    [
        (
            spec(model("a", 8), cores=[0, 2, 11, 13, 15, 22]),
            "a/0 needs 8 contiguous cores that begin at a multiple of 2, "
            "the longest free run on inf2.48xlarge/0 is 8 (3-10)",
        ),
        (spec(model("a"), cores=["0-23"]), "a/0 needs 1 core, but none is free on inf2.48xlarge/0"),
        (spec(model("a"), cores=["0-23"], count=2), "a/0 needs 1 core, but none is free on any of 2 hosts"),
        (
            spec(model("a", 8), cores=["0-3", "8-23"], count=2),
            "a/0 needs 8 contiguous cores, the longest free run on inf2.48xlarge/0 is 4 (4-7), the longest of 2 hosts",
        ),
    ],
)
def test_refusals_fit_the_case(wish: Spec, text: str) -> None:
    """Alignment, no core at all, several hosts."""
    assert why(planned(wish)) == [f"no-room: {text}"]


def test_a_missing_core_is_reported() -> None:
    """A Neuron engine on a plain CPU host."""
    drawn = plan(Spec(models=(model("a", 8, engine="nxd-inference"),)), [PLAIN])
    assert why(drawn) == ["no-room: a/0 needs 8 cores, but no host has NeuronCores"]


def test_running_replicas_stay() -> None:
    """Anywhere, as long as they match the spec; new ones are placed around them."""
    wish = spec(model("a", 8), model("b", 8, replicas=2))
    drawn = planned(wish, running=[runs("b", 1, "2-9"), runs("a", 0, "10-17")])
    assert (places(drawn), why(drawn)) == (
        [("a/0", H0, "10-17"), ("b/1", H0, "2-9")],
        ["no-room: b/0 needs 8 contiguous cores, the longest free run on inf2.48xlarge/0 is 6 (18-23)"],
    )


@pytest.mark.parametrize(
    "running",
    [
        runs("gone", 0, "0-7"),  # a model that the spec has no more
        runs("a", 0, "0-3"),  # another tp_degree
        runs("a", 0, "0-7", "elsewhere"),
        runs("a", 0, "20-27"),
        runs("a", 0, None),
    ],
)
def test_replicas_that_no_longer_match_the_spec_stop(running: Running) -> None:
    """Their cores count as free, and diff stops them."""
    wish = spec(model("a", 8, "0-7"))
    drawn = planned(wish, running=[running])
    assert (places(drawn), diff(drawn, [running]).stop) == (
        [("a/0", H0, "0-7")],
        () if running == drawn.placements[0].running else (running,),
    )


def test_a_replica_on_cores_that_became_reserved_ends() -> None:
    """The reserve is the spec's word."""
    drawn = planned(spec(model("a", 8), cores=[0]), running=[runs("a", 0, "0-7")])
    assert places(drawn) == [("a/0", H0, "8-15")]


def test_a_running_replica_outside_its_pin_moves_to_it() -> None:
    """Pins are exact for running replicas, too."""
    running = [runs("a", 0, "8-15")]
    changes = diff(planned(spec(model("a", 8, "0-7")), running=running), running)
    assert ([str(start.cores) for start in changes.start], changes.stop) == (["0-7"], tuple(running))


def test_a_running_replica_on_any_pin_of_its_model_counts_for_that_pin() -> None:
    """Index 0 may be on the second pin; the new replica gets the first."""
    wish = spec(model("a", 8, "0-7", "8-15", replicas=2))
    drawn = planned(wish, running=[runs("a", 0, "8-15")])
    assert places(drawn) == [("a/0", H0, "8-15"), ("a/1", H0, "0-7")]


def test_scaling_down_keeps_the_lowest_indices() -> None:
    """The last started ends first."""
    wish = spec(model("a", 2, replicas={"min": 1, "max": 3}))
    running = [runs("a", 2, "4-5"), runs("a", 0, "0-1"), runs("a", 1, "2-3")]
    assert places(planned(wish, running=running, wanted={"a": 2})) == [("a/0", H0, "0-1"), ("a/1", H0, "2-3")]


def test_scaling_up_takes_the_lowest_unused_index() -> None:
    """A gap is filled."""
    wish = spec(model("a", 2, replicas=3))
    drawn = planned(wish, running=[runs("a", 0, "0-1"), runs("a", 2, "4-5")])
    assert places(drawn)[1] == ("a/1", H0, "2-3")


def test_only_one_of_two_replicas_on_one_core_is_kept() -> None:
    """An impossible observation does not give an impossible plan."""
    wish = spec(model("a", 2, replicas=1), model("b", 2, replicas=1))
    drawn = planned(wish, running=[runs("a", 0, "0-1"), runs("b", 0, "0-1")])
    assert places(drawn) == [("a/0", H0, "0-1"), ("b/0", H0, "2-3")]


def test_one_index_runs_once() -> None:
    """Two replicas of one index are not both kept."""
    drawn = planned(spec(model("a", 2, replicas=2)), running=[runs("a", 0, "0-1"), runs("a", 0, "4-5")])
    assert places(drawn) == [("a/0", H0, "0-1"), ("a/1", H0, "2-3")]


def test_quarantined_cores_are_not_used() -> None:
    """The replica is placed elsewhere."""
    drawn = planned(spec(model("a", 8)), blocked={H0: frozenset({3})})
    assert places(drawn) == [("a/0", H0, "8-15")]


def test_a_replica_that_runs_on_a_core_quarantined_later_stays() -> None:
    """It holds the core; only new replicas keep off."""
    drawn = planned(spec(model("a", 8)), running=[runs("a", 0, "0-7")], blocked={H0: frozenset({3})})
    assert places(drawn) == [("a/0", H0, "0-7")]


def test_a_pin_on_a_quarantined_core_is_not_moved() -> None:
    """The refusal names the core and the place of the pin."""
    drawn = planned(spec(model("a", 8, "0-7")), blocked={H0: frozenset({3, 5})})
    assert why(drawn) == ["pin-taken: a/0 is pinned to cores 0-7, but on inf2.48xlarge/0 3, 5 are withheld"]


def test_a_pin_in_use_by_another_replica_waits() -> None:
    """Running replicas never move for it; the message has the replicas and their cores."""
    wish = spec(model("a", 8, f"{H0}:0-7"), model("b", 8))
    drawn = planned(wish, running=[runs("b", 0, "4-11")])
    assert why(drawn) == [
        "pin-taken: a/0 is pinned to cores 0-7 of inf2.48xlarge/0, but on inf2.48xlarge/0 b/0 holds 4-7"
    ]


def test_new_replicas_avoid_unused_pins() -> None:
    """A pinned model with min 0 finds its cores free at its first request."""
    asleep = model("asleep", 8, "0-7", replicas={"min": 0, "max": 1})
    wish = spec(asleep, model("b", 8), model("c", 8))
    assert places(planned(wish)) == [("b/0", H0, "8-15"), ("c/0", H0, "16-23")]


def test_unused_pins_are_used_before_a_replica_is_rejected() -> None:
    """Their model does not run."""
    wish = spec(model("asleep", 8, "0-7", replicas={"min": 0, "max": 1}), model("b", 8, replicas=3))
    assert places(planned(wish))[2] == ("b/2", H0, "0-7")


def test_replicas_missed_by_a_bounded_search_are_placed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that gives up affects the order, but not replicas that have room."""
    monkeypatch.setattr("placements.planner.pins.SEARCH_STEPS", 0)
    monkeypatch.setattr("placements.planner.packer.TRIES", (1,))
    wish = spec(model("a", 2, "0-1"), model("b", 2, "0-1"), model("c", 12), model("d", 8), count=2)
    drawn = planned(wish)
    assert (drawn.unplaced, places(drawn)[:2]) == ((), [("a/0", H0, "0-1"), ("b/0", H1, "0-1")])


def test_a_cpu_replica_of_a_real_host_uses_no_cores() -> None:
    """cores is null; such replicas are spread by threads, and their number is not limited."""
    wish = spec(model("a", 8, engine="cpu", replicas=3), count=2)
    assert [(p.host, p.cores, p.cpus) for p in planned(wish).placements] == [
        (H0, None, ()),
        (H1, None, ()),
        (H0, None, ()),
    ]


def test_a_running_replica_without_cores_stays_on_its_host() -> None:
    """On the second host, it does not move to the first."""
    wish = spec(model("a", engine="cpu"), count=2)
    assert places(planned(wish, running=[runs("a", 0, None, H1)])) == [("a/0", H1, "None")]


def test_a_plain_cpu_host_serves_cpu_models() -> None:
    """No topology, no cores."""
    drawn = plan(Spec(models=(model("a", 2),)), [PLAIN])
    assert [(p.host, p.cores, p.threads) for p in drawn.placements] == [("plain", None, 2)]


def test_threads_and_masks_come_from_the_host() -> None:
    """The share of the range, and its CPUs: on nodes 1, 2 and 3, as its devices 4 to 7."""
    (placement,) = planned(spec(model("a", 8, "8-15"))).placements
    assert (placement.threads, cpu_list(placement.cpus)) == (60, "25-39,64-71,88-95,121-135,160-167,184-191")


def test_starting_one_replica_never_changes_another_s_threads() -> None:
    """Threads depend on the host and the degree only."""
    alone, together = planned(spec(model("a", 8))), planned(spec(model("a", 8), model("b", 8), model("c", 8)))
    assert together.placements[0] == alone.placements[0]


def test_memory_on_one_host_and_cpus_on_another_place_nothing() -> None:
    hosts = [replace(host(), memory_gib=10.0), replace(host(i=1, cpus=4, reserve=0), memory_gib=768.0)]
    drawn = plan(Spec(models=(model("a", 2, threads=10, host_memory_gib=50.0),)), hosts)
    assert why(drawn) == ["no-room: a/0 needs cores, memory and CPUs that no host has free together"]


def test_the_json_of_a_plan() -> None:
    """Exactly these keys; cores equals NEURON_RT_VISIBLE_CORES."""
    drawn = plan(Spec(models=(model("a", 2), model("b", 24))), [host(emulated=True, cpus=2, reserve=0)])
    drawn = Plan(drawn.placements[:1], (Unplaced("c", 1, (Problem("no-room", "error", "f:1:1", "x", "y"),)),), ())
    assert json.loads(json.dumps(drawn.as_dict())) == {
        "placements": [
            {
                "model": "b",
                "replica": 0,
                "host": H0,
                "cores": "0-23",
                "threads": 2,
                "env": {
                    "COREWRIGHT_CPUS": "0-1",
                    "NEURON_PROCESS_TAG": "b/0",
                    "NEURON_RT_VISIBLE_CORES": "0-23",
                    "OMP_NUM_THREADS": "2",
                    "OMP_WAIT_POLICY": "PASSIVE",
                    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            }
        ],
        "unplaced": [
            {
                "model": "c",
                "replica": 1,
                "problems": [{"id": "no-room", "severity": "error", "where": "f:1:1", "what": "x", "hint": "y"}],
            }
        ],
        "moves": [],
        "problems": [],
    }


def test_a_replica_without_cores_is_null_in_json() -> None:
    """cores: null."""
    assert planned(spec(model("a", engine="cpu"))).as_dict()["placements"][0]["cores"] is None


def test_a_rejected_plan_has_only_problems() -> None:
    """A spec with errors places nothing."""
    problem = Problem("x", "error", "", "x")
    assert not Plan(problems=(problem,)).complete


def test_a_plan_is_complete_when_min_is_placed() -> None:
    """A replica beyond min that does not fit is a warning."""
    wish = spec(model("a", 8, replicas={"min": 3, "max": 4}))
    drawn = planned(wish, wanted={"a": 4})
    severities = [problem.severity for unplaced in drawn.unplaced for problem in unplaced.problems]
    assert (drawn.complete, severities) == (True, ["warning"])


def test_a_plan_without_its_min_is_not_complete() -> None:
    """The missing replica is an error."""
    assert planned(spec(model("a", 8, replicas=4))).complete is False


def test_findings_about_the_spec_join_the_plan() -> None:
    """with_problems keeps all else."""
    drawn, warning = planned(spec(model("a"))), Problem("x", "warning", "", "x")
    assert drawn.with_problems([warning]) == Plan(drawn.placements, drawn.unplaced, (warning,))


def test_the_diff_of_a_running_plan_is_empty() -> None:
    """Exit code 0 of `plan`."""
    drawn = planned(spec(model("a", 8), model("b", 2, replicas=2)))
    assert not diff(drawn, [placement.running for placement in drawn.placements])


def test_diff_of_an_empty_fleet_starts_everything() -> None:
    """Exit code 2 of `plan`."""
    drawn = planned(spec(model("a", 8)))
    assert (diff(drawn, []).start, diff(drawn, []).stop) == (drawn.placements, ())


def test_among_equal_hosts_the_one_with_the_model_is_used() -> None:
    """Two new replicas exchange their places if that brings one to its model; a pin is fixed."""
    held = {H0: frozenset({"y"}), H1: frozenset({"x"})}
    alone = spec(model("x", 8), count=2)
    assert places(planned(alone, held=held)) == [("x/0", H1, "0-7")]
    full = spec(model("x", 24), model("y", 24), count=2)
    assert places(planned(full)) == [("x/0", H0, "0-23"), ("y/0", H1, "0-23")]
    assert places(planned(full, held=held)) == [("x/0", H1, "0-23"), ("y/0", H0, "0-23")]
    pinned = spec(model("x", 8, f"{H0}:0-7"), count=2)
    assert places(planned(pinned, held=held)) == [("x/0", H0, "0-7")]


def test_a_host_that_holds_the_model_is_not_worth_a_larger_range() -> None:
    """It would cost the only range of 24 cores that is left."""
    wish = spec(model("big", 12), model("x", 2), count=2)
    assert places(planned(wish, held={H1: frozenset({"x"})})) == [("big/0", H0, "0-11"), ("x/0", H0, "12-13")]


def test_running_replicas_stay_although_another_host_has_their_model() -> None:
    """A move costs more than a completed fetch."""
    wish = spec(model("x", 8), count=2)
    drawn = planned(wish, held={H1: frozenset({"x"})}, running=[runs("x", 0, "8-15")])
    assert places(drawn) == [("x/0", H0, "8-15")]
