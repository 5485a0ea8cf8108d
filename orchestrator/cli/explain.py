"""`corewright explain`: why a model is where it is or has no place, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from orchestrator.cli.client import AdminClient
from orchestrator.cli.plan import cores_text, move_lines, text_of
from orchestrator.failure import Failed
from orchestrator.operations import Refused
from orchestrator.specfile import SpecFile
from placements.explain import explain

MOST = 8  # replicas whose places are told


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
    if file.spec.model(model) is None:
        known = ", ".join(one.name for one in file.spec.models)
        raise Refused("model-unknown", f"{file.name} has no model {model}", f"it has {known}", problems=file.problems)
    found = explain(file.spec, file.hosts, model, file.checkpoints, drafts=file.drafts, problems=file.problems)
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
            lines.append(f"{number}. {paint('1;31', one['id'])}: {one['what']}")
            lines += [f"     {line}" for line in one["details"]]
        parts.append("\n".join(lines))
    if data["suggestions"]:
        lines = ["Each of these would help, and has been tried:"]
        for one in data["suggestions"]:
            lines += [f"  {paint('32', one['change'])}", f"      {one['gives']}"]
            if one["id"] != "move":
                lines += [f"      {line}" for line in move_lines(one["moves"])]
        parts.append("\n".join(lines))
    elif failed:
        parts.append("No single change that was tried would help, and no two together.")
    if data["replicas"]:
        parts.append("\n".join(_places(data["replicas"])))
    if data["holds"]:
        width = max(len(one["id"]) for one in data["holds"])
        holds = [f"  {one['id'].ljust(width)}  {one['what']}" for one in data["holds"]]
        parts.append("\n".join([("What holds:" if failed else "The numbers:"), *holds]))
    return "\n\n".join(parts)


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
            yield f"    {reason}"
    if len(replicas) > MOST:
        yield f"... and {len(replicas) - MOST} more; `-o json` has each"
