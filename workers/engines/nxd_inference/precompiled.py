"""Sources that were compiled or sharded by NxD Inference elsewhere, and checks that they match the spec.

    config.json, tokenizer.json, ...                   as in every checkpoint
    neuron_config.json, model.pt                       written by ``compile``: the settings, and the graphs
    weights/tp{rank}_sharded_checkpoint.safetensors    the weights of each core, where saving them was enabled

The package loads such a folder without comparing its settings. neuron_config.json has all of them, so they are compared
here, before a core is claimed. It does not have the compiler's version; that is known only where corewright's record is
beside it.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import msgspec.structs

from placements.engines.capabilities import SHORTEST_BUCKET
from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG
from workers.compiled.file_states import damaged
from workers.compiled.manifest import LOCK_FILE, plain_of, read_record
from workers.compiled.prediction import Difference, differences
from workers.engines.checkpoint_files import read_config, read_json
from workers.engines.nxd_inference.config import (
    FIELDS,
    MOE_OPTIONS,
    OPTIONS,
    UNSERVED,
    NxdSettings,
    lengths,
    neuron_options,
    window_of,
)
from workers.engines.weight_files import names_of, tensors_of
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)

DRAWN = "on_device_sampling_config"
ENTRY = "model/"  # the prefix of these files in the record of an entry
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's -> the file format's
OF_ONE_BYTE = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2"})
_QUANTIZED = {"int8": "I8", "f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}  # quantization_dtype -> the file format's

_SHARD = re.compile(r"weights/tp(\d+)_sharded_checkpoint\.safetensors")
_ORIGINAL = ("model.safetensors", INDEX)
# Fields of neuron_config.json that do not affect what graphs compute: paths, the behavior of a load, kernels, and
# lengths that callers pass. Buckets are compared by their effective values.
_PASSED_OVER = frozenset(
    {
        *("quantized_checkpoints_path", "save_sharded_checkpoint", "skip_sharding", "skip_warmup"),
        *("overrides_torch_dtype", "max_new_tokens", "logical_neuron_cores"),
        *("attn_kernel_enabled", "enable_bucketing", "buckets"),
    }
)
_OF_WEIGHTS = ("tp_degree", "torch_dtype", "fused_qkv", "quantized", "quantization_dtype", "quantization_type")
_FOLLOWS = frozenset({"world_size", "local_ranks_size"})  # from the parallel degrees
_REQUEST = frozenset({"top_k", "top_p", "temperature", "on_device_sampling_config"})  # set by each request
_BUCKETS = {"context_encoding_buckets": "max_context_length", "token_generation_buckets": "max_length"}
_FACTS = ("model_type", "num_hidden_layers", "head_dim", "tie_word_embeddings", "rope_scaling")
_AS_RECORDED = ("engine", "versions", "environment", "target", "lnc")  # of a manifest
_SPEC = {DRAWN: "sampling"}
_MISSING: Any = object()
_ORIGINAL_HINT = "set `source` to the original checkpoint: corewright compiles it once"
_ASK = f"adapt the spec to these settings, or {_ORIGINAL_HINT}"


@dataclass(frozen=True)
class PrecompiledModel:
    """The compiled or sharded model in a source's folder."""

    folder: Path
    names: frozenset[str]  # of all files, including those that are not fetched yet
    compiled: bool  # there is a model.pt; else only weights
    ranks: tuple[int, ...]  # of the shards present

    @property
    def recorded(self) -> dict[str, Any] | None:
        """The content of neuron_config.json. Raises EngineLoadError where it cannot be read."""
        return read_json(self.folder / NEURON_CONFIG) if NEURON_CONFIG in self.names else None

    @property
    def loads_shards(self) -> bool:
        """Returns whether ``load`` reads shards."""
        recorded = self.recorded if self.compiled else None
        return recorded is None or bool(recorded["neuron_config"].get("save_sharded_checkpoint"))


def find(source: Path) -> PrecompiledModel | None:
    """Returns what NxD Inference compiled or sharded in ``source``; None for an ordinary checkpoint."""
    names = names_of(source)
    ranks = tuple(sorted(int(match[1]) for name in names if (match := _SHARD.fullmatch(name))))
    compiled = COMPILED in names and (NEURON_CONFIG in names or bool(ranks))
    return PrecompiledModel(source, names, compiled, ranks) if compiled or ranks else None


