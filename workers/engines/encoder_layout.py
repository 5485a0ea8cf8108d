"""The layout of an encoder's folder: a plain checkpoint, or one of sentence-transformers with modules of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from workers.host.foreign_files import read_json
from workers.messages.encoder_protocol import EncoderKind
from workers.messages.engine_protocol import EngineLoadError

Pooling = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of 1_Pooling/config.json before sentence-transformers 5.4, in the order in which their vectors are joined."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of torch.nn that may follow a dense layer or a score. Other names in a config would run code."""


@dataclass(frozen=True)
class Dense:
    """A linear layer after the pooling, in a folder with its weights."""

    folder: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str  # one of ACTIVATIONS


@dataclass(frozen=True)
class Normalize:
    """Scales each vector to length 1."""


@dataclass(frozen=True)
class EncoderLayout:
    """What a folder says about the encoder in it."""

    transformer: Path  # the folder with config.json and the weights
    pooling: tuple[Pooling, ...] = ("mean",)  # of embeddings; the vectors of several are joined
    pools_prompt: bool = True  # False: tokens of the prompt are left out of the pooling
    after: tuple[Dense | Normalize, ...] = ()  # what follows the pooling, in order
    max_length: int | None = None  # tokens of an input; None: the checkpoint's positions
    lower_case: bool = False  # text is lower-cased before it is tokenized
    prompts: Mapping[str, str] | None = None  # by name
    default_prompt: str | None = None  # the name of the prompt where a request names none


def read_layout(folder: Path, kind: EncoderKind) -> EncoderLayout:
    """Returns the layout of a folder. A plain checkpoint of an embedding gets the mean over its tokens, as
    sentence-transformers gives it. Raises EngineLoadError for a module that is not supported."""
    if kind != "embedding" or not (folder / "modules.json").is_file():
        return EncoderLayout(folder, **_text(folder), **_prompts(folder))
    modules = _json(folder / "modules.json", list)
    names = [str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else "" for module in modules]
    if names[:2] != ["Transformer", "Pooling"]:
        raise _unsupported(folder, f"its modules are {', '.join(names) or 'none'}, not Transformer and Pooling first")
    folders = [folder / str(module.get("path", "")) for module in modules]
    after = tuple(_after(name, at) for name, at in zip(names[2:], folders[2:], strict=True))
    pooling, pools_prompt = _pooling(folders[1])
    return EncoderLayout(folders[0], pooling, pools_prompt, after, **_text(folders[0]), **_prompts(folder))


def _pooling(folder: Path) -> tuple[tuple[Pooling, ...], bool]:
    """Returns the modes, and whether the tokens of a prompt are pooled. Raises EngineLoadError."""
    config = _json(folder / "config.json", dict)
    given = config.get("pooling_mode")
    modes = tuple(mode for flag, mode in _FLAGS.items() if config.get(flag)) if given is None else given
    modes = (modes,) if isinstance(modes, str) else tuple(modes) or ("mean",)
    if unknown := [mode for mode in modes if mode not in POOLINGS]:
        raise _unsupported(folder, f"its pooling mode {unknown[0]!r} is unknown; known are {', '.join(POOLINGS)}")
    return modes, bool(config.get("include_prompt", True))


def _after(name: str, folder: Path) -> Dense | Normalize:
    if name == "Normalize":
        return Normalize()
    if name != "Dense":
        raise _unsupported(folder, f"its module {name!r} is not supported after the pooling; Dense and Normalize are")
    config = _json(folder / "config.json", dict)
    place = "sentence_embedding"
    if {config.get("module_input_name", place), config.get("module_output_name") or place} != {place}:
        raise _unsupported(folder, "its dense layer does not work on the pooled vector")
    if config.get("use_residual"):
        raise _unsupported(folder, "its dense layer has a residual connection")
    activation = activation_of(config.get("activation_function", "torch.nn.modules.activation.Tanh"), folder)
    return Dense(folder, config["in_features"], config["out_features"], config.get("bias", True), activation)


def activation_of(name: object, folder: Path) -> str:
    """Returns the class of torch.nn that a config names. Raises EngineLoadError for another one."""
    module, _, cls = str(name).rpartition(".")
    if not module.startswith("torch.nn") or cls not in ACTIVATIONS:
        raise _unsupported(folder, f"its activation {name} is not supported; {', '.join(ACTIVATIONS)} of torch.nn are")
    return cls


def _text(folder: Path) -> dict[str, Any]:
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json"):
        if (folder / name).is_file():
            config = _json(folder / name, dict)
            length, lower_case = config.get("max_seq_length"), config.get("do_lower_case")
            return {
                "max_length": length if isinstance(length, int) and length > 0 else None,
                "lower_case": lower_case is True,
            }
    return {}


def _prompts(folder: Path) -> dict[str, Any]:
    file = folder / "config_sentence_transformers.json"
    config = _json(file, dict) if file.is_file() else {}
    return {"prompts": config.get("prompts") or {}, "default_prompt": config.get("default_prompt_name")}


def _json(file: Path, kind: type) -> Any:
    try:
        value = read_json(file)
    except (OSError, ValueError) as error:
        raise EngineLoadError("encoder-unreadable", f"{file} cannot be read: {error}", "copy the file again") from error
    if not isinstance(value, kind):
        raise EngineLoadError("encoder-unreadable", f"{file} is not a JSON {kind.__name__}", "copy the file again")
    return value


def _unsupported(folder: Path, what: str) -> EngineLoadError:
    return EngineLoadError("encoder-unsupported", f"{folder}: {what}", "use another model, or the engine server")
