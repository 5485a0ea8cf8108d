"""The Optimum Neuron engine, 0.0.28: exports a model to transformers-neuronx, loads it and runs it slot by slot.

Its ``forward`` takes what that package takes: ``cache_ids`` and ``start_ids``. It has no export without a device
(``modeling_decoder._export``), so the first start compiles on the cores of its replica.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from placements.engines.optimum_neuron.capabilities import OPTIMUM_FAMILIES
from placements.engines.transformers_neuronx.capabilities import Reading
from workers.compiled.compile_session import CompileSession
from workers.compiled.host_sets import Buildable, LockedEntry, compiling, entry
from workers.engines import package_contract
from workers.engines.checkpoint_files import check_length, eos_token_ids, positions_of, read_config
from workers.engines.engine_setup import LoadableEngine, dtype_on
from workers.engines.manifest_parts import neuron_build, versions_of
from workers.engines.optimum_neuron import compiled_folder
from workers.engines.optimum_neuron.package import DISTRIBUTION, OptimumPackage, find_package
from workers.engines.optimum_neuron.settings import OptimumSettings, check_computed
from workers.engines.transformers_neuronx.rows import ContinuousRows, LockStepRows
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError, EngineSpec

log = logging.getLogger(__name__)

MODEL = "model"  # in an entry
PACKAGES = ("transformers-neuronx", "torch-neuronx", "neuronx-cc", "libneuronxla", "torch", "transformers")
WHERE = "the compilers write to this log"


def first_buildables(settings: OptimumSettings, package: OptimumPackage, root: Path | None) -> list[Buildable]:
    """Returns the compile unit, which only a start can compile; none for a compiled source. Raises EngineLoadError."""
    if _checked(settings, package):
        return []
    return [Buildable(source=Path(settings.source), manifest=_manifest(settings, package), kept=root is not None)]


def _checked(settings: OptimumSettings, package: OptimumPackage) -> bool:
    """Returns whether the source is compiled. Raises EngineLoadError for what the package cannot run or compute, and
    for a compiled source that does not match."""
    source = Path(settings.source)
    folder, config = compiled_folder.find(source), read_config(source)
    dtype_on("optimum-neuron", settings.dtype)
    check_length(settings.max_len, positions_of(config))
    check_computed(settings, config)
    family, fact, hint = config.get("model_type"), "", "use the engine cpu, or another model"
    if family not in OPTIMUM_FAMILIES["tnx"]:
        fact, hint = f"Optimum Neuron {package.version} does not serve {family}", "use the engine cpu"
    elif lacks := Reading.of(config).lacks:
        fact = f"Optimum Neuron {package.version} does not support {family} with {lacks}"
    if fact:
        raise EngineLoadError("unknown-family", f"{fact} ({source / 'config.json'})", hint)
    if settings.sampling == "device":
        message = f"Optimum Neuron {package.version} samples on the host only"
        raise EngineLoadError("bad-engine-option", message, "set `sampling: host`")
    if settings.prefill_chunk_size:
        message = f"Optimum Neuron {package.version} has no prefill_chunk_size; 0.4.6 and later have it"
        raise EngineLoadError("bad-engine-option", message, "remove `engine_options.prefill_chunk_size`")
    if folder is not None:
        compiled_folder.check(folder, settings, ())
        compiled_folder.check_installed(folder, package)
    return folder is not None


def _manifest(settings: OptimumSettings, package: OptimumPackage) -> dict[str, Any]:
    """Returns everything that the graphs depend on, as JSON: not the weights."""
    fields = msgspec.to_builtins(settings)
    return {
        "engine": "optimum-neuron",
        "versions": {DISTRIBUTION: package.version, **versions_of(PACKAGES)},
        **neuron_build(),
        "model": foreign_files.read_json(Path(settings.source) / "config.json"),
        "options": {name: fields[name] for name in ("dtype", "slots", "max_len", "tp_degree")},
    }


class FirstOptimumEngine(LoadableEngine[EngineSpec]):
    """Implements ``GenerateEngine``. Exceptions of the Neuron runtime are passed on unchanged."""

    def __init__(self, settings: OptimumSettings, compiled: Path | None) -> None:
        """``compiled`` is the folder of kept artifacts; None: they are not kept. Nothing is read yet."""
        self._settings = settings
        self._compiled = compiled
        self._rows: ContinuousRows | LockStepRows | None = None

    def load(self) -> None:
        """Export unless exported before, load, and run each kind of graph once.

        Raises ``EngineLoadError``, and exceptions of the package and the runtime.
        """
        settings, package = self._settings, find_package()
        source = Path(settings.source)
        is_compiled = _checked(settings, package)
        package_contract.log_drift("optimum-neuron", log)
        config = read_config(source)
        if is_compiled:
            model = package.model_class.from_pretrained(str(source))
        else:
            with tempfile.TemporaryDirectory(prefix="corewright-optimum-") as scratch:
                model = self._exported(package.model_class, _manifest(settings, package), Path(scratch))
        continuous = bool(model.continuous_batching)
        rows = ContinuousRows if continuous else LockStepRows
        self._rows = rows(_Stepped(model), settings.slots, settings.max_len)
        self._spec = EngineSpec(
            slots=settings.slots,
            max_len=settings.max_len,
            prefill_buckets=(settings.max_len,),
            decode_buckets=(settings.max_len,),
            vocab_size=int(config["vocab_size"]),
            eos_token_ids=eos_token_ids(source, config),
            continuous=continuous or settings.slots == 1,
            keeps_idle_slots=False,
        )
        every = range(settings.slots)
        self.prefill(every[:1] if continuous else every, [[0, 0]] * (1 if continuous else settings.slots))
        self.decode(every, [0] * settings.slots, [2] * settings.slots)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """See ``GenerateEngine.prefill``. An engine that is not continuous begins a new batch."""
        return self._loaded.prefill(slots, prompts).float()

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """See ``GenerateEngine.decode``. Raises ValueError for unsorted slots."""
        return self._loaded.decode(slots, tokens, positions).float()

    def close(self) -> None:
        """Release the model. The cores are free when the process exits."""
        self._spec = self._rows = None

    @property
    def _loaded(self) -> ContinuousRows | LockStepRows:
        if self._rows is None:
            raise RuntimeError("the engine is not loaded")
        return self._rows

    def _exported(self, kind: Any, manifest: Mapping[str, Any], scratch: Path) -> Any:
        """Returns the model on its cores, exported or with the graphs of an earlier export."""
        source = Path(self._settings.source)
        with entry(self._compiled or scratch, manifest) as artifacts:
            if artifacts.complete:
                return kind.from_pretrained(str(_joined(scratch / "joined", artifacts.path / MODEL, source)))
            session = CompileSession(manifest, source, self._compiled)
            with session.compiling(), compiling(f"{source} with Optimum Neuron, except graphs in its cache", WHERE):
                model = kind.from_pretrained(
                    str(source),
                    export=True,
                    batch_size=self._settings.slots,
                    sequence_length=self._settings.max_len,
                    num_cores=self._settings.tp_degree,
                    auto_cast_type=self._settings.dtype,
                )
            self._save(model, artifacts, scratch / "no-checkpoint")
            session.record_compiled(artifacts.path / MODEL / "compiled")
            return model

    def _save(self, model: Any, artifacts: LockedEntry, empty: Path) -> None:
        """Save the settings and the graphs. The package would copy the checkpoint of a local folder, too, which here
        every start links instead."""
        empty.mkdir()
        model.checkpoint_dir = str(empty)
        model.save_pretrained(str(artifacts.path / MODEL))
        shutil.rmtree(artifacts.path / MODEL / "checkpoint")
        artifacts.finish(self._settings.source)


def _joined(folder: Path, saved: Path, source: Path) -> Path:
    """Makes a folder that looks as if ``saved`` had been saved with the checkpoint in ``source``."""
    folder.mkdir()
    for path in saved.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    (folder / "checkpoint").symlink_to(source.resolve())
    return folder


class _Stepped:
    """The package's model with the ``forward`` of transformers-neuronx: logits ``[rows, vocab]``."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def forward(self, input_ids: Any, cache_ids: Any, start_ids: Any) -> Any:
        return self._model.forward(input_ids, cache_ids, start_ids, return_dict=False)[0][:, -1]