def with_sharding(settings: NxdSettings) -> NxdSettings:
    """Returns the settings with ``window`` and ``presharded`` set by the source. Raises EngineLoadError for unsupported
    layouts."""
    if settings.draft_source is not None and find(Path(settings.draft_source)) is not None:
        message = (
            f"the draft model in {settings.draft_source} is already compiled or sharded, but a draft is always compiled"
        )
        raise EngineLoadError("layout-unsupported", message, "set `draft.source` to the original checkpoint")
    window = window_of(read_config(Path(settings.source))) or 0
    settings = msgspec.structs.replace(settings, window=window if window < settings.max_len else 0)
    model = find(Path(settings.source))
    if model is None:
        return settings
    recorded = model.recorded
    if recorded is not None and not isinstance(recorded.get("neuron_config"), dict):
        message = f"{model.folder} was compiled by Optimum Neuron, whose graphs NxD Inference cannot run"
        raise EngineLoadError("layout-unsupported", message, _optimum_hint(model))
    if not model.compiled and settings.draft_source is not None:
        message = f"the sharded weights in {model.folder} do not include a draft model"
        raise EngineLoadError("layout-unsupported", message, f"remove `draft`, or {_ORIGINAL_HINT}")
    return msgspec.structs.replace(settings, presharded=not model.compiled)


def _optimum_hint(model: PrecompiledModel) -> str:
    """Returns a hint for the user, who must choose to compile again."""
    for folder in ("", "checkpoint/"):
        if any(folder + name in model.names for name in _ORIGINAL):
            where = model.folder / folder
            return (
                f"{where} holds the original weights: use a folder with them, config.json and the tokenizer to compile"
            )
    return _ORIGINAL_HINT


def check(model: PrecompiledModel, settings: NxdSettings, config: Any, manifest: Mapping[str, Any]) -> None:
    """Raises EngineLoadError where ``model`` is incomplete or does not match ``settings``. Uses no device.

    ``config`` is the InferenceConfig that would be compiled, ``manifest`` that of the artifacts.
    1. A model.pt is a program, which must be trusted.
    2. The recorded settings match: every field that differs is reported.
    3. The weights of every core are present, and of no other.
    """
    _check_program(model, settings)  # 1
    recorded = model.recorded
    if recorded is not None:  # 2
        mismatches = config_differences(model, config, None if model.compiled else _OF_WEIGHTS)
        _raise_mismatch(model, [*(_build_differences(model, manifest) if model.compiled else ()), *mismatches])
    _check_names(model, settings)  # 3
    if model.loads_shards:
        _check_files(model, settings, str(config.neuron_config.torch_dtype).removeprefix("torch."))


def start_error(config: ReplicaConfig) -> EngineLoadError | None:
    """Returns the error of a start of ``config``, as far as names and small files show it without the package: for
    planning."""
    try:
        settings = with_sharding(NxdSettings.of(config))
        model = find(Path(settings.source))
        if model is None:
            return None
        _check_program(model, settings)
        recorded = model.recorded
        if recorded is not None:
            # Only names of options depend on the version.
            release = (0, 9) if "kv_quant_config" in recorded["neuron_config"] else (0, 7)
            options = neuron_options(settings, lengths(settings), release, "")
            # Unnamed options keep their defaults; options from the environment depend on the host.
            every = {*options, *FIELDS, *UNSERVED, DRAWN} - _FOLLOWS - {"logical_nc_config"}
            compared = every if model.compiled else _OF_WEIGHTS
            _raise_mismatch(model, _options(options, recorded["neuron_config"], {}, compared))
        _check_names(model, settings)
    except EngineLoadError as error:
        return error
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # not as the package writes it
        message = f"the {NEURON_CONFIG} in {config.source} cannot be compared: {type(error).__name__}: {error}"
        return EngineLoadError("artifacts-mismatch", message, _ORIGINAL_HINT)
    return None


def _check_program(model: PrecompiledModel, settings: NxdSettings) -> None:
    if not model.compiled:
        return
    if not settings.allow_pickle:
        raise EngineLoadError(
            "pickle-refused",
            f"{model.folder / COMPILED} is a compiled program, and loading it can run code",
            f"set `allow_pickle: true` if you trust it, or {_ORIGINAL_HINT}",
        )
    if NEURON_CONFIG not in model.names:
        message = f"the settings of {model.folder / COMPILED} are unknown: there is no {NEURON_CONFIG}"
        raise EngineLoadError("artifacts-mismatch", message, f"copy that file, too, or {_ORIGINAL_HINT}")


