"""Reads the small files of checkpoints that the planner and the controller need, never the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2s
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from placements.engines.registry import candidates_of, capabilities
from placements.facts.adapters import USE_PEFT, Adapter
from placements.facts.checkpoints import Checkpoint, CheckpointError, families
from placements.spec.notation import is_path, source_kind
from placements.spec.problems import Problem
from placements.spec.schema import ModelSpec, Spec
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import NEURON_CONFIG, graph_cache_error, names_in, registry_of
from workers.artifacts.sources.listing import SourceError
from workers.engines.optimum_neuron.graph_cache import RegisteredExport, exports_in, fetch_exports
from workers.engines.optimum_neuron.settings import OptimumSettings
from workers.host import foreign_files
from workers.host.interpreter import is_in_transformers
from workers.messages.replica_config import ADAPTERS, DRAFT, SOURCE, Keys, ReplicaConfig

if TYPE_CHECKING:
    from workers.artifacts.sources.open_source import SourceQuery
    from workers.artifacts.sources.source_metadata import Metadata, MetadataResult, SourceMetadata


AT_ONCE = 8  # concurrent queries to sources
_SKIPPED = "rules about heads, memory and lengths are skipped for it"


class SourcePart(NamedTuple):
    """A source of a model: its own, its draft's or an adapter's."""

    model: ModelSpec
    keys: Keys = SOURCE

    @property
    def key(self) -> tuple[str, ...]:
        return self.model.name, *self.keys

    @property
    def config_file(self) -> str:
        return "adapter_config.json" if self.is_adapter else "config.json"

    @property
    def is_draft(self) -> bool:
        return self.keys == DRAFT

    @property
    def is_adapter(self) -> bool:
        return self.keys[0] == ADAPTERS

    @property
    def source(self) -> str:
        if self.is_adapter:
            return self.model.adapters[self.keys[1]]
        return self.model.draft.source if self.is_draft and self.model.draft else self.model.source

    @property
    def folder(self) -> str | None:
        """The local folder; None for a remote source."""
        if self.is_adapter:
            return self.model.adapter_places[self.keys[1]] if is_path(self.source) else None
        return self.model.draft_path if self.is_draft else self.model.source_path

    @property
    def revision(self) -> str | None:
        if self.is_adapter:
            return None
        return self.model.draft.revision if self.is_draft and self.model.draft else self.model.revision

    def where(self, spec: Spec) -> str:
        return spec.where("models", self.model.name, *(self.keys if self.is_adapter else self.keys[:1]))


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts read from a spec's checkpoints, drafts and adapters, by model, and the problems found."""

    checkpoints: Mapping[str, Checkpoint]
    drafts: Mapping[str, Checkpoint]
    problems: tuple[Problem, ...]
    heads: Mapping[tuple[str, ...], Metadata] = field(default_factory=lambda: MappingProxyType({}))
    """Metadata of remote sources, by `SourcePart.key`."""
    adapters: Mapping[str, Mapping[str, Adapter]] = field(default_factory=lambda: MappingProxyType({}))


def source_parts(spec: Spec) -> Iterator[SourcePart]:
    """Yields every source that replicas of the spec would read."""
    for model in spec.models:
        if model.has_source and "source" not in model.broken:
            yield SourcePart(model)
            if model.draft is not None:
                yield SourcePart(model, DRAFT)
            for name in model.adapters:
                yield SourcePart(model, (ADAPTERS, name))


