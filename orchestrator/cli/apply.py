"""The commands `apply`, `diff` and `rollout`: change the fleet's spec, compare with it, and control its rollouts."""

from __future__ import annotations

import difflib
from typing import Annotated, Any

import typer

from orchestrator.cli.app import (
    CHANGES,
    FAILED,
    FormatOption,
    ModelArgument,
    SpecArgument,
    TimeoutOption,
    WaitOption,
    YesOption,
    app,
    group,
    option,
    switch,
)
from orchestrator.cli.client import PLAN_DEADLINE_S, AdminClient, the_fleet, typed
from orchestrator.cli.follow import follow_to_end, rollout_line
from orchestrator.cli.listing import REVISIONS
from orchestrator.cli.output import Format, complain, confirmed, on_terminal, paint_diff, say, show, state_paint, stdout
from orchestrator.cli.plan_result import make_plan, model_lines, problems_of, risks, text_of
from orchestrator.control.resolve.spec_file import load
from orchestrator.messages.fleet_status import RevisionRow, RolloutReport, RolloutStatus
from orchestrator.process.failure import Failed
from orchestrator.process.text_table import Paint, columns
from placements.spec.problems import has_errors


@app.command()
def apply(
    spec: SpecArgument,
    check_index: Annotated[
        int | None, option("N", "Fail if the fleet has changed since `plan` printed this index.", min=0)
    ] = None,
    dry_run: Annotated[bool, switch("--dry-run", "Show the plan, and apply nothing.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    canary: Annotated[
        float | None, option("SHARE", "Send this share of the requests (0 to 1) to the new version.")
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Apply a spec to the running fleet as a new revision."""
    if canary is not None and not 0 < canary < 1:
        raise typer.BadParameter("must be above 0 and below 1", param_hint="--canary")
    client, file = the_fleet(), load(spec)
    source = text_of(file)
    if dry_run:
        result = make_plan(file, client)
        if check_index is not None and result.data["index"] not in (None, check_index):
            message = f"the fleet's index is {result.data['index']}, not {check_index}"
            raise Failed("index-changed", message, "review the new plan: corewright plan SPEC")
        show(result.data, output, result.table, result.problems)
        raise typer.Exit(result.exit_code)
    previewed = on_terminal() and not yes
    if previewed:
        index = preview(client, source, output, yes)
        check_index = index if check_index is None else check_index
    reply = client.post_spec("apply", source, check_index=check_index, canary=canary)
    lines = []
    if output is Format.TABLE:
        complain(problems_of(reply["plan"]))
        lines = [] if previewed else changed_lines(reply["plan"]["models"])
    raise typer.Exit(show_applied(client, reply, output, lines, wait, timeout))


def changed_lines(models: list[dict[str, Any]]) -> list[str]:
    return [line for model in models for line in model_lines(model)]


def preview(client: AdminClient, spec: tuple[str, str, str], output: Format, yes: bool) -> int | None:
    """Print the changes of a spec. If it is another fleet's, or deletes or interrupts a model, prompt, and abort unless
    confirmed.

    Returns the index of the preview, or None if there was no prompt."""
    data = client.post_spec("plan", spec)
    if output is Format.TABLE:
        show(None, output, "\n".join(changed_lines(data["models"])))
    warnings = risks(data)
    if yes or not warnings or not on_terminal():
        return None
    say("\n".join(warnings))
    if not confirmed("Continue?", yes):
        raise typer.Abort
    return int(data["index"])


def show_applied(
    client: AdminClient, reply: dict[str, Any], output: Format, lines: list[str], wait: bool, timeout: float | None
) -> int:
    """Show the reply to an apply, and with ``wait`` follow its rollout. Returns the exit code."""
    number = reply["revision"]
    if reply["changed"]:
        of = f" is revision {reply['of']} again" if reply.get("of") else ""
        lines = [*lines, f"revision {number} (index {reply['index']}){of}"]
    else:
        lines = [f"nothing to do: revision {number} is the same spec"]
    if not wait:
        show(reply, output, "\n".join(lines))
        return 0
    if output is Format.TABLE:
        show(None, output, "\n".join(lines))
    final, code = follow_to_end(client, number, reply["index"], timeout)
    if final is not None:
        show({**reply, "rollout": final}, output, rollout_line(final))
    return code


@app.command()
def diff(spec: SpecArgument, output: FormatOption = Format.TABLE) -> None:
    """Show the differences between a spec and the running revision."""
    client, file = the_fleet(), load(spec)
    after, name, _ = text_of(file)
    before = client.get("spec")
    running = f"{before['file']} (revision {before['revision']})" if before.get("revision") else before["file"]
    terminated = (text if text.endswith("\n") or not text else f"{text}\n" for text in (before["text"], after))
    old, new = (text.splitlines(keepends=True) for text in terminated)
    text = "".join(difflib.unified_diff(old, new, running, name))
    result = make_plan(file, client)
    tags = "\n".join(changed_lines(result.data["models"]))
    data = {"revision": before.get("revision"), "diff": text, "models": result.data["models"]}
    table = "\n".join(part for part in (paint_diff(text), tags if text else "") if part)
    show(data, output, table, result.problems)
    raise typer.Exit(FAILED if has_errors(result.problems) else CHANGES if text else 0)


rollout = group("rollout", "Show and control the rollout of the newest revision.")


@rollout.command("status")
def status(wait: WaitOption = False, timeout: TimeoutOption = None, output: FormatOption = Format.TABLE) -> None:
    """Show the progress of the newest revision."""
    client = the_fleet()
    state, code = _rollout(client), 0
    current: RolloutReport | None = state
    if wait:
        current, code = follow_to_end(client, state.revision, client.status().index, timeout)
    if current is not None:
        show(current, output, rollout_text(current, state_paint(stdout())))
    raise typer.Exit(code)


@rollout.command("history")
def history(output: FormatOption = Format.TABLE) -> None:
    """List revisions, newest first."""
    data = the_fleet().get("revisions")
    show(data, output, REVISIONS.text(typed(data["revisions"], list[RevisionRow]), state_paint(stdout())))


@rollout.command("undo")
def undo(
    to: Annotated[int | None, option("REV", "Revision to apply.", default="the previous one", min=1)] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Roll back to an earlier revision."""
    client = the_fleet()
    report = _rollout(client)
    skipped = [] if to is not None else report.undo_skips
    to = to or report.undo
    if to is not None:
        revision = client.get(f"revisions/{to}")
        if output is Format.TABLE:
            failed = f" (skipping {', '.join(map(str, skipped))}: failed)" if skipped else ""
            show(None, output, f"going back to revision {to}{failed}")
        preview(client, (revision["text"], revision["file"], revision["base_dir"]), output, yes)
    reply = client.post("rollout/undo", {"to": to}, PLAN_DEADLINE_S)
    raise typer.Exit(show_applied(client, reply, output, [], wait=False, timeout=None))


def rollout_text(rollout: RolloutStatus, paint: Paint | None = None) -> str:
    """Returns the line of the rollout, and a row for each model."""
    rows = [
        (model.model, model.state, model.strategy, model.wanted, model.updated, model.ready, model.old)
        for model in rollout.models
    ]
    table = columns(("MODEL", "STATE", "STRATEGY", "WANTED", "UPDATED", "READY", "OLD"), rows, paint)
    return rollout_line(rollout) + ("\n\n" + table if rows else "")


def _rollout(client: AdminClient) -> RolloutReport:
    return client.read(RolloutReport, "rollout")


def _show(reply: Any, output: Format) -> None:
    show(reply, output, rollout_text(typed(reply, RolloutReport), state_paint(stdout())))


@rollout.command("pause")
def pause(output: FormatOption = Format.TABLE) -> None:
    """Pause the rollout: replace no further replicas."""
    _show(the_fleet().post("rollout/pause"), output)


@rollout.command("resume")
def resume(output: FormatOption = Format.TABLE) -> None:
    """Resume a paused or failed rollout."""
    _show(the_fleet().post("rollout/resume"), output)


@rollout.command("promote")
def promote(output: FormatOption = Format.TABLE) -> None:
    """Promote the canary: update all remaining replicas."""
    client = the_fleet()
    state = _rollout(client)
    if output is Format.TABLE and state.canary is not None:
        old = [f"{model.model}: {model.old} old to replace" for model in state.models if model.old]
        canary = f"the canary of revision {state.revision}, which gets {state.canary:.0%} of the requests"
        show(None, output, "\n".join([f"promoting {canary}", *old, ""]))
    _show(client.post("rollout/promote"), output)


@rollout.command("restart")
def restart(model: ModelArgument, output: FormatOption = Format.TABLE) -> None:
    """Restart all replicas of a model, with its update strategy."""
    _show(the_fleet().post("rollout/restart", {"model": model}), output)