def _check_names(model: PrecompiledModel, settings: NxdSettings) -> None:
    if model.loads_shards:
        _check_ranks(model, settings.tp_degree)
    elif not any(name in model.names for name in _ORIGINAL):
        message = f"{model.folder} was compiled without weights, and has no safetensors"
        raise EngineLoadError("weights-missing", message, "copy the model's safetensors there")


def config_of(model: PrecompiledModel, config: Any) -> Any:
    """Returns the InferenceConfig that ``model`` was compiled with; ``config`` is the one it was compared with."""
    recorded = _read_back(model, config)
    if getattr(recorded, "pad_token_id", None) is None:  # the padding of prompts
        recorded.pad_token_id = config.pad_token_id
    return recorded


def _read_back(model: PrecompiledModel, config: Any) -> Any:
    """Returns its InferenceConfig. The package cannot read the enumerations of a kv_quant_config that it wrote."""
    recorded = read_json(model.folder / NEURON_CONFIG)
    options = recorded["neuron_config"]
    if isinstance(kv_quant := options.get("kv_quant_config"), Mapping):
        options["kv_quant_config"] = {"direct_cast": kv_quant.get("direct_cast", True)}
    return type(config).from_json_string(json.dumps(recorded))


def link_shards(compiled: Path, source: Path, scratch: Path) -> Path:
    """Returns a folder below ``scratch`` that looks as if ``compiled`` had been saved with the shards of ``source``."""
    folder = Path(tempfile.mkdtemp(prefix="joined-", dir=scratch))
    for name in (NEURON_CONFIG, COMPILED):
        (folder / name).symlink_to((compiled / name).resolve())
    (folder / "weights").symlink_to((source / "weights").resolve())
    return folder


def config_differences(model: PrecompiledModel, config: Any, only: Collection[str] | None = None) -> list[Difference]:
    """Returns how its neuron_config.json differs from ``config``, an InferenceConfig; ``only`` in these options.

    An option that the file lacks has the installed version's default: its writer did not know it, or did not set it.
    Raises EngineLoadError where the installed version cannot read the file.
    """
    expected, recorded = json.loads(config.to_json_string()), read_json(model.folder / NEURON_CONFIG)
    try:
        read = json.loads(_read_back(model, config).to_json_string())
    except (AssertionError, AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        message = f"the installed NxD Inference cannot read {NEURON_CONFIG}: {type(error).__name__}: {error}"
        hint = f"it may be from another version; {_ORIGINAL_HINT}"
        raise EngineLoadError("artifacts-mismatch", message, hint) from error
    changes = _options(expected["neuron_config"], recorded["neuron_config"], read["neuron_config"], only)
    if only is not None:
        return changes
    needed = [*getattr(config, "get_required_attributes", list)(), *_FACTS]
    needed = [name for name in needed if name != "pad_token_id"]  # not part of a graph
    changes += _facts(expected, recorded, needed)
    ours, theirs = (item.get("fused_spec_config") for item in (expected, recorded))
    if (ours is None) != (theirs is None):
        changes.append(Difference("draft", *("one" if item is not None else None for item in (ours, theirs))))
    elif ours is not None and theirs is not None:
        own, other = ours["draft_config"], theirs["draft_config"]
        draft_defaults = read["fused_spec_config"]["draft_config"]["neuron_config"]
        more = _options(own["neuron_config"], other["neuron_config"], draft_defaults, None)
        changes += [replace(item, field=f"of the draft, {item.field}") for item in more if item not in changes]
        changes += [replace(item, field=f"of the draft, {item.field}") for item in _facts(own, other, needed)]
    return changes


def _options(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], defaults: Mapping[str, Any], only: Collection[str] | None
) -> list[Difference]:
    """Returns differences of options. Derived ones are reported only without any other, and equal lines once."""
    own, other, effective = (_comparable(item) for item in (ours, theirs, {**theirs, **defaults}))
    direct: dict[tuple[str, str, str], Difference] = {}
    derived: list[Difference] = []
    for option in sorted(own.keys() | other.keys()):
        parent = option.partition(".")[0]
        if option in _PASSED_OVER or (only is not None and parent not in only):
            continue
        if parent != option and own[parent] != other[parent]:
            continue  # reported for the parent
        expected, actual = own.get(option, _MISSING), other.get(option, _MISSING)
        actual = effective.get(option, _MISSING) if actual is _MISSING else actual
        is_named = expected is not _MISSING
        expected, actual = (_default(option) if item is _MISSING else item for item in (expected, actual))
        if expected is _MISSING or actual is _MISSING or expected == actual:
            continue
        if not (is_named or expected or actual):
            continue  # off, written as 0 or null depending on the version
        difference = Difference(_named(option), expected, actual)
        if only is None and _is_derived(option):
            derived.append(difference)
        else:
            field = _SPEC.get(option, FIELDS.get(option, option))
            direct.setdefault((field, repr(expected), repr(actual)), difference)
    return list(direct.values()) or derived


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    comparable = dict(options)
    if isinstance(kv_quant := options.get("kv_quant_config"), Mapping):
        comparable["kv_quant_config"] = [
            kv_quant.get("direct_cast", True),
            kv_quant.get("quant_dtype", "float8_e4m3fn"),
        ]
    for name, longest in _BUCKETS.items():
        if isinstance(length := options.get(longest), int):
            comparable[name] = _buckets(options, name, length)
    drawn = options.get(DRAWN)
    if isinstance(drawn, Mapping):
        comparable |= {f"{DRAWN}.{name}": value for name, value in drawn.items() if name not in _REQUEST}
    comparable[DRAWN] = "host" if drawn is None else "device"
    return comparable