def read_facts(
    spec: Spec,
    *,
    fresh: bool = True,
    pinned: Mapping[tuple[str, ...], Metadata] | None = None,
    here: bool | None = None,
) -> CheckpointFacts:
    """Reads the config.json of each model and draft, and the configuration of each adapter. Blocks.

    Remote sources (the hub, S3) are queried; if not ``fresh``, only those without stored metadata; never ``pinned``
    ones. An unreadable checkpoint is a warning, and the rules that need it are skipped; a checkpoint that no engine of
    this version can serve is an error, except for the engines server and vllm. ``here``: this machine will load the
    folders, so an unloadable one is an error; False: another machine will, and it is a warning; None: weights and
    tokenizers are not checked.
    """
    checkpoints: dict[str, Checkpoint] = {}
    drafts: dict[str, Checkpoint] = {}
    adapters: dict[str, dict[str, Adapter]] = {}
    problems: list[Problem] = []
    every = list(source_parts(spec))
    heads = _heads_of(spec, [part for part in every if part.folder is None], fresh, pinned or {}, problems)
    for part in every:
        head = heads.get(part.key)
        folder = part.folder if head is None else head.folder
        if folder is None:
            continue  # reported already
        if part.is_adapter:
            adapter = _read_adapter(part, folder, part.where(spec), here)
            if isinstance(adapter, Adapter):
                adapters.setdefault(part.model.name, {})[part.keys[1]] = adapter
            else:
                problems.append(adapter)
            continue
        read = _read(part, folder, head, part.where(spec), spec.python_for(part.model.engine))
        if isinstance(read, Checkpoint):
            (drafts if part.is_draft else checkpoints)[part.model.name] = read
        if capabilities(part.model.engine).forwards and Path(folder).is_dir():
            continue  # its command may load files that corewright cannot read
        problem = None if isinstance(read, Checkpoint) else read
        if (problem is None or problem.severity == "warning") and (here is not None or head is not None):
            unloadable = _unloadable(part, folder, head, part.where(spec), bool(here), readable=problem is None)
            problem = unloadable or problem
        if problem is not None:
            problems.append(problem)
    return CheckpointFacts(checkpoints, drafts, tuple(problems), heads, adapters)


def _read_adapter(part: SourcePart, folder: str, where: str, here: bool | None) -> Adapter | Problem:
    name, is_local = part.keys[1], part.folder is not None
    try:
        adapter = Adapter.from_config(foreign_files.read_json(Path(folder) / "adapter_config.json"))
        if is_local and here is not None and not (Path(folder) / "adapter_model.safetensors").is_file():
            raise FileNotFoundError(2, "it has no adapter_model.safetensors")
    except (OSError, ValueError) as error:
        why = error.strerror or error if isinstance(error, OSError) else error
        fact = f"{part.model.name}: the adapter {name} in {folder if is_local else part.source} cannot be read: {why}"
        unknown = is_local and isinstance(error, OSError) and not here
        return Problem("adapter-unusable", "warning" if unknown else "error", where, fact, USE_PEFT)
    return adapter


def _read(part: SourcePart, folder: str, head: Metadata | None, where: str, python: str | None) -> Checkpoint | Problem:
    """``python``: the interpreter of the model's engine; None: this one."""
    model, source = part.model.name, part.source
    file = Path(folder) / "config.json"
    shown = str(file) if part.folder is not None else f"the config.json of {source}"
    try:
        config = foreign_files.read_json(file)
        if code := _needed_code(part.model, config):
            family = config.get("model_type")
            if part.model.trust_remote_code:
                fact = f"{model}: the planner has no facts of the family {family!r} of {shown}, whose code is {code}"
                return Problem("checkpoint-unreadable", "warning", where, fact, _SKIPPED)
            if not is_in_transformers(f'("{family}", "', python):
                fact = f"{model}: the family {family!r} of {shown} is implemented only by the checkpoint's code, {code}"
                hint = "serve a checkpoint of a known family; its own code runs only with `trust_remote_code: true`"
                return Problem("remote-code-refused", "error", where, fact, hint)
        if unsupported := _unsupported(part, folder, head, config):
            return Problem("layout-unsupported", "error", where, f"{model}: {unsupported}", _CONVERT)
        if (Path(folder) / NEURON_CONFIG).exists():  # it describes the weights instead
            config = {**config, "quantization_config": None}
        return Checkpoint.from_config(config, part.model.kind)
    except CheckpointError as error:
        if error.id == "unknown-family" and capabilities(part.model.engine).own_families:
            fact = f"{model}: the planner has no facts of the family {config['model_type']!r}; vLLM decides on it"
            return Problem("checkpoint-unreadable", "warning", where, fact, f"check that vLLM serves it; {_SKIPPED}")
        return Problem(error.id, "error", where, f"{model}: {error.what}", error.hint)
    except OSError as error:
        is_cache = isinstance(error, FileNotFoundError) and any(Path(folder).glob("neuronxcc-*"))
        if is_cache and (cache := local_cache(part, folder)) is not None:
            return _problem(part, cache, where)
        fact = f"{model}: {shown} cannot be read: {error.strerror or error}"
        begins = f"{_BEGINS}; " if source.startswith(".") else ""
        hint = f"{begins}{_ENOUGH} {_SKIPPED}"
        return Problem("checkpoint-unreadable", "warning", where, fact, hint)
    except ValueError as error:
        fact = f"{model}: {shown} is not JSON: {error}"
        return Problem("checkpoint-unreadable", "warning", where, fact, "fetch the checkpoint again")


