"""The NxD Inference engine: a model that AWS's package compiles, loads and runs, driven slot by slot.

A slot is a line of the device's KV cache, named by ``seq_ids``. What the package asks of a caller:

1. A call is a prompt or a step by its tensors alone: a prompt is wider than one token, and its lowest position is 0.
2. Padding stands on the right, with 0 in the attention mask and in the positions: a prompt is as long as its highest
   position says, plus one.
3. The rows of a step are sorted by slot, and every live slot is among them: the lines of the others are written at the
   first row's position (``models/model_wrapper._forward_with_pad``).
4. Each row has its sampling parameters, top_k from 1 on: 0 and -1 draw any id of the vocabulary.
5. A step says with a mask what its slots hold, its own token not among it, and the mask is as wide as the longest: by
   that width, and by what a speculative step takes ahead, the package chooses the graph
   (``model_wrapper.ModelWrapper.get_target_bucket``: the first bucket that is longer). A mask that the package has to
   infer is as wide as a whole slot in early versions (``model_base._infer_attention_mask``), so that every step would
   run the largest graph, and find none where it speculates.
"""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.engines import package_contract
from workers.engines.checkpoint_files import check_length, eos_token_ids, positions_of, read_config
from workers.engines.nxd_inference import artifacts as nxd_artifacts
from workers.engines.nxd_inference import precompiled
from workers.engines.nxd_inference.config import GLOBAL_TOPK, Lengths, Settings, lengths
from workers.engines.nxd_inference.package import Package, build_config, import_package, require_package
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError, EngineSpec
from workers.neff_cache.compile_units import Buildable, Tell
from workers.neff_cache.compiled_artifacts import Entry, entry

if TYPE_CHECKING:
    from workers.engines import EngineConfig


log = logging.getLogger(__name__)


def open_neuronx_distributed(config: EngineConfig) -> NxdEngine:
    """The engine, not loaded yet. Raises EngineLoadError where the package or the checkpoint is missing."""
    require_package()
    return NxdEngine(Settings.of(config), config.compiled)


def buildables(config: EngineConfig, read: bool = True) -> list[Buildable]:
    """What the engine of ``config`` compiles: one set, the draft in it. Raises EngineLoadError.

    The sharded weights are a part of it. With ``read`` False no checkpoint is read whose digest is not known.
    A source that is compiled already has none; what its start would refuse is raised.
    """
    settings = precompiled.seen(Settings.of(config))
    package = import_package()
    given = precompiled.given_in(Path(settings.source))
    if given is not None:
        precompiled.check(
            given, settings, _described(package, settings)[1], nxd_artifacts.manifest(settings, package, None)
        )
        if given.compiled:
            return []
    root = None if config.compiled is None else Path(config.compiled)
    told, unread = nxd_artifacts.foretold(settings, package, root, read)

    def make(found: Entry, tell: Tell) -> None:
        nxd_artifacts.compile_apart(settings, found)
        found.finish(settings.source)

    return [Buildable(source=Path(settings.source), manifest=told, make=make, kept=root is not None, unread=unread)]


def _described(package: Package, settings: Settings) -> tuple[Any, Any]:
    """As ``build_config``. Raises EngineLoadError also for what the package's constructors refuse, and for a quantized
    checkpoint that is not what the configuration names."""
    try:
        kind, config = build_config(package, settings, nxd_artifacts.QUANTIZED)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"NxD Inference {package.version} refuses the options of {settings.source}: "
        what += f"{type(error).__name__}: {error}"
        raise EngineLoadError("bad-engine-option", what, "see `engine_options`") from error
    precompiled.check_quantized(settings, config.neuron_config)
    return kind, config


