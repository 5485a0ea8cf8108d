"""Measures the speeds of replicas by the times that gateways report, for the plans of this fleet and of later ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.control.fleet_state import FleetState
from orchestrator.control.resolve.resolved_revision import ResolvedRevision
from orchestrator.process.speed_record import SpeedRecord
from orchestrator.process.version import corewright_version
from placements.engines.registry import capabilities
from placements.resources.calibration import MeasuredSpeed, shape_of
from placements.resources.measured_times import Times
from placements.spec.schema import ModelSpec

WRITE_S = 60.0  # between two writes; a crash loses what was measured since the last one


class SpeedMeasurement:
    """The measured speeds of one controller's fleet, on its event loop."""

    def __init__(self, state: FleetState, path: Path) -> None:
        self._state = state
        self._record = SpeedRecord(path, corewright_version(), state.wall())

    def add(self, model: str, times: Mapping[str, Times]) -> None:
        """Adds the times of a report, by the version of the model. Times of unknown versions, of encoders, and of
        servers, whose shape is unknown, are dropped."""
        for version, own in times.items():
            revision = self._state.revision_of_version(model, version)
            spec = revision.spec.model(model)
            if spec is None or spec.kind != "generate" or revision.versions[model] != version:
                continue
            shape = self.shape(spec, revision)
            if not capabilities(shape["engine"]).forwards:
                self._record.add(shape, own, self._state.wall())

    def shape(self, model: ModelSpec, revision: ResolvedRevision) -> dict[str, Any]:
        """Returns the shape of a model's replicas, with the engine that ``auto`` has become on their hosts."""
        state, engine = self._state, revision.engines[model.name]
        if engine == "auto":
            running = (state.configs[view.id] for view in state.views.of_model(model.name) if view.id in state.configs)
            version = revision.versions[model.name]
            engine = next((each.model.engine for each in running if each.run.version == version), engine)
        return shape_of(model, revision.checkpoints.get(model.name), engine, revision.hosts)

    def measured(self) -> tuple[MeasuredSpeed, ...]:
        """Returns the measured speeds by shape."""
        return self._record.measured()

    async def round(self, *, last: bool = False) -> None:
        """Writes the file if it is due, or as the ``last`` time."""
        now = self._state.wall()
        if self._record.changed and (last or not 0.0 <= now - self._record.written_at < WRITE_S):
            await self._state.in_thread(self._record.write, self._record.content(now))
