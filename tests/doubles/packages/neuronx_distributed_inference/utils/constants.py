"""Names of graphs, and which class plays which architecture, by version."""

from __future__ import annotations

import importlib
from typing import Any

from neuronx_distributed_inference._played import PACKAGE, contract, version
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

CONTEXT_ENCODING_MODEL = "context_encoding_model"
TOKEN_GENERATION_MODEL = "token_generation_model"
SPECULATION_MODEL = "speculation_model"
FUSED_SPECULATION_MODEL = "fused_speculation_model"


def _registry() -> dict[str, dict[str, Any]]:
    data = contract().data
    snapshot = data["snapshots"].get(version()) or data["other_revisions"][version()]
    names = snapshot["registries"][f"{PACKAGE}.utils.constants.MODEL_TYPES"]
    return {arch: {task: _class(arch, name) for task, name in tasks.items()} for arch, tasks in names.items()}


def _class(arch: str, name: str) -> Any:
    try:
        module = importlib.import_module(f"{PACKAGE}.models.{arch}.modeling_{arch}")
    except ModuleNotFoundError:  # one that this stand-in does not play: images, and sizes that no test has
        return type(name, (NeuronBaseForCausalLM,), {"__doc__": "Not played."})
    return getattr(module, name)


MODEL_TYPES = _registry()
