"""The Optimum Neuron engine, 0.4: exports, loads and runs a model of its NxD backend, slot by slot.

A slot is a line of the device's KV cache, named by ``seq_ids``. The package's rules for callers
(``modeling_decoder.NxDModelForCausalLM.forward``, ``decoder_wrappers``):

1. Only the tensors decide whether a call is a prompt or a step: a prompt is wider than one token, and its lowest
   position is 0.
2. A prompt ends at its first highest position. The package pads positions with 1, which ends a prompt of one token in
   its padding: so prompts are passed as wide as their graph, with position 0 in the padding.
3. With continuous batching, a step of fewer rows than slots is filled up with copies of its first row in all other
   slots: every live slot must be among the rows.
4. Without (mixtral, granite), ``seq_ids`` are ignored: row i is slot i, and prompts of all slots are one call.
5. With ``prefill_chunk_size``, prompts go through ``prefill_chunk``, one slot at a time, which returns logits also
   where the device samples.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.engines import package_contract
from workers.engines.checkpoint_files import check_length, eos_token_ids, positions_of, read_config
from workers.engines.compiled_engine import CompiledEngine
from workers.engines.optimum_neuron import artifacts, compiled_folder
from workers.engines.optimum_neuron.first_engine import FirstOptimumEngine, first_buildables
from workers.engines.optimum_neuron.package import OptimumPackage, export_config, find_package
from workers.engines.optimum_neuron.settings import OptimumSettings, check_computed
from workers.messages.engine_protocol import DeviceSampling, EngineSpec, GenerateEngine
from workers.messages.replica_config import ReplicaConfig
from workers.neff_cache.compiled_artifacts import Buildable, LockedEntry, Tell, entry

log = logging.getLogger(__name__)


def open_optimum(config: ReplicaConfig) -> GenerateEngine:
    """Returns the engine, not loaded yet. Raises EngineLoadError where the package or the checkpoint is missing."""
    kind = FirstOptimumEngine if find_package().era == "tnx" else OptimumEngine
    return kind(OptimumSettings.of(config), kept_in(config))


def buildables(config: ReplicaConfig, read: bool = True) -> list[Buildable]:
    """Returns the engine's compile unit. Raises EngineLoadError.

    The sharded weights are part of it. With ``read`` False, no checkpoint is read whose digest is unknown. A source
    that is already compiled has no unit; raises what its start would refuse.
    """
    settings, package = OptimumSettings.of(config), find_package()
    if package.era == "tnx":
        return first_buildables(settings, package, kept_in(config))
    check_computed(settings, read_config(Path(settings.source)))
    if _is_compiled(settings, package):
        return []
    export_config(package, settings)
    root = kept_in(config)
    manifest, unread = artifacts.manifest(settings, package, root, read)

    def make(entry: LockedEntry, tell: Tell) -> None:
        artifacts.compile_in_subprocess(settings, entry)
        entry.finish(settings.source)

    return [Buildable(source=Path(settings.source), manifest=manifest, make=make, kept=root is not None, unread=unread)]


def _is_compiled(settings: OptimumSettings, package: OptimumPackage) -> bool:
    """Returns whether the source is compiled. Raises EngineLoadError where it does not match the settings or this
    host."""
    folder = compiled_folder.find(Path(settings.source))
    if folder is not None:
        compiled_folder.check(folder, settings, ())
        compiled_folder.check_installed(folder, package)
    return folder is not None


def kept_in(config: ReplicaConfig) -> Path | None:
    """Returns the folder of kept artifacts, if they are kept."""
    return None if config.run.compiled is None else Path(config.run.compiled)


class OptimumEngine(CompiledEngine):
    """Implements ``GenerateEngine``; ``SamplingEngine`` with ``sampling: device``."""

    def __init__(self, settings: OptimumSettings, compiled: Path | None) -> None:
        """``compiled`` is the folder of kept artifacts; None: they are not kept. Nothing is read yet."""
        self._settings = settings
        self._compiled = compiled
        self._slot_sampling: list[DeviceSampling] = []

    def _load(self, scratch: Path) -> None:
        settings = self._settings
        source = read_config(Path(settings.source))
        eos = eos_token_ids(Path(settings.source), source)
        check_length(settings.max_len, positions_of(source))
        check_computed(settings, source)
        package = find_package()
        package_contract.log_drift("optimum-neuron", log)
        folder = settings.source
        if not _is_compiled(settings, package):
            export_config(package, settings)  # only to check it: in the compiling process it would be a failed compile
            folder = self._exported(package, scratch)
        self._model = package.model_class.from_pretrained(folder)
        neuron = self._model.neuron_config
        self._slot_sampling = [DeviceSampling()] * settings.slots
        on_device = settings.sampling == "device"
        self._spec = EngineSpec(
            slots=settings.slots,
            max_len=settings.max_len,
            prefill_buckets=(int(neuron.max_context_length),),
            decode_buckets=(settings.max_len,),
            vocab_size=int(source["vocab_size"]),
            eos_token_ids=eos,
            continuous=bool(neuron.continuous_batching) or settings.slots == 1,
            returns="tokens" if on_device else "logits",
            keeps_idle_slots=False,
            device_top_k=int(neuron.max_topk) if on_device else 0,
        )
        self.prefill([0], [[0]])
        self.decode(range(settings.slots), [0] * settings.slots, [1] * settings.slots)

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """See ``GenerateEngine.prefill``. An engine that is not continuous begins a new batch."""
        if getattr(self._model.neuron_config, "prefill_chunk_size", 0):
            return self._prefill_in_chunks(slots, prompts)
        if not self.spec.continuous:
            rows = dict(zip(slots, prompts, strict=True))
            every = range(self.spec.slots)
            return self._picked(self._prefill(every, [rows.get(slot, [0]) for slot in every]), slots)
        return self._prefill(slots, prompts)

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        """See ``GenerateEngine.decode``. ``positions`` are from 1 on: position 0 means a prompt."""
        if self.spec.continuous:
            return self._run(slots, [[token] for token in tokens], [[position] for position in positions])
        rows = dict(zip(slots, zip(tokens, positions, strict=True), strict=True))
        every = range(self.spec.slots)
        filled = [rows.get(slot, (tokens[0], positions[0])) for slot in every]
        output = self._run(every, [[token] for token, _ in filled], [[position] for _, position in filled])
        return self._picked(output, slots)

    def _exported(self, package: OptimumPackage, scratch: Path) -> str:
        """Returns the folder of the exported model, exporting it if needed."""
        settings = self._settings
        manifest, _ = artifacts.manifest(settings, package, self._compiled, read=True)
        with entry(self._compiled or scratch, manifest) as exported:
            if not exported.complete:
                artifacts.compile_in_subprocess(settings, exported)
                exported.finish(settings.source)
        return str(exported.path / artifacts.MODEL)  # complete entries stay, so others may load it as well

    def _prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        """Run prompts, each as wide as the graph."""
        width = self.spec.prefill_buckets[-1]
        padding = [[0] * (width - len(prompt)) for prompt in prompts]
        ids = [[*prompt, *rest] for prompt, rest in zip(prompts, padding, strict=True)]
        return self._run(
            slots, ids, [[*range(len(prompt)), *rest] for prompt, rest in zip(prompts, padding, strict=True)]
        )

    def _prefill_in_chunks(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        import torch

        size, rows = int(self._model.neuron_config.prefill_chunk_size), []
        with torch.inference_mode():
            for slot, prompt in zip(slots, prompts, strict=True):
                for start in range(0, len(prompt), size):
                    ids = torch.tensor([list(prompt[start : start + size])])
                    positions = torch.arange(start, start + ids.shape[1])[None]
                    inputs = ids, positions, torch.tensor([slot]), self._sampling_params([slot])
                    logits = self._model.prefill_chunk(*inputs)
                rows.append(logits[0, -1, : self.spec.vocab_size].float())
        if self.spec.returns == "logits":
            return torch.stack(rows)
        return [drawn_token(row, self._slot_sampling[slot]) for row, slot in zip(rows, slots, strict=True)]

    def _run(self, slots: Sequence[int], ids: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Any:
        """Call the model: ``ids`` and ``positions`` are ``[len(slots), width]``. Returns logits or tokens."""
        import torch

        with torch.inference_mode():
            output = self._model.forward(
                input_ids=torch.tensor(ids),
                position_ids=torch.tensor(positions),
                seq_ids=torch.tensor(list(slots)),
                sampling_params=self._sampling_params(slots),
            )
        if self.spec.returns == "logits":
            return output[:, -1, : self.spec.vocab_size].float()
        return output.reshape(len(slots), -1)[:, -1].tolist()

    def _sampling_params(self, slots: Sequence[int]) -> Any:
        """Returns ``[len(slots), 3]`` float32: top_k, top_p, temperature."""
        import torch

        sampling = [self._slot_sampling[slot] for slot in slots]
        return torch.tensor([[float(row.top_k), float(row.top_p), float(row.temperature)] for row in sampling])

    def _picked(self, output: Any, slots: Sequence[int]) -> Any:
        return output[list(slots)] if self.spec.returns == "logits" else [output[slot] for slot in slots]


def drawn_token(logits: Any, sampling: DeviceSampling) -> int:
    """Returns an id drawn from the logits ``[vocab]`` of a prompt's last chunk, as the device would draw it."""
    import torch

    values, ids = torch.topk(logits / sampling.temperature, sampling.top_k)
    shares = torch.softmax(values, dim=-1)
    shares[1:][shares.cumsum(-1)[1:] > sampling.top_p] = 0.0  # as in the package's Sampler: the likeliest one stays
    return int(ids[torch.multinomial(shares, 1)])


if __name__ == "__main__":
    sys.exit(artifacts.main(sys.argv[1:]))
