"""What engines share that load a compiled model from a folder: a scratch folder, and the sampling of each slot."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.engines.engine_setup import LoadableEngine
from workers.messages.engine_protocol import DeviceSampling


class CompiledEngine(LoadableEngine):
    """Its model is released on ``close``."""

    _model: Any = None
    _slot_sampling: list[DeviceSampling]

    def load(self) -> None:
        """Compile unless compiled before, load, and run every bucket once.

        Raises ``EngineLoadError``, and exceptions of the package and the runtime.
        """
        with tempfile.TemporaryDirectory(prefix="corewright-compiled-") as scratch:
            self._load(Path(scratch))

    @abstractmethod
    def _load(self, scratch: Path) -> None:
        """Loads as ``load``. ``scratch`` is for what is not kept: a replica is killed later, and removes nothing."""

    def sample_by(self, slots: Sequence[int], sampling: Sequence[DeviceSampling]) -> None:
        """See ``SamplingEngine.sample_by``."""
        for slot, parameters in zip(slots, sampling, strict=True):
            self._slot_sampling[slot] = parameters

    def close(self) -> None:
        """Release the model. The cores are free when the process exits."""
        self._spec = None
        self._model = None
