"""What the engine ``cpu`` can do."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from placements.engines.capabilities import ON_CPUS, Capabilities, OptionRange, Unused
from placements.facts.checkpoints import ROTARY
from placements.facts.encoders import KINDS

FIRST_TRANSFORMERS = "4.57"
"""The first release of transformers that the cpu engine runs with. Other parts of corewright accept earlier ones, which
images of the Neuron SDK have."""


CPU_ROPES = dict.fromkeys(("linear", "dynamic", "yarn", "longrope", "llama3", "proportional"), "")
"""The types of rotary positions in ``modeling_rope_utils.ROPE_INIT_FUNCTIONS`` of transformers 5."""


class CpuCapabilities(Capabilities):
    """The engine ``cpu`` compiles if the model asks for it."""

    def compiles(self, options: Mapping[str, object], *, emulated: bool) -> bool:
        return bool(options.get("compile"))


CAPABILITIES = CpuCapabilities(
    engine="cpu",
    runs_on="cpus",
    kinds=KINDS,
    dtype="fp32",
    requires=("torch", "safetensors", "numpy"),
    transformers=FIRST_TRANSFORMERS,
    loads_arriving=True,
    options=MappingProxyType(
        {"prefill_chunk": OptionRange(1, 1 << 24, whole=True), "prefix_cache": None, "compile": None}
    ),
    runs_code=True,
    warm=True,
    ropes=MappingProxyType(dict.fromkeys(ROTARY, MappingProxyType(CPU_ROPES))),
    drafts=("draft_model",),
    scores_prompts=True,
    pads_to_longest=True,
    unused=(*ON_CPUS, Unused(("draft", "engine_options"), encoding=True)),
)
"""``prefill_chunk``: tokens of a prompt in one forward pass; ``prefix_cache``: reuse the longest prefix that a slot
still holds; ``compile``: compile each bucket with torch.compile. It reads no quantized ``weights``: each of the
quantizers of transformers needs a package that corewright does not install, and most need a GPU."""
