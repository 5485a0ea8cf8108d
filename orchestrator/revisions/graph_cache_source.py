"""Describes sources that are caches of compiled graphs, by the exports that their registry lists."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.revisions.config_builder import unplaced_config
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import graph_cache_error, names_in, registry_of
from workers.artifacts.sources.listing import SourceError
from workers.engines.optimum_neuron.graph_cache import RegisteredExport, exports_in, fetch_exports
from workers.engines.optimum_neuron.settings import OptimumSettings

if TYPE_CHECKING:
    from orchestrator.revisions.checkpoint_reader import SourcePart
    from placements.spec.schema import ModelSpec
    from workers.artifacts.sources.open_source import SourceQuery

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
    if model.engine != "optimum-neuron" or model.broken & _COMPARED:
        return None
    return OptimumSettings.of(
        unplaced_config(model, model.engine, source="", draft_source=None, length=model.length(None))
    )
