"""What a source brings along for NxD Inference: a model that it has compiled, or weights divided among the cores.

    config.json, tokenizer.json, ...                   as in every checkpoint
    neuron_config.json, model.pt                       what ``compile`` wrote: the settings, and the graphs
    weights/tp{rank}_sharded_checkpoint.safetensors    the weights of each core, where it was told to save them

The package loads such a folder whatever it was compiled for: ``load`` compares nothing. neuron_config.json tells all
of the settings, so they are compared here, before a core is claimed. It does not tell the compiler; that is known where
the record of corewright lies beside it.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from workers.artifacts.sources.layout import COMPILED, INDEX, NEURON_CONFIG, names_in
from workers.artifacts.sources.listing import Listing
from workers.engines.checkpoint_files import read_json
from workers.engines.nxd_inference.config import SHORTEST_BUCKET, Settings, lengths, neuron_options
from workers.engines.nxd_inference.options import FIELDS, MOE_OPTIONS, OPTIONS, UNSERVED
from workers.host import foreign_files
from workers.messages.engine_protocol import EngineLoadError
from workers.neff_cache.file_states import damaged
from workers.neff_cache.predict import Difference, differences
from workers.neff_cache.record import LOCK_FILE, plain_of, read_record

if TYPE_CHECKING:
    from workers.engines import EngineConfig

log = logging.getLogger(__name__)

DRAWN = "on_device_sampling_config"
ENTRY = "model/"  # where the record of an entry has these files
SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # torch's -> the file format's
BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}  # of a number; of all others 1
OF_ONE_BYTE = frozenset({"I8", "U8", "F8_E4M3", "F8_E5M2"})
_QUANTIZED = {"int8": "I8", "f8e4m3": "F8_E4M3", "f8e5m2": "F8_E5M2"}  # quantization_dtype -> the file format's

_SHARD = re.compile(r"weights/tp(\d+)_sharded_checkpoint\.safetensors")
_ORIGINAL = ("model.safetensors", INDEX)
# Of neuron_config.json, what says nothing about the graphs: places, what is done at a load, and lengths that an
# application takes from a caller. Buckets are compared as they come out.
_PASSED_OVER = frozenset(
    {
        *("quantized_checkpoints_path", "save_sharded_checkpoint", "skip_sharding", "skip_warmup"),
        *("overrides_torch_dtype", "max_new_tokens", "logical_neuron_cores"),
        *("enable_bucketing", "buckets"),
    }
)
_OF_WEIGHTS = ("tp_degree", "torch_dtype", "fused_qkv", "quantized", "quantization_dtype", "quantization_type")
_FOLLOWS = frozenset({"world_size", "local_ranks_size"})  # from the degrees
_REQUEST = frozenset({"top_k", "top_p", "temperature", "on_device_sampling_config"})  # each request sets its own
_BUCKETS = {"context_encoding_buckets": "max_context_length", "token_generation_buckets": "max_length"}
_FACTS = ("model_type", "num_hidden_layers", "head_dim", "tie_word_embeddings", "rope_scaling")
_AS_RECORDED = ("engine", "versions", "environment", "target", "lnc")  # of a manifest
_SPEC = {DRAWN: "sampling"}
_MISSING: Any = object()
_ORIGINAL_HINT = "name the original checkpoint as `source`: corewright compiles it, and keeps what was compiled"
_ASK = f"let the spec ask for what is there; or {_ORIGINAL_HINT}"


@dataclass(frozen=True)
class Given:
    """What lies beside config.json."""

    folder: Path
    names: frozenset[str]  # of all files; of a source that is not fetched yet, of those that it will have
    compiled: bool  # there is a model.pt; else the weights alone
    ranks: tuple[int, ...]  # of the shards that are there

    @property
    def recorded(self) -> dict[str, Any] | None:
        """neuron_config.json. Raises EngineLoadError where it cannot be read."""
        return read_json(self.folder / NEURON_CONFIG) if NEURON_CONFIG in self.names else None


def given_in(source: Path) -> Given | None:
    """None for a checkpoint as transformers writes it."""
    names = _names(source)
    ranks = tuple(sorted(int(found[1]) for name in names if (found := _SHARD.fullmatch(name))))
    compiled = COMPILED in names and (NEURON_CONFIG in names or bool(ranks))
    return Given(source, names, compiled, ranks) if compiled or ranks else None


def _names(source: Path) -> frozenset[str]:
    from workers.artifacts.sources.source_metadata import MARK

    try:  # these are the small files of a source elsewhere, with the list of all
        told = foreign_files.read_bytes(source / MARK)
    except OSError:
        return frozenset(names_in(source))
    return frozenset(file.name for file in msgspec.json.decode(told, type=Listing).files)


def seen(settings: Settings) -> Settings:
    """With what its source brings along. Raises EngineLoadError where that is none of NxD Inference's."""
    if settings.draft_source is not None and given_in(Path(settings.draft_source)) is not None:
        what = (
            f"the draft model in {settings.draft_source} is compiled or sharded already, and a draft is compiled anew"
        )
        raise EngineLoadError("layout-unsupported", what, "name the draft's original checkpoint")
    given = given_in(Path(settings.source))
    if given is None:
        return settings
    recorded = given.recorded
    if recorded is not None and not isinstance(recorded.get("neuron_config"), dict):
        what = f"{given.folder} was compiled by Optimum Neuron, whose graphs NxD Inference cannot call"
        raise EngineLoadError("layout-unsupported", what, _optimum_hint(given))
    if not given.compiled and settings.draft_source is not None:
        what = f"the sharded weights in {given.folder} are those of one model, and with a draft there are two"
        raise EngineLoadError("layout-unsupported", what, f"leave out `draft`, or {_ORIGINAL_HINT}")
    return replace(settings, presharded=not given.compiled)


