"""Compiled artifacts of vLLM's Neuron plugins: what they depend on, and the folder that a server uses.

The plugin on NxD Inference has one folder for a model, `NEURON_COMPILED_ARTIFACTS`. It loads whatever is there, and
only warns where settings differ; without the variable, 0.2 deletes its folder and compiles at each start. So the
variable is always set, to an entry whose manifest has every setting. Only a device compiles.

The later plugin keeps a folder for each graph, ``neuron/compile_cache/<32 hex digits>`` below `VLLM_CACHE_ROOT`, and
compiles on a host without devices, too. An entry has all folders of a start. It does not read the variable above. From
0.29 on it keeps the traces of graphs below `VLLM_CACHE_ROOT`, too, if `VLLM_NEURON_BACKEND` is set (Precompile Cache):
on a host they last as long as the entry, and are not part of it.

An entry is complete only after its server was ready.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from pathlib import Path
from typing import Any

from placements.engines.vllm.capabilities import Plugin
from workers.artifacts.sources.listing import SourceError
from workers.compiled import shared_sets
from workers.compiled.compile_session import CompileSession
from workers.compiled.file_states import Part, parts
from workers.compiled.host_sets import SPENT, LockedEntry, check_room, entry
from workers.compiled.neuron_cache import URL
from workers.compiled.neuron_target import LNC, OVERRIDE
from workers.compiled.shared_sets import pull_or_log
from workers.engines.manifest_parts import checkpoint_digests, neuron_build
from workers.engines.weight_files import copy_bytes
from workers.host import foreign_files, host_facts
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)

MODEL, WORK = "model", "work"  # in an entry of the plugin on NxD Inference
_GRAPH = re.compile(r"neuron/compile_cache/[0-9a-f]{32}/.+")  # in an entry of the later plugin
VERSIONS = (
    *("vllm", "vllm-neuron", "neuronx-distributed-inference", "neuronx-cc"),
    *("torch", "torch-neuronx", "libneuronxla", "transformers"),
)
SERVED_ALIKE = frozenset(
    {
        *("api-key", "disable-uvicorn-access-log", "generation-config", "host", "port", "uds"),
        *("max-num-queued-reqs", "served-model-name", "shutdown-timeout"),
    }
)
"""Flags that no graph depends on."""
FLAGS = "NEURON_CC_FLAGS"
_CACHES = frozenset({"NEURON_LIBTORCH_REMOTE_CACHE", "VLLM_CACHE_ROOT"})
RUN_ALIKE = _CACHES | {URL, OVERRIDE, *LNC, "NEURON_PROCESS_TAG", "NEURON_VISIBLE_DEVICES"}
"""Variables that no graph depends on, or that the manifest has as its target."""
_READ = ("DISABLE_NEURON_", "NEURON_", "UNSAFE_", "VLLM_NEURON_", "XLA_")  # prefixes of variables that change graphs
_SHOWN = {"tensor-parallel-size": "tp_degree", "max-num-seqs": "batch_size", "max-model-len": "seq_len"}

AHEAD = {"VLLM_NEURON_CPU_COMPILE": "1"}
NO_COMPILE = {"VLLM_NEURON_DISABLE_WARMUP_COMPILE": "1", "NEURON_LIBTORCH_DISABLE_GRAPH_CAPTURE_BACKEND": "1"}
"""Makes a missing graph an error of the start; otherwise the server compiles it on its cores."""
MISS = "compile cache miss"
"""Part of the later plugin's error of a missing graph, in 0.24 (`compile/backend.py`)."""
_CPU_TARGET = "trn2"  # of a compilation ahead, unless the environment has one


@dataclass(frozen=True)
class Needs:
    """The artifacts that a server needs."""

    manifest: Mapping[str, Any]
    unread: tuple[str, ...]  # files whose digests the manifest lacks


def needs(
    config: ReplicaConfig,
    plugin: Plugin,
    packages: Mapping[str, str],
    arguments: Sequence[str],
    *,
    read: bool = True,
) -> Needs:
    """Returns the manifest of a server with these arguments of `vllm serve`. ``packages``: versions in its interpreter.

    The artifacts of NxD Inference contain sharded weights, so their manifest has a digest of all files; with ``read``
    False no file is read whose digest is unknown.
    """
    sources = [Path(folder) for folder in (config.source, config.draft_source) if folder is not None]
    sources += map(Path, config.adapters.values())
    content: dict[str, Any] = {}
    unread: tuple[str, ...] = ()
    if plugin == "nxd" and config.run.compiled is not None:
        digests, unread = checkpoint_digests(sources, Path(config.run.compiled), read=read)
        content = {"checkpoints": digests}
    elif plugin == "neuron":
        model, *drafts = (blake2s(foreign_files.read_bytes(source / "config.json")).hexdigest() for source in sources)
        content = {"model": model, "drafts": drafts}
    alike = RUN_ALIKE | ({FLAGS} if plugin == "neuron" else frozenset())  # it has flags of its own, so they are unset
    manifest = {
        "engine": "vllm",
        "plugin": plugin,
        "versions": {name: packages.get(name) for name in VERSIONS},
        **neuron_build(),
        "environment": {
            name: value
            for name, value in sorted(config.place.env.items())
            if name.startswith(_READ) and name not in alike and not name.startswith("NEURON_RT_")
        },
        "dtype": config.dtype,
        "options": _options(arguments[1:], sources),
        **content,
    }
    return Needs(manifest, unread)


