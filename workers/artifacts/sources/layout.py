"""Selects the files of a source that make up the model, and detects their layout. Pure: names in, names out."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from placements.engines.capabilities import SourceForm
from placements.engines.registry import ENGINES
from workers.artifacts.sources.listing import Listing, RemoteFile, SourceError

Layout = Literal["hf", "optimum", "split", "presharded"]

INDEX = "model.safetensors.index.json"
SPLIT = "pytorch_model.bin/key_to_filename.json"  # what transformers-neuronx's ``save_pretrained_split`` wrote
NEURON_CONFIG, COMPILED = "neuron_config.json", "model.pt"  # of NxD Inference, and of Optimum Neuron since 0.4
TNX_SHARDS = "DecoderLMHead.safetensors"  # written by ``save(folder, sharded_weights=True)``
ADAPTER_FILES = frozenset({"adapter_config.json", "adapter_model.safetensors"})  # of a LoRA adapter, by peft
PICKLES = frozenset({".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"})

# Formats of other programs, which no engine reads, and leftovers of training.
_FOREIGN = frozenset({".gguf", ".h5", ".mlmodel", ".msgpack", ".npz", ".onnx", ".ot", ".tflite"})
_TRAINING_FILES = re.compile(r"(training_args|optimizer|scheduler|rng_state.*|scaler)\.(bin|pt|pth)")
_SPLIT_FOLDER = "pytorch_model.bin/"
_WEIGHT_PICKLE = re.compile(r"pytorch_model[^/]*\.bin")
_SMALL = frozenset({".jinja", ".json", ".merges", ".model", ".spm", ".tiktoken", ".txt", ".vocab", ".yaml", ".yml"})
_OTHER_SAFETENSORS = re.compile(r"(consolidated|adapter_|.*\.(fp16|fp32|bf16|ema)[.-]).*", re.IGNORECASE)
_FOLDERS = re.compile(
    r"(pytorch_model\.bin|checkpoint|compiled|weights|neuronxcc-[^/]+|additional_chat_templates)/.+", re.DOTALL
)
_CACHED_GRAPH = re.compile(r"neuronxcc-[^/]+/MODULE_[^/]+/")  # as Neuron's cache, and Optimum's on the hub, lay it out
_REGISTERED = re.compile(r"(neuronxcc-[^/]+)/0_REGISTRY/([^/]+)/.+/([^/]+)\.json")  # by Optimum Neuron, one per export
MOST_REGISTERED = 64  # files that are read; the public cache has thousands
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors|pytorch_model\.bin)")  # of sentence-transformers
_METADATA_FILES = re.compile(
    r"[^/]+\.(json|jinja|merges|model|spm|tiktoken|txt|vocab)|additional_chat_templates/[^/]+|\d+_\w+/config\.json"
)
_OWN = "corewright-"  # prefix of the files that the store writes beside a model's own
HEAD_BYTES = 64 * 2**20  # largest metadata file; the largest known tokenizer.json has 35 MB


def layout_of(names: Iterable[str] | Path, config: Mapping[str, Any] | None = None) -> Layout:
    """Returns the layout of a model's files. ``names``: all file names, or the folder that holds them.

    1. optimum: compiled by Optimum Neuron: a folder ``checkpoint/`` beside ``compiled/`` or neuron_config.json, or a
       config.json with ``neuron``.
    2. presharded: compiled by NxD Inference, or weights already sharded per core by it or by transformers-neuronx.
    3. split: one file per weight, as transformers-neuronx wrote them.
    4. hf: config.json, and weights that transformers reads.

    ``config``: the decoded config.json, if the caller has it. Raises SourceError ``layout-unknown``.
    """
    all_names = set(names_in(names) if isinstance(names, Path) else names)
    settings = config or {}
    folders = {name.split("/", 1)[0] for name in all_names if "/" in name}
    # 1.
    if isinstance(settings.get("neuron"), dict):
        return "optimum"
    if "checkpoint" in folders and ("compiled" in folders or NEURON_CONFIG in all_names):
        return "optimum"
    # 2.
    if (
        settings.get("is_presharded_checkpoint") is True
        or TNX_SHARDS in all_names
        or any(map(_is_shard_of_a_core, all_names))
    ):
        return "presharded"
    if NEURON_CONFIG in all_names and COMPILED in all_names:
        return "presharded"
    # 3.
    if SPLIT in all_names:
        return "split"
    # 4.
    if "config.json" in all_names:
        return "hf"
    raise _unknown("the model", all_names)


def _unknown(source: str, names: Collection[str]) -> SourceError:
    if (cache := graph_cache_error(source, names)) is not None:
        return cache
    some = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return SourceError("layout-unknown", f"{source} has no config.json; it has {some or 'no files'}", "check the path")


def graph_cache_error(source: str, names: Collection[str]) -> SourceError | None:
    """Returns the error of a source that is a cache of compiled graphs, without a model; None: it is not."""
    if "config.json" in names or not any(map(_CACHED_GRAPH.match, names)):
        return None
    fact = f"{source} is a cache of compiled graphs (neuronxcc-*/MODULE_*), not a model"
    return SourceError("layout-unknown", fact, "set source to the model that the graphs were compiled from")


def registry_of(names: Iterable[str]) -> list[str]:
    """Returns the files of a cache of graphs that say what Optimum Neuron exported, one for each export."""
    exports = {match.groups(): name for name in sorted(names) if (match := _REGISTERED.fullmatch(name))}
    return sorted(exports.values())[:MOST_REGISTERED]


def served_by(layout: Layout, names: Collection[str]) -> tuple[str, ...]:
    """Returns the engines that load such a model.

    Optimum Neuron before 0.4 wrote a checkpoint beside NEFFs, which transformers-neuronx can load, too. Of presharded
    models only those of NxD Inference, and of Optimum Neuron without its folder of weights, whose names are the same:
    transformers-neuronx does not record the configuration of its own.
    """
    form = _form_of(layout, names)
    return tuple(name for name, engine in ENGINES.items() if form in engine.loads)


def _form_of(layout: Layout, names: Collection[str]) -> SourceForm | None:
    if layout == "optimum":
        return "optimum" if NEURON_CONFIG in names else "optimum-first"
    if layout != "presharded":
        return layout
    if not is_of_nxd(names):
        return None
    return "precompiled" if NEURON_CONFIG in names and COMPILED in names else "sharded"


def is_of_nxd(names: Collection[str]) -> bool:
    """Returns whether NxD Inference can load a presharded model: compiled, or with its shards in ``weights/``."""
    shards = any(name.startswith("weights/") and _is_shard_of_a_core(name) for name in names)
    return shards or (NEURON_CONFIG in names and COMPILED in names)


def names_in(folder: Path) -> list[str]:
    """Returns the relative paths of all files below a folder."""
    return [Path(parent, name).relative_to(folder).as_posix() for parent, _, names in os.walk(folder) for name in names]


def _is_shard_of_a_core(name: str) -> bool:
    return re.fullmatch(r"(weights/)?tp\d+_sharded_checkpoint\.safetensors", name) is not None


def checked(listing: Listing) -> Listing:
    """Returns ``listing``. Raises SourceError ``name-unsafe`` for a name that would lead out of the folder."""
    for file in listing.files:
        parts = PurePosixPath(file.name).parts
        plain = file.name == "/".join(parts) and not file.name.startswith("/") and "\0" not in file.name
        if not plain or not parts or ".." in parts or any(len(part.encode()) > 255 for part in parts):
            message = f"{listing.source} has a file named {file.name!r}, which is not a path within a folder"
            raise SourceError("name-unsafe", message, "rename the file")
    return listing


def selected(listing: Listing, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> Listing:
    """Returns the part of ``listing`` that is fetched.

    1. Safetensors, if there are any that transformers would read; then no pickles.
    2. Else pickles, if they are allowed.
    3. Compiled files, and presharded or split weights. A compiled model.pt is a pickle as well.
    4. Small files: the config, the tokenizer, templates. Python files only with ``trust_remote_code``.
    5. The modules of sentence-transformers after the transformer, such as ``1_Pooling``, with their weights.

    Raises SourceError: ``pickle-refused`` if the only weights are pickles that are not allowed, ``name-unsafe``, and
    ``layout-unknown`` without a config.json.
    """
    checked(listing)
    names = frozenset(file.name for file in listing.files)
    files = [file for file in listing.files if _is_taken(file.name, names, trust_remote_code)]
    pickles = [file for file in files if _kind(file.name) == "pickle"]
    if pickles and not allow_pickle:
        raise _refused(listing, pickles)
    if "config.json" not in names:
        raise _unknown(listing.source, names)
    return Listing(source=listing.source, revision=listing.revision, files=tuple(files))


def selected_of_adapter(listing: Listing) -> Listing:
    """Returns the part of ``listing`` that is fetched of a LoRA adapter: its configuration and its safetensors.

    Raises SourceError: ``layout-unknown`` without one of them, and ``name-unsafe``."""
    files = tuple(file for file in checked(listing).files if file.name in ADAPTER_FILES)
    if len(files) < len(ADAPTER_FILES):
        message = f"{listing.source} has no {' and '.join(ADAPTER_FILES - {file.name for file in files})}"
        raise SourceError("layout-unknown", message, "save the adapter with peft, as safetensors")
    return Listing(source=listing.source, revision=listing.revision, files=files)


def metadata_files(listing: Listing) -> Listing:
    """Returns the part of ``listing`` that the planner and a tokenizer need: small files at its root, and the
    configurations of sentence-transformers' modules."""
    files = tuple(
        file
        for file in listing.files
        if _METADATA_FILES.fullmatch(file.name) and not file.name.endswith(".index.json") and file.size <= HEAD_BYTES
    )
    return Listing(source=listing.source, revision=listing.revision, files=files)


