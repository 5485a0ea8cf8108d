"""The checkpoints that the CPU engine loads: their families, their weight files, and transformers' model of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.artifacts.fetch.arrival import pending_files, wait_for
from workers.artifacts.sources.listing import SourceError
from workers.engines.checkpoint_files import check_length
from workers.engines.weight_files import (
    check_pickles,
    check_safetensors,
    files_in,
    index_of,
    no_weights,
    pickles_refused,
)
from workers.messages.engine_protocol import EngineLoadError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FamilyHooks:
    """The properties of a model family that the two hooks depend on."""

    alibi: bool = False  # positions enter as a bias on the scores, not as embeddings or rotations
    window: bool = False  # config.sliding_window, if not None, applies to every layer
    layer_types: bool = False  # config.layer_types lists the layers with the window; one mask for each type


# By config.json's model_type. A family is listed once tests compare its greedy output with ``generate``.
FAMILIES = {
    "bloom": FamilyHooks(alibi=True),
    "gpt2": FamilyHooks(),
    "gpt_bigcode": FamilyHooks(),
    "gpt_neox": FamilyHooks(),
    "gptj": FamilyHooks(),
    "llama": FamilyHooks(),
    "mistral": FamilyHooks(window=True),
    "mixtral": FamilyHooks(window=True),
    "opt": FamilyHooks(),
    "qwen2": FamilyHooks(layer_types=True),
    "qwen3": FamilyHooks(layer_types=True),
}


def windows_of(family: FamilyHooks, config: Any) -> int | dict[str, int | None] | None:
    """Returns the sliding window of all layers, None for none; or by layer type where the family needs it."""
    window: int | None = getattr(config, "sliding_window", None)
    if family.layer_types:
        return {kind: window if kind == "sliding_attention" else None for kind in config.layer_types}
    return window if family.window else None


def family_of(settings: dict[str, Any], path: Path, trust_remote_code: bool) -> FamilyHooks:
    model_type = settings.get("model_type")
    if trust_remote_code and settings.get("auto_map") and model_type not in FAMILIES:
        return FamilyHooks()  # most families are like this; untested for this one
    if model_type not in FAMILIES:
        raise EngineLoadError(
            "unknown-family",
            f"the model_type {model_type!r} of {path / 'config.json'} is not supported by the cpu engine",
            f"supported: {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]


def weight_files(path: Path, allow_pickle: bool) -> tuple[list[Path], bool]:
    """Returns the files that transformers will read, and whether they are pickles (only without safetensors)."""
    safe, pickle = path / "model.safetensors", path / "pytorch_model.bin"
    pending = pending_files(path)  # first: a file that arrives meanwhile is then seen twice, not missed
    is_there = {
        file: any(candidate.exists() or candidate.name in pending for candidate in (file, index_of(file)))
        for file in (safe, pickle)
    }
    if not any(is_there.values()):
        raise no_weights(path)
    pickled = not is_there[safe]
    if pickled and not allow_pickle:
        raise pickles_refused(path, (pickle if pickle.exists() or pickle.name in pending else index_of(pickle)).name)
    single = pickle if pickled else safe
    index = index_of(single)
    files = files_in(index) if index.exists() else [single]
    missing = [file.name for file in files if file.name not in pending and not file.exists()]
    if missing:
        raise EngineLoadError("weights-missing", f"{path} is missing {', '.join(missing)}", "copy the weights again")
    return files, pickled


def arrived(wait: Callable[[], object]) -> None:
    """Wait for files that are being fetched. Raises EngineLoadError where the fetch fails."""
    try:
        wait()
    except SourceError as error:
        raise EngineLoadError(error.id, error.what, error.hint) from error


def check_weights(files: Sequence[Path], pickled: bool) -> None:
    """Check that the files can be read. Waits for each that is being fetched. Raises EngineLoadError."""

    def here() -> Iterator[Path]:
        for file in files:
            arrived(partial(wait_for, file.parent, file.name))
            yield file

    check = check_pickles if pickled else check_safetensors
    check(here())


def prepare_forks() -> None:
    """Have transformers 5 build its table for the names of weights, a thousand regular expressions, which takes 0.1 s
    in the first load of a process."""
    with contextlib.suppress(ImportError):  # older ones have none
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("")


def load_model(
    path: Path,
    dtype: torch.dtype,
    pickled: bool,
    trust_remote_code: bool,
    auto_class: str = "AutoModelForCausalLM",
    unused: str | None = None,
) -> Any:
    """Returns transformers' model by one of its ``Auto`` classes, with all weights of the checkpoint; those that begin
    with ``unused`` may be missing. Raises EngineLoadError."""
    import transformers

    try:
        loaded: Any = getattr(transformers, auto_class).from_pretrained(
            str(path),
            dtype=dtype,
            use_safetensors=not pickled,
            weights_only=True,  # for pickles: calls no function that the file names
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below with their names, which the exception lacks
        )
    except Exception as error:  # OSError, RuntimeError, KeyError and more
        raise EngineLoadError(
            "weights-mismatch",
            f"{path} cannot be loaded: {type(error).__name__}: {error}",
            "check that config.json belongs to these weights",
        ) from error
    model, info = loaded
    # transformers fills absent weights with random numbers and only warns.
    missing = sorted(key for key in info["missing_keys"] if unused is None or not key.startswith(unused))
    mismatched = sorted(
        f"{name} is {list(actual)}, not {list(expected)}" for name, actual, expected in info["mismatched_keys"]
    )
    for problem, weights in (("is missing weights that", missing), ("has weights of other shapes than", mismatched)):
        if weights:
            raise EngineLoadError(
                "weights-mismatch",
                f"{path} {problem} config.json describes: {len(weights)}, the first is {weights[0]}",
                "check that config.json belongs to these weights",
            )
    model.eval()
    return model


def check_positions(config: Any, max_len: int) -> None:
    check_length(max_len, getattr(config, "max_position_embeddings", None))
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    if kind == "longrope":
        # transformers scales all rows of a batch by the longest one, so other rows would change an answer.
        check_length(max_len, original, "positions before longrope")
