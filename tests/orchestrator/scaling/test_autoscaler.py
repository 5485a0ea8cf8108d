"""The autoscaler: one decision over all models that share cores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from orchestrator.scaling.autoscaler import FleetNow, History, Load, ModelNow, Targets, autoscale
from orchestrator.scaling.service_capacity import ServiceCapacity, delayed, occupied
from placements.facts.topology import TOPOLOGIES, Host
from placements.planner.board import Demand
from placements.planner.capacity import Need
from placements.planner.host_pool import HostPool
from placements.spec.sections import Objectives
from tests.orchestrator.scaling.pools import need_of, pool_of

HOST = (24, 0.0)


def chat(name: str = "chat", cores: int = 8, **fields: object) -> ModelNow:
    """A model of 4 slots that has served for long."""
    known = ModelNow(
        name=name,
        need=need_of(cores),
        slots=4,
        min=0,
        max=8,
        load_s=30.0,
        since=0.0,
        idle_s=1e6,
        first_ready_at=0.0,
        objectives=Objectives(ttft_ms=5000.0),
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
            {name: Load(5.0, arrived=n, ended=n, slot_s=8.0 * n) for name, n in counts.items()},
        )
    return known


def decide(history: History, *models: ModelNow, now: float = 1000.0, hosts: int = 1) -> Targets:
    return autoscale(history, FleetNow(models, pool_of(*(HOST,) * hosts)), now)


def test_a_model_without_enough_slots_grows_by_one_replica_with_a_reason() -> None:
    """The reason has the numbers."""
    targets = decide(busy({"chat": 1.0}), chat(target=1))
    assert targets.counts == {"chat": 2}
    assert "1 to 2: 1.00 requests per second of" in targets.reasons["chat"]
    assert "on 8 free cores" in targets.reasons["chat"]


def test_an_idle_replica_stays_until_its_cores_are_needed() -> None:
    history = busy({"chat": 0.0}, 300.0, busy({"chat": 1.0}), 600.0)
    assert decide(history, chat(target=3, max=3, idle_s=900.0), now=900.0).counts == {"chat": 3}


def test_an_idle_model_loses_its_cores_to_one_that_serves_more_there() -> None:
    """Both changes have a reason."""
    history = busy({"chat": 0.0, "code": 2.0}, 600.0, busy({"chat": 0.2, "code": 2.0}, 60.0), 60.0)
    targets = decide(history, chat(target=1), chat("code", target=2, cores=8))
    assert targets.counts == {"chat": 0, "code": 3}
    assert "1 to 0: its cores serve more requests for code" in targets.reasons["chat"]
    assert "on the cores of 1 replica that served less" in targets.reasons["code"]


def test_a_replica_stays_for_twice_its_load_time() -> None:
    """A replica that has just become ready is not removed for another model."""
    history = busy({"chat": 0.0, "code": 2.0})
    kept = decide(history, chat(target=1, since=950.0), chat("code", target=2))
    assert kept.counts == {"chat": 1, "code": 2}
    assert kept.reasons["code"].startswith("held back: no cores that serve less elsewhere")


def test_a_loading_replica_is_not_removed_for_another_model() -> None:
    history = busy({"chat": 0.0, "code": 2.0})
    assert decide(history, chat(target=1, starting=1), chat("code", target=2)).counts == {"chat": 1, "code": 2}


def test_two_models_with_equal_demand_do_not_take_cores_from_each_other() -> None:
    """The gain must clearly exceed the loss."""
    history = busy({"chat": 0.3, "code": 0.3})
    assert decide(history, chat(target=1), chat("code", target=2)).counts == {"chat": 1, "code": 2}


def test_at_most_four_replicas_are_removed_for_others_in_one_decision() -> None:
    """A large change takes several decisions."""
    idle = [chat(f"idle-{i}", target=1) for i in range(6)]
    eager = [chat(f"eager-{i}", target=0) for i in range(6)]
    history = busy({f"eager-{i}": 2.0 for i in range(6)})
    targets = decide(history, *idle, *eager, hosts=2)
    assert sum(targets.counts[model.name] for model in idle) == 2
    assert sum(targets.counts[model.name] for model in eager) == 4


def test_the_first_request_wakes_a_model_at_zero() -> None:
    """One request that waits is enough, and it wakes one replica."""
    history = History().after(1000.0, {"chat": Load(1.0, arrived=1, waiting=1, longest_wait_s=0.1)})
    targets = decide(history, chat(target=0, since=None, first_ready_at=None))
    assert targets.counts == {"chat": 1}
    assert "started for waiting requests" in targets.reasons["chat"]


def test_requests_that_gave_up_count_as_one_long_wait() -> None:
    """If each is rejected after 20 s, a model without replicas for five minutes still comes before second replicas of
    others; a model that was served meanwhile, or has no more requests, does not.
    """
    history = busy({"hot": 1.0, "cold": 0.0}, 300.0)
    models = chat("hot", target=3), chat("cold", target=0, since=None, first_ready_at=None)
    first_woken = None
    for tick in range(1, 75):
        now = 300.0 + 5.0 * tick
        comes = tick % 5 != 0  # after 20 s of waiting 5 s without a request
        cold = Load(5.0, arrived=int(tick % 5 == 1), waiting=int(comes), longest_wait_s=5.0 * (tick % 5))
        history = history.after(now, {"hot": Load(5.0, arrived=5, ended=5, slot_s=40.0, live=8), "cold": cold})
        if first_woken is None and comes and decide(history, *models, now=now).counts["cold"]:
            first_woken = now
    assert first_woken is not None
    assert 600.0 <= first_woken <= 610.0
    served = history.after(675.0, {"cold": Load(5.0, arrived=1, ended=1)})
    assert served.course("cold").unserved_s(675.0) == 0.0
    silent = history
    for tick in range(15):
        silent = silent.after(675.0 + 5.0 * tick, {"cold": Load(5.0)})
    assert silent.course("cold").unserved_s(750.0) == 0.0


def test_a_starting_model_does_not_jump_to_its_max() -> None:
    """While none of its replicas is ready, the first burst starts at most two of them."""
    history, target = History(), 0
    for tick in range(1, 7):
        history = history.after(5.0 * tick, {"chat": Load(5.0, arrived=100, waiting=100 * tick)})
        model = chat(target=target, starting=target, since=5.0 * tick, first_ready_at=None)
        target = decide(history, model, now=5.0 * tick, hosts=4).counts["chat"]
    assert target == 2


def test_a_model_without_requests_scales_to_zero_after_its_idle_time() -> None:
    """Only requests count, and the time starts with its first ready replica."""
    model = chat(target=1, idle_s=600.0, first_ready_at=500.0)
    assert decide(History(), model, now=1000.0).counts == {"chat": 1}
    gone = decide(History(), model, now=1101.0)
    assert gone.counts == {"chat": 0}
    assert gone.reasons["chat"] == "1 to 0: no request for 601 s (idle_s 600)"


def test_a_model_with_a_min_never_scales_to_zero() -> None:
    """Idle time applies to models with min 0."""
    assert decide(History(), chat(target=2, min=1, idle_s=60.0), now=5000.0).counts["chat"] == 2


def test_a_manual_scale_overrides_the_autoscaler() -> None:
    """It takes precedence over demand, idle time and min."""
    history = busy({"chat": 3.0})
    assert decide(history, chat(target=1, min=2, override=1)).counts == {"chat": 1}
    assert decide(History(), chat(target=1, override=1, idle_s=1.0), now=5000.0).counts == {"chat": 1}
    assert decide(history, chat(target=1, override=0)).reasons["chat"] == "1 to 0: scaled by an operator"


def test_a_schedule_that_raises_min_starts_replicas() -> None:
    """Min and max hold as they are now, whatever the demand."""
    assert decide(History(), chat(target=1, min=3, max=3)).counts == {"chat": 3}
    assert decide(busy({"chat": 3.0}), chat(target=3, max=1)).counts == {"chat": 1}


def test_a_higher_priority_takes_needed_cores_from_a_lower_one() -> None:
    """Strictly: even if the lower one would serve more there, and even below its min."""
    history = busy({"vip": 1.0, "bulk": 3.0})
    targets = decide(history, chat("vip", target=1, priority=1), chat("bulk", target=2, min=2))
    assert targets.counts == {"vip": 2, "bulk": 1}


def test_a_lower_priority_gets_only_spare_cores_of_a_higher_one() -> None:
    """Its overload never costs a higher priority a replica that its load needs."""
    history = busy({"vip": 0.5, "bulk": 9.0})
    targets = decide(history, chat("vip", target=2, priority=1), chat("bulk", target=1))
    assert targets.counts["vip"] >= 2


def test_a_min_precedes_replicas_beyond_the_min_of_equal_priority() -> None:
    """A model below its min gets cores from one above its own, whatever that one serves."""
    targets = decide(busy({"code": 3.0}), chat(target=0, min=1), chat("code", target=3))
    assert targets.counts == {"chat": 1, "code": 2}


def test_priced_cores_are_used_only_if_they_pay_off() -> None:
    """A replica on a priced host starts only if its requests are worth it, and is removed first."""
    history = busy({"chat": 1.0})
    places = ((0, 0), (0, 8), (0, 16))
    hosts = pool_of(HOST, (24, 2.0))
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


def test_scattered_free_cores_are_not_room() -> None:
    """Free cores that are not contiguous hold no replica: the target waits."""
    small = [chat(f"small-{i}", target=1, cores=4, min=1, max=1, places=((0, 8 * i),)) for i in range(3)]
    targets = decide(busy({"chat": 1.0}), chat(target=0), *small)
    assert targets.counts["chat"] == 0
    assert targets.reasons["chat"].startswith("held back")


def test_a_model_without_room_does_not_grow_further() -> None:
    """As reported by the planner."""
    assert decide(busy({"chat": 3.0}), chat(target=2, reachable=1), hosts=2).counts == {"chat": 2}


def test_after_the_loss_of_a_host_the_targets_fit_the_rest() -> None:
    """They are cut from the lowest priority, beyond min first."""
    targets = decide(History(), chat("a", target=2, min=1), chat("b", target=2, min=1, priority=1), chat("c", target=2))
    assert targets.counts == {"a": 1, "b": 2, "c": 0}


def test_models_without_cores_do_not_compete_for_cores() -> None:
    """A model on the CPU grows regardless of the cores."""
    assert decide(busy({"chat": 1.0}), chat(target=1, cores=0), hosts=0).counts == {"chat": 2}


def test_a_steady_burst_is_distinguished_from_noise() -> None:
    """A short average counts as far as its difference from the longer ones exceeds chance."""
    quiet = busy({"chat": 0.2}, 1800.0)
    once = quiet.after(1805.0, {"chat": Load(5.0, arrived=4)}).course("chat").forecast()
    often = busy({"chat": 3.0}, 60.0, quiet, 1800.0).course("chat").forecast()
    assert once.rates[0] < 0.3
    assert often.rates[0] > 2.0


def test_service_times_are_those_of_requests_that_ended() -> None:
    """The prior fades with what is measured."""
    assert busy({"chat": 1.0}).course("chat").forecast().service_s == pytest.approx(8.0, abs=0.1)


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


# Each rule of docs/scaling.md


def test_the_idle_time_begins_when_the_last_answer_ends() -> None:
    """An answer that took longer than idle_s is inference to its end, not idle time."""
    history = History().after(105.0, {"chat": Load(5.0, arrived=1, live=1)}).after(800.0, {"chat": Load(5.0, live=1)})
    history = history.after(805.0, {"chat": Load(5.0, ended=1, slot_s=700.0)})
    model = chat(target=1, idle_s=600.0)
    assert decide(history, model, now=1400.0).counts == {"chat": 1}
    assert decide(history, model, now=1405.0).counts == {"chat": 0}


def test_a_long_load_is_not_idle_time_for_its_request() -> None:
    """The time starts with the first ready replica, although the last request came earlier."""
    history = History().after(100.0, {"chat": Load(5.0, arrived=1)})
    model = chat(target=1, idle_s=600.0, first_ready_at=500.0)
    assert decide(history, model, now=1099.0).counts == {"chat": 1}
    assert decide(history, model, now=1100.0).counts == {"chat": 0}


def test_a_replica_that_loads_fast_stays_for_its_warm_up() -> None:
    """At least 30 s: until then measurements reflect its start."""
    history = busy({"chat": 0.0, "code": 2.0})
    young, old = chat(target=1, load_s=5.0, since=971.0), chat(target=1, load_s=5.0, since=970.0)
    assert decide(history, young, chat("code", target=2)).counts == {"chat": 1, "code": 2}
    assert decide(history, old, chat("code", target=2)).counts == {"chat": 0, "code": 3}


def test_cores_move_for_more_than_three_times_their_value() -> None:
    """A model that would serve slightly more on another's cores does not get them."""
    models = (chat(target=1), chat("code", target=2))
    assert decide(busy({"chat": 0.4, "code": 1.0}), *models).counts == {"chat": 1, "code": 2}
    assert decide(busy({"chat": 0.1, "code": 1.0}), *models).counts == {"chat": 0, "code": 3}


