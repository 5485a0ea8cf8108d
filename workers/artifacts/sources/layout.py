"""Which files of a source make up the model, and in what layout they are. Pure: names in, names out."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError

Layout = Literal["hf", "optimum", "split", "presharded"]

_SERVED: Mapping[Layout, tuple[str, ...]] = {
    "hf": ("cpu", "transformers-neuronx", "nxd-inference"),
    "split": ("transformers-neuronx",),
    "optimum": ("transformers-neuronx",),
    "presharded": ("nxd-inference",),
}

INDEX = "model.safetensors.index.json"
SPLIT = "pytorch_model.bin/key_to_filename.json"  # what transformers-neuronx's ``save_pretrained_split`` wrote
NEURON_CONFIG, COMPILED = "neuron_config.json", "model.pt"  # of NxD Inference, and of Optimum Neuron since 0.4
TNX_SHARDS = "DecoderLMHead.safetensors"  # one file of those of ``save(folder, sharded_weights=True)``
PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})

# Of other programs, which no engine reads; and what training leaves beside a model.
_FOREIGN = frozenset({".gguf", ".h5", ".mlmodel", ".msgpack", ".npz", ".onnx", ".ot", ".tflite"})
_OF_TRAINING = re.compile(r"(training_args|optimizer|scheduler|rng_state.*|scaler)\.(bin|pt|pth)")
_SPLIT_FOLDER = "pytorch_model.bin/"
_WEIGHT_PICKLE = re.compile(r"pytorch_model[^/]*\.bin")
_SMALL = frozenset({".jinja", ".json", ".merges", ".model", ".spm", ".tiktoken", ".txt", ".vocab", ".yaml", ".yml"})
_OTHER_SAFETENSORS = re.compile(r"(consolidated|adapter_|.*\.(fp16|fp32|bf16|ema)[.-]).*", re.IGNORECASE)
_FOLDERS = re.compile(
    r"(pytorch_model\.bin|checkpoint|compiled|weights|neuronxcc-[^/]+|additional_chat_templates)/.+", re.DOTALL
)
_OF_THE_HEAD = re.compile(r"[^/]+\.(json|jinja|merges|model|spm|tiktoken|txt|vocab)|additional_chat_templates/[^/]+")
_OWN = "corewright-"  # names of files that the store writes beside a model's own
HEAD_BYTES = 64 * 2**20  # the largest file of a head; the largest tokenizer.json known has 35 MB


def layout_of(names: Iterable[str] | Path, config: Mapping[str, Any] | None = None) -> Layout:
    """How the files of a model are laid out. ``names`` are all of them, or the folder that holds them.

    1. optimum: compiled by Optimum Neuron: a folder ``checkpoint/`` beside ``compiled/`` or neuron_config.json, or a
       config.json with ``neuron``.
    2. presharded: compiled by NxD Inference, or weights that are already divided among the cores: by it, or by
       transformers-neuronx.
    3. split: one file for each weight, as transformers-neuronx wrote them.
    4. hf: config.json, and weights that transformers reads.

    ``config`` is the decoded config.json, where the caller has it. Raises SourceError ``layout-unknown``.
    """
    found = set(names_in(names) if isinstance(names, Path) else names)
    settings = config or {}
    folders = {name.split("/", 1)[0] for name in found if "/" in name}
    # 1.
    if isinstance(settings.get("neuron"), dict):
        return "optimum"
    if "checkpoint" in folders and ("compiled" in folders or NEURON_CONFIG in found):
        return "optimum"
    # 2.
    if settings.get("neuron_sharded_weights") is True or TNX_SHARDS in found or any(map(_is_shard_of_a_core, found)):
        return "presharded"
    if NEURON_CONFIG in found and COMPILED in found:
        return "presharded"
    # 3.
    if SPLIT in found:
        return "split"
    # 4.
    if "config.json" in found:
        return "hf"
    raise _unknown("the model", found)


def _unknown(source: str, names: Collection[str]) -> SourceError:
    some = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return SourceError("layout-unknown", f"{source} has no config.json, but {some or 'nothing'}", "is the place right?")


def served_by(layout: Layout, names: Collection[str]) -> tuple[str, ...]:
    """The engines that load such a model.

    Of what Optimum Neuron compiled, what it did before 0.4: a split model beside NEFFs; since then it is a program of
    its own. Of presharded ones, those of NxD Inference: transformers-neuronx does not tell what its were made for.
    """
    if layout == "optimum" and NEURON_CONFIG in names:
        return ()
    if layout == "presharded" and not is_of_nxd(names):
        return ()
    return _SERVED[layout]


def is_of_nxd(names: Collection[str]) -> bool:
    """Whether a presharded model is in a form that NxD Inference loads: compiled, or its shards in ``weights/``."""
    shards = any(name.startswith("weights/") and _is_shard_of_a_core(name) for name in names)
    return shards or (NEURON_CONFIG in names and COMPILED in names)


def names_in(folder: Path) -> list[str]:
    """Of all files below it, as paths within it."""
    return [Path(parent, name).relative_to(folder).as_posix() for parent, _, names in os.walk(folder) for name in names]


def _is_shard_of_a_core(name: str) -> bool:
    return re.fullmatch(r"(weights/)?tp\d+_sharded_checkpoint\.safetensors", name) is not None


def checked(listing: Listing) -> Listing:
    """The same. Raises SourceError for a name that would lead out of the folder where the files are kept."""
    for file in listing.files:
        parts = PurePosixPath(file.name).parts
        plain = file.name == "/".join(parts) and not file.name.startswith("/") and "\0" not in file.name
        if not plain or not parts or ".." in parts or any(len(part.encode()) > 255 for part in parts):
            what = f"{listing.source} has a file with the name {file.name!r}, which is no path within a folder"
            raise SourceError("name-unsafe", what, "rename the file")
    return listing


def selected(listing: Listing, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Listing:
    """What of ``listing`` is fetched.

    1. Safetensors, where there are any that transformers would read; no pickle then.
    2. Else pickles, where they are allowed.
    3. What is compiled, and presharded or split weights. A compiled model.pt is a pickle as well.
    4. Small files: the config, the tokenizer, templates. Python files only where they are trusted.

    Raises SourceError: ``pickle-refused`` where the only weights are pickles that nobody allowed, ``name-unsafe``, and
    ``layout-unknown`` without a config.json.
    """
    checked(listing)
    names = frozenset(file.name for file in listing.files)
    kept = [file for file in listing.files if _is_taken(file.name, names, trust_remote_code)]
    pickles = [file for file in kept if _kind(file.name) == "pickle"]
    if pickles and not allow_pickle:
        raise _refused(listing, pickles)
    if "config.json" not in names:
        raise _unknown(listing.source, names)
    return Listing(source=listing.source, revision=listing.revision, files=tuple(kept))


def head(listing: Listing) -> Listing:
    """Of ``listing``, what the planner and a tokenizer need: small files at its root."""
    files = tuple(
        file
        for file in listing.files
        if _OF_THE_HEAD.fullmatch(file.name) and not file.name.endswith(".index.json") and file.size <= HEAD_BYTES
    )
    return Listing(source=listing.source, revision=listing.revision, files=files)


def _kind(name: str) -> Literal["weights", "pickle", "small", "code", "other"]:
    suffix = PurePosixPath(name).suffix.lower()
    base = name.rsplit("/", 1)[-1]
    if base.startswith(".") or name.startswith(_OWN) or suffix in _FOREIGN or _OF_TRAINING.fullmatch(base):
        return "other"
    if "/" in name and not _FOLDERS.fullmatch(name):
        return "other"  # original/, onnx/, runs/: the same weights for other programs, or logs
    if suffix == ".safetensors":
        return "weights"
    if suffix in PICKLES or (_SPLIT_FOLDER in name and suffix != ".json"):
        return "pickle"
    if suffix == ".py":
        return "code"
    return "small" if suffix in _SMALL or "/" in name or base == "VERSION" else "other"


def _is_taken(name: str, names: frozenset[str], trust_remote_code: bool) -> bool:
    kind = _kind(name)
    if kind in ("other", "code"):
        return kind == "code" and trust_remote_code
    root = "checkpoint/" if name.startswith("checkpoint/") else ""
    rest = name[len(root) :]
    safe = f"{root}model.safetensors" in names or root + INDEX in names
    if rest.startswith(_SPLIT_FOLDER):
        return not safe
    if kind == "small" or "/" in rest:
        return True
    if kind == "weights":
        alone = root + INDEX not in names  # the other precisions and formats beside it are never read
        return not safe or (rest == "model.safetensors" if alone else _OTHER_SAFETENSORS.fullmatch(rest) is None)
    if rest == COMPILED and NEURON_CONFIG in names:
        return True
    usual = any(_WEIGHT_PICKLE.fullmatch(other.removeprefix(root)) for other in names)
    return not safe and (not usual or _WEIGHT_PICKLE.fullmatch(rest) is not None)


def _refused(listing: Listing, files: list[RemoteFile]) -> SourceError:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    what = f"the weights of {listing.source} are pickled ({files[0].name}{more}), and reading a pickle can run code"
    hint = "convert them with save_pretrained; or, if you trust the files, set `allow_pickle: true`"
    return SourceError("pickle-refused", what, hint)
