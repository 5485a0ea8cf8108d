"""`corewright explain`: why a model is where it is or has no place, and what would help."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.api.operations import Refused
from orchestrator.cli.client import AdminClient
from orchestrator.cli.plan import cores_text, move_lines, text_of
from orchestrator.process.failure import Failed
from orchestrator.revisions.spec_file import SpecFile
from placements.explain.explain import explain
from placements.explain.remedies import Question

MOST = 8  # replicas whose places are told
WIDTH = 80  # columns
_COLORS = re.compile("\x1b\\[[0-9;]*m")
_NONE = {
    "nothing": "No change was tried: mend the errors above first.",
    "some": "No change that was tried would help. Not all were tried: there were too many.",
    "all": "No single change that was tried would help, and no two together.",
}


def explanation(file: SpecFile | None, fleet: AdminClient | None, model: str) -> dict[str, Any]:
    """As the fleet says it, of its own spec or of the file's; without a fleet what follows from the file alone."""
    if fleet is not None:
        if file is None:
            spec = fleet.get("spec")
            told = (spec["text"], spec["file"], spec["base_dir"])
        else:
            told = text_of(file)
        answer: dict[str, Any] = fleet.post_spec("explain", told, model=model)
        return answer
    if file is None:
        raise Failed("no-fleet", "no fleet runs that could be asked", "corewright explain MODEL SPEC")
    if file.spec is None:
        raise Refused("spec-invalid", f"{file.name} is no spec", "corewright validate SPEC", problems=file.problems)
    one = file.spec.model(model)
    if one is None:
        known = ", ".join(one.name for one in file.spec.models)
        raise Refused("model-unknown", f"{file.name} has no model {model}", f"it has {known}", problems=file.problems)
    found = explain(Question(one, file.spec, file.hosts, file.checkpoints, file.drafts), file.problems)
    return {"index": None, "revision": None, **found.as_dict()}


def explanation_text(data: Mapping[str, Any], *, color: bool = False) -> str:
    """What fails and what would help first, then the places, then what holds. ``color`` adds ANSI codes."""

    def paint(code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color else text

    parts = [paint("1", _headline(data))]
    failed = data["failed"]
    if failed:
        lines = []
        for number, one in enumerate(failed, 1):
            lines.append(_wrapped(f"{number}. {paint('1;31', one['id'])}: {one['what']}", 5))
            lines += [_wrapped(f"     {line}", 7) for line in one["details"]]
            lines += [_wrapped(f"     hint: {one['hint']}", 11)] if one["hint"] else []
        parts.append("\n".join(lines))
    if data["suggestions"]:
        skipped = any(one["id"] == "unknown-key" for one in failed)
        lines = [f"Each of these would help{', once unknown keys are gone' if skipped else ''}, and has been tried:"]
        for one in data["suggestions"]:
            lines += [_wrapped(f"  {paint('32', one['change'])}", 4), _wrapped(f"      {one['gives']}", 8)]
            if one["id"] != "move":
                lines += [_wrapped(f"      {line}", 8) for line in move_lines(one["moves"])]
        lines += ["  Not all changes were tried: there were too many."] if data.get("tried") == "some" else []
        parts.append("\n".join(lines))
    elif failed:
        parts.append(_NONE[data.get("tried", "all")])
    if data["replicas"]:
        parts.append("\n".join(_places(data["replicas"])))
    if data["holds"]:
        width = max(len(one["id"]) for one in data["holds"])
        holds = []
        for one in data["holds"]:
            holds.append(_wrapped(f"  {one['id'].ljust(width)}  {one['what']}", width + 6))
            holds += [_wrapped(f"  {'':{width}}  {line}", width + 6) for line in one["details"]]
        parts.append("\n".join([("What holds:" if failed else "The numbers:"), *holds]))
    return "\n\n".join(parts)


def _wrapped(line: str, indent: int) -> str:
    """Of at most WIDTH columns where its words allow it; what goes on is indented. Colours take no columns."""
    start = len(line) - len(line.lstrip())
    lines, width = [line[:start]], start
    for i, word in enumerate(re.split(r"(?<=\S) ", line[start:])):
        size = len(_COLORS.sub("", word))
        if i and width + 1 + size > WIDTH:
            lines.append(" " * indent + word)
            width = indent + size
        else:
            lines[-1] += f" {word}" if i else word
            width += size + (1 if i else 0)
    return "\n".join(lines)


def _headline(data: Mapping[str, Any]) -> str:
    placed, wanted = len(data["replicas"]), data["wanted"]
    noun = "replica has" if wanted == 1 else "replicas have"
    state = f"{placed} of {wanted} {noun} a place" if placed or wanted != 1 else "it has no place"
    more = f"min {data['min']}, priority {data['priority']}"
    return f"{data['model']}: {state} ({more})"


def _places(replicas: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for one in replicas[:MOST]:
        cores = "" if one["cores"] is None else f" {cores_text(one['cores'])}"
        yield f"{one['replica']} lies on {one['host']}{cores}"
        for reason in one["why"]:
            yield _wrapped(f"    {reason}", 6)
    if len(replicas) > MOST:
        yield f"... and {len(replicas) - MOST} more; `-o json` has each"
