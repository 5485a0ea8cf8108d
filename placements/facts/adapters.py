"""What the configuration of a LoRA adapter decides, as peft saves it in adapter_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's ``--max-lora-rank`` (0.32, `config/lora.py`)."""
LEAST_MAX_RANK = 16
"""The least one that is set, so that adapters of usual ranks can be added while a server runs."""
_GATED = frozenset(
    ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")
)
MODULES: Mapping[str, frozenset[str]] = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _GATED)
"""Family -> the modules that an adapter can change, in transformers' names."""
USE_PEFT = "use a LoRA adapter that peft has saved as safetensors"


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter."""

    rank: int  # the largest of its matrices
    base: str = ""  # the checkpoint that it was trained for, as peft names it
    modules: tuple[str, ...] = ()  # the names of what it changes; empty: unknown
    unsupported: str = ""  # a feature of peft that vLLM does not implement

    @classmethod
    def from_config(cls, config: Any) -> Adapter:
        """Reads a decoded adapter_config.json. Raises ValueError for one that is not of a LoRA adapter."""
        if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
            raise ValueError("adapter_config.json is not of a LoRA adapter")
        pattern, modules = config.get("rank_pattern") or {}, config.get("target_modules")
        ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
        for rank in ranks:
            if type(rank) is not int or rank < 1:
                raise ValueError(f"the rank in adapter_config.json is {rank!r}")
        base = config.get("base_model_name_or_path")
        return cls(
            rank=max(ranks),
            base=base if isinstance(base, str) else "",
            modules=tuple(map(str, modules)) if isinstance(modules, list) else (),
            unsupported=_unsupported(config),
        )


def _unsupported(config: dict[str, Any]) -> str:
    """Returns the first feature that vLLM refuses (0.32, `lora/peft_helper.py`)."""
    if config.get("bias", "none") != "none":
        return "bias"
    kept = config.get("modules_to_save")
    if kept and not (isinstance(kept, list) and {"classifier", "score"}.issuperset(map(str, kept))):
        return "modules_to_save"
    switches = ("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora")
    return next((name for name in switches if config.get(name)), "")


def max_rank(ranks: list[int]) -> int | None:
    """Returns the least ``--max-lora-rank`` for adapters of these ranks; None: there is none."""
    return next((allowed for allowed in RANKS if allowed >= max((LEAST_MAX_RANK, *ranks))), None)
