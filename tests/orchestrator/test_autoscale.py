"""The autoscaler: one decision over all models that share cores."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import pytest

from orchestrator.autoscale import FleetNow, History, Load, ModelNow, Objectives, Targets, autoscale
from orchestrator.queueing import delayed, occupied

HOST = (24, 0.0)


def chat(name: str = "chat", **fields: object) -> ModelNow:
    """A model of 8 cores and 4 slots that has served for long."""
    known = ModelNow(
        name=name,
        cores=8,
        slots=4,
        min=0,
        max=8,
        load_s=30.0,
        since=0.0,
        idle_s=1e6,
        first_ready_at=0.0,
        objectives=Objectives(5.0),
    )
    model = replace(known, **fields)  # type: ignore[arg-type]
    return replace(model, ready=model.target - model.starting)


def busy(
    loads: Mapping[str, float], seconds: float = 600.0, history: History | None = None, at: float = 0.0
) -> History:
    """So many requests a second of 8 s, for that time: reports every 5 s."""
    known = history or History()
    for tick in range(1, int(seconds / 5.0) + 1):
        counts = {name: round(rate * 5.0 * tick) - round(rate * 5.0 * (tick - 1)) for name, rate in loads.items()}
        known = known.after(
            at + 5.0 * tick,
            {name: Load(5.0, arrived=n, ended=n, slot_s=8.0 * n, first_tokens=n) for name, n in counts.items()},
        )
    return known


def decide(history: History, *models: ModelNow, now: float = 1000.0, hosts: int = 1) -> Targets:
    return autoscale(history, FleetNow(models, (HOST,) * hosts), now)


def test_a_model_whose_slots_do_not_suffice_grows_by_one_and_says_why() -> None:
    """Growth is one replica at a time, and its reason has the numbers."""
    targets = decide(busy({"chat": 1.0}), chat(target=1))
    assert targets.counts == {"chat": 2}
    assert "1 to 2: 1.00 requests a second of" in targets.reasons["chat"]
    assert "on 8 free cores" in targets.reasons["chat"]


def test_an_idle_replica_stays_while_nobody_needs_its_cores() -> None:
    """Cores that nobody asks for are kept warm."""
    history = busy({"chat": 0.0}, 300.0, busy({"chat": 1.0}), 600.0)
    assert decide(history, chat(target=3, max=3, idle_s=900.0), now=900.0).counts == {"chat": 3}


def test_an_idle_model_gives_its_cores_to_one_that_serves_more_there() -> None:
    """An idle replica ends as soon as another model serves more on its cores, with a reason for both."""
    history = busy({"chat": 0.0, "code": 2.0}, 600.0, busy({"chat": 0.2, "code": 2.0}, 60.0), 60.0)
    targets = decide(history, chat(target=1), chat("code", target=2, cores=8))
    assert targets.counts == {"chat": 0, "code": 3}
    assert "1 to 0: its cores serve more for code" in targets.reasons["chat"]
    assert "on the cores of 1 replica that served less" in targets.reasons["code"]


def test_a_replica_stays_for_twice_its_load_time() -> None:
    """Nobody gets the cores of a replica that has just become ready."""
    history = busy({"chat": 0.0, "code": 2.0})
    kept = decide(history, chat(target=1, since=950.0), chat("code", target=2))
    assert kept.counts == {"chat": 1, "code": 2}
    assert kept.reasons["code"].startswith("held back: no cores that serve less elsewhere")


def test_a_replica_that_starts_costs_nobody_its_start() -> None:
    """What loads is not ended for another model."""
    history = busy({"chat": 0.0, "code": 2.0})
    assert decide(history, chat(target=1, starting=1), chat("code", target=2)).counts == {"chat": 1, "code": 2}


def test_two_models_with_the_same_demand_do_not_take_each_other_s_cores() -> None:
    """What is gained elsewhere must be clearly more than what is lost."""
    history = busy({"chat": 0.3, "code": 0.3})
    assert decide(history, chat(target=1), chat("code", target=2)).counts == {"chat": 1, "code": 2}


def test_at_most_two_replicas_end_for_others_in_one_decision() -> None:
    """A large change takes several decisions."""
    idle = [chat(f"idle-{i}", target=1) for i in range(6)]
    eager = [chat(f"eager-{i}", target=0) for i in range(6)]
    history = busy({f"eager-{i}": 2.0 for i in range(6)})
    targets = decide(history, *idle, *eager, hosts=2)
    assert sum(targets.counts[one.name] for one in idle) == 4
    assert sum(targets.counts[one.name] for one in eager) == 2


def test_the_first_request_wakes_a_model_at_zero() -> None:
    """One request that waits is enough, and it wakes one replica."""
    history = History().after(1000.0, {"chat": Load(1.0, arrived=1, cold=1, waiting=1, longest_wait_s=0.1)})
    targets = decide(history, chat(target=0, since=None, first_ready_at=None))
    assert targets.counts == {"chat": 1}
    assert "the first requests wake it" in targets.reasons["chat"]


def test_requests_that_each_give_up_wait_together() -> None:
    """Where each is refused after 20 s, a model that serves none for a minute still goes before the second replicas of
    others; one that was served meanwhile, or that nobody asks any more, does not."""
    history = busy({"hot": 1.0, "cold": 0.0}, 300.0)
    models = chat("hot", target=3), chat("cold", target=0, since=None, first_ready_at=None)
    first_woken = None
    for tick in range(1, 25):
        now = 300.0 + 5.0 * tick
        comes = tick % 5 != 0  # after 20 s of waiting 5 s without a request
        cold = Load(5.0, arrived=int(tick % 5 == 1), waiting=int(comes), longest_wait_s=5.0 * (tick % 5))
        history = history.after(now, {"hot": Load(5.0, arrived=5, ended=5, slot_s=40.0, live=8), "cold": cold})
        if first_woken is None and comes and decide(history, *models, now=now).counts["cold"]:
            first_woken = now
    assert first_woken is not None
    assert 360.0 <= first_woken <= 370.0
    served = history.after(425.0, {"cold": Load(5.0, arrived=1, ended=1)})
    assert served.unserved_s("cold", 425.0) == 0.0
    silent = history
    for tick in range(15):
        silent = silent.after(425.0 + 5.0 * tick, {"cold": Load(5.0)})
    assert silent.unserved_s("cold", 500.0) == 0.0


def test_a_model_that_wakes_does_not_jump_to_its_max() -> None:
    """While none of its replicas is ready, the first burst's samples start two of them at most."""
    history, target = History(), 0
    for tick in range(1, 7):
        history = history.after(5.0 * tick, {"chat": Load(5.0, arrived=100, cold=100, waiting=100 * tick)})
        model = chat(target=target, starting=target, since=5.0 * tick, first_ready_at=None)
        target = decide(history, model, now=5.0 * tick, hosts=4).counts["chat"]
    assert target == 2


