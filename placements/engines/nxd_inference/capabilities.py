"""What the engine ``nxd-inference`` can do, by the series of NxD Inference."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from placements.engines.capabilities import LLAMA_ROPES, NEURON_INDEX, Capabilities, ClassOptions
from placements.facts.versions import order, reaches, series

Release = tuple[int, int]

NXD_VERSIONS = ("0.4", "0.5", "0.6", "0.7", "0.8", "0.9")
"""The supported series of NxD Inference, oldest first. The own code of earlier ones has not been run."""
NXD_RELEASES: tuple[Release, ...] = tuple((major, minor) for major, minor in map(order, NXD_VERSIONS))

_LAST: Mapping[str, str] = {"inf2": "0.8", "trn1": "0.8"}
"""Machine family -> the last series of NxD Inference that its release notes list. They require Trn2 for the models of
0.9, but AWS maintains 0.10 on inf2 and trn1, too (announce-eos-nxdi-nxd-core-inference.rst, 2026-10-16)."""

NXD_FAMILIES: Mapping[str, str] = {"llama": "0.4", "mixtral": "0.4", "qwen2": "0.5", "qwen3": "0.5", "mistral": "0.4"}
"""model_type -> the first series of NxD Inference that serves it, from ``utils.constants.MODEL_TYPES`` of the series
above, for the families in `checkpoints`. No family was dropped again. Mistral has its own class from 0.9 on; before
that, Llama's class serves it."""

NXD_WINDOW = "0.7"
"""The first series of NxD Inference that keeps the sliding window of Mistral: Llama's class reads it from then on."""

NXD_FUSED_QKV: Mapping[str, str] = {"llama": "0.4", "qwen2": "0.7", "qwen3": "0.9"}
"""Class of a family -> the first series of NxD Inference in which it joins the weights of Q, K and V
(`convert_state_dict_to_fused_qkv`). A compile with any other class ends with a KeyError."""

NXD_UNQUANTIZED: Mapping[str, str] = {
    "mixtral": "it joins the weights of the experts, but not their scales",
    "qwen2": "it does not divide the biases of quantized layers",
}
"""Families that no series of NxD Inference quantizes -> why. A compile ends with "Cannot find ...gate_up_proj.scale",
or with NotImplementedError in `quantization_layers.set_bias_to_state_dict`."""

NXD_QUANTIZED_OPTIONS = ("quantized_checkpoints_path", "quantization_dtype")
"""Options of NxD Inference's NeuronConfig that require ``quantize``."""

NXD_QUANTIZED_DTYPES: Mapping[str, tuple[str, ...]] = {"int8": ("int8",), "fp8": ("f8e4m3", "f8e5m2")}
"""``quantize`` -> values of ``quantization_dtype``, the default first."""

NXD_E5M2 = "0.7"
"""The first series of NxD Inference that computes with f8e5m2: earlier ones convert all types except f8e4m3 to int8
(`model_wrapper.DecoderModelInstance.load_module`)."""


def nxd_release(version: str) -> Release:
    """Returns the series of ``NXD_VERSIONS`` whose options a version has: "0.8.16251+f3ca" is (0, 8).

    The newest series for a version that is newer or not a number; the oldest series for an older one.
    """
    parts = series(version).split(".")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        return NXD_RELEASES[-1]
    return max((release for release in NXD_RELEASES if release <= order(series(version))), default=NXD_RELEASES[0])


class NxdCapabilities(Capabilities):
    """What NxD Inference can do."""

    def serves(self, model_type: str, machines: str | None = None, version: str | None = None) -> bool:
        """By the first series of the family."""
        newest = version or (NXD_VERSIONS[-1] if machines is None else self.newest(machines))
        return super().serves(model_type, machines, version) and reaches(newest, NXD_FAMILIES[model_type])

    def newest(self, machines: str) -> str:
        """The last known series."""
        return _LAST.get(machines, NXD_VERSIONS[-1])

    def unsupported(self, version: str, machines: str) -> str | None:
        """Earlier versions than the supported ones do not work anywhere."""
        if version and not reaches(version, NXD_VERSIONS[0]):
            return f"{version} is too old: {NXD_VERSIONS[0]} and later are supported"
        return super().unsupported(version, machines)

    def maintenance(self, version: str, machines: str) -> str:
        """Returns text for a series after the last listed one, which gets critical fixes only."""
        if machines not in _LAST or reaches(_LAST[machines], series(version)):
            return ""
        return f"is in maintenance on {machines}, where {_LAST[machines]} is the last one in AWS's release notes"

    def step_widths(self, draft_k: int | None) -> tuple[int, ...]:
        """One token, or a draft's with one more (`model_base`)."""
        return (1,) if draft_k is None else (1, draft_k + 1)


CAPABILITIES = NxdCapabilities(
    engine="nxd-inference",
    runs_on="neuron",
    package="neuronx_distributed_inference",
    requires=("neuronx-distributed-inference",),
    loads=("hf", "sharded", "precompiled"),
    install="AWS's Deep Learning AMI Neuron has it under /opt/aws_neuronx_venv_pytorch_*_nxd_inference (inf2 and trn1: "
    f"up to SDK 2.28; trn2 and trn3: up to SDK 2.31); else pip install neuronx-distributed-inference {NEURON_INDEX}",
    options=MappingProxyType({"prefix_cache": None}),
    families=tuple(NXD_FAMILIES),
    ropes=MappingProxyType({"llama": LLAMA_ROPES, "mistral": dict.fromkeys(LLAMA_ROPES, "up to version 0.8 only")}),
    stores_shards=True,
    quantize=("int8", "fp8"),
    quantize_kv=("fp8",),
    drafts=("draft_model",),
    scores_prompts=True,
    unquantized=MappingProxyType(NXD_UNQUANTIZED),
    sets_workers=False,
    compiler_flags=frozenset(
        {"--auto-cast", "--model-type", "--tensorizer-options", "--internal-hlo2tensorizer-options", "--logfile"}
    ),
    class_options=(ClassOptions("MoENeuronConfig", "mixture-of-experts models", ("mixtral", "qwen3_moe")),),
    why_no_encoder="its models return the logits or the id of the next token, not the hidden states of a text",
    versions=NXD_VERSIONS,
)
"""``prefix_cache``: keep prefixes of prompts in blocks of the KV cache (`kv_blocks`). The compiler's flags are those
that `ModelWrapper` and neuronx-distributed's `ModelBuilder` pass in every version. ``ropes``: Mistral's class of
0.9 and the classes of Mixtral, Qwen 2 and Qwen 3 ignore ``rope_scaling``."""
