"""The torch-neuronx engine: runs an encoder on one NeuronCore, as a trace for each length bucket.

Rules of the package for callers, from AWS's documentation:

1. ``torch.jit.load`` puts a trace onto a core at once, but not weights that are separate from it: each call would move
   them, until ``move_trace_to_device`` is called. The device is numbered within the process's own cores.
2. A trace takes tensors of the CPU in the shapes and types of its example, and returns them. After ``dynamic_batch``
   the first dimension may differ: the package splits and pads it to the compiled batch.
3. ``replace_weights`` takes the state of a module of the same structure.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.batching.buckets import smallest_bucket
from workers.compiled.host_sets import Buildable, LockedEntry, entry, peek
from workers.engines.cpu.checkpoint import check_weights, weight_files
from workers.engines.engine_setup import LoadableEngine
from workers.engines.torch_neuronx.artifacts import TRACE, compile_in_process, import_package, is_whole, unit
from workers.engines.torch_neuronx.tracing import Tracing
from workers.host.neuron_faults import fault_of
from workers.messages.encoder_protocol import EncodeInput, EncoderSpec
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    import numpy
    import torch

log = logging.getLogger(__name__)

MOST_ERROR = 0.1  # of a vector's length, between the core and the CPU; bf16 differs by a few hundredths


def open_torch_neuronx(config: ReplicaConfig) -> TorchNeuronxEncoder:
    """Returns the engine, not loaded yet."""
    return TorchNeuronxEncoder(config)


def buildables(config: ReplicaConfig, _read: bool = True) -> list[Buildable]:
    """Returns a compile unit for each length. Raises EngineLoadError."""
    import_package()
    tracing = Tracing.of(config)
    return [unit(tracing, length) for length in tracing.lengths]


class TorchNeuronxEncoder(LoadableEngine[EncoderSpec]):
    """Implements ``EncodeEngine``. Exceptions of the Neuron runtime are passed on unchanged, except for full memory."""

    def __init__(self, config: ReplicaConfig) -> None:
        """Nothing is read before ``load``."""
        self._config = config
        self._tracing: Tracing | None = None
        self._traces: dict[int, Any] = {}

    def load(self) -> None:
        """See ``EncodeEngine.load``. Everything that needs no device is done before the core is claimed."""
        package = import_package()
        tracing = Tracing.of(self._config)
        weights, pickled = weight_files(tracing.layout.transformer, self._config.model.allow_pickle)
        check_weights(weights, pickled)
        scratch = None if self._config.run.compiled is not None else Path(tempfile.mkdtemp(prefix="corewright-tnx-"))
        try:
            self._load(package, tracing, pickled, scratch or Path(str(self._config.run.compiled)))
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)

    def _load(self, package: Any, tracing: Tracing, pickled: bool, root: Path) -> None:
        units = {length: unit(tracing, length) for length in tracing.lengths}
        if not all(peek(root, need.manifest, is_whole).complete for need in units.values()):
            compile_in_process(self._config.with_run(compiled=str(root)))
        graph = tracing.loaded(pickled)
        for length, need in units.items():
            with entry(root, need.manifest, is_whole) as held:
                self._traces[length] = self._on_core(package, held, graph)
        self._tracing = tracing
        widths = {self._check(length, graph) for length in tracing.lengths}
        self._spec = EncoderSpec(
            rows=self._config.model.max_batch,
            buckets=tracing.lengths,
            vocab_size=int(tracing.config.vocab_size),
            width=widths.pop(),
            labels=tracing.labels,
            compiled_rows=tracing.batch,
        )

    def encode(self, inputs: Sequence[EncodeInput]) -> numpy.ndarray[Any, Any]:
        """See ``EncodeEngine.encode``."""
        length = smallest_bucket(self.spec.buckets, max(len(input.ids) for input in inputs))
        return self._run(inputs, length).numpy()

    def close(self) -> None:
        self._traces.clear()

    def _run(self, inputs: Sequence[EncodeInput], length: int) -> torch.Tensor:
        import torch

        assert self._tracing is not None
        with torch.inference_mode():
            vectors: torch.Tensor = self._traces[length](*self._tracing.inputs(list(inputs), length))
        return vectors

    def _on_core(self, package: Any, held: LockedEntry, graph: torch.nn.Module) -> Any:
        """Returns the trace of an entry, on the core, with the weights of the checkpoint. Raises EngineLoadError."""
        import torch

        if not held.complete:
            fact = f"the compiled artifacts in {held.path} were removed while the replica started"
            raise EngineLoadError("artifacts-stale", fact, "start it again")
        jit: Any = torch.jit
        try:
            trace = jit.load(str(held.path / TRACE))
            self._replace_weights(package, trace, held, graph)
            package.move_trace_to_device(trace, 0)
        except RuntimeError as error:
            fault = fault_of(error)
            if fault is None or fault.id != "hbm-exhausted":
                raise
            size = sum(weight.nbytes for weight in graph.state_dict().values()) / 2**20
            message = f"the core's memory is full after {len(self._traces)} of the length buckets of "
            message += f"{self._config.source}, each with {size:.0f} MiB of weights of its own: {fault.what}"
            raise EngineLoadError(fault.id, message, "use fewer buckets.prefill, or dtype: bf16") from error
        return trace

    def _replace_weights(self, package: Any, trace: Any, held: LockedEntry, graph: torch.nn.Module) -> None:
        try:
            package.replace_weights(trace, graph.state_dict())
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            held.forget()
            fact = f"the trace in {held.path} does not take the weights of {self._config.source}: {error}"
            hint = "it is discarded: the next start compiles it again"
            raise EngineLoadError("artifacts-stale", fact, hint) from error

    def _check(self, length: int, graph: torch.nn.Module) -> int:
        """Runs a bucket once with a full batch, and compares it with the CPU: a trace freezes control flow by the
        values of its example. Returns the width of a vector. Raises EngineLoadError."""
        import torch

        assert self._tracing is not None
        probe = self._tracing.probe(length)
        with torch.inference_mode():
            expected: torch.Tensor = graph(*self._tracing.inputs([probe], length))
        rows = self._run([probe] * self._tracing.batch, length)
        scale = max(float(expected.norm()), 0.0 if self._tracing.kind == "embedding" else 1.0)
        error = float((rows - expected).norm(dim=-1).max()) / max(scale, 1e-9)
        if not error <= MOST_ERROR:  # NaN, too
            fact = f"the trace of {length} tokens of {self._config.source} differs from the CPU by {error:.3g} of a "
            fact += f"vector's length; the most is {MOST_ERROR}"
            raise EngineLoadError("trace-deviates", fact, "try dtype: fp32 without compiler.flags, or engine: cpu")
        return rows.shape[1]