def _options(arguments: Iterable[str], sources: Iterable[Path]) -> dict[str, Any]:
    """Returns flags and their values. A folder of a checkpoint is replaced by its place in ``sources``."""
    values: dict[str, list[Any]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            values[name] = [_plain(value)] if equals else []
        else:
            for place, source in enumerate(sources):
                argument = argument.replace(str(source), f"checkpoint {place}")
            values.setdefault(name, []).append(_plain(argument))
    return {
        _SHOWN.get(name, name): value[0] if len(value) == 1 else value or True
        for name, value in values.items()
        if name not in SERVED_ALIKE
    }


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class PreparedServer:
    """The variables and locks of a server for its compiled artifacts."""

    env: dict[str, str]
    held: tuple[int, ...] = ()  # descriptors that must stay open until its last process has ended


@contextlib.contextmanager
def prepared(config: ReplicaConfig, plugin: Plugin, wanted: Needs, scratch: Path) -> Iterator[PreparedServer]:
    """The context in which a server becomes ready; its artifacts are then complete, and pushed in the background.

    1. A complete entry is used as it is. Of the later plugin, a missing graph is then an error.
    2. Otherwise, the entry is fetched from the ``neff_cache``.
    3. Otherwise, the server compiles it on its cores. Other starts on this host that need it wait, until its last
       process has ended if it fails.

    ``scratch`` is a folder for files that are not kept. Raises EngineLoadError.
    """
    if plugin == "cpu":
        yield PreparedServer({})
        return
    if config.run.compiled is None:
        yield PreparedServer(_variables(plugin, scratch, scratch))
        return
    compiled = False
    with entry(Path(config.run.compiled), wanted.manifest) as held:
        if held.complete or pull_or_log(held, config.model.neff_cache):  # 1, 2
            with _hinted(config, held.path):
                yield PreparedServer(
                    _variables(plugin, held.path, scratch) | (NO_COMPILE if plugin == "neuron" else {})
                )
        else:  # 3
            with filling(config, plugin, held) as server:
                yield server
            compiled = True
    if compiled and config.model.neff_cache:
        threading.Thread(target=_send, args=(config, wanted.manifest), name="neff-push", daemon=True).start()


@contextlib.contextmanager
def filling(config: ReplicaConfig, plugin: Plugin, held: LockedEntry) -> Iterator[PreparedServer]:
    """The context in which a server compiles into an exclusively held entry, which is complete afterwards."""
    log.info("compiling %s with vLLM into %s; its output is in this log", config.source, held.path)
    if plugin == "nxd":
        weights = map(Path, filter(None, (config.source, config.draft_source)))
        check_room(held.path, sum(copy_bytes(source, config.dtype) for source in weights))
    session = CompileSession(held.manifest, Path(config.source or ""), held.path.parent, shared=False)
    with session.compiling() if plugin == "nxd" else contextlib.nullcontext(), SPENT.running():
        env = _variables(plugin, held.path, held.path)
        if plugin == "nxd" and URL in os.environ:
            env[URL] = os.environ[URL]
        yield PreparedServer(env, () if held.lock is None else (held.lock,))
    shutil.rmtree(held.path / WORK, ignore_errors=True)
    files = _made(plugin, held.path)
    if files:
        held.finish(config.source or "", files)
        log.info("compiled %s: %d files in %s", config.source, len(files), held.path)
    else:
        log.warning("vLLM left no compiled artifacts in %s: the next start compiles again", held.path)


def ahead(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a server that compiles on a host without devices."""
    cores = ("NEURON_VISIBLE_DEVICES", "NEURON_RT_VISIBLE_CORES")
    target = env.get(OVERRIDE) or os.environ.get(OVERRIDE) or _CPU_TARGET
    return {name: value for name, value in env.items() if name not in cores} | AHEAD | {OVERRIDE: target}


def _variables(plugin: Plugin, folder: Path, work: Path) -> dict[str, str]:
    if plugin == "neuron":
        return {"VLLM_CACHE_ROOT": str(folder)}
    # By default, all compilations of a host share one folder and overwrite each other's files.
    return {"NEURON_COMPILED_ARTIFACTS": str(folder / MODEL), "BASE_COMPILE_WORK_DIR": f"{work / WORK}/"}


def _made(plugin: Plugin, folder: Path) -> dict[str, Part]:
    """Returns the files of a server's artifacts; the later plugin's folder has vLLM's other caches, too."""
    if plugin == "nxd":
        return parts(folder)
    others = [name for path in folder.rglob("*") if not _GRAPH.fullmatch(name := path.relative_to(folder).as_posix())]
    return parts(folder, frozenset(others))


@contextlib.contextmanager
def _hinted(config: ReplicaConfig, folder: Path) -> Iterator[None]:
    """Names the artifacts in the error of a start that has logged a missing graph."""
    try:
        yield
    except EngineLoadError as error:
        if not any(MISS in line for line in host_facts.last_words(Path(config.run.log))):
            raise
        message = f"{error.what}: a graph is missing in {folder}"
        raise EngineLoadError(error.id, message, f"remove {folder} and compile again") from error


def _send(config: ReplicaConfig, manifest: Mapping[str, Any]) -> None:
    assert config.run.compiled is not None
    assert config.model.neff_cache is not None
    with entry(Path(config.run.compiled), manifest) as held:
        try:
            if held.complete:
                shared_sets.push(held, config.model.neff_cache)
        except SourceError as error:
            log.warning("cannot push compiled artifacts to %s: %s", config.model.neff_cache, error)