def test_a_long_load_reduces_the_gain_of_moved_cores() -> None:
    """With the same demand: while a replica loads it serves nothing, and the replaced one would have served."""
    history = busy({"chat": 0.2, "code": 1.5})
    fast, slow = (chat("code", target=2, load_s=load_s) for load_s in (1.0, 60.0))
    assert decide(history, chat(target=1), fast).counts == {"chat": 0, "code": 3}
    assert decide(history, chat(target=1), slow).counts == {"chat": 1, "code": 2}


def test_a_higher_priority_gives_up_a_replica_only_if_its_load_fits_on_one_fewer() -> None:
    """The N-1 test: a model without spare capacity keeps its replicas, even if it does not need more."""
    vip, bulk = chat("vip", target=2, priority=1), chat("bulk", target=1)
    assert decide(busy({"vip": 0.1, "bulk": 1.5}), vip, bulk).counts == {"vip": 1, "bulk": 2}
    assert decide(busy({"vip": 0.25, "bulk": 1.5}), vip, bulk).counts == {"vip": 2, "bulk": 1}


def waited(seconds: float) -> History:
    """One request waits for chat, and code is asked for more than it has."""
    served = Load(5.0, arrived=10, ended=10, slot_s=80.0)
    waits = Load(5.0, waiting=1, longest_wait_s=seconds)
    return busy({"chat": 0.0, "code": 2.0}).after(605.0, {"chat": waits, "code": served})


