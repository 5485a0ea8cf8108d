"""The NxD Inference engine: compiles, loads and runs a model with AWS's package, slot by slot.

A slot is a line of the device's KV cache, named by ``seq_ids``. The package's rules for callers:

1. Only the tensors decide whether a call is a prompt or a step: a prompt is wider than one token, and its lowest
   position is 0.
2. Padding is on the right, with 0 in the attention mask and in the positions: a prompt's length is its highest position
   plus one.
3. The rows of a step are sorted by slot, and every live slot is among them: the lines of other slots are written at the
   first row's position (``models/model_wrapper._forward_with_pad``).
4. Each row has its sampling parameters, top_k from 1 on: -1 draws evenly from the global_topk likeliest ids. So does 0
   from 0.6 on; 0.4 and 0.5 raise ValueError for it (``modules/generation/sampling.validate_sampling_params``).
5. The mask of a step covers the tokens in its slots, without its own token, and is as wide as the longest. By that
   width, and by the tokens of a speculative step, the package chooses the graph
   (``model_wrapper.ModelWrapper.get_target_bucket``: the first bucket that is longer). A mask that the package infers
   is as wide as a whole slot in early versions (``model_base._infer_attention_mask``): every step would then run the
   largest graph, and a speculative step would find none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.compiled.host_sets import Buildable
from workers.engines import package_contract
from workers.engines.checkpoint_files import check_length, eos_token_ids, positions_of, read_config
from workers.engines.compiled_engine import CompiledEngine, compiled_folder
from workers.engines.engine_setup import kept_in
from workers.engines.nxd_inference import artifacts as nxd_artifacts
from workers.engines.nxd_inference import precompiled
from workers.engines.nxd_inference.config import GLOBAL_TOPK, GraphLengths, NxdSettings, lengths
from workers.engines.nxd_inference.package import Package, build_config, import_package
from workers.messages.engine_protocol import DeviceSampling, EngineLoadError, EngineSpec
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)


def buildables(config: ReplicaConfig, read: bool = True) -> list[Buildable]:
    """Returns the engine's compile unit, which includes the draft. Raises EngineLoadError.

    The sharded weights are part of it. With ``read`` False, no checkpoint is read whose digest is unknown. A source
    that is already compiled has no unit; raises what its start would refuse.
    """
    settings = precompiled.with_sharding(NxdSettings.of(config))
    package = import_package()
    model = precompiled.find(Path(settings.source))
    if model is not None:
        manifest = nxd_artifacts.unit(settings, package, None).manifest
        precompiled.check(model, settings, _build_config(package, settings)[1], manifest)
        if model.compiled:
            return []
    return [nxd_artifacts.unit(settings, package, kept_in(config), read)]


def _build_config(package: Package, settings: NxdSettings) -> tuple[Any, Any]:
    """Like ``build_config``. Raises EngineLoadError also for options that the package's constructors reject, and for a
    quantized checkpoint that does not match the configuration."""
    try:
        kind, config = build_config(package, settings, nxd_artifacts.QUANTIZED)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"NxD Inference {package.version} rejected the options of {settings.source}: "
        message += f"{type(error).__name__}: {error}"
        raise EngineLoadError("bad-engine-option", message, "check `engine_options`") from error
    precompiled.check_quantized(settings, config.neuron_config)
    return kind, config


class NxdEngine(CompiledEngine):
    """Implements ``GenerateEngine``; ``SamplingEngine`` with ``sampling: device``, ``RunEngine`` with a draft.

    It has no ``generate``. The package's adapter for transformers' loop raises NameError in 0.7 and 0.8
    (``hf_adapter.prepare_inputs_for_generation``), replaces ``sampling_params`` by the GenerationConfig, and
    divides logits on the host by the temperature twice: in transformers' warper and in its own sampler.
    """

    def __init__(self, settings: NxdSettings, compiled: Path | None) -> None:
        """``compiled`` is the folder of kept artifacts; None: they are not kept. Nothing is read yet."""
        self._settings = settings
        self._compiled = compiled
        self._slot_sampling: list[DeviceSampling] = []

    def _load(self, scratch: Path) -> None:
        settings = self._settings = precompiled.with_sharding(self._settings)
        source = read_config(Path(settings.source))
        eos = eos_token_ids(Path(settings.source), source)
        check_length(settings.max_len, positions_of(source))
        package = import_package()
        package_contract.log_drift("nxd-inference", log)
        # Built here only to check it: in the compiling process it would be just another failed compile.
        kind, config = _build_config(package, settings)
        sizes = lengths(settings)
        model = precompiled.find(Path(settings.source))
        if model is not None:
            precompiled.check(model, settings, config, nxd_artifacts.unit(settings, package, None).manifest)
        if model is not None and model.compiled:
            self._model = kind(settings.source, precompiled.config_of(model, config))
            self._model.load(settings.source)
        else:
            folder = self._compiled_folder(package, scratch)
            # Not by the neuron_config.json there: the package cannot read a kv_quant_config that it wrote.
            self._model = kind(folder, config)
            self._model.load(folder)
        self._slot_sampling = [DeviceSampling()] * settings.slots
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
        import torch

        single = [row for row, prompt in enumerate(prompts) if len(prompt) == 1]
        longer = [row for row, prompt in enumerate(prompts) if len(prompt) > 1]
        rows: dict[int, Any] = {}
        if longer:
            output = self._prefill([slots[row] for row in longer], [prompts[row] for row in longer])
            rows.update(zip(longer, output, strict=True))
        for row in single:
            # The package fills positions up to the bucket with 1, and takes the first highest one as the prompt's end,
            # which here would be padding. Only the largest bucket leaves a prompt of its own width unchanged.
            rows[row] = self._prefill([slots[row]], [prompts[row]], self.spec.prefill_buckets[-1])[0]
        ordered = [rows[row] for row in range(len(prompts))]
        return torch.stack(ordered) if self.spec.returns == "logits" else ordered

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """See ``GenerateEngine.decode``. With a draft, this is a step that keeps the first token only."""
        if self.spec.run_k:
            return [run[0] for run in self.decode_runs(slots, tokens, positions)]
        return self._answers(self._step(slots, tokens, positions), len(slots))

    def decode_runs(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> list[list[int]]:
        """See ``RunEngine.decode_runs``."""
        fused = self._step(slots, tokens, positions).fused_outputs
        # Accepted tokens, padded to speculation_length; the last output is the next position. 0 is also a valid id.
        accepted, following = fused[0].reshape(len(slots), -1).tolist(), fused[3].reshape(-1).tolist()
        return [row[: after - position] for row, after, position in zip(accepted, following, positions, strict=True)]

    def _compiled_folder(self, package: Package, scratch: Path) -> str:
        """Returns the folder of the compiled model, compiling it if needed."""
        settings = self._settings
        unit = nxd_artifacts.unit(settings, package, self._compiled)
        folder = compiled_folder(unit, self._compiled or scratch) / nxd_artifacts.MODEL
        if settings.presharded:
            folder = precompiled.link_shards(folder, Path(settings.source), scratch)
        return str(folder)

    def _prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], width: int = 0) -> Any:
        """Run prompts, padded to at least ``width`` tokens, in one call."""
        width = max(width, *(len(prompt) for prompt in prompts))
        output = self._forward(
            slots,
            input_ids=[[*prompt, *[0] * (width - len(prompt))] for prompt in prompts],
            attention_mask=[[1] * len(prompt) + [0] * (width - len(prompt)) for prompt in prompts],
            position_ids=[[*range(len(prompt)), *[0] * (width - len(prompt))] for prompt in prompts],
        )
        if not self.spec.run_k:
            return self._answers(output, len(slots))
        return output.fused_outputs[0].reshape(len(slots), -1)[:, 0].tolist()

    def _step(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """Run one token of each slot. ``positions`` are from 1 on: position 0 means a prompt."""
        width = max(positions)
        return self._forward(
            slots,
            input_ids=[[token] for token in tokens],
            attention_mask=[[1] * position + [0] * (width - position) for position in positions],
            position_ids=[[position] for position in positions],
        )

    def _forward(self, slots: Sequence[int], **inputs: Sequence[Sequence[int]]) -> Any:
        """Call the model with tensors of ``inputs``, each with a row for each slot."""
        import torch

        with torch.inference_mode():
            return self._model.forward(
                **{name: torch.tensor(rows) for name, rows in inputs.items()},
                seq_ids=torch.tensor(slots),
                sampling_params=self._sampling_params(slots),
            )

    def _answers(self, output: Any, rows: int) -> Any:
        """Returns float32 logits ``[rows, vocab_size]``, or the ids that the device sampled."""
        if self.spec.returns == "logits":
            return output.logits[:, -1, : self.spec.vocab_size].float()
        tokens = getattr(output, "tokens", None)
        drawn = output.hidden_states if tokens is None else tokens
        return drawn.reshape(rows, -1)[:, -1].tolist()

    def _warm_up(self, sizes: GraphLengths) -> None:
        """Call each graph once. A length is in a bucket while it is below it."""
        for bucket in sizes.context_buckets:
            self.prefill([0], [[0] * (bucket - 1)])
        every = range(self.spec.slots)
        ahead = self._settings.speculation_length
        for bucket in sizes.token_buckets:
            position = bucket - 1 - ahead
            if position > 0:  # a shorter graph cannot hold a step
                self.decode(every, [0] * len(every), [position] * len(every))


def _global_topk(settings: NxdSettings) -> int:
    """Returns the configured global_topk, at most GLOBAL_TOPK."""
    sampling = settings.engine_options.get("on_device_sampling_config")
    return int(sampling.get("global_topk", GLOBAL_TOPK)) if isinstance(sampling, dict) else GLOBAL_TOPK