def _buckets(options: Mapping[str, Any], name: str, longest: int) -> list[int]:
    """Returns the compiled lengths (``modules/autobucketing``): powers of two, the last by rounding."""
    if not options.get("enable_bucketing"):
        return [longest]
    buckets = options.get(name)
    if isinstance(buckets, Sequence) and buckets:
        return sorted(int(length) for length in buckets)
    if longest == SHORTEST_BUCKET:
        return [longest]
    return [*(2**power for power in range(int(math.log2(SHORTEST_BUCKET)), round(math.log2(longest)))), longest]


def _default(option: str) -> Any:
    """Returns the default of an option; ``_MISSING`` where it depends on others."""
    entry = OPTIONS.get(option)
    if entry is None:
        return _MISSING if option.startswith(DRAWN) else None
    try:
        return ast.literal_eval(entry.default)
    except (ValueError, SyntaxError):
        return _MISSING


def _is_derived(option: str) -> bool:
    if option in MOE_OPTIONS or option in _BUCKETS or option.startswith(DRAWN):
        return False
    return option in _FOLLOWS or option not in OPTIONS or "self." in OPTIONS[option].default


def _named(option: str) -> str:
    """Returns the name of the spec's field for an option, or of the option itself."""
    field = _SPEC.get(option, FIELDS.get(option))
    if field is None:
        return option if option in UNSERVED or option not in OPTIONS else f"engine_options.{option}"
    return field if field == option else f"{field} ({option})"


