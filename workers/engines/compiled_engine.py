"""What engines share that load a compiled model from a folder: a scratch folder, and the sampling of each slot."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.engines.engine_setup import LoadableEngine
from workers.messages.engine_protocol import DeviceSampling


class CompiledEngine(LoadableEngine):
    """Its model is released on ``close``, with what is not kept."""

    _scratch: Path | None = None
    _model: Any = None
    _slot_sampling: list[DeviceSampling]

    def sample_by(self, slots: Sequence[int], sampling: Sequence[DeviceSampling]) -> None:
        """See ``SamplingEngine.sample_by``."""
        for slot, parameters in zip(slots, sampling, strict=True):
            self._slot_sampling[slot] = parameters

    def close(self) -> None:
        """Release the model. The cores are free when the process exits."""
        self._spec = None
        self._model = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _scratch_folder(self) -> Path:
        """Returns a folder that is removed on ``close``."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="corewright-compiled-"))
        return self._scratch