def _optimum_hint(given: Given) -> str:
    """To compile anew is for the user to ask."""
    for folder in ("", "checkpoint/"):
        if any(folder + name in given.names for name in _ORIGINAL):
            where = given.folder / folder
            return (
                f"{where} holds the original weights: name a folder of them, config.json and the tokenizer to compile"
            )
    return _ORIGINAL_HINT


def check(given: Given, settings: Settings, config: Any, manifest: Mapping[str, Any]) -> None:
    """Raises EngineLoadError where ``given`` is not what ``settings`` ask for, or not whole. Touches no device.

    ``config`` is the InferenceConfig that would be compiled, ``manifest`` what the artifacts would depend on.
    1. A model.pt is a program, which is trusted or not run.
    2. What was recorded is what is asked for: each field that is not is told.
    3. The weights of every core are there, and of no other.
    """
    _check_program(given, settings)  # 1
    recorded = given.recorded
    if recorded is not None:  # 2
        why = otherwise(given, config, None if given.compiled else _OF_WEIGHTS)
        _raise_otherwise(given, [*(_otherwise_made(given, manifest) if given.compiled else ()), *why])
    _check_weights(given, settings, str(config.neuron_config.torch_dtype).removeprefix("torch."))  # 3


def foreseen(config: EngineConfig) -> EngineLoadError | None:
    """What a start of ``config`` would fail with, as far as names and small files tell it without the package: for who
    only plans."""
    try:
        settings = seen(Settings.of(config))
        given = given_in(Path(settings.source))
        if given is None:
            return None
        _check_program(given, settings)
        recorded = given.recorded
        if recorded is not None:
            # Only names of options depend on the version.
            release = (0, 9) if "kv_quant_config" in recorded["neuron_config"] else (0, 7)
            options = neuron_options(settings, lengths(settings), release, "")
            # What is not named stays as it is by default; what the environment says is the host's.
            every = {*options, *FIELDS, *UNSERVED, DRAWN} - _FOLLOWS - {"logical_nc_config"}
            compared = every if given.compiled else _OF_WEIGHTS
            _raise_otherwise(given, _options(options, recorded["neuron_config"], {}, compared))
        _check_names(given, settings)
    except EngineLoadError as error:
        return error
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:  # the package writes others
        what = f"the {NEURON_CONFIG} in {config.source} cannot be compared: {type(error).__name__}: {error}"
        return EngineLoadError("artifacts-mismatch", what, _ORIGINAL_HINT)
    return None


def _check_program(given: Given, settings: Settings) -> None:
    if not given.compiled:
        return
    if not settings.allow_pickle:
        raise EngineLoadError(
            "pickle-refused",
            f"{given.folder / COMPILED} is a compiled program, and loading it can run code",
            f"if you trust it, set `allow_pickle: true`; or {_ORIGINAL_HINT}",
        )
    if NEURON_CONFIG not in given.names:
        what = f"nothing tells what {given.folder / COMPILED} was compiled for: it has no {NEURON_CONFIG}"
        raise EngineLoadError("artifacts-mismatch", what, f"copy the file too; or {_ORIGINAL_HINT}")


