"""Builds a rollback that reverts only the changes of a failed update, not those of later revisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec.structs
import yaml

from orchestrator.control.decisions.changes import interpreters
from orchestrator.control.journal.journal_records import Revision
from orchestrator.control.resolve.resolved_revision import ResolvedRevision, resolve_revision
from placements.facts.topology import Machine
from placements.planner.plan import plan
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.problems import has_errors
from placements.spec.schema import Spec
from placements.spec.yaml_tree import read

_ABSENT = object()


def revert_change(now: Any, after: Any, before: Any) -> Any:
    """Returns ``now`` without the change from ``before`` to ``after``, key by key; later changes of a key stay."""
    if now == after:
        return before
    if not (isinstance(now, dict) and isinstance(after, dict) and isinstance(before, dict)):
        return now
    merged = {
        key: revert_change(now.get(key, _ABSENT), after.get(key, _ABSENT), before.get(key, _ABSENT))
        for key in dict.fromkeys((*now, *before))
    }
    return {key: value for key, value in merged.items() if value is not _ABSENT}


def changing_specs(specs: Sequence[Spec], model: str) -> list[int]:
    """Returns the indexes, last first, of the specs that changed the configuration of the model's replicas.

    Considers only those after its last return to the first spec's configuration.
    """
    kinds = [_process(spec, model) for spec in specs]
    indexes = []
    for place in range(len(specs) - 1, 0, -1):
        if kinds[place] == kinds[0]:
            break
        if kinds[place] != kinds[place - 1]:
            indexes.append(place)
    return indexes


def _process(spec: Spec, name: str) -> object:
    model = spec.model(name)
    return None if model is None else (model.started_with, interpreters(spec, model.engine))


def revert_changes(
    revisions: Sequence[Revision], model: str, machine: Machine
) -> tuple[ResolvedRevision, list[int]] | None:
    """Returns the last revision without those that changed the failed model, and their numbers. Blocks.

    ``revisions`` begins with the last complete one. Returns None if all later ones must be reverted, or if the result
    is not a spec that the fleet can run: then only the first one is known to work.
    """
    first, last = revisions[0], revisions[-1]
    specs = [parse(revision.text, revision.file, revision.base_dir).spec for revision in revisions]
    parsed = [spec for spec in specs if spec is not None]
    if len(parsed) < len(specs) or any(revision.base_dir != first.base_dir for revision in revisions):
        return None
    places = changing_specs(parsed, model)
    if not places or len(places) == len(revisions) - 1:
        return None
    data = [read(revision.text, revision.file).value for revision in revisions]
    merged = data[-1]
    for place in places:
        merged = revert_change(merged, data[place], data[place - 1])
    numbers = sorted(revisions[place].number for place in places)
    title = f"# revision {last.number} without the changes of {', '.join(map(str, numbers))}\n"
    text = title + yaml.safe_dump(merged, sort_keys=False, allow_unicode=True, width=120)
    spec = parse(text, last.file, last.base_dir).spec
    if spec is None or _process(spec, model) != _process(parsed[0], model):
        return None
    try:
        generation = resolve_revision(msgspec.structs.replace(last, text=text), machine)
    except ValueError:
        return None
    problems = check(generation.spec, generation.hosts, generation.checkpoints, {})
    ever = plan(generation.spec, generation.hosts, generation.checkpoints)
    if has_errors(problems) or any(revision.required for revision in ever.unplaced):
        return None
    return generation, numbers