def _unloadable(
    part: SourcePart, folder: str, head: Metadata | None, where: str, here: bool, readable: bool
) -> Problem | None:
    """Returns why a start would fail to load the folder, or the tokenizer of a remote source (``head``); None: it would
    succeed. ``readable``: its config.json was read."""
    from workers.engines.weight_files import check_checkpoint
    from workers.messages.engine_protocol import EngineLoadError
    from workers.text.tokenizer import check_tokenizer_files

    try:
        if head is None:
            check_checkpoint(Path(folder), allow_pickle=part.model.allow_pickle)
        engine = capabilities(part.model.engine)
        if not part.is_draft and engine.tokenizer == "checkpoint":
            runs_class = engine.launches and not part.model.trust_remote_code
            check_tokenizer_files(Path(folder), None if head is None else head.names, runs_class=runs_class)
    except EngineLoadError as error:
        fact = f"{part.model.name}: {error.what if head is None else error.what.replace(folder, part.source)}"
        begins = f"{_BEGINS}; " if error.id == "model-not-found" and part.source.startswith(".") else ""
        if here or head is not None:
            return Problem(error.id, "error", where, fact, begins + error.hint)
        fact += "; the machine that will load it was not checked"
        hint = error.hint if readable else f"{begins}{_ENOUGH} {_SKIPPED}"
        return Problem("checkpoint-unreadable", "warning", where, fact, hint)
    return None


_BEGINS = "relative paths start at the folder of the spec file"
_ENOUGH = "config.json alone is enough for planning; without it,"
_CONVERT = "use the model's original checkpoint: corewright compiles it and caches the result"
_LAID_OUT = ("checkpoint", "compiled", "weights", "pytorch_model.bin", "neuron_config.json", "model.pt")


def _unsupported(part: SourcePart, folder: str, head: Metadata | None, config: Any) -> str | None:
    """Returns why the model's engine does not support the layout of its files; None: it does, or it is unknown."""
    marked = isinstance(config, dict) and ("neuron" in config or "is_presharded_checkpoint" in config)
    if head is None and not marked and not any((Path(folder) / name).exists() for name in _LAID_OUT):
        return None
    from workers.artifacts.sources.layout import layout_of, names_in, served_by

    names, engine = names_in(Path(folder)) if head is None else head.names, part.model.engine
    layout = layout_of(names, config)
    engines = served_by(layout, names)
    if any(candidate in engines for candidate in candidates_of(engine)):
        return None
    shown = f"only {' and '.join(engines)} does" if engines else "no engine of this version does"
    return f"{part.source} has the layout {layout}, which {engine} does not load: {shown}"


def _needed_code(model: ModelSpec, config: object) -> str | None:
    """Returns the Python code of a checkpoint of an unknown family, as "file.Class"; None: it names none, or the
    model's engine and kind never run it."""
    if not isinstance(config, dict) or not capabilities(model.engine).runs_code or model.kind != "generate":
        return None
    named = config.get("auto_map")
    if config.get("model_type") in families(model.kind) or not isinstance(named, dict):
        return None
    return next((str(value) for value in named.values() if value), None)


# Remote sources


def source_metadata_store() -> SourceMetadata:
    """Returns the store of remote sources' metadata in this machine's home."""
    from orchestrator.process.home import Home
    from workers.artifacts.sources.source_metadata import SourceMetadata

    return SourceMetadata(Home.from_environment().path / "store" / "heads")


def source_query(part: SourcePart) -> SourceQuery:
    """Returns the metadata query for a remote source."""
    from workers.artifacts.sources.open_source import SourceQuery

    model = part.model
    return SourceQuery(
        source=part.source,
        revision=part.revision,
        allow_pickle=model.allow_pickle,
        trust_remote_code=model.trust_remote_code,
        adapter=part.is_adapter,
    )


def is_hub_source(part: SourcePart) -> bool:
    """Returns whether the source is a hub id."""
    return source_kind(part.source) == "hub"