def _check_weights(given: Given, settings: Settings, dtype: str) -> None:
    _check_names(given, settings)
    if not given.compiled or _saves_shards(given.recorded):
        _check_files(given, settings, dtype)


def _check_names(given: Given, settings: Settings) -> None:
    if not given.compiled or _saves_shards(given.recorded):
        _check_ranks(given, settings.tp_degree)
    elif not any(name in given.names for name in _ORIGINAL):
        what = f"{given.folder} was compiled without the weights, and they are not beside it"
        raise EngineLoadError("weights-missing", what, "copy the model's safetensors there")


def config_of(given: Given, config: Any) -> Any:
    """The InferenceConfig that ``given`` was compiled with; ``config`` is the one that it was compared with."""
    recorded = _read_back(given, config)
    if getattr(recorded, "pad_token_id", None) is None:  # which prompts are padded with
        recorded.pad_token_id = config.pad_token_id
    return recorded


def _read_back(given: Given, config: Any) -> Any:
    """Its InferenceConfig. The package does not read back the enumerations of a kv_quant_config that it wrote."""
    recorded = read_json(given.folder / NEURON_CONFIG)
    options = recorded["neuron_config"]
    if isinstance(kept := options.get("kv_quant_config"), Mapping):
        options["kv_quant_config"] = {"direct_cast": kept.get("direct_cast", True)}
    return type(config).from_json_string(json.dumps(recorded))


def joined(compiled: Path, source: Path, scratch: Path) -> Path:
    """A folder below ``scratch`` that looks as if ``compiled`` had been saved with the shards of ``source``."""
    folder = Path(tempfile.mkdtemp(prefix="joined-", dir=scratch))
    for name in (NEURON_CONFIG, COMPILED):
        (folder / name).symlink_to((compiled / name).resolve())
    (folder / "weights").symlink_to((source / "weights").resolve())
    return folder


def otherwise(given: Given, config: Any, only: Collection[str] | None = None) -> list[Difference]:
    """How its neuron_config.json differs from ``config``, an InferenceConfig; ``only`` in these options.

    An option that the file lacks has the default of the installed version: so its writer did not have it, or did not
    name it. Raises EngineLoadError where the installed version does not read the file.
    """
    wanted, recorded = json.loads(config.to_json_string()), read_json(given.folder / NEURON_CONFIG)
    try:
        read = json.loads(_read_back(given, config).to_json_string())
    except (AssertionError, AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        what = f"the installed NxD Inference does not read {NEURON_CONFIG}: {type(error).__name__}: {error}"
        hint = f"was it written by another version? {_ORIGINAL_HINT}"
        raise EngineLoadError("artifacts-mismatch", what, hint) from error
    found = _options(wanted["neuron_config"], recorded["neuron_config"], read["neuron_config"], only)
    if only is not None:
        return found
    needed = [*getattr(config, "get_required_attributes", list)(), *_FACTS]
    needed = [name for name in needed if name != "pad_token_id"]  # it is no part of a graph
    found += _facts(wanted, recorded, needed)
    ours, theirs = (one.get("fused_spec_config") for one in (wanted, recorded))
    if (ours is None) != (theirs is None):
        found.append(Difference("draft", *("one" if one is not None else None for one in (ours, theirs))))
    elif ours is not None and theirs is not None:
        own, other = ours["draft_config"], theirs["draft_config"]
        known = read["fused_spec_config"]["draft_config"]["neuron_config"]
        more = _options(own["neuron_config"], other["neuron_config"], known, None)
        found += [replace(one, field=f"of the draft, {one.field}") for one in more if one not in found]
        found += [replace(one, field=f"of the draft, {one.field}") for one in _facts(own, other, needed)]
    return found


def _options(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], defaults: Mapping[str, Any], only: Collection[str] | None
) -> list[Difference]:
    """What follows from other options is told where nothing else differs, and equal sentences once."""
    own, other, known = (_comparable(one) for one in (ours, theirs, {**theirs, **defaults}))
    first: dict[tuple[str, str, str], Difference] = {}
    follows: list[Difference] = []
    for option in sorted(own.keys() | other.keys()):
        parent = option.partition(".")[0]
        if option in _PASSED_OVER or (only is not None and parent not in only):
            continue
        if parent != option and own[parent] != other[parent]:
            continue  # told of the parent
        wanted, found = own.get(option, _MISSING), other.get(option, _MISSING)
        found = known.get(option, _MISSING) if found is _MISSING else found
        is_named = wanted is not _MISSING
        wanted, found = (_default(option) if one is _MISSING else one for one in (wanted, found))
        if wanted is _MISSING or found is _MISSING or wanted == found:
            continue
        if not (is_named or wanted or found):
            continue  # off, as one version or the other writes it: 0, null
        told = Difference(_named(option), wanted, found)
        if only is None and _is_derived(option):
            follows.append(told)
        else:
            field = _SPEC.get(option, FIELDS.get(option, option))
            first.setdefault((field, repr(wanted), repr(found)), told)
    return list(first.values()) or follows


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(options)
    if isinstance(kept := options.get("kv_quant_config"), Mapping):
        found["kv_quant_config"] = [kept.get("direct_cast", True), kept.get("quant_dtype", "float8_e4m3fn")]
    for name, longest in _BUCKETS.items():
        if isinstance(length := options.get(longest), int):
            found[name] = _buckets(options, name, length)
    drawn = options.get(DRAWN)
    if isinstance(drawn, Mapping):
        found |= {f"{DRAWN}.{name}": value for name, value in drawn.items() if name not in _REQUEST}
    found[DRAWN] = "host" if drawn is None else "device"
    return found


