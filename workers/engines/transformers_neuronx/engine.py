"""The transformers-neuronx engine: drives one model class of the package step by step through its ``forward``.

Llama, Mistral and Mixtral batch continuously. The others are static: one batch at a time, all rows in lock-step. So is
a model of one slot, where both are equivalent and static batching has fewer failure modes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placements.engines.transformers_neuronx.capabilities import (
    FAMILIES,
    MISREAD_HINT,
    REFUSED,
    Family,
    Reading,
    run_length,
)
from workers.artifacts.sources.layout import TNX_SHARDS
from workers.compiled.host_sets import Buildable, LockedEntry, Tell
from workers.engines import package_contract
from workers.engines.checkpoint_files import check_length, eos_token_ids, positions_of, read_config
from workers.engines.engine_setup import LoadableEngine, kept_in, not_installed, source_of
from workers.engines.manifest_parts import version_of
from workers.engines.speculative import buildables_of, with_draft
from workers.engines.transformers_neuronx.artifacts import compile_ahead, compile_now, is_whole, manifest, start_from
from workers.engines.transformers_neuronx.options import (
    Options,
    Shapes,
    device_generation,
    device_top_k,
    neuron_config,
    options_for,
)
from workers.engines.transformers_neuronx.rows import ContinuousRows, LockStepRows, Rows, SerialRows
from workers.engines.weight_files import (
    check_pickles,
    check_safetensors,
    index_of,
    pickled_files,
    present_files_in,
    weights_root,
)
from workers.host.start_phases import START
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError, EngineSpec, GenerateEngine
from workers.messages.replica_config import ReplicaConfig

if TYPE_CHECKING:
    import torch


def family_of(model_type: object, where: object) -> Family:
    """Returns the family of ``model_type``, which the file ``where`` names. Raises EngineLoadError."""
    if isinstance(model_type, str) and model_type in REFUSED:
        message = f"transformers-neuronx does not support the model_type {model_type} of {where}: {REFUSED[model_type]}"
        raise EngineLoadError("unknown-family", message, "use the cpu engine, or another model")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise EngineLoadError(
            "unknown-family",
            f"transformers-neuronx has no class for the model_type {model_type!r} of {where}",
            f"supported: {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]


def check_layout(path: Path, settings: Mapping[str, Any]) -> None:
    """Raises EngineLoadError for the output of ``save(folder, sharded_weights=True)``; ``settings`` is its config.json.

    The package loads such weights without comparing them with the configuration. Their files record the number of cores
    and the dtype, but not how heads were replicated, what was fused, or which layouts were chosen.
    """
    if settings.get("is_presharded_checkpoint") is True or (path / TNX_SHARDS).exists():
        message = f"transformers-neuronx has sharded the weights in {path}, and their settings are not recorded"
        hint = "set `source` to the original checkpoint: it is compiled once, and sharded at each start"
        raise EngineLoadError("layout-unsupported", message, hint)


def check_weights(path: Path, allow_pickle: bool) -> None:
    """Raises EngineLoadError where files are missing, truncated, or pickles that are not allowed.

    The package prefers safetensors, then the folder ``pytorch_model.bin/``, then pickles. It unpickles without
    restrictions, so allowed pickles are first read with torch's ``weights_only``, which calls no function.
    """
    single = path / "model.safetensors"
    if single.exists() or index_of(single).exists():
        check_safetensors([single] if single.exists() else present_files_in(index_of(single)))
        return
    files = pickled_files(path, allow_pickle)
    check_pickles(file for file in files if file.suffix != ".safetensors")
    check_safetensors(file for file in files if file.suffix == ".safetensors")


log = logging.getLogger(__name__)

# The package's exceptions for options that do not fit together. StopIteration: no bucket holds a position.
_REFUSALS = (AssertionError, AttributeError, KeyError, NotImplementedError, StopIteration, TypeError, ValueError)


def open_transformers_neuronx(config: ReplicaConfig) -> GenerateEngine:
    """Returns the engine, not loaded yet, with its draft on the same cores if there is one. Raises EngineLoadError."""
    return with_draft(*_engines(config), config.draft_k)


def buildables(config: ReplicaConfig, _read: bool = True) -> list[Buildable]:
    """Returns the engine's compile units, with its draft's. Raises EngineLoadError."""
    return buildables_of(*_engines(config))


def _engines(config: ReplicaConfig) -> tuple[TransformersNeuronxEngine, TransformersNeuronxEngine | None]:
    source = source_of(config)
    if config.draft_source is None:
        return TransformersNeuronxEngine(config, source), None
    target = TransformersNeuronxEngine(
        config, source, speculates=run_length(config.draft_k + 1, config.model.max_batch)
    )
    # The draft begins with the last two tokens of a slot, so it takes several in one step, too.
    runs = run_length(2, config.model.max_batch)
    return target, TransformersNeuronxEngine(config, Path(config.draft_source), speculates=runs)


@dataclass(frozen=True)
class _Planned:
    """What follows from a configuration before the package creates a model."""

    family: Family
    continuous: bool
    shapes: Shapes
    options: Options
    model_class: Any
    vocab_size: int


class TransformersNeuronxEngine(LoadableEngine[EngineSpec]):
    """Implements ``GenerateEngine``; ``SamplingEngine`` with ``sampling: device``, ``VerifyingEngine`` with a draft.

    Exceptions of the Neuron runtime are passed on unchanged.
    """

    def __init__(self, config: ReplicaConfig, path: Path, speculates: int = 0) -> None:
        """``speculates`` is the largest number of tokens of a slot in a ``verify``; 0: there is no ``verify``.

        Nothing is read before ``load``.
        """
        self._config = config
        self._path = path
        self._length = speculates
        self._model: Any = None
        self._rows: Rows | None = None
        self._is_serial = False
        self._sampling = [DeviceSampling()] * config.model.max_batch
        self.compiled = False  # whether ``load`` had to compile, as far as known

    def load(self) -> None:
        """See ``GenerateEngine.load``. Everything that needs no device is checked before a core is claimed."""
        settings = read_config(self._path)
        plan = self._plan(settings)
        check_weights(weights_root(self._path), self._config.model.allow_pickle)
        family, continuous, shapes = plan.family, plan.continuous, plan.shapes
        package_contract.log_drift("transformers-neuronx", log)
        model = self._build_model(plan)
        root = kept_in(self._config)
        with self._package_errors():
            if root is None or family.serial:
                compile_now(self._path, model, self._manifest(plan), root)
                self.compiled = True
            else:
                self.compiled = not start_from(root, self._manifest(plan), self._path, model)
            if family.resets and not continuous:
                model.reset()  # new caches may contain NaN, by a comment in the package's GPT-2, which resets itself
        self._model = model
        self._is_serial = family.serial
        self._rows = self._make_rows(model, family, continuous)
        self._spec = EngineSpec(
            slots=self._config.model.max_batch,
            max_len=self._config.max_len,
            prefill_buckets=shapes.prefill,
            decode_buckets=shapes.decode,
            vocab_size=plan.vocab_size,
            eos_token_ids=eos_token_ids(self._path, settings),
            continuous=continuous,
            returns="tokens" if self._config.model.sampling == "device" else "logits",
            keeps_idle_slots=False,
            device_top_k=device_top_k(plan.vocab_size) if self._config.model.sampling == "device" else 0,
        )
        with self._package_errors():
            self._warm_up()

    def buildable(self) -> Buildable:
        """Returns the engine's compile unit, without weights and without a device. Raises EngineLoadError."""
        plan = self._plan(read_config(self._path))

        def make(artifacts: LockedEntry, tell: Tell) -> None:
            check_weights(weights_root(self._path), self._config.model.allow_pickle)
            model = self._build_model(plan)
            if not plan.family.resets:
                # GPT-2 is reset for each context length while its graphs are built. On the host each reset joins the
                # parts of a cache and lists the whole once for each core: tp_degree times the memory.
                model.reset = _skip_reset
            with self._package_errors():
                compile_ahead(artifacts, self._path, model)

        has_entry = not plan.family.serial
        return Buildable(
            source=self._path,
            manifest=self._manifest(plan),
            is_whole=is_whole,
            make=make if has_entry and hasattr(plan.model_class, "cpu_compile") else None,
            kept=has_entry,
        )

    def _plan(self, settings: Mapping[str, Any]) -> _Planned:
        check_layout(weights_root(self._path), settings)
        family = family_of(settings.get("model_type"), self._path / "config.json")
        continuous = family.continuous and self._config.model.max_batch > 1
        shapes = Shapes.of(self._config, family, continuous)
        self._check_speculation(family, continuous, shapes)
        check_length(self._config.max_len, positions_of(settings))
        model_class, vocab_size = _registry()[settings["model_type"]], int(settings["vocab_size"])
        _check_reading(settings, self._path)
        options = options_for(self._config, family, shapes, continuous, model_class, vocab_size)
        return _Planned(family, continuous, shapes, options, model_class, vocab_size)

    def _manifest(self, plan: _Planned) -> dict[str, Any]:
        return manifest(self._path, asdict(plan.options), [self._length] if self._length else [])

    def _build_model(self, plan: _Planned) -> Any:
        """Returns the package's model, before it reads weights."""
        config = neuron_config(plan.options.neuron)
        with self._package_errors():
            constructor, weights = plan.options.constructor, str(weights_root(self._path))
            model = plan.model_class.from_pretrained(weights, neuron_config=config, **constructor)
            if self._length:
                model.enable_speculative_decoder(self._length)
        return model

    @contextlib.contextmanager
    def _package_errors(self) -> Iterator[None]:
        """Raises EngineLoadError for the package's exceptions where options do not fit together: in its constructors,
        in building graphs and in their first runs. Exceptions of its runtime pass unchanged."""
        try:
            yield
        except _REFUSALS as error:
            message = f"transformers-neuronx rejected the options of {self._path}: {type(error).__name__}: {error}"
            raise EngineLoadError("bad-engine-option", message, "check `engine_options` and `buckets`") from error

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """See ``GenerateEngine.prefill``. Where the engine is not continuous, it begins a new batch."""
        return self._converted(self._loaded.prefill(slots, prompts))

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """See ``GenerateEngine.decode``. Raises ValueError for unsorted slots."""
        return self._converted(self._loaded.decode(slots, tokens, positions))

    def verify(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], positions: Sequence[int]) -> torch.Tensor:
        """See ``VerifyingEngine.verify``, except that idle slots are overwritten.

        One graph, of the longest run, serves all lengths. Where it would exceed the KV cache, or where a row begins at
        position 0 (which the package treats as a prompt), the tokens are decoded one by one.
        """
        import torch

        count = len(tokens[0])
        if min(positions) > 0 and max(positions) + self._length <= self.spec.max_len and 1 < count <= self._length:
            return self._loaded.verify(slots, tokens, positions, self._length)
        columns = []
        for ahead in range(count):
            places = [position + ahead for position in positions]
            columns.append(self.decode(slots, [row[ahead] for row in tokens], places))
        return torch.stack(columns, dim=1)

    def sample_by(self, slots: Sequence[int], sampling: Sequence[DeviceSampling]) -> None:
        """See ``SamplingEngine.sample_by``. The package needs lists by slot."""
        for slot, parameters in zip(slots, sampling, strict=True):
            self._sampling[slot] = parameters
        self._update_sampling()

    def close(self) -> None:
        """Release the model. Its cores are free when the process exits."""
        self._spec = None
        self._model = self._rows = None

    @property
    def _loaded(self) -> Rows:
        if self._rows is None:
            raise RuntimeError("the engine is not loaded")
        return self._rows

    def _make_rows(self, model: Any, family: Family, continuous: bool) -> Rows:
        kind = ContinuousRows if continuous else SerialRows if family.serial else LockStepRows
        return kind(model, self._config.model.max_batch, self._config.max_len)

    def _check_speculation(self, family: Family, continuous: bool, shapes: Shapes) -> None:
        if not self._length:
            return
        message = hint = ""
        if not family.speculates:
            message = f"the class of {self._path} takes only one token a step"
            hint = "speculation needs Llama or GPT-2, for the model and for its draft"
        elif not continuous and self._config.model.max_batch > 1:
            message = "all rows of a static batch share a position, so they would have to accept the same tokens"
            hint = "set `max_batch: 1`"
        elif self._config.model.sampling == "device":
            message, hint = "drafts are verified with logits on the host", "set `sampling: host`"
        elif continuous and self._length > shapes.prefill[-1]:
            message = f"runs of {self._length} tokens are longer than the longest prefill bucket, {shapes.prefill[-1]}"
            hint = f"add a bucket of at least {self._length}"
        if message:
            raise EngineLoadError("bad-draft", message, hint)

    def _converted(self, output: torch.Tensor) -> Any:
        if self.spec.returns == "tokens":
            tokens: list[int] = output.reshape(-1).tolist()
            return tokens
        return output.float()

    def _update_sampling(self) -> None:
        from transformers_neuronx.config import GenerationConfig

        options = device_generation(self._sampling, self.spec.vocab_size)
        self._model.update_generation_config(GenerationConfig(**options))

    def _warm_up(self) -> None:
        """Run every graph once. GPT-NeoX has only one, for which one token is enough."""
        every = range(self.spec.slots)
        for bucket in self.spec.prefill_buckets:
            rows = every[:1] if self.spec.continuous else every
            self.prefill(rows, [[0] * (1 if self._is_serial else bucket)] * len(rows))
        for bucket in self.spec.decode_buckets:
            self.decode(every, [0] * len(every), [bucket - 1] * len(every))
        if self._length and self.spec.max_len > self._length:
            self.verify(every, [[0] * self._length] * len(every), [1] * len(every))