def test_after_a_minute_of_waiting_a_first_replica_precedes_second_replicas() -> None:
    """Whatever those serve, but not before the only replica of another model."""
    model = chat(target=0)
    assert decide(waited(59.0), model, chat("code", target=3), now=605.0).counts == {"chat": 0, "code": 3}
    assert decide(waited(61.0), model, chat("code", target=3), now=605.0).counts == {"chat": 1, "code": 2}
    alone = autoscale(waited(61.0), FleetNow((model, chat("code", target=1)), pool_of((8, 0.0))), 605.0)
    assert alone.counts == {"chat": 0, "code": 1}


def test_the_last_replica_of_a_model_with_waiting_requests_is_not_removed_for_a_second_one() -> None:
    history = busy({"chat": 0.0, "code": 3.0})
    served = Load(5.0, arrived=15, ended=15, slot_s=120.0)
    models = (chat(target=1), chat("code", target=2))
    waits = history.after(605.0, {"chat": Load(5.0, waiting=1), "code": served})
    quiet = history.after(605.0, {"chat": Load(5.0), "code": served})
    assert decide(waits, *models).counts == {"chat": 1, "code": 2}
    assert decide(quiet, *models).counts == {"chat": 0, "code": 3}


PLACES = ((0, 0), (0, 8), (0, 16))


