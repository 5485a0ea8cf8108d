"""How many LoRA adapters, and where they are."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference._played import PACKAGE, contract, played, version

_HERE = "modules.lora_serving.config"


class LoraServingConfig:
    """Every option of the version is an attribute."""

    @played(f"{_HERE}.LoraServingConfig.__init__")
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        recorded = contract().signature(f"{PACKAGE}.{_HERE}.LoraServingConfig.__init__", version())
        bound_call = recorded.bind(self, *args, **kwargs)
        bound_call.apply_defaults()
        self.__dict__.update({name: value for name, value in bound_call.arguments.items() if name != "self"})