def _registry() -> Any:
    """Returns the package's table of classes by model_type. Raises EngineLoadError where it is not installed."""
    try:
        from transformers_neuronx import modeling_auto
    except ImportError as error:
        raise not_installed("transformers-neuronx", error.name or str(error)) from error
    START.end("imports")
    return modeling_auto.NEURON_MODEL_FOR_CAUSAL_LM_MAPPING


def _check_reading(settings: Mapping[str, Any], path: Path) -> None:
    """Raises EngineLoadError where the package would compute another model than config.json describes."""
    reading, file = Reading.of(settings), path / "config.json"
    if reading.lacks:
        message = f"transformers-neuronx does not support {settings['model_type']} with {reading.lacks} ({file})"
        raise EngineLoadError("unknown-family", message, "use the cpu engine, or another model")
    if misread := reading.misread(version_of("transformers")):
        message = f"transformers-neuronx misreads the rotary positions of {file}: {misread}"
        raise EngineLoadError("rotary-misread", message, MISREAD_HINT)
    if reading.approximates:
        log.warning("%s: %s is approximated by gelu_new (tanh)", file, reading.approximates)


def _skip_reset(context_length_estimate: int) -> None:
    """Replaces ``reset`` of a model that is only compiled: nothing has run, so there is nothing to reset."""