def on_paid(history: History, model: ModelNow) -> int:
    """With a second host that costs."""
    return autoscale(history, FleetNow((model,), pool_of(HOST, (24, 2.0))), 1000.0).counts["chat"]


def test_without_a_worth_priced_cores_are_used_only_while_the_load_needs_them() -> None:
    """A load that fits on hosts without a price starts no replica there; otherwise the model keeps what it has."""
    full, paid = chat(target=3, places=PLACES), chat(target=4, places=(*PLACES, (1, 0)))
    assert decide(busy({"chat": 0.9}), full, hosts=2).counts["chat"] == 4
    assert on_paid(busy({"chat": 0.9}), full) == 3
    assert on_paid(busy({"chat": 1.2}), paid) == 4


def test_no_capacity_is_spare_while_requests_wait() -> None:
    """Priced cores are not given up then, whatever the forecast."""
    paid = chat(target=4, places=(*PLACES, (1, 0)))
    quiet = busy({"chat": 0.05})
    assert on_paid(quiet.after(605.0, {"chat": Load(5.0)}), paid) == 3
    assert on_paid(quiet.after(605.0, {"chat": Load(5.0, waiting=1)}), paid) == 4


def test_a_replica_that_costs_ends_when_it_is_clearly_not_worth_it() -> None:
    """Between what starts one and what ends one is a quarter: a price at the edge makes no flapping."""
    history = busy({"chat": 1.5})
    loss = ServiceCapacity(history.course("chat").forecast(), 4, 4.5, False)
    even = 2.0 * 8 / ((loss.of(4) - loss.of(3)) * 3.6)  # worth per 1000 at which the fourth pays just what it costs
    paid = chat(target=4, max=4, places=(*PLACES, (1, 0)))
    assert on_paid(history, replace(paid, worth_per_1000=0.85 * even)) == 4
    assert on_paid(history, replace(paid, worth_per_1000=0.75 * even)) == 3
    full = chat(target=3, max=4, places=PLACES, worth_per_1000=0.85 * even)
    assert on_paid(history, full) == 3


