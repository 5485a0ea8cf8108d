"""Predicts whether a start will compile, from the artifacts it needs and the candidates it has. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Where = Literal["compiled", "elsewhere", "source", "neff-cache", "nothing"]
Outcome = Literal["hit", "compile", "fail"]

# Display names of manifest fields.
NAMES = {
    "versions.neuronx-cc": "compiler version",
    "environment.NEURON_CC_FLAGS": "compiler flags",
    "model": "config.json",
    "code": "code of the checkpoint",
    "checkpoints": "files of the checkpoint",
    "speculation": "speculation lengths",
    "amp": "dtype",
    "torch_dtype": "dtype",
}
GROUPS = ("options.constructor.", "options.neuron.", "options.", "shapes.")
DECODE, PREFILL = "options.constructor.n_positions", "options.constructor.context_length_estimate"
COMPLETE: Mapping[Where, str] = {
    "compiled": "it was compiled on this host",
    "elsewhere": "its neff_cache has artifacts compiled by another host",
    "neff-cache": "the cache has all of its graphs",
}
ORDER: tuple[Where, ...] = ("compiled", "elsewhere", "source", "neff-cache")
LATER = "clear it with `corewright cache retry`"


@dataclass(frozen=True)
class Difference:
    """A field that differs between two manifests; None: the field is absent."""

    field: str
    wanted: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.field}: needs {_plain(self.wanted)}, found {_plain(self.found)}"


@dataclass(frozen=True)
class ArtifactCandidate:
    """A set of compiled artifacts in a place that a start checks."""

    where: Where
    place: str  # folder, or URL of a remote cache
    manifest: Mapping[str, Any] | None  # None: unknown
    source: str = ""  # the model's source, if known
    missing: tuple[str, ...] = ()  # files or graphs that are missing or damaged
    failed: tuple[str, ...] = ()  # graphs that failed to compile and will not be retried
    locked: tuple[str, ...] = ()  # missing graphs that are being compiled now
    silent: str = ""  # why the content of the place is unknown; there is no manifest then


@dataclass(frozen=True)
class Prediction:
    """The predicted outcome of a start."""

    outcome: Outcome
    where: Where
    reason: str  # for display
    place: str = ""
    why: tuple[Difference, ...] = ()  # how the nearest candidate differs
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def hit(self) -> bool:
        """Returns whether nothing is compiled or refused."""
        return self.outcome == "hit"


def predict(wanted: Mapping[str, Any] | None, candidates: Sequence[ArtifactCandidate], source: str = "") -> Prediction:
    """Predicts the outcome of a start that needs the manifest ``wanted`` for the model ``source``.

    Checks the candidates in the order of the start itself:

    1. An engine that compiles nothing (None) is a hit.
    2. Complete artifacts of exactly this manifest are used: compiled on this host, else from the model's
       ``neff_cache``, from which they are fetched before the start.
    3. NEFFs beside the model are used if their record matches, and refused otherwise.
    4. The cache is a hit if it has all graphs; a graph that failed to compile fails again. The graphs of a model with
       fewer buckets are a subset of those with more: there is one per bucket.
    5. Else the start compiles. The reason names the differences from the nearest candidate, and unavailable places.
    """
    if wanted is None:  # 1
        return Prediction("hit", "nothing", "the engine compiles nothing")
    for candidate in sorted(candidates, key=lambda each: (ORDER.index(each.where), each.manifest != wanted)):
        is_same, where, place = candidate.manifest == wanted, candidate.where, candidate.place
        if where == "source":  # 3
            return _beside(wanted, candidate)
        if is_same and candidate.failed:  # 4
            return Prediction(
                "fail", where, f"the cache has a failed compilation; {LATER}", place, failed=candidate.failed
            )
        if is_same and not candidate.missing:  # 2, 4
            return Prediction("hit", where, COMPLETE[where], place)
        is_whole = not candidate.missing and not candidate.failed
        if where == "neff-cache" and is_whole and has_more_buckets(candidate.manifest, wanted):
            return Prediction("hit", where, "the cache has its graphs, as part of more buckets", place)
    prediction = _compiles(wanted, candidates, source)  # 5
    unavailable = [candidate.silent for candidate in candidates if candidate.silent]
    return replace(prediction, reason="; ".join(dict.fromkeys([prediction.reason, *unavailable])))


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Returns the fields that differ, sorted by name; a list counts as one value."""
    ours, theirs = flat(wanted), flat(found)
    return tuple(
        Difference(named(path), ours.get(path), theirs.get(path))
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    )


def flat(manifest: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens a manifest: {"versions": {"torch": "2"}} becomes {"versions.torch": "2"}."""
    fields: dict[str, Any] = {}
    for name, value in manifest.items():
        if isinstance(value, Mapping):
            fields |= flat(value, f"{prefix}{name}.")
        else:
            fields[f"{prefix}{name}"] = value
    return fields


def named(path: str) -> str:
    """Returns the display name of a field."""
    if path in NAMES:
        return NAMES[path]
    short = next((path.removeprefix(group) for group in GROUPS if path.startswith(group)), path)
    return NAMES.get(short, short)


def has_more_buckets(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Returns whether ``found`` has all buckets of ``wanted`` and more, and is otherwise equal, including the longest
    decode bucket, which is the length of the KV cache."""
    ours, theirs = flat(wanted), flat(found or {})
    differing = [path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)]
    if not differing or not set(differing) <= {DECODE, PREFILL}:
        return False
    lists = [(ours.get(path), theirs.get(path)) for path in (DECODE, PREFILL)]
    pairs = [(few, many) for few, many in lists if isinstance(few, list) and isinstance(many, list) and few and many]
    same_length = len(pairs) == len(lists) and max(ours[DECODE]) == max(theirs[DECODE])
    return same_length and all(set(few) <= set(many) for few, many in pairs)


def _beside(wanted: Mapping[str, Any], candidate: ArtifactCandidate) -> Prediction:
    if candidate.manifest is None:
        reason = "the NEFFs beside the model have no record of their compiler, flags and shapes"
        return Prediction("fail", "source", reason, candidate.place)
    why = differences(wanted, candidate.manifest)
    if candidate.manifest == wanted and not candidate.missing:
        return Prediction("hit", "source", "the NEFFs beside the model match their record", candidate.place)
    reason = "the NEFFs beside the model were compiled differently" if why else "NEFFs beside the model are damaged"
    return Prediction("fail", "source", reason, candidate.place, why, candidate.missing)


def _compiles(wanted: Mapping[str, Any], candidates: Sequence[ArtifactCandidate], source: str) -> Prediction:
    related = [
        (candidate, candidate.manifest)
        for candidate in candidates
        if candidate.manifest is not None
        and candidate.manifest.get("engine") == wanted.get("engine")
        and (candidate.source == source or _model(candidate.manifest) == _model(wanted))
    ]
    if not related:
        return Prediction("compile", "nothing", "this model has not been compiled")
    nearest, manifest = min(related, key=lambda pair: len(differences(wanted, pair[1])))
    if why := differences(wanted, manifest):
        return Prediction("compile", nearest.where, "it was compiled differently", nearest.place, why)
    reason = "another process is compiling it" if nearest.locked else "parts of it are missing or damaged"
    return Prediction("compile", nearest.where, reason, nearest.place, missing=nearest.missing)


def _model(manifest: Mapping[str, Any]) -> object:
    return manifest.get("model"), manifest.get("checkpoints")


def _plain(value: Any) -> str:
    if value is None or value in ("", []):
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