class NxdEngine:
    """Keeps ``GenerateEngine``, with ``sampling: device`` ``SamplingEngine``, with a draft ``RunEngine``.

    It has no ``generate`` of its own. The package's adapter for transformers' loop raises NameError in 0.7 and 0.8
    (``hf_adapter.prepare_inputs_for_generation``), replaces ``sampling_params`` by the GenerationConfig from 0.3 on,
    and divides logits on the host by the temperature twice, in transformers' warper and in its own sampler.
    """

    def __init__(self, settings: Settings, compiled: str | None) -> None:
        """``compiled`` is the folder where artifacts are kept; None: they go with this engine. Nothing is read yet."""
        self._settings = settings
        self._compiled = compiled
        self._scratch: Path | None = None
        self._spec: EngineSpec | None = None
        self._model: Any = None
        self._how: list[DeviceSampling] = []

    @property
    def spec(self) -> EngineSpec:
        if self._spec is None:
            raise RuntimeError("the engine is not loaded")
        return self._spec

    def load(self) -> None:
        """Compile where that was not done before, load, and run every bucket once.

        Raises ``EngineLoadError``, and whatever the package and the runtime raise.
        """
        settings = self._settings = precompiled.seen(self._settings)
        sizes = lengths(settings)
        source = read_config(Path(settings.source))
        eos = eos_token_ids(Path(settings.source), source)
        check_length(settings.max_len, positions_of(source))
        package = import_package()
        package_contract.log_drift("nxd-inference", log)
        # Made here only to find what is wrong with it: in the compiling process it would be one failure like any other.
        kind, config = _described(package, settings)
        given = precompiled.given_in(Path(settings.source))
        if given is not None:
            precompiled.check(given, settings, config, nxd_artifacts.manifest(settings, package, None))
        if given is not None and given.compiled:
            self._model = kind(settings.source, precompiled.config_of(given, config))
            self._model.load(settings.source)
        else:
            folder = self._made(package)
            # Not by the neuron_config.json there: the package does not read back a kv_quant_config that it wrote.
            self._model = kind(folder, config)
            self._model.load(folder)
        self._how = [DeviceSampling()] * settings.slots
        on_device = settings.sampling == "device" and not settings.speculation_length
        self._spec = EngineSpec(
            slots=settings.slots,
            max_len=settings.max_len,
            prefill_buckets=sizes.context_buckets,
            decode_buckets=sizes.decode_buckets,
            vocab_size=int(source["vocab_size"]),
            eos_token_ids=eos,
            returns="tokens" if on_device or settings.speculation_length else "logits",
            keeps_idle_slots=False,
            device_top_k=min(_global_topk(settings), int(source["vocab_size"])) if on_device else 0,
            run_k=settings.draft_k if settings.speculation_length else 0,
        )
        self._warm_up(sizes)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """See ``GenerateEngine.prefill``. The package runs one prompt at a time."""
        single = [row for row, prompt in enumerate(prompts) if len(prompt) == 1]
        longer = [row for row, prompt in enumerate(prompts) if len(prompt) > 1]
        found: dict[int, Any] = {}
        if longer:
            output = self._prefill([slots[row] for row in longer], [prompts[row] for row in longer])
            found.update(zip(longer, output, strict=True))
        for row in single:
            # The package fills positions up to the bucket with 1, and takes the first of the highest for the prompt's
            # end, which here would be the padding. The largest bucket alone leaves a prompt of its own width as it is.
            found[row] = self._prefill([slots[row]], [prompts[row]], self.spec.prefill_buckets[-1])[0]
        return self._joined([found[row] for row in range(len(prompts))])

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """See ``GenerateEngine.decode``. With a draft it is a step that keeps the first token only."""
        if self.spec.run_k:
            return [run[0] for run in self.decode_runs(slots, tokens, positions)]
        return self._answers(self._step(slots, tokens, positions), len(slots))

    def decode_runs(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
        """See ``RunEngine.decode_runs``."""
        fused = self._step(slots, tokens, positions).fused_outputs
        # Accepted tokens padded to speculation_length; last the position after them. A padding 0 is an id as well.
        accepted, following = fused[0].reshape(len(slots), -1).tolist(), fused[3].reshape(-1).tolist()
        return [row[: after - position] for row, after, position in zip(accepted, following, positions, strict=True)]

    def sample_by(self, slots: Sequence[int], how: Sequence[DeviceSampling]) -> None:
        """See ``SamplingEngine.sample_by``."""
        for slot, one in zip(slots, how, strict=True):
            self._how[slot] = one

    def close(self) -> None:
        """Let go of the model. The cores are free when the process ends."""
        self._spec = None
        self._model = None
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _made(self, package: Package) -> str:
        """The folder of the compiled model, compiled where it was not before."""
        settings = self._settings
        told = nxd_artifacts.manifest(settings, package, None if self._compiled is None else Path(self._compiled))
        with entry(self._root(), told) as artifacts:
            if not artifacts.complete:
                nxd_artifacts.compile_apart(settings, artifacts)
                artifacts.finish(settings.source)
        folder = artifacts.path / nxd_artifacts.MODEL  # complete entries stay, so others may load it as well
        return str(
            precompiled.joined(folder, Path(settings.source), self._scratched()) if settings.presharded else folder
        )

    def _root(self) -> Path:
        if self._compiled is not None:
            return Path(self._compiled)
        return self._scratched()

    def _scratched(self) -> Path:
        """A folder that goes with this engine."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="corewright-nxd-"))
        return self._scratch

    def _prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], width: int = 0) -> Any:
        """Prompts of at least ``width`` tokens with their padding, in one call."""
        width = max(width, *(len(prompt) for prompt in prompts))
        output = self._call(
            slots,
            [[*prompt, *[0] * (width - len(prompt))] for prompt in prompts],
            [[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts],
            [[*range(len(prompt)), *[0] * (width - len(prompt))] for prompt in prompts],
        )
        if not self.spec.run_k:
            return self._answers(output, len(slots))
        return output.fused_outputs[0].reshape(len(slots), -1)[:, 0].tolist()

    def _step(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """One token of each slot. ``positions`` are from 1 on: at 0 there is a prompt."""
        width = max(positions)
        mask = [[1] * position + [0] * (width - position) for position in positions]
        return self._call(slots, [[token] for token in tokens], mask, [[position] for position in positions])

    def _call(
        self,
        slots: Sequence[int],
        ids: Sequence[Sequence[int]],
        mask: Sequence[Sequence[int]],
        positions: Sequence[Sequence[int]],
    ) -> Any:
        """One call of the model: ``ids`` and ``positions`` are ``[len(slots), width]``; ``mask`` too, of a prompt."""
        import torch

        with torch.inference_mode():
            return self._model.forward(
                input_ids=torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                position_ids=torch.tensor(positions),
                seq_ids=torch.tensor(slots),
                sampling_params=self._sampling_params([self._how[slot] for slot in slots]),
            )

    def _sampling_params(self, how: Sequence[DeviceSampling]) -> Any:
        """``[rows, 3]`` float32: top_k, top_p, temperature."""
        import torch

        return torch.tensor([[float(one.top_k), one.top_p, one.temperature] for one in how])

    def _answers(self, output: Any, rows: int) -> Any:
        """Float32 logits ``[rows, vocab_size]``, or the ids that the device drew."""
        if self.spec.returns == "logits":
            return output.logits[:, -1, : self.spec.vocab_size].float()
        tokens = getattr(output, "tokens", None)
        drawn = output.hidden_states if tokens is None else tokens
        return drawn.reshape(rows, -1)[:, -1].tolist()

    def _joined(self, rows: list[Any]) -> Any:
        import torch

        return torch.stack(rows) if self.spec.returns == "logits" else rows

    def _warm_up(self, sizes: Lengths) -> None:
        """One call for each graph. A length is in a bucket while it is below it."""
        for bucket in sizes.context_buckets:
            self.prefill([0], [[0] * (bucket - 1)])
        every = range(self.spec.slots)
        ahead = self._settings.speculation_length
        for bucket in sizes.token_buckets:
            position = bucket - 1 - ahead
            if position > 0:  # a shorter graph holds no step
                self.decode(every, [0] * len(every), [position] * len(every))


def _global_topk(settings: Settings) -> int:
    """At most GLOBAL_TOPK (``nxd_config``)."""
    given = settings.engine_options.get("on_device_sampling_config")
    return int(given.get("global_topk", GLOBAL_TOPK)) if isinstance(given, dict) else GLOBAL_TOPK


if __name__ == "__main__":
    sys.exit(nxd_artifacts.main(sys.argv[1:]))