def _buckets(options: Mapping[str, Any], name: str, longest: int) -> list[int]:
    """The lengths that are compiled (``modules/autobucketing``): powers of two, the last left to rounding."""
    if not options.get("enable_bucketing"):
        return [longest]
    given = options.get(name)
    if isinstance(given, Sequence) and given:
        return sorted(int(one) for one in given)
    if longest == SHORTEST_BUCKET:
        return [longest]
    return [*(2**power for power in range(int(math.log2(SHORTEST_BUCKET)), round(math.log2(longest)))), longest]


def _default(option: str) -> Any:
    """Of an option that is not named; ``_MISSING`` where that depends on others."""
    known = OPTIONS.get(option)
    if known is None:
        return _MISSING if option.startswith(DRAWN) else None
    try:
        return ast.literal_eval(known.default)
    except (ValueError, SyntaxError):
        return _MISSING


def _is_derived(option: str) -> bool:
    if option in MOE_OPTIONS or option in _BUCKETS or option.startswith(DRAWN):
        return False
    return option in _FOLLOWS or option not in OPTIONS or "self." in OPTIONS[option].default


def _named(option: str) -> str:
    """By the field of a spec that stands for it."""
    field = _SPEC.get(option, FIELDS.get(option))
    if field is None:
        return option if option in UNSERVED or option not in OPTIONS else f"engine_options.{option}"
    return field if field == option else f"{field} ({option})"


def _facts(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: Sequence[str]) -> list[Difference]:
    """Of the model itself: a config.json that lies beside the graphs of another one."""
    return [
        Difference(f"{name} of config.json", ours[name], theirs[name])
        for name in dict.fromkeys(names)
        if name in ours and name in theirs and ours[name] != theirs[name]
    ]


def _otherwise_made(given: Given, manifest: Mapping[str, Any]) -> list[Difference]:
    """By the record of corewright, where it lies there: another compiler, other versions, another target.

    Raises EngineLoadError where a file is not as it was.
    """
    record = read_record(given.folder / LOCK_FILE)
    if record is None:
        log.warning("nothing tells which compiler has made %s: its runtime must be as new", given.folder / COMPILED)
        return []
    files = {name[len(ENTRY) :]: part for name, part in record.files.items() if name.startswith(ENTRY)}
    if LOCK_FILE in given.names and (bad := damaged(given.folder, files)) and (given.folder / COMPILED).exists():
        what = f"of what was compiled into {given.folder}, {', '.join(bad)} is missing or not as it was"
        raise EngineLoadError("artifacts-mismatch", what, "copy it again")
    ours, theirs = ({name: one.get(name) for name in _AS_RECORDED} for one in (plain_of(manifest), record.manifest))
    return list(differences(ours, theirs))


def _raise_otherwise(given: Given, why: Sequence[Difference]) -> None:
    if why:
        made = "compiled for other settings than" if given.compiled else "sharded for other settings than"
        what = f"{given.folder} was {made} the spec's: {'; '.join(map(str, why))}"
        raise EngineLoadError("artifacts-mismatch", what, _ASK)


