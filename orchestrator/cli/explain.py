"""The command `explain`: why a model is placed where it is or is not placed, and which changes would help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from orchestrator.cli.app import (
    FAILED,
    FormatOption,
    ModelArgument,
    OfflineOption,
    OptionalSpecArgument,
    app,
    known_model,
)
from orchestrator.cli.client import AdminClient, with_fleet
from orchestrator.cli.output import Format, complain, show, stdout, use_color
from orchestrator.cli.plan_result import cores_text, move_lines, text_of
from orchestrator.control.resolve.spec_file import SpecFile, load
from orchestrator.process.failure import Failed
from placements.explain.explain import explain
from placements.explain.explanation import Question

MOST = 8  # replicas whose places are shown
WIDTH = 80  # columns
_NONE = {
    "nothing": "No change was tried: fix the errors above first.",
    "some": "No change that was tried would help. Not all were tried: there were too many.",
    "all": "No single change that was tried would help, and no two together.",
}


def explanation(file: SpecFile | None, fleet: AdminClient | None, model: str) -> dict[str, Any]:
    """Returns the explanation of the fleet, for its own spec or the file's; without a fleet that of the file alone."""
    if fleet is not None:
        if file is None:
            spec = fleet.get("spec")
            source = (spec["text"], spec["file"], spec["base_dir"])
        else:
            source = text_of(file)
        reply: dict[str, Any] = fleet.post_spec("explain", source, model=model)
        return reply
    if file is None:
        raise Failed("no-fleet", "no fleet is running", "pass a spec: corewright explain MODEL SPEC")
    if file.spec is None:
        complain(file.problems)
        raise Failed("spec-invalid", f"{file.name} is not a valid spec", "run `corewright validate SPEC`")
    question = Question(known_model(file, model), file.spec, file.hosts, file.checkpoints, file.drafts)
    result = explain(question, file.problems)
    return {"index": None, "revision": None, **result.as_dict()}


def explanation_text(data: Mapping[str, Any], *, color: bool = False) -> str:
    """Returns failed constraints and suggestions, then the places, then met constraints. ``color`` adds ANSI codes."""

    def paint(code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if color else text

    parts = [paint("1", _headline(data))]
    failed = data["failed"]
    if failed:
        lines = []
        for number, constraint in enumerate(failed, 1):
            text = _wrapped(f"{number}. {constraint['id']}: {constraint['what']}", 5)
            lines.append(text.replace(constraint["id"], paint("1;31", constraint["id"]), 1))
            lines += [_wrapped(f"     {line}", 7) for line in constraint["details"]]
            lines += [_wrapped(f"     hint: {constraint['hint']}", 11)] if constraint["hint"] else []
        parts.append("\n".join(lines))
    if data["suggestions"]:
        skipped = any(constraint["id"] == "unknown-key" for constraint in failed)
        lines = [f"Each of these would help{', once unknown keys are gone' if skipped else ''}, and has been tried:"]
        for suggestion in data["suggestions"]:
            lines.append("  " + paint("32", _wrapped(f"  {suggestion['change']}", 4).lstrip()))
            lines.append(_wrapped(f"      {suggestion['gives']}", 8))
            if suggestion["id"] != "move":
                lines += [_wrapped(f"      {line}", 8) for line in move_lines(suggestion["moves"])]
        lines += ["  Not all changes were tried: there were too many."] if data.get("tried") == "some" else []
        parts.append("\n".join(lines))
    elif failed:
        parts.append(_NONE[data.get("tried", "all")])
    if data["replicas"]:
        parts.append("\n".join(_places(data["replicas"])))
    if data["holds"]:
        width = max(len(constraint["id"]) for constraint in data["holds"])
        holds = []
        for constraint in data["holds"]:
            holds.append(_wrapped(f"  {constraint['id'].ljust(width)}  {constraint['what']}", width + 6))
            holds += [_wrapped(f"  {'':{width}}  {line}", width + 6) for line in constraint["details"]]
        parts.append("\n".join([("What holds:" if failed else "The numbers:"), *holds]))
    return "\n\n".join(parts)


def _wrapped(line: str, indent: int) -> str:
    """Returns the line wrapped at WIDTH columns, with further lines indented."""
    return textwrap.fill(line, WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _headline(data: Mapping[str, Any]) -> str:
    placed, wanted = len(data["replicas"]), data["wanted"]
    noun = "replica has" if wanted == 1 else "replicas have"
    state = f"{placed} of {wanted} {noun} a place" if placed or wanted != 1 else "its replica has no place"
    more = f"min {data['min']}, priority {data['priority']}"
    return f"{data['model']}: {state} ({more})"


def _places(replicas: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for replica in replicas[:MOST]:
        cores = "" if replica["cores"] is None else f" {cores_text(replica['cores'])}"
        yield f"{replica['replica']} is placed on {replica['host']}{cores}"
        for reason in replica["why"]:
            yield _wrapped(f"    {reason}", 6)
    if len(replicas) > MOST:
        yield f"... and {len(replicas) - MOST} more; `-o json` has each"


@app.command("explain")
def explain_model(
    model: ModelArgument,
    spec: OptionalSpecArgument = None,
    offline: OfflineOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Explain the placement of a model. Shows why it has no place, and which changes would help."""
    if spec is None and offline:
        raise typer.BadParameter("required with --offline", param_hint="SPEC")
    file = None if spec is None else load(spec, folders="ignore")
    data = with_fleet(spec or "", offline, lambda fleet: explanation(file, fleet, model))
    show(data, output, explanation_text(data, color=use_color(stdout())))
    raise typer.Exit(0 if data["fits"] else FAILED)
