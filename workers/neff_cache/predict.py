"""Whether a start will have to compile, by what it needs and what is there. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Where = Literal["compiled", "elsewhere", "source", "neff-cache", "nothing"]
Outcome = Literal["hit", "compile", "fail"]

# The fields of manifests, by the names that people have for them.
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
LATER = "`corewright cache retry` has it tried again"


@dataclass(frozen=True)
class Difference:
    """A field of the manifest that is another; None: it is not there."""

    field: str
    wanted: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.field}: needs {_plain(self.wanted)}, there is {_plain(self.found)}"


@dataclass(frozen=True)
class Candidate:
    """Something that was compiled, and lies where a start looks for it."""

    where: Where
    place: str  # its folder; of a cache elsewhere its URL
    manifest: Mapping[str, Any] | None  # None: nothing tells what it was compiled from
    source: str = ""  # of which model, as far as that is told
    missing: tuple[str, ...] = ()  # files or graphs of it that are not there, or not as they were
    failed: tuple[str, ...] = ()  # graphs that the compiler could not compile, and will not try again
    locked: tuple[str, ...] = ()  # of the missing graphs, those that somebody compiles now
    silent: str = ""  # why nobody knows what that place holds, in words; it has no manifest then


@dataclass(frozen=True)
class Prediction:
    """What a start will do."""

    outcome: Outcome
    where: Where
    reason: str  # in words
    place: str = ""
    why: tuple[Difference, ...] = ()  # how the nearest that is there differs
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def hit(self) -> bool:
        """Nothing is compiled, and nothing refused."""
        return self.outcome == "hit"


def predict(
    wanted: Mapping[str, Any] | None, there: Sequence[Candidate], source: str = "", *, ahead: bool = False
) -> Prediction:
    """What a start that needs artifacts of the manifest ``wanted`` does, of the model ``source``. As it looks itself:

    1. An engine that compiles nothing (None) finds all that it needs.
    2. Whole artifacts of just this manifest are taken: of those that were compiled here, else from the model's
       ``neff_cache``, from where they are brought before the start.
    3. NEFFs beside the model are taken when their record proves them to be its own, and else refused; with ``ahead``,
       when it is compiled ahead of time, they do not matter.
    4. The cache gives the graphs, when all are there; one that the compiler has failed at fails again. A model with
       fewer buckets has no graphs that one with more has not: there is one for each bucket.
    5. Else it compiles. The nearest of what is there tells why, and so does a place that gave no answer.
    """
    if wanted is None:  # 1
        return Prediction("hit", "nothing", "the engine compiles nothing")
    for one in _same(wanted, there, "compiled"):  # 2
        if not one.missing:
            return Prediction("hit", "compiled", "it was compiled on this host", one.place)
    for one in _same(wanted, there, "elsewhere"):
        if one.missing:
            continue
        return Prediction("hit", "elsewhere", "its neff_cache holds what another host compiled", one.place)
    beside = [one for one in there if one.where == "source"]
    if beside and not ahead:  # 3
        return _beside(wanted, beside)
    for one in _same(wanted, there, "neff-cache"):  # 4
        if one.failed:
            reason = f"the cache holds a compilation that has failed; {LATER}"
            return Prediction("fail", one.where, reason, one.place, failed=one.failed)
        if not one.missing:
            return Prediction("hit", one.where, "the cache has all of its graphs", one.place)
    for one in there:
        if one.where == "neff-cache" and not one.missing and not one.failed and has_more_buckets(one.manifest, wanted):
            return Prediction("hit", one.where, "the cache has its graphs, among those of more buckets", one.place)
    told = _compiles(wanted, [one for one in there if one.where != "source"], source)  # 5
    return replace(told, reason="; ".join(dict.fromkeys([told.reason, *(one.silent for one in there if one.silent)])))


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Field by field, in the order of their names; lists count as one value."""
    ours, theirs = flat(wanted), flat(found)
    return tuple(
        Difference(named(path), ours.get(path), theirs.get(path))
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path)
    )


def flat(manifest: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"versions": {"torch": "2"}} as {"versions.torch": "2"}."""
    found: dict[str, Any] = {}
    for name, value in manifest.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def named(path: str) -> str:
    """A field as people call it."""
    if path in NAMES:
        return NAMES[path]
    short = next((path.removeprefix(group) for group in GROUPS if path.startswith(group)), path)
    return NAMES.get(short, short)


def _same(wanted: Mapping[str, Any], there: Sequence[Candidate], where: Where) -> list[Candidate]:
    return [one for one in there if one.where == where and one.manifest == wanted]


def has_more_buckets(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> bool:
    """Whether one with the manifest ``found`` has all graphs that ``wanted`` needs, and others. Beside them all is the
    same, and so is the longest one that is decoded: the length of the KV cache."""
    ours, theirs = flat(wanted), flat(found or {})
    others = [path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)]
    if not others or not set(others) <= {DECODE, PREFILL}:
        return False
    lists = [(ours.get(path), theirs.get(path)) for path in (DECODE, PREFILL)]
    known = [(few, many) for few, many in lists if isinstance(few, list) and isinstance(many, list) and few and many]
    same_length = len(known) == len(lists) and max(ours[DECODE]) == max(theirs[DECODE])
    return same_length and all(set(few) <= set(many) for few, many in known)


def _beside(wanted: Mapping[str, Any], beside: Sequence[Candidate]) -> Prediction:
    for one in beside:
        if one.manifest == wanted and not one.missing:
            return Prediction("hit", "source", "NEFFs beside the model are proven to be its own", one.place)
    one = beside[0]
    if one.manifest is None:
        reason = "nothing proves which compiler, flags and shapes the NEFFs beside the model were made for"
        return Prediction("fail", "source", reason, one.place)
    why = differences(wanted, one.manifest)
    reason = (
        "the NEFFs beside the model were compiled otherwise" if why else "of the NEFFs beside the model some are bad"
    )
    return Prediction("fail", "source", reason, one.place, why, one.missing)


def _compiles(wanted: Mapping[str, Any], there: Sequence[Candidate], source: str) -> Prediction:
    related = [
        (one, one.manifest)
        for one in there
        if one.manifest is not None
        and one.manifest.get("engine") == wanted.get("engine")
        and (one.source == source or _model(one.manifest) == _model(wanted))
    ]
    if not related:
        return Prediction("compile", "nothing", "nothing of this model was compiled")
    nearest, manifest = min(related, key=lambda pair: len(differences(wanted, pair[1])))
    if why := differences(wanted, manifest):
        return Prediction("compile", nearest.where, "it was compiled otherwise", nearest.place, why)
    reason = "somebody compiles it now" if nearest.locked else "parts of it are missing or damaged"
    return Prediction("compile", nearest.where, reason, nearest.place, missing=nearest.missing)


def _model(manifest: Mapping[str, Any]) -> object:
    return manifest.get("model"), manifest.get("checkpoints")


def _plain(value: Any) -> str:
    if value is None or value in ("", []):
        return "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