def test_the_peak_demand_of_a_model_is_remembered_for_an_hour() -> None:
    """It is part of the forecast after the averages have decayed, and decays, too."""
    burst = busy({"chat": 3.0}, 300.0)
    assert busy({"chat": 0.0}, 600.0, burst, 300.0).course("chat").forecast().rates[-1] > 2.0
    assert busy({"chat": 0.0}, 7200.0, burst, 300.0).course("chat").forecast().rates[-1] < 0.5


def test_with_a_tpot_objective_only_80_percent_of_the_slots_count() -> None:
    """Each prefill stalls the tokens of the other requests."""
    guess = busy({"chat": 1.0}).course("chat").forecast()
    assert ServiceCapacity(guess, 5, 5.0, True).of(3) == ServiceCapacity(guess, 4, 5.0, False).of(3)


def test_a_load_fits_if_that_of_the_last_minutes_would() -> None:
    """Not that of the last hour: a current burst is not averaged over it."""
    burst = busy({"chat": 4.0}, 60.0, busy({"chat": 0.1}, 3600.0), 3600.0).course("chat").forecast()
    worth = ServiceCapacity(burst, 4, 5.0, False)
    assert not worth.fits(math.ceil(burst.rates[3] * burst.service_s / 4) + 1)
    assert worth.fits(math.ceil(burst.rates[0] * burst.service_s / 4) + 2)