def _kind(name: str) -> Literal["weights", "pickle", "small", "code", "other"]:
    suffix = PurePosixPath(name).suffix.lower()
    base = name.rsplit("/", 1)[-1]
    if base.startswith(".") or name.startswith(_OWN) or suffix in _FOREIGN or _TRAINING_FILES.fullmatch(base):
        return "other"
    if "/" in name and not (_FOLDERS.fullmatch(name) or _MODULE.fullmatch(name)):
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
    relative = name[len(root) :]
    safe = f"{root}model.safetensors" in names or root + INDEX in names
    if relative.startswith(_SPLIT_FOLDER):
        return not safe
    if kind == "pickle" and _MODULE.fullmatch(name):
        return f"{name.rpartition('/')[0]}/model.safetensors" not in names
    if kind == "small" or "/" in relative:
        return True
    if kind == "weights":
        alone = root + INDEX not in names  # other precisions and formats beside it are never read
        return not safe or (
            relative == "model.safetensors" if alone else _OTHER_SAFETENSORS.fullmatch(relative) is None
        )
    if relative == COMPILED and NEURON_CONFIG in names:
        return True
    usual = any(_WEIGHT_PICKLE.fullmatch(other.removeprefix(root)) for other in names)
    return not safe and (not usual or _WEIGHT_PICKLE.fullmatch(relative) is not None)


def _refused(listing: Listing, files: list[RemoteFile]) -> SourceError:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    message = f"the weights of {listing.source} are pickled ({files[0].name}{more}), and loading a pickle can run code"
    hint = "convert them with save_pretrained, or set `allow_pickle: true` if you trust the files"
    return SourceError("pickle-refused", message, hint)