def _saves_shards(recorded: Mapping[str, Any] | None) -> bool:
    """What ``load`` goes by; 0.2 has always saved them unless they were told otherwise."""
    return recorded is None or bool(recorded["neuron_config"].get("save_sharded_checkpoint", True))


def _check_ranks(given: Given, degree: int) -> None:
    most = given.ranks[-1] + 1 if given.ranks else 0
    whole = given.ranks == tuple(range(most))
    if most > degree or (whole and most and most != degree and not given.compiled):
        what = f"{given.folder / 'weights'} has the weights of {most} cores, and tp_degree is {degree}"
        raise EngineLoadError("shards-mismatch", what, f"set `tp_degree: {most}`, or {_ORIGINAL_HINT}")
    missing = [rank for rank in range(degree) if rank not in given.ranks]
    if missing:
        names = ", ".join(f"weights/tp{rank}_sharded_checkpoint.safetensors" for rank in missing)
        raise EngineLoadError("weights-missing", f"{given.folder} lacks {names}", "copy the weights again")


def _check_files(given: Given, settings: Settings, dtype: str) -> None:
    """Of shards that are on this host: each is whole, and what they hold is of the dtype that is asked for."""
    found: dict[str, int] = {}
    for rank in given.ranks:
        file = given.folder / f"weights/tp{rank}_sharded_checkpoint.safetensors"
        if file.exists():
            for kind, size in _sizes(file).items():
                found[kind] = found.get(kind, 0) + size
    if not found:
        return
    small = OF_ONE_BYTE & found.keys()
    most = max(found, key=lambda kind: found[kind])
    wanted = "numbers of one byte" if settings.quantize else SAFETENSORS[dtype]
    if (settings.quantize is not None) != bool(small) or (not settings.quantize and most != wanted):
        kinds = f"{', '.join(sorted(found))}, mostly {most}"
        what = f"the shards in {given.folder / 'weights'} hold {kinds}; needed are {wanted}"
        raise EngineLoadError("shards-mismatch", what, "see `dtype` and `quantize`")


def check_quantized(settings: Settings, options: Any) -> None:
    """Raises EngineLoadError where the quantized checkpoint that the user brings is not what a NeuronConfig names.

    The package would cast whatever is there and compute with it.
    """
    folder = Path(settings.quantized_source or "")
    if settings.quantized_source is None or settings.quantize is None:
        return
    if INDEX not in (names := _names(folder) if folder.is_dir() else ()) and "model.safetensors" not in names:
        what = f"{folder}, the quantized checkpoint, has no {INDEX} and no model.safetensors"
        raise EngineLoadError("weights-missing", what, "name a folder with safetensors in `quantized_checkpoints_path`")
    files = [folder / name for name in sorted(names) if name.endswith(".safetensors") and "/" not in name]
    small = OF_ONE_BYTE & set().union(*(_sizes(file) for file in files))
    wanted = _QUANTIZED[options.quantization_dtype]
    if small != {wanted}:
        what = f"{folder}, the quantized checkpoint, holds {', '.join(sorted(small)) or 'no quantized weights'}; "
        what += f"needed is {wanted}, of {options.quantization_dtype}"
        raise EngineLoadError("quantized-mismatch", what, "see `quantize` and `engine_options.quantization_dtype`")
    per_channel = any(math.prod(shape) > 1 for file in files for shape in _scales(file))
    if per_channel is not (options.quantization_type == "per_channel_symmetric"):
        kind = "per_channel_symmetric" if per_channel else "per_tensor_symmetric"
        what = (
            f"the scales in {folder}, the quantized checkpoint, are {kind}, and the model's {options.quantization_type}"
        )
        raise EngineLoadError("quantized-mismatch", what, f"engine_options: {{quantization_type: {kind}}}")


def _scales(file: Path) -> Iterator[Sequence[int]]:
    """The shapes of the scales of weights; the package takes names of either form."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118 - it is no mapping
            if name.endswith((".scale", ".weight_scale")):
                yield opened.get_slice(name).get_shape()


def _sizes(file: Path) -> dict[str, int]:
    """Bytes by dtype. Raises EngineLoadError for a file that is cut off or garbled."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, int] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                kind = str(part.get_dtype())
                found[kind] = found.get(kind, 0) + BYTES.get(kind, 1) * math.prod(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise EngineLoadError("weights-broken", f"{file} cannot be read: {error}", "copy the file again") from error
    return found