def test_the_gain_of_a_replica_is_the_best_mean_of_the_next_replicas() -> None:
    """The model still grows if the first of several serves nothing in time."""
    worth = ServiceCapacity(busy({"chat": 4.0}).course("chat").forecast(), 4, 5.0, False)
    assert worth.gain(5, 9) == pytest.approx((worth.of(9) - worth.of(5)) / 4)
    assert worth.gain(5, 9) > 2 * worth.gain(5, 6)


def test_a_longer_allowed_wait_reduces_the_fraction_of_late_requests() -> None:
    late = [delayed(10.0, 1.0, 16.0, 8.0, slack) for slack in (0.0, 2.0, 10.0)]
    assert late == sorted(late, reverse=True)
    assert late[1] < late[0] / 2


def test_among_lower_priorities_replicas_above_min_are_removed_first() -> None:
    """Even if one at its min serves nothing."""
    models = (chat("vip", target=1, priority=1), chat("least", target=1, min=1), chat("bulk", target=1))
    counts = decide(busy({"vip": 1.0, "bulk": 0.3}), *models).counts
    assert counts == {"vip": 2, "least": 1, "bulk": 0}


def test_the_min_of_a_lower_priority_is_removed_only_for_a_load_that_does_not_fit() -> None:
    """A mere improvement takes replicas above min only."""
    vip, history = chat("vip", target=2, priority=1), busy({"vip": 0.5})
    assert decide(history, vip, chat("least", target=1, min=1)).counts == {"vip": 2, "least": 1}
    assert decide(history, vip, chat("least", target=1, min=0)).counts == {"vip": 3, "least": 0}
    assert decide(busy({"vip": 1.0}), vip, chat("least", target=1, min=1)).counts == {"vip": 3, "least": 0}


def test_free_cores_go_to_the_model_that_serves_more_there() -> None:
    """One replica fits, and the other model's name comes first."""
    counts = decide(busy({"first": 6.0, "second": 1.0}), chat("first", target=1), chat("second", target=1)).counts
    assert counts == {"first": 1, "second": 2}


def test_only_a_request_restarts_a_model_that_scaled_to_zero() -> None:
    """A decaying forecast does not, even if cores are free."""
    history = busy({"chat": 0.0}, 605.0, busy({"chat": 3.0}, 600.0), 600.0)
    assert decide(history, chat(target=0, idle_s=600.0), now=1205.0).counts == {"chat": 0}
    requested = history.after(1210.0, {"chat": Load(5.0, arrived=1, waiting=1)})
    assert decide(requested, chat(target=0, idle_s=600.0), now=1210.0).counts == {"chat": 1}


def test_a_replica_that_waits_for_cores_is_not_removed_but_a_given_up_one_is() -> None:
    """The former has not had its time yet, the latter has."""
    history = busy({"chat": 0.0, "code": 2.0})
    waits = replace(chat(target=1), ready=0, since=None)
    assert decide(history, waits, chat("code", target=2)).counts == {"chat": 1, "code": 2}
    failed = replace(chat(target=1), ready=0, since=None, given_up=1)
    assert decide(history, failed, chat("code", target=2)).counts == {"chat": 0, "code": 3}


def test_the_shorter_objective_counts_minus_the_prefill_time_for_ttft() -> None:
    """The same load needs one more replica if requests may wait less."""
    history = busy({"chat": 0.75})

    def count(objectives: Objectives, prefill_s: float = 0.1) -> int:
        return decide(history, chat(target=3, objectives=objectives, prefill_s=prefill_s), hosts=2).counts["chat"]

    assert count(Objectives(ttft_ms=8000.0)) == 3
    assert count(Objectives(ttft_ms=8000.0), prefill_s=7.9) == 4
    assert count(Objectives(ttft_ms=8000.0, queue_ms=100.0)) == 4
    assert count(Objectives(ttft_ms=200.0, queue_ms=8000.0)) == 4


