"""Searches for changes that give a model its replicas. Every suggestion has been planned."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from placements.engines.registry import capabilities, resolve
from placements.explain.explanation import Question, Suggestion, Trial, changed, place_text, spots
from placements.explain.other_places import MOST_HOSTS, near_pins, new_host, with_hosts
from placements.facts.plural import counted
from placements.facts.topology import DEGREES, TOPOLOGIES, Host
from placements.planner.plan import Plan, plan
from placements.planner.replica_demand import suits
from placements.resources.host_memory import host_memory
from placements.resources.memory import estimate, fits, usable_hbm
from placements.rules.checks import check
from placements.spec.notation import CorePin
from placements.spec.schema import ModelSpec, Replicas, Spread

MOVES = (1, 2, 4)
"""The numbers of moved replicas that are tried."""

_MOST_RIVALS = 6  # models whose ``min`` is tried lower
_MOST_SPOTS = 4  # places that are listed
_LENGTH_STEP = 128  # tokens; suggested lengths are multiples of it
_NEAREST = 4  # ranges near a pin that are tried
_MANY_HOSTS = 100  # from this many on, fewer counts of new hosts are tried
_UNCERTAIN = frozenset(topology.instance for topology in TOPOLOGIES.values() if topology.note)  # not suggested

MOST_PLANS = 200
"""The most plans of one search."""

MOST_WORK = 16_000
"""The most plans x hosts of one search: 16 plans of 1000 hosts take some seconds."""

_KINDS_SHARE = 4  # one kind of change gets at most a fourth of the plans


@dataclass(frozen=True)
class Remedies:
    """The result of a search."""

    suggestions: tuple[Suggestion, ...]
    exhaustive: bool  # False: the budget of plans was used up


def remedies(question: Question, plans: int | None = None) -> Remedies:
    """Returns changes that work, the smallest first, as described in `explain.explain`.

    ``plans`` limits the plans, by default to MOST_PLANS, or on large fleets to MOST_WORK.
    """
    most = max(_KINDS_SHARE, min(MOST_PLANS, MOST_WORK // max(1, len(question.hosts)))) if plans is None else plans
    search = _RemedySearch(question, most)
    return Remedies(tuple(search.suggestions()), search.exhaustive)


class _RemedySearch:
    """Tries changes for one question."""

    def __init__(self, question: Question, plans: int) -> None:
        self._question = question
        self._model = question.model
        self._left = plans
        self._share = max(1, plans // _KINDS_SHARE)
        self._turn = 0  # plans left for the current kind
        self._helped: set[str] = set()  # kinds that work
        self.exhaustive = True

    def suggestions(self) -> Iterator[Suggestion]:
        """Yields suggestions in the numbered order of `explain`."""
        question = self._question
        start = Trial("", "", question.spec, question.hosts, question.wanted, question.blocked)
        helped = False
        for kind in self._single(start):
            tried = self._first(kind)
            if tried is not None:
                helped = True
                self._helped.add(tried.trial.id)
                yield tried
        if not helped:
            yield from self._pairs(start)

    def _single(self, start: Trial) -> Iterator[Iterator[Trial]]:
        """Yields each kind of change as trials, of which the first that works suffices."""
        # 1.
        yield self._uncordoned(start)
        if self._question.running and not self._question.wrong:
            yield (replace(start, id="move", change="", moves=moves) for moves in MOVES)
        # 2.
        yield self._padded(start)
        yield self._other_pins(start)
        if self._model.cores:
            yield iter([self._changed(start, "pins", "without its pins", cores=())])
        yield self._with_degrees(start, smaller=True)
        yield self._with_degrees(start, smaller=False)
        yield self._wider_spread(start)
        # 3.
        yield self._fewer_threads(start)
        yield self._shared_threads(start)
        yield self._fewer_slots(start)
        yield self._shorter(start)
        yield self._quantized(start)
        # 4.
        yield self._fewer_replicas(start)
        yield self._other_pins_of_rivals(start)
        yield self._lower_rivals(start)
        # 5.
        yield self._more_hosts(start)

    def _pairs(self, start: Trial) -> Iterator[Suggestion]:
        # 6.
        ways: list[Callable[[Trial], Iterator[Trial]]] = [
            self._fewer_slots,
            self._shorter,
            self._quantized,
            self._fewer_replicas,
            self._more_hosts,
        ]
        firsts = [trial for smaller in (False, True) for trial in self._with_degrees(start, smaller)]
        firsts += self._padded(start)
        if self._model.max_batch > 1:
            firsts.append(self._changed(start, "slots", "max_batch: 1", max_batch=1))
        firsts += self._quantized(start)
        reported: set[str] = set()
        for way in ways:
            for first in firsts:
                if way.__name__ == "_fewer_slots" and first.id == "slots":
                    continue
                tried = self._first(first.and_then(second) for second in way(first))
                if tried is not None and tried.trial.id not in reported:
                    reported.add(tried.trial.id)
                    yield tried
                    break

    def _first(self, trials: Iterable[Trial]) -> Suggestion | None:
        self._turn = self._share
        for trial in trials:
            tried = self._tried(trial)
            if tried is not None:
                return tried
        return None

    def _tried(self, trial: Trial) -> Suggestion | None:
        """Returns the suggestion if the trial works, else None."""
        question, name = self._question, self._model.name
        for problem in check(trial.spec, trial.hosts, question.checkpoints, question.drafts, room=False):
            if problem.severity == "error" and (problem.id, problem.what) not in question.tolerated:
                return None
        if not self._may_plan():
            return None
        drawn = self._planned(trial)
        before, after = (Counter(placement.model for placement in each.placements) for each in (question.drawn, drawn))
        if after[name] < trial.wanted[name]:
            return None
        if any(after[rival] < count for rival, count in before.items() if rival not in (name, *trial.losers)):
            return None
        if trial.moves:
            moved = [
                f"{move.after.model}/{move.after.replica} from {place_text(move.before.host, move.before.cores)}"
                f" to {place_text(move.after.host, move.after.cores)}"
                for move in drawn.moves
            ]
            trial = replace(trial, change=f"move {', '.join(moved)}")
        return Suggestion(trial, drawn, self._gives(trial, drawn))

    def _may_plan(self) -> bool:
        """Takes one plan from the budget; False if it is used up."""
        if min(self._left, self._turn) < 1:
            self.exhaustive = False
            return False
        self._left, self._turn = self._left - 1, self._turn - 1
        return True

    def _planned(self, trial: Trial) -> Plan:
        question = self._question
        return plan(
            trial.spec,
            trial.hosts,
            question.checkpoints,
            question.running,
            trial.wanted,
            trial.blocked,
            moves=trial.moves,
        )

    def _gives(self, trial: Trial, drawn: Plan) -> str:
        """Returns the number of replicas, the places of new ones, and their memory as text."""
        question = self._question
        own = [placement for placement in drawn.placements if placement.model == self._model.name]
        new = [placement for placement in own if placement.running not in question.running]
        parts = [f"{len(own)} of {counted(trial.wanted[self._model.name], 'replica')}"]
        if new:
            listed = ", ".join(spots(new[:_MOST_SPOTS]))
            parts.append(listed + (f" and {len(new) - _MOST_SPOTS} more" if len(new) > _MOST_SPOTS else ""))
        model, checkpoint = self._now(trial), question.checkpoints.get(self._model.name)
        host = next((host for host in trial.hosts if own and host.name == own[0].host), None)
        if checkpoint is not None and host is not None and host.topology is not None and own[0].cores is not None:
            need = estimate(model, checkpoint, resolve(model.engine, host, model.kind), question.drafts.get(model.name))
            on_cores = need.on_cores(model.tp_degree)
            parts.append(f"{need.total:.2f} of {usable_hbm(host.topology, need):.2f} GiB {on_cores}")
        return "; ".join(parts)

    def _changed(self, trial: Trial, id: str, change: str, **fields: object) -> Trial:
        """Returns the trial with other fields of the model."""
        return replace(trial, id=id, change=change, spec=changed(trial.spec, self._model.name, fields))

    def _uncordoned(self, trial: Trial) -> Iterator[Trial]:
        """Yields trials without one host's cordon, then without all cordons."""
        cordons = {name: cores for name, cores in self._question.cordoned.items() if cores}
        choices = [[name] for name in list(cordons)[:MOST_HOSTS]]
        if len(cordons) > 1:
            choices.append(list(cordons))
        for names in choices:
            freed = {name: trial.blocked.get(name, frozenset()) - cordons[name] for name in names}
            more = f" and {counted(len(names) - 3, 'more host')}" if len(names) > 3 else ""
            change = ", ".join(f"corewright uncordon {name}" for name in names[:3]) + more
            yield replace(trial, id="uncordon", change=change, blocked={**trial.blocked, **freed})

    def _degrees(self, smaller: bool) -> list[int]:
        """Returns the documented degrees below or above the model's, the nearest first."""
        tp = self._model.tp_degree
        degrees = {
            row.tp
            for host in self._question.kinds
            if host.topology is not None
            for row in DEGREES[host.topology.family].values()
            if row.documented and row.tp <= host.cores and (row.tp < tp if smaller else row.tp > tp)
        }
        return sorted(degrees, key=lambda degree: abs(math.log2(degree / tp)))

    def _with_degrees(self, trial: Trial, smaller: bool) -> Iterator[Trial]:
        """Yields degrees that divide the heads, then those that need padding."""
        degrees = self._degrees(smaller)
        for tp in degrees:
            yield from self._with_degree(trial, tp)
        for tp in degrees:
            if self._wants_padding(tp):
                for other in self._with_degree(trial, tp):
                    yield from (other.and_then(padded) for padded in self._padded(other))

    def _with_degree(self, trial: Trial, tp: int) -> Iterator[Trial]:
        yield self._changed(trial, "degree", f"tp_degree: {tp}", tp_degree=tp)
        if self._model.cores and "pins" not in self._helped:  # their lengths are those of the degree
            yield self._changed(trial, "degree", f"tp_degree: {tp}, without its pins", tp_degree=tp, cores=())

    def _wants_padding(self, tp: int) -> bool:
        checkpoint = self._question.checkpoints.get(self._model.name)
        return checkpoint is not None and checkpoint.heads % tp != 0 and not self._model.allow_head_padding

    def _padded(self, trial: Trial) -> Iterator[Trial]:
        """Yields a trial with padded heads, if the degree does not divide them."""
        if self._wants_padding(self._now(trial).tp_degree):
            yield self._changed(trial, "padding", "allow_head_padding: true", allow_head_padding=True)

    def _other_pins(self, trial: Trial) -> Iterator[Trial]:
        """Yields trials that move each unavailable pin to the nearest available legal range, then to the next."""
        pins = self._model.cores
        if not pins or len({pin.cores for pin in pins}) > _MOST_RIVALS:
            return
        for rank in range(_NEAREST):
            moved: list[CorePin] = []
            for pin in pins:
                others = [*moved, *(other for other in pins if other is not pin)]
                if not near_pins(self._question, pin, others, itself=True):
                    near = near_pins(self._question, pin, others)
                    if len(near) <= rank:
                        return
                    pin = near[rank]
                moved.append(pin)
            if tuple(moved) == pins:
                return
            parts = [f'"{pin}" -> "{new}"' for pin, new in zip(pins, moved, strict=True) if pin != new]
            yield self._changed(trial, "pins", f"cores: {', '.join(parts)}", cores=tuple(moved))

    def _other_pins_of_rivals(self, trial: Trial) -> Iterator[Trial]:
        """Yields trials with other pins or no pins for one rival, then for all."""
        rivals = [model for model in trial.spec.models if model.cores and model.name != self._model.name]
        choices = [[rival] for rival in rivals[:_MOST_RIVALS]] + ([rivals] if 1 < len(rivals) <= _MOST_RIVALS else [])
        for chosen in choices:
            spec = trial.spec
            for rival in chosen:
                spec = changed(spec, rival.name, {"cores": ()})
            names = " and ".join(rival.name for rival in chosen)
            freed = replace(trial, id="rival-pins", change=f"without the pins of {names}", spec=spec)
            tried = self._tried(freed)
            if tried is None:
                continue
            parts = []
            for rival in chosen:  # the same as pins
                places = [placement for placement in tried.plan.placements if placement.model == rival.name]
                cores = [
                    CorePin(placement.cores, pin.host and placement.host)
                    for placement, pin in zip(places, rival.cores, strict=False)
                    if placement.cores is not None
                ]
                if len(cores) == len(rival.cores) and tuple(cores) != rival.cores:
                    spec = changed(spec, rival.name, {"cores": tuple(cores)})
                    before, after = (", ".join(f'"{pin}"' for pin in pins) for pins in (rival.cores, cores))
                    parts.append(f"cores of {rival.name}: {before} -> {after}")
                else:
                    spec = changed(spec, rival.name, {"cores": rival.cores})
            if parts:
                yield replace(freed, change=", and ".join(parts), spec=spec)
            yield freed

    def _fewer_threads(self, trial: Trial) -> Iterator[Trial]:
        """Yields the greatest number of threads that works."""
        if isinstance(self._model.threads, int) and self._short_of_cpus:

            def with_threads(count: int) -> Trial:
                return self._changed(trial, "threads", f"threads: {count}", threads=count)

            most = greatest(self._model.threads - 1, lambda count: self._tried(with_threads(count)) is not None)
            if most:
                yield with_threads(most)

    def _shared_threads(self, trial: Trial) -> Iterator[Trial]:
        if isinstance(self._model.threads, int) and self._short_of_cpus:
            yield self._changed(trial, "threads", "threads: share", threads="share")

    @cached_property
    def _short_of_cpus(self) -> bool:
        return any(
            problem.id == "vcpus-short"
            for unplaced in self._question.drawn.unplaced
            if unplaced.model == self._model.name
            for problem in unplaced.problems
        )

    def _wider_spread(self, trial: Trial) -> Iterator[Trial]:
        spread = self._model.spread
        for most in range(spread.host + 1, self._question.target + 1) if spread is not None else ():
            yield self._changed(trial, "spread", f"spread: {{host: {most}}}", spread=Spread(host=most))

    def _now(self, trial: Trial) -> ModelSpec:
        model = trial.spec.model(self._model.name)
        return self._model if model is None else model

    def _has_memory(self, model: ModelSpec, host: Host) -> bool:
        """Returns whether an empty host of the type has the memory for one replica."""
        checkpoint, draft = self._question.checkpoints[model.name], self._question.drafts.get(model.name)
        engine = resolve(model.engine, host, model.kind)
        if host.topology is not None and not fits(estimate(model, checkpoint, engine, draft), host.topology):
            return False
        release, surplus_gib = self._question.spec.vllm_release_on(host), host.measured.host_gib
        need = host_memory(model, checkpoint, engine, draft, release, surplus_gib)
        return host.memory_gib is None or need.load <= host.memory_gib

    def _memory_short(self, model: ModelSpec) -> list[Host]:
        """Returns one host of each type with too little memory for the model, the largest HBM first."""
        if model.name not in self._question.checkpoints:
            return []
        short = [
            host for host in self._question.kinds if host.topology is not None and not self._has_memory(model, host)
        ]
        return sorted(short, key=lambda host: -(host.topology.hbm_per_core_gib if host.topology else 0))

    def _fewer_slots(self, trial: Trial) -> Iterator[Trial]:
        model = self._now(trial)
        yield from self._smaller(trial, "slots", "max_batch", model.max_batch, 1)

    def _shorter(self, trial: Trial) -> Iterator[Trial]:
        model = self._now(trial)
        checkpoint = self._question.checkpoints.get(model.name)
        positions = checkpoint.max_positions if checkpoint is not None else None
        length = model.length(checkpoint)
        if positions and length > positions:
            length = positions
            yield self._changed(trial, "length", f"max_len: {length}", max_len=length)
        yield from self._smaller(trial, "length", "max_len", length, _LENGTH_STEP if length > _LENGTH_STEP else 1)

    def _smaller(self, trial: Trial, id: str, name: str, now: int, step: int) -> Iterator[Trial]:
        """Yields the greatest multiples of ``step`` below ``now`` with which a replica fits into memory."""
        model = self._now(trial)
        tried: set[int] = set()
        for host in self._memory_short(model):

            def fits_with(count: int, host: Host = host) -> bool:
                return self._has_memory(model.model_copy(update={name: count * step}), host)

            value = step * greatest((now - 1) // step, fits_with)
            if value >= (2 if name == "max_len" else 1) and value not in tried:
                tried.add(value)
                yield self._changed(trial, id, f"{name}: {value}", **{name: value})

    def _quantized(self, trial: Trial) -> Iterator[Trial]:
        model = self._now(trial)
        if model.quantize is None and self._memory_short(model):
            yield self._changed(trial, "int8", "quantize: int8", quantize="int8")

    def _fewer_replicas(self, trial: Trial) -> Iterator[Trial]:
        """Yields the number of replicas that have a place."""
        model = self._now(trial)
        if trial.spec is self._question.spec:
            drawn = self._question.drawn
        elif self._may_plan():
            drawn = self._planned(trial)
        else:
            return
        count = sum(placement.model == model.name for placement in drawn.placements)
        if 0 < count < self._question.target:
            most = model.replicas.max
            word = f"replicas: {count}" if most == model.replicas.min else f"replicas: {{min: {count}, max: {most}}}"
            least = min(model.replicas.min, count)
            replicas = Replicas(min=least, max=count if most == model.replicas.min else most)
            fewer = self._changed(trial, "replicas", word, replicas=replicas, cores=model.cores[: replicas.max])
            yield replace(fewer, wanted={**trial.wanted, model.name: count})

    def _lower_rivals(self, trial: Trial) -> Iterator[Trial]:
        """Yields trials with fewer replicas of one rival of the same or a higher priority, the least loss first."""
        counts = Counter(
            placement.model for placement in self._question.drawn.placements if placement.cores is not None
        )
        rivals = [
            model
            for model in trial.spec.models
            if model.name != self._model.name and model.priority >= self._model.priority and counts[model.name]
        ]
        rivals.sort(key=lambda model: (model.priority, model.tp_degree))
        options = [
            (less * rival.tp_degree, rival, less)
            for rival in rivals[:_MOST_RIVALS]
            for less in doubling(-(-self._short() // rival.tp_degree), counts[rival.name])
        ]
        for _, rival, less in sorted(options, key=lambda option: option[0]):
            left = counts[rival.name] - less
            replicas = Replicas(min=min(rival.replicas.min, left), max=rival.replicas.max)
            yield replace(
                trial,
                id="rival",
                change=f"replicas of {rival.name}: min {rival.replicas.min} -> {left}",
                spec=changed(trial.spec, rival.name, {"replicas": replicas}),
                wanted={**trial.wanted, rival.name: left},
                losers=frozenset({rival.name}),
            )

    def _more_hosts(self, trial: Trial) -> Iterator[Trial]:
        """Yields the fewest new hosts that help, of the fleet's types first."""
        model, question = self._now(trial), self._question
        real = not any(host.emulated for host in (*question.hosts, *question.absent))
        templates = {host.topology: host for host in question.kinds if host.topology is not None}
        families = {topology.family for topology in templates}
        instances = {topology.instance for topology in templates}
        other_templates = [
            new_host(topology, (*question.hosts, *question.absent)[0], real)
            for topology in sorted(
                TOPOLOGIES.values(), key=lambda topology: (topology.family not in families, topology.cores)
            )
            if topology.instance not in instances | _UNCERTAIN and capabilities(model.engine).runs_in(topology.family)
        ]
        for template in (*templates.values(), *other_templates):
            if suits(model, template, question.checkpoints.get(model.name)):
                yield from self._fewest(trial, template)

    def _fewest(self, trial: Trial, template: Host) -> Iterator[Trial]:
        """Yields the fewest hosts of one type that help, if any tried number does."""
        question, tp = self._question, self._now(trial).tp_degree
        missing = max(1, question.target - (0 if question.wrong else len(question.placed)))
        own = self._short() if not question.wrong and trial.spec is question.spec else tp * missing
        usable = max(1, template.cores - len(template.reserved_cores))
        ranks = {model.name: model.priority for model in question.spec.models}
        equals = [replica for replica in question.drawn.unplaced if ranks[replica.model] >= self._model.priority]
        sizes = {model.name: model.tp_degree for model in question.spec.models}
        theirs = sum(sizes[replica.model] for replica in equals if replica.model != self._model.name)
        most = missing + sum(replica.model != self._model.name for replica in equals)  # a host for each
        least, with_equals = -(-own // usable), -(-(own + theirs) // usable)
        steps = {least, with_equals, with_equals + with_equals // 8}
        if len(question.hosts) < _MANY_HOSTS:
            steps.update(doubling(least, missing))
        low = 0
        for number in sorted(steps):
            if number > max(most, missing):
                return
            if self._tried(with_hosts(trial, template, number)) is None:
                low = number
                continue
            high = number
            while high - low > 1 and self._turn > 1 and self._left > 1:
                middle = (low + high) // 2
                if middle < least:
                    break
                if self._tried(with_hosts(trial, template, middle)) is None:
                    low = middle
                else:
                    high = middle
            self._turn, self._left = self._turn + 1, self._left + 1  # the last of these was drawn already
            yield with_hosts(trial, template, high)
            return

    def _short(self) -> int:
        """Returns a lower bound of the missing cores."""
        question = self._question
        total = sum(host.cores - len(question.unusable(host)) for host in question.own_hosts)
        taken = sum(len(placement.cores or ()) for placement in question.drawn.placements)
        return max(1, (question.target - len(question.placed)) * self._model.tp_degree - (total - taken))


def greatest(most: int, works: Callable[[int], bool]) -> int:
    """Returns the greatest number up to ``most`` that works if all smaller ones do; 0 if there is none."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not works(number))


def doubling(least: int, most: int) -> Iterator[int]:
    """Yields numbers from ``least`` to ``most`` with doubling steps: 3, 4, 6, 10, ..."""
    step, number = 1, max(1, least)
    while number < most:
        yield number
        number += step
        step *= 2
    if most > 0:
        yield most
