"""Decides which hosts are prepared for new versions before old replicas stop there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator.control.decisions.replica_view import backoff_s
from orchestrator.control.decisions.rollout_step import Goal, ReplicaTarget, Situation, new_targets
from placements.engines.registry import Engine, needs_neuron
from placements.spec.notation import is_path
from placements.spec.schema import ModelSpec
from workers.messages.status import Failure

Key = tuple[str, str, str]  # model, version and host of a preparation


def takes_long(model: ModelSpec, engine: Engine) -> bool:
    """Returns whether a start of the model may have to fetch or compile something first."""
    remote = model.source_kind != "path" or model.draft_kind not in (None, "path")
    remote = remote or not all(map(is_path, model.adapters.values()))
    may_compile = engine == "auto" or needs_neuron(engine) or bool(model.engine_options.get("compile"))
    return model.has_source and (remote or may_compile)


@dataclass(frozen=True)
class Preparation:
    """The preparation of a new version on a host, which precedes the stop of an old replica there."""

    model: str
    version: str
    host: str
    done: bool = False
    failures: int = 0  # in a row
    reason: str | None = None
    stopped: bool = False  # a retry would fail again
    since: float = 0.0  # when the last attempt ended, on the controller's clock

    @property
    def key(self) -> Key:
        return self.model, self.version, self.host

    @property
    def retry_at(self) -> float:
        """When the next attempt may begin, on the controller's clock."""
        if self.stopped:
            return float("inf")
        return self.since + backoff_s(self.failures) if self.failures else 0.0

    def failed(self, failure: Failure, now: float, *, stopped: bool) -> Preparation:
        return replace(self, failures=self.failures + 1, reason=str(failure), stopped=stopped, since=now)


def upcoming_targets(situation: Situation, goal: Goal, name: str) -> tuple[ReplicaTarget, ...]:
    """Returns the replicas that the next step of a model's update starts in place of old ones, by its ``goal``."""
    return tuple(target for target in new_targets(goal, situation.views, situation.replaced) if target.model == name)


def preparation_of(target: ReplicaTarget, preparations: Mapping[Key, Preparation]) -> Preparation:
    """Returns the preparation of the target's host for it; a new one if there is none."""
    new = Preparation(target.model, target.version, target.host)
    return preparations.get(new.key, new)