def test_a_model_that_loads_for_longer_than_the_horizon_grows_too() -> None:
    """It is looked ahead for three load times at least."""
    assert decide(busy({"chat": 1.0}), chat(target=1, load_s=300.0)).counts == {"chat": 2}


def test_a_replica_that_would_serve_less_than_one_request_is_not_started() -> None:
    """Nor a second one for a few requests an hour, even if cores are free."""
    assert decide(busy({"chat": 0.005}, 3600.0), chat(target=1)).counts == {"chat": 1}


def test_long_waits_get_cores_for_a_first_replica_only() -> None:
    """Only a model without replicas precedes the others."""
    served = Load(5.0, arrived=3, ended=3, slot_s=24.0)
    waits = Load(5.0, arrived=2, ended=2, slot_s=16.0, waiting=1, longest_wait_s=90.0)
    late = busy({"chat": 0.4, "code": 0.6}).after(605.0, {"chat": waits, "code": served})
    assert decide(late, chat(target=1), chat("code", target=2)).counts == {"chat": 1, "code": 2}


def test_cores_reserved_for_a_min_are_not_used_for_growth() -> None:
    """The planner may find room for it by moving others: a growing model leaves that many cores free."""
    scattered = [chat(f"small-{i}", target=1, cores=4, min=1, max=1, places=((0, 8 * i),)) for i in range(3)]
    eager = [chat(f"eager-{i}", target=0, cores=4) for i in range(2)]
    targets = decide(busy({"eager-0": 1.0, "eager-1": 1.0}), chat(target=1, min=1), *scattered, *eager)
    assert targets.counts["chat"] == 1
    assert sum(targets.counts[model.name] for model in eager) == 1


def test_priced_cores_of_others_are_taken_only_if_they_pay_off() -> None:
    """A higher priority takes none on which it would not start if they were free."""
    bulk = chat("bulk", target=1, places=((1, 0),))
    vip = chat("vip", target=3, priority=1, places=PLACES)

    def counts(worth: float) -> Mapping[str, int]:
        models = (replace(vip, worth_per_1000=worth), replace(bulk, min=1))
        return autoscale(busy({"vip": 3.0}), FleetNow(models, pool_of(HOST, (8, 2.0))), 1000.0).counts

    assert counts(1.0) == {"vip": 3, "bulk": 1}
    assert counts(500.0) == {"vip": 4, "bulk": 0}


def test_a_priced_replica_has_a_minimum_lifetime_too() -> None:
    """Measurements from before it served do not show its worth."""
    paid = chat(target=4, places=(*PLACES, (1, 0)), worth_per_1000=0.1)
    assert on_paid(busy({"chat": 1.0}), replace(paid, since=950.0)) == 4
    assert on_paid(busy({"chat": 1.0}), replace(paid, since=900.0)) == 3


def test_priority_decides_which_min_gets_scarce_cores() -> None:
    """Twelve cores are free in pieces: the planner may find room for one of two models, and it is the more important
    one.
    """
    small = chat(target=1, cores=4, min=1, max=1, priority=2)
    scattered = [replace(small, name=f"small-{i}", places=((0, 8 * i),)) for i in range(3)]
    models = (chat("a", target=1, min=1), chat("z", target=1, min=1, priority=1))
    counts = decide(History(), *models, *scattered).counts
    assert (counts["a"], counts["z"]) == (0, 1)