def _heads_of(
    spec: Spec,
    away: list[SourcePart],
    fresh: bool,
    pinned: Mapping[tuple[str, ...], Metadata],
    problems: list[Problem],
) -> dict[tuple[str, ...], Metadata]:
    """Returns the metadata of remote sources by part. Equal queries are sent once; imports only if there are any."""
    if not away:
        return {}
    from workers.artifacts.sources.listing import SourceError

    heads, result = source_metadata_store(), {}
    queries = {
        part.key: source_query(part) for part in away if "revision" not in part.model.broken and not _misplaced(part)
    }
    unknown = {question for key, question in queries.items() if key not in pinned}

    def answer(question: SourceQuery) -> MetadataResult | SourceError:
        try:
            return heads.refresh(question) if fresh else heads.get(question)
        except SourceError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="heads") as pool:
        answers = dict(zip(unknown, pool.map(answer, unknown), strict=True))
    for part in away:
        if part.key in pinned:
            result[part.key] = pinned[part.key]
        elif part.key in queries:
            reply = answers[queries[part.key]]
            if isinstance(reply, SourceError):
                if reply.id == "layout-unknown" and not part.is_adapter:
                    reply = remote_cache(part, queries[part.key], reply)
                problems.append(_problem(part, reply, part.where(spec)))
                continue
            if reply.away is not None:
                fact = f"{part.model.name}: {reply.away.what}; its stored metadata is used"
                problems.append(Problem("source-away", "warning", part.where(spec), fact, reply.away.hint))
            result[part.key] = reply.head
    return result


def _misplaced(part: SourcePart) -> bool:
    """Returns whether a revision is set for a source without revisions, which a rule reports."""
    return part.revision is not None and part.source.startswith("s3://")


def _problem(part: SourcePart, error: SourceError, where: str) -> Problem:
    """Returns an error for a rejected source, a warning for an unreachable one, which the host may still reach."""
    if error.id in _REJECTIONS:
        return Problem(error.id, "error", where, f"{part.model.name}: {error.what}", error.hint)
    file = f"{part.source}/{part.config_file}" if part.is_adapter else "its config.json"
    fact = f"{part.model.name}: {file} cannot be read: {error.what}"
    hint = f"{error.hint or 'retry later'}; until then {_SKIPPED}"
    return Problem("checkpoint-unreadable", "warning", where, fact, hint)


_REJECTIONS = ("pickle-refused", "name-unsafe", "layout-unknown")

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json", "modules.json", "1_Pooling/config.json"),
)


def tokenizer_key(engine: str, folder: str | None) -> str:
    """Returns a key that is equal for sources with identical tokenizer and chat template files, and, of
    sentence-transformers' folders, identical prompts and limits; a gateway loads equal tokenizers once. Blocks."""
    if not capabilities(engine).reads_checkpoint:
        return engine
    if folder is None:
        return f"{engine}:{folder}"
    digest = blake2s(digest_size=8)
    empty = digest.digest()
    for name in _TOKENIZER_FILES:
        with contextlib.suppress(OSError):
            digest.update(
                name.encode()
                + b"\0"
                + blake2s(foreign_files.read_bytes(Path(folder) / name, foreign_files.MAX_TOKENIZER_BYTES)).digest()
            )
    return digest.hexdigest() if digest.digest() != empty else f"{engine}:{folder}"


PATIENCE_S = 3.0  # a user waits for the command
SHOWN = 4  # exports in a message
_COMPARED = frozenset({"dtype", "engine", "engine_options", "max_batch", "max_len", "sampling", "tp_degree"})


def local_cache(part: SourcePart, folder: str) -> SourceError | None:
    """Returns the error of a folder that is a cache of graphs; None: it is not. Blocks."""
    names = names_in(Path(folder))
    error = graph_cache_error(part.source, names)
    return None if error is None else _with(exports_in(Path(folder), registry_of(names)), error, part.model)


def remote_cache(part: SourcePart, query: SourceQuery, error: SourceError) -> SourceError:
    """Returns ``error`` (`layout-unknown`) with the exports of the source, if it is a cache of graphs. Blocks."""
    with contextlib.suppress(SourceError, OSError):
        return _with(fetch_exports(query, RetryPolicy(seconds=PATIENCE_S)), error, part.model)
    return error


def _with(exports: list[RegisteredExport], error: SourceError, model: ModelSpec) -> SourceError:
    if not exports:
        return error
    shown = [export.describe(_settings(model)) for export in exports[:SHOWN]]
    more = f", and {len(exports) - SHOWN} more" if len(exports) > SHOWN else ""
    models = " or ".join(sorted({export.model for export in exports})[:SHOWN])
    fact = f"{error.what}; it has graphs of {', and of '.join(shown)}{more}"
    return SourceError(error.id, fact, f"set source to the model that the graphs were compiled from: {models}")


def _settings(model: ModelSpec) -> OptimumSettings | None:
    """Returns the settings to compare; None: another engine's, or they are broken."""
    if not capabilities(model.engine).exports_graphs or model.broken & _COMPARED:
        return None
    return OptimumSettings.of(ReplicaConfig(model=model.resolved(model.engine, None)))
