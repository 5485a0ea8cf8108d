"""What the engine ``vllm`` can do, by the releases of its two plugins for Neuron and their machines."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from placements.engines.capabilities import Capabilities, DraftMethod, Unused
from placements.facts.versions import reaches, series

Plugin = Literal["nxd", "neuron", "cpu"]
"""``nxd``: `vllm-neuron` up to 0.5, on NxD Inference. ``neuron``: the later one, "vLLM Neuron", with a back end of its
own. ``cpu``: vLLM's CPU back end, on emulated hosts."""

NEURON_FROM = (0, 20)
"""The first version of `vllm-neuron` with a back end of its own; its versions begin with vLLM's."""

Version = tuple[int, int]


class VllmNeuron(NamedTuple):
    """A release of `vllm-neuron`, with its vLLM and Neuron SDK. A release that is not in ``RELEASES`` has those of the
    last one before it."""

    plugin: str
    vllm: str
    sdk: str

    @property
    def back_end(self) -> Plugin:
        """The plugin of the release."""
        return plugin_of(self.plugin)

    @property
    def drafts(self) -> tuple[DraftMethod, ...]:
        """The methods of speculative decoding: EAGLE 3 came with 0.4, and a draft model ended with vLLM's V0."""
        if self.back_end == "neuron":
            return ("eagle3",)
        return ("eagle",) if self.vllm == "0.11" else ("eagle", "eagle3")


RELEASES: tuple[VllmNeuron, ...] = (
    VllmNeuron("0.2", "0.11", "2.27"),
    VllmNeuron("0.4", "0.13", "2.28"),
    VllmNeuron("0.5", "0.16", "2.29 to 2.31"),
    VllmNeuron("0.21", "0.21", "2.31"),
    VllmNeuron("0.24", "0.24", "2.32"),
    VllmNeuron("0.29", "0.29", "2.33"),
)
"""By AWS's release notes (nxd-inference.rst, containers.rst, vllm-user-guide-v1.rst), oldest first."""

LAST_FOR: Mapping[str, str] = {"inf2": "0.4", "trn1": "0.4"}
"""Machine family -> the last release of the plugin in AWS's release notes, which is planned by default. 0.5 runs there,
too, on the NxD Inference that AWS maintains (`nxd_inference.capabilities`): AWS's page about vLLM with NxD Inference
lists Inf2, Trn1 and Trn2 for it (neuron-inference-overview.html)."""


LORA_SINCE: Version = (0, 13)
"""The vLLM of `vllm-neuron` 0.4, which first serves LoRA adapters on NxD Inference."""

EMBEDS_SINCE: Version = (0, 24)
"""The first `vllm-neuron` with pooling models, of which it serves embeddings by decoders, on Trn2 and Trn3 (AWS Neuron
SDK docs of 2.32, vllm-neuron/docs/design/vllm/pooling-models and model-recipes/qwen3-embedding-8b)."""

BLOCK_SIZE = 32
"""Tokens of a block of the KV cache with prefix caching, as both plugins recommend."""

KV_SHARE = 0.30
"""The share that the KV cache gets of what the plugin "vLLM Neuron" uses of HBM, see `hbm_share`:
VLLM_NEURON_KV_GMU_BUDGET_CAP_FRACTION."""

MIN_KV_GIB = 1.0
"""The least KV cache on a core with which it starts: VLLM_NEURON_MIN_KV_BUDGET_GIB."""


def hbm_share(options: Mapping[str, Any]) -> float:
    """Returns the share of HBM that vLLM uses: gpu_memory_utilization of ``engine_options``, or vLLM's default."""
    given = options.get("gpu_memory_utilization")
    return float(given) if isinstance(given, int | float) and 0 < given <= 1 else 0.9


def release_for(machines: str, named: str | None = None) -> VllmNeuron:
    """Returns the release to plan for: the named one, else the last that runs on the family of machines."""
    version = version_of(named or LAST_FOR.get(machines, RELEASES[-1].plugin))
    known = [RELEASES[0], *(release for release in RELEASES if version_of(release.plugin) <= version)][-1]
    return known if named is None or version_of(known.plugin) == version else known._replace(plugin=named)


def blocks(max_len: int, slots: int, block_size: int) -> int:
    """Returns the blocks that hold every slot at its full length."""
    return -(-max_len // block_size) * slots


def kv_tokens(options: Mapping[str, Any], slots: int, max_len: int) -> int:
    """Returns the tokens of the KV cache by ``engine_options``: whole slots, or blocks with ``prefix_cache``."""
    if options.get("prefix_cache") is not True:
        return slots * max_len
    size, number = options.get("block_size"), options.get("num_gpu_blocks_override")
    size = size if type(size) is int and size > 0 else BLOCK_SIZE
    return size * (number if type(number) is int and number > 0 else blocks(max_len, slots, size))


def version_of(text: str) -> Version:
    """Returns the first two numbers of a version: "0.24.0.1.1.0" is (0, 24). (0, 0) without numbers."""
    numbers = [part for part in text.split("+")[0].split(".")[:2] if part.isdecimal()]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (0, 0)


def plugin_of(vllm_neuron: str) -> Plugin:
    """Returns the plugin of a version of `vllm-neuron`."""
    return "neuron" if version_of(vllm_neuron) >= NEURON_FROM else "nxd"


class VllmCapabilities(Capabilities):
    """What vLLM can do. Its versions are those of vLLM."""

    def version_among(self, packages: Mapping[str, str]) -> str | None:
        """That of vLLM, if it has the plugin."""
        return packages.get("vllm") if "vllm-neuron" in packages else None

    def unsupported(self, version: str, machines: str) -> str | None:
        """By the releases of the plugin."""
        if not version:
            return None
        if not reaches(version, RELEASES[0].vllm):
            return f"{version} is of no supported release of vllm-neuron"
        last = [release.vllm for release in RELEASES if machines not in LAST_FOR or release.back_end == "nxd"][-1]
        is_later = machines in LAST_FOR and not reaches(last, series(version))
        return f"{version} does not run on {machines}" if is_later else None

    def maintenance(self, version: str, machines: str) -> str:
        """Returns text for a release after the last listed one, on an NxD Inference that gets critical fixes only."""
        last = release_for(machines)
        if machines not in LAST_FOR or self.unsupported(version, machines) or reaches(last.vllm, series(version)):
            return ""
        return f"is in maintenance on {machines}, where {last.vllm} is the last one in AWS's release notes"

    def compiles(self, options: Mapping[str, object], *, emulated: bool) -> bool:
        return not emulated  # on emulated hosts, its CPU back end compiles nothing


CAPABILITIES = VllmCapabilities(
    engine="vllm",
    runs_on="server",
    kinds=("generate", "embedding"),
    runs_code=True,
    imports_long=False,
    own_families=True,
    weights=MappingProxyType({"llama": ("modelopt fp8", "compressed-tensors kv")}),
    ropes=MappingProxyType({"llama": MappingProxyType({"llama3": ""})}),
    quantize=("int8", "fp8"),
    quantize_kv=("fp8",),
    drafts=("draft_model", "eagle", "eagle3"),
    serves_adapters=True,
    scores_prompts=True,
    launches=True,
    unused=(Unused(("draft", "adapters", "max_wait_ms"), encoding=True),),
)
"""``weights`` and ``ropes`` are those of the plugin "vLLM Neuron": its features guide (quantization), and its code
(``llama3/quantization.py``; ``qwen3/model.py`` scales no positions). On NxD Inference, those of that engine."""
