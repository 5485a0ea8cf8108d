"""Decides how many replicas each model should have: by hand, by the autoscaler, or by its spec and schedules."""

from __future__ import annotations

from orchestrator.control.journal.journal_records import Target
from orchestrator.control.record_writer import RecordWriter
from orchestrator.scaling.schedules import Bounds, bounds
from placements.spec.schema import ModelSpec


class ReplicaCounts:
    """The desired numbers of replicas. Manual scales and the autoscaler's targets are in the journal."""

    def __init__(self, records: RecordWriter) -> None:
        self.woken: set[str] = set()  # models with min 0 that a request started
        self.held_back: dict[str, str] = {}  # by model, why the autoscaler does not start requested replicas
        self.autoscaled = False  # gateways report demand, so that the autoscaler decides
        self._records = records

    def desired(self, model: ModelSpec, before: Bounds | None = None) -> int:
        """Returns the desired number of replicas: the manual scale, else the autoscaler's and the spec's.

        ``before``: the bounds that those of ``model`` are about to replace.
        """
        scale = self._records.state.scales.get(model.name)
        if scale is not None and scale.sleep:
            return 0
        if scale is not None and scale.count is not None:
            return min(scale.count, model.replicas.max)
        return self.target(model, before)

    def target(self, model: ModelSpec, before: Bounds | None = None) -> int:
        """Returns the desired number without a manual scale: the autoscaler's target within the bounds."""
        held = self.bounds(model)
        count = self._records.state.targets.get(model.name) if model.scaling.auto else None
        if before is not None and self._stays(model, before):
            count = self.within(model, before)
        return min(max(held.min, self._min_replicas(model) if count is None else count), held.max)

    def _min_replicas(self, model: ModelSpec) -> int:
        """Returns the desired number without the autoscaler: min, or 1 if a request started the model."""
        return max(self.bounds(model).min, 1 if model.name in self.woken else 0)

    def bounds(self, model: ModelSpec) -> Bounds:
        """Returns the current limits of the number of replicas, from the spec and its schedules."""
        return bounds(model, self._records.wall())

    def within(self, model: ModelSpec, held: Bounds) -> int:
        """Returns the autoscaler's target within these bounds."""
        return min(max(held.min, self._records.state.targets.get(model.name, 0)), held.max)

    def follow(self, model: ModelSpec, before: Bounds) -> None:
        """Note that the bounds of the model have changed: if the minimum is lower, running replicas stay until the
        autoscaler removes them."""
        if self._stays(model, before):
            self.set_target(model, self.within(model, before))

    def _stays(self, model: ModelSpec, before: Bounds) -> bool:
        return self.autoscaled and model.scaling.auto and self.bounds(model).min < self.within(model, before)

    def set_target(self, model: ModelSpec, count: int | None) -> None:
        """Set the autoscaler's target; None clears it, so that the spec and the requests decide."""
        held = self.bounds(model)
        if count == 0:
            self.woken.discard(model.name)
        if count is not None:
            count = min(max(count, held.min), held.max)
        target = None if count == self._min_replicas(model) else count
        if target != self._records.state.targets.get(model.name):
            self._records.note(Target(model=model.name, count=target))

    def required(self, model: ModelSpec, before: Bounds | None = None) -> int:
        """Returns how many replicas a rollout waits for: those that the autoscaler adds start as cores allow."""
        scaled = self._records.state.scales.get(model.name)
        desired = self.desired(model, before)
        return desired if scaled is not None else min(desired, self._min_replicas(model))

    def is_unloaded(self, model: str) -> bool:
        """Returns whether the model was unloaded or scaled to 0 manually, so that requests do not start it."""
        scale = self._records.state.scales.get(model)
        return scale is not None and (scale.sleep or scale.count == 0)