def test_a_model_nobody_asks_goes_to_zero_after_its_idle_time() -> None:
    """Only requests count, and the clock starts when a replica was ready first."""
    model = chat(target=1, idle_s=600.0, first_ready_at=500.0)
    assert decide(History(), model, now=1000.0).counts == {"chat": 1}
    gone = decide(History(), model, now=1101.0)
    assert gone.counts == {"chat": 0}
    assert gone.reasons["chat"] == "1 to 0: no request for 601 s, and its idle_s is 600"


def test_a_model_with_a_min_never_goes_to_zero() -> None:
    """Idle time is for models of min 0."""
    assert decide(History(), chat(target=2, min=1, idle_s=60.0), now=5000.0).counts["chat"] == 2


def test_what_somebody_has_scaled_by_hand_stays() -> None:
    """An override goes over demand, idle time and min."""
    history = busy({"chat": 3.0})
    assert decide(history, chat(target=1, min=2, override=1)).counts == {"chat": 1}
    assert decide(History(), chat(target=1, override=1, idle_s=1.0), now=5000.0).counts == {"chat": 1}
    assert decide(history, chat(target=1, override=0)).reasons["chat"] == "1 to 0: scaled by hand"


def test_a_schedule_that_raises_min_starts_replicas() -> None:
    """Min and max hold as they are now, whatever the demand."""
    assert decide(History(), chat(target=1, min=3, max=3)).counts == {"chat": 3}
    assert decide(busy({"chat": 3.0}), chat(target=3, max=1)).counts == {"chat": 1}


def test_a_higher_priority_takes_what_it_needs_from_a_lower_one() -> None:
    """Strictly: even where the lower one would serve more there, and even below its min."""
    history = busy({"vip": 1.0, "bulk": 3.0})
    targets = decide(history, chat("vip", target=1, priority=1), chat("bulk", target=2, min=2))
    assert targets.counts == {"vip": 2, "bulk": 1}