def test_cores_reserved_for_a_min_are_not_combined_with_those_of_a_lower_priority() -> None:
    """Four free cores and four of a lower priority are room for eight only if the min keeps its eight."""
    scattered = [chat(f"small-{i}", target=1, cores=4, min=1, max=1, priority=3, places=((0, 8 * i),)) for i in (1, 2)]
    third = chat("small-3", target=1, cores=4, min=1, max=1, priority=3, places=((0, 20),))
    young = chat("bulk", target=1, cores=4, priority=1, places=((0, 0),), since=999.0)
    waits, vip = chat(target=1, min=1), chat("vip", target=0, priority=2)
    counts = decide(busy({"vip": 2.0}), waits, vip, young, *scattered, third).counts
    assert counts["chat"] == 1
    assert counts["vip"] == 0


def test_unusable_cores_are_not_room() -> None:
    """Nor together with neighbouring cores of other models."""
    idle = chat(target=1, places=((0, 0),))
    fleet = FleetNow((idle, chat("large", target=0, cores=16)), pool_of((16, 0.0), blocked=(frozenset(range(8, 16)),)))
    assert autoscale(busy({"chat": 0.0, "large": 3.0}), fleet, 1000.0).counts == {"chat": 1, "large": 0}


def test_the_start_or_end_of_a_busy_period_is_not_a_burst() -> None:
    """Steady demand within each busy period counts as hardly burstier than Poisson arrivals."""
    spells = busy({"chat": 0.0}, 300.0, busy({"chat": 1.0}, 300.0), 300.0)
    assert busy({"chat": 1.0}, 300.0, spells, 600.0).course("chat").forecast().dispersion < 1.5


def test_several_small_replicas_start_at_once_but_only_one_large_one() -> None:
    """As many as 8 cores hold: otherwise a busy period on small replicas would be over before there are enough."""
    history = busy({"chat": 4.0})
    grown = {cores: decide(history, chat(target=2, cores=cores), hosts=4).counts["chat"] - 2 for cores in (1, 2, 4, 8)}
    assert grown == {1: 6, 2: 4, 4: 2, 8: 1}


def test_the_loss_of_an_idle_model_is_limited_by_its_load_time() -> None:
    """A model that loads fast gives up cores that a slow one keeps, and that it keeps itself while it has a request."""
    code = Load(5.0, arrived=5, ended=5, slot_s=40.0)
    history = busy({"chat": 0.3, "code": 1.0}, 600.0)
    idle = history.after(605.0, {"chat": Load(5.0), "code": code})
    live = history.after(605.0, {"chat": Load(5.0, live=1), "code": code})
    fast, slow = (chat(target=1, load_s=load_s) for load_s in (5.0, 60.0))
    other = chat("code", target=2)
    assert decide(idle, fast, other).counts == {"chat": 0, "code": 3}
    assert decide(idle, slow, other).counts == {"chat": 1, "code": 2}
    assert decide(live, fast, other).counts == {"chat": 1, "code": 2}


def test_a_start_may_be_anywhere_that_the_hardware_allows() -> None:
    """Of 24 cores only 2 to 9 are free: eight cores of inf2 may begin at each even one."""
    small = [chat(f"small-{i}", 2, target=1, min=1, max=1, places=((0, i),)) for i in (0, *range(10, 24, 2))]
    assert decide(busy({"chat": 1.0}), chat(target=0), *small).counts["chat"] == 1


def test_free_cores_where_a_model_cannot_run_are_not_counted() -> None:
    """Four cores are no degree of trn1, however many it has: cores of the other model on inf2 are taken instead."""
    hosts = (Host(name, TOPOLOGIES[name], (), emulated=True) for name in ("inf2.24xlarge", "trn1.32xlarge"))
    pool = HostPool(tuple(hosts), {})
    bulk = chat("bulk", 4, target=3, min=1, max=3, places=((0, 0), (0, 4), (0, 8)))
    waiting = replace(chat("chat", 4, target=0), need=Need(Demand(0, 4, frozenset({pool.kinds.of[0]}))))
    counts = autoscale(waited(61.0), FleetNow((bulk, waiting), pool), 605.0).counts
    assert counts == {"bulk": 2, "chat": 1}