def _facts(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> list[Difference]:
    """Returns differences of the model itself: config.json may be another model's than the graphs."""
    return [
        Difference(f"{name} of config.json", ours[name], theirs[name])
        for name in dict.fromkeys(names)
        if name in ours and name in theirs and _fact(ours, name) != _fact(theirs, name)
    ]


def _fact(config: Mapping[str, Any], name: str) -> Any:
    """Returns a field of the model; ``head_dim`` may be null, which means the usual one."""
    if name == "head_dim" and config[name] is None:
        return config["hidden_size"] // config["num_attention_heads"]
    return config[name]


def _build_differences(model: PrecompiledModel, manifest: Mapping[str, Any]) -> list[Difference]:
    """Returns differences of the compiler, versions and target, by corewright's record, where there is one.

    Raises EngineLoadError where a file has changed.
    """
    record = read_record(model.folder / LOCK_FILE)
    if record is None:
        log.warning("the compiler of %s is unknown: the runtime must be at least as new", model.folder / COMPILED)
        return []
    files = {name[len(ENTRY) :]: part for name, part in record.files.items() if name.startswith(ENTRY)}
    if LOCK_FILE in model.names and (bad := damaged(model.folder, files)) and (model.folder / COMPILED).exists():
        message = f"compiled files in {model.folder} are missing or have changed: {', '.join(bad)}"
        raise EngineLoadError("artifacts-mismatch", message, "copy them again")
    ours, theirs = (
        {name: fields.get(name) for name in _AS_RECORDED} for fields in (plain_of(manifest), record.manifest)
    )
    return list(differences(ours, theirs))


def _raise_mismatch(model: PrecompiledModel, mismatches: Sequence[Difference]) -> None:
    if mismatches:
        action = "compiled for other settings than" if model.compiled else "sharded for other settings than"
        message = f"{model.folder} was {action} the spec's: {'; '.join(map(str, mismatches))}"
        raise EngineLoadError("artifacts-mismatch", message, _ASK)


def _check_ranks(model: PrecompiledModel, degree: int) -> None:
    count = model.ranks[-1] + 1 if model.ranks else 0
    contiguous = model.ranks == tuple(range(count))
    if count > degree or (contiguous and count and count != degree and not model.compiled):
        message = f"{model.folder / 'weights'} has the weights of {count} cores, but tp_degree is {degree}"
        raise EngineLoadError("shards-mismatch", message, f"set `tp_degree: {count}`, or {_ORIGINAL_HINT}")
    missing = [rank for rank in range(degree) if rank not in model.ranks]
    if missing:
        names = ", ".join(f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in missing)
        raise EngineLoadError("weights-missing", f"{model.folder} is missing {names}", "copy the weights again")


def _check_files(model: PrecompiledModel, settings: NxdSettings, dtype: str) -> None:
    """Check the shards on this host: each is complete, and their dtype matches the spec."""
    sizes: Counter[str] = Counter()  # bytes by dtype
    for rank in model.ranks:
        file = model.folder / f"weights/tp{rank}_sharded_checkpoint.safetensors"
        if file.exists():
            for tensor in tensors_of(file).values():
                sizes[tensor.dtype] += tensor.size
    if not sizes:
        return
    small = OF_ONE_BYTE & sizes.keys()
    largest = max(sizes, key=lambda kind: sizes[kind])
    expected = "one-byte numbers" if settings.quantize else SAFETENSORS[dtype]
    if (settings.quantize is not None) != bool(small) or (not settings.quantize and largest != expected):
        kinds = f"{', '.join(sorted(sizes))}, mostly {largest}"
        message = f"the shards in {model.folder / 'weights'} hold {kinds}, but the spec needs {expected}"
        raise EngineLoadError("shards-mismatch", message, "check `dtype` and `quantize`")


def check_quantized(settings: NxdSettings, options: Any) -> None:
    """Raises EngineLoadError where the user's quantized checkpoint does not match the NeuronConfig.

    The package would cast any weights and compute with them.
    """
    folder = Path(settings.quantized_source or "")
    if settings.quantized_source is None or settings.quantize is None:
        return
    if INDEX not in (names := names_of(folder) if folder.is_dir() else ()) and "model.safetensors" not in names:
        message = f"{folder}, the quantized checkpoint, has no {INDEX} and no model.safetensors"
        raise EngineLoadError(
            "weights-missing", message, "set `quantized_checkpoints_path` to a folder with safetensors"
        )
    files = [folder / name for name in sorted(names) if name.endswith(".safetensors") and "/" not in name]
    tensors = [item for file in files for item in tensors_of(file).items()]
    small = {tensor.dtype for _, tensor in tensors} & OF_ONE_BYTE
    expected = _QUANTIZED[options.quantization_dtype]
    if small != {expected}:
        message = f"{folder}, the quantized checkpoint, holds {', '.join(sorted(small)) or 'no quantized weights'}; "
        message += f"{options.quantization_dtype} needs {expected}"
        raise EngineLoadError("quantized-mismatch", message, "check `quantize` and `engine_options.quantization_dtype`")
    # The package accepts names of either form.
    scales = [tensor.shape for name, tensor in tensors if name.endswith((".scale", ".weight_scale"))]
    per_channel = any(math.prod(shape) > 1 for shape in scales)
    if per_channel is not (options.quantization_type == "per_channel_symmetric"):
        kind = "per_channel_symmetric" if per_channel else "per_tensor_symmetric"
        message = (
            f"the scales in {folder}, the quantized checkpoint, are {kind}, but the model's {options.quantization_type}"
        )
        raise EngineLoadError("quantized-mismatch", message, f"engine_options: {{quantization_type: {kind}}}")