def test_a_lower_priority_gets_only_what_a_higher_one_does_not_need() -> None:
    """A flood of a lower priority costs a higher one none of the replicas that its load does not fit without."""
    history = busy({"vip": 0.5, "bulk": 9.0})
    targets = decide(history, chat("vip", target=2, priority=1), chat("bulk", target=1))
    assert targets.counts["vip"] >= 2


def test_a_min_goes_before_what_others_of_the_priority_have_beyond_theirs() -> None:
    """A model without its min gets cores from one above its own, whatever that one serves."""
    targets = decide(busy({"code": 3.0}), chat(target=0, min=1), chat("code", target=3))
    assert targets.counts == {"chat": 1, "code": 2}


def test_cores_that_cost_are_taken_only_where_it_pays() -> None:
    """On a host with a price a replica starts only for requests that are worth it, and it ends first."""
    history = busy({"chat": 1.0})
    places = ((0, 0), (0, 8), (0, 16))
    hosts = (HOST, (24, 2.0))
    full = chat(target=3, places=places)
    load = busy({"chat": 2.5})

    def count(model: ModelNow, known: History) -> int:
        return autoscale(known, FleetNow((model,), hosts), 1000.0).counts["chat"]

    assert count(full, load) == 4
    assert count(replace(full, worth_per_1000=1.0), load) == 3
    assert count(replace(full, worth_per_1000=500.0), load) == 4
    paid = replace(full, target=4, ready=4, places=(*places, (1, 0)))
    assert count(replace(paid, worth_per_1000=1.0), history) == 3
    assert count(paid, busy({"chat": 0.05})) == 3


def test_room_in_pieces_is_no_room() -> None:
    """Cores that are free but not in a row take no replica: the target waits."""
    small = [chat(f"small-{i}", target=1, cores=4, min=1, max=1, places=((0, 8 * i),)) for i in range(3)]
    targets = decide(busy({"chat": 1.0}), chat(target=0), *small)
    assert targets.counts["chat"] == 0
    assert targets.reasons["chat"].startswith("held back")


def test_a_model_that_the_planner_finds_no_room_for_does_not_grow_further() -> None:
    """What the planner could not place counts."""
    assert decide(busy({"chat": 3.0}), chat(target=2, reachable=1), hosts=2).counts == {"chat": 2}


def test_when_a_host_is_lost_the_targets_fit_what_is_left() -> None:
    """Cut from the lowest priority, what is beyond min first."""
    targets = decide(History(), chat("a", target=2, min=1), chat("b", target=2, min=1, priority=1), chat("c", target=2))
    assert targets.counts == {"a": 1, "b": 2, "c": 0}


def test_models_without_cores_share_none() -> None:
    """A model on the CPU grows whatever the cores are."""
    assert decide(busy({"chat": 1.0}), chat(target=1, cores=0), hosts=0).counts == {"chat": 2}


def test_a_steady_burst_is_told_from_noise() -> None:
    """A short average is believed as far as it is off the longer ones by more than chance."""
    quiet = busy({"chat": 0.2}, 1800.0)
    once = quiet.after(1805.0, {"chat": Load(5.0, arrived=4)}).forecast("chat")
    often = busy({"chat": 3.0}, 60.0, quiet, 1800.0).forecast("chat")
    assert once.rates[0] < 0.3
    assert often.rates[0] > 2.0


def test_service_times_are_those_of_requests_that_ended() -> None:
    """The prior fades with what is measured."""
    assert busy({"chat": 1.0}).forecast("chat").service_s == pytest.approx(8.0, abs=0.1)


def test_more_slots_serve_more_and_the_gain_falls() -> None:
    """Slots in use grow with the slots, ever less, up to the load."""
    used = [occupied(10.0, 4.0, slots) for slots in range(0, 60, 4)]
    steps = [b - a for a, b in itertools.pairwise(used)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)
    assert used[-1] == pytest.approx(10.0, abs=0.1)


def test_bursty_arrivals_wait_more_often() -> None:
    """The same load on the same slots: the burstier, the more are late; all of them, where the slots do not suffice."""
    late = [delayed(10.0, z, 16.0, 8.0, 2.0) for z in (1.0, 4.0, 8.0)]
    assert late == sorted(late)
    assert 0.0 < late[0] < late[-1] < 1.0
    assert delayed(17.0, 1.0, 16.0, 8.0, 2.0) == 1.0
