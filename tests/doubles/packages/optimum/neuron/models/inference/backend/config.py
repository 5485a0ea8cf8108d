"""The configuration of an exported model (``NeuronConfig``, ``NxDNeuronConfig``), and the machine that it fits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from neuron_double.bound import bound
from neuron_double.compiler import compiler_version
from neuron_double.machine import instance
from optimum.neuron.version import __version__

TARGETS = {"trn1": "trn1", "trn1n": "trn1", "inf2": "trn1", "trn2": "trn2"}
FILE = "neuron_config.json"
CHUNKS = tuple(map(int, __version__.split(".")[:3])) >= (0, 4, 6)


class NxDNeuronConfig:
    """Settings of a model. ``save_pretrained`` adds the versions, and ``from_pretrained`` accepts no others."""

    @bound("optimum.neuron.models.inference.backend.config.NxDNeuronConfig.__init__")
    def __init__(
        self,
        batch_size: int,
        sequence_length: int,
        tp_degree: int,
        torch_dtype: torch.dtype | str,
        target: str | None,
        on_device_sampling: bool = False,
        fused_qkv: bool = False,
        continuous_batching: bool = False,
        max_topk: int = 256,
        max_context_length: int | None = None,
        checkpoint_id: str | None = None,
        checkpoint_revision: str | None = None,
        speculation_length: int = 0,
        prefill_chunk_size: int = 0,
    ) -> None:
        if CHUNKS:
            self.prefill_chunk_size = prefill_chunk_size
        self.checkpoint_id, self.checkpoint_revision = checkpoint_id, checkpoint_revision
        self.batch_size, self.max_batch_size = batch_size, batch_size
        self.sequence_length, self.tp_degree, self.target = sequence_length, tp_degree, target
        self.torch_dtype = getattr(torch, torch_dtype) if isinstance(torch_dtype, str) else torch_dtype
        self.on_device_sampling, self.max_topk = on_device_sampling, max_topk
        self.fused_qkv, self.continuous_batching = fused_qkv, continuous_batching
        self.max_context_length = max_context_length or sequence_length
        self.speculation_length = speculation_length

    def to_dict(self) -> dict[str, Any]:
        written = {name: value for name, value in vars(self).items() if name != "max_batch_size"}
        written["torch_dtype"] = str(self.torch_dtype).removeprefix("torch.")
        return written

    def save_pretrained(self, folder: str) -> None:
        versions = {"optimum_neuron_version": __version__, "neuronxcc_version": compiler_version()}
        written = {"_serialized_key": "NxDNeuronConfig", **versions, **self.to_dict()}
        Path(folder, FILE).write_text(json.dumps(written, indent=2, sort_keys=True))

    @classmethod
    def from_pretrained(cls, folder: str) -> NxDNeuronConfig:
        """Raises OSError without the file, ValueError for another version, RuntimeError for another compiler."""
        if not Path(folder, FILE).exists():
            raise OSError(f"{folder} has no {FILE}")
        recorded = json.loads(Path(folder, FILE).read_text())
        for key in ("optimum_neuron_version", "_serialized_key", "neuronxcc_version"):
            if key not in recorded:
                raise ValueError(f"Invalid neuron configuration: missing mandatory {key} attribute.")
        if (version := recorded.pop("optimum_neuron_version")) != __version__:
            raise ValueError(f"generated with optimum-neuron version {version}, but this version is {__version__}.")
        if (compiler := recorded.pop("neuronxcc_version")) != compiler_version():
            raise RuntimeError(f"exported using version {compiler} of the neuronxcc compiler")
        assert recorded.pop("_serialized_key") == "NxDNeuronConfig"
        return cls(**recorded)


def current_instance_type() -> str:
    return TARGETS[instance().name.split(".")[0].removesuffix("u")]


def get_available_cores() -> int:
    """By the smaller of two variables; one range is read, or one core."""
    most = min(int(os.environ.get("NEURON_RT_NUM_CORES", instance().cores)), instance().cores)
    first, dash, last = os.environ.get("NEURON_RT_VISIBLE_CORES", f"0-{most - 1}").partition("-")
    return min(int(last) - int(first) + 1 if dash else 1, most)


def align_compilation_target(target: str) -> None:
    """Raises ValueError where the variable names another target."""
    override = os.environ.setdefault("NEURON_PLATFORM_TARGET_OVERRIDE", target)
    if override != target:
        raise ValueError(f"The compilation target is {target} but NEURON_PLATFORM_TARGET_OVERRIDE is {override}")
