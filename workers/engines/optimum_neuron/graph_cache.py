"""Sources that are caches of compiled graphs: the exports that Optimum Neuron lists in their registry.

    neuronxcc-<version>/MODULE_<graph>+<flags>/model.neff, ...
    neuronxcc-<version>/0_REGISTRY/0.0.28/inference/<family>/<model>/<hash>.json
    neuronxcc-<version>/0_REGISTRY/0.4.5/<family>/<model>/<hash>.json; the same file again in a folder of its digest

Each JSON file is the model's config.json, in which ``neuron`` has the settings of the export; 0.4 adds ``_model_id``.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.layout import checked, registry_of
from workers.artifacts.sources.open_source import SourceQuery
from workers.engines.optimum_neuron.settings import ExportRecord, OptimumSettings
from workers.host import foreign_files


@dataclass(frozen=True)
class RegisteredExport:
    """A model that was exported with graphs of the cache."""

    model: str  # its id on the hub
    record: ExportRecord

    def describe(self, settings: OptimumSettings | None) -> str:
        """Returns its degree, batch, length and type, and what differs from ``settings``; None: nothing to compare."""
        record, recorded = self.record, self.record.recorded
        text = f"{self.model} with tp_degree {recorded[record.cores_field]}, max_batch {recorded['batch_size']}"
        text += f", max_len {recorded['sequence_length']}, {record.dtype}"
        if settings is None:
            return text
        return f"{text} ({'; '.join(map(str, record.differences(settings))) or 'as the spec'})"


def fetch_exports(query: SourceQuery, retry_policy: RetryPolicy) -> list[RegisteredExport]:
    """Returns the exports of a cache on S3 or the hub. Fetches only its registry. Raises SourceError and OSError."""
    remote = query.open_all(retry_policy)
    listing = remote.listing()
    small = {file.name: file for file in listing.files if file.size <= foreign_files.MAX_CONFIG_BYTES}
    registry = msgspec.structs.replace(listing, files=tuple(small[name] for name in registry_of(small)))
    with tempfile.TemporaryDirectory(prefix="corewright-registry-") as folder:
        remote.fetch(checked(registry), Path(folder), Progress(listing.source), threading.Event())
        return exports_in(Path(folder), registry_of(small))


def exports_in(folder: Path, names: list[str]) -> list[RegisteredExport]:
    """Returns the exports that the files ``names`` of a registry describe; other files are of training or encoders."""
    exports = []
    for name in names:
        try:
            export = _export(name, foreign_files.read_json(folder / name))
        except (OSError, ValueError):
            continue
        if export is not None:
            exports.append(export)
    return exports


def _export(name: str, entry: Any) -> RegisteredExport | None:
    neuron = entry.get("neuron") if isinstance(entry, dict) else None
    if not isinstance(neuron, dict):
        return None
    record = ExportRecord("nxd" if "tp_degree" in neuron else "tnx", neuron)
    if not {record.cores_field, "batch_size", "sequence_length"} <= neuron.keys():
        return None  # of an encoder
    in_path = name.partition(f"/{entry.get('model_type')}/")[2].rpartition("/")[0]
    return RegisteredExport(str(entry.get("_model_id") or in_path or "a model without a name"), record)
