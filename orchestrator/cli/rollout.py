"""The commands of `rollout`: show and control the rollout of the newest revision."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from orchestrator.cli.app import FormatOption, ModelArgument, TimeoutOption, WaitOption, YesOption, group
from orchestrator.cli.apply import preview, show_applied
from orchestrator.cli.client import PLAN_DEADLINE_S, AdminClient, the_fleet, typed
from orchestrator.cli.follow import follow_to_end
from orchestrator.cli.listing import REVISIONS, RevisionRow
from orchestrator.cli.output import Format, show, stdout
from orchestrator.cli.state_colors import state_paint
from orchestrator.cli.tables import rollout_text
from orchestrator.fleet.fleet_status import RolloutReport

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
    to: Annotated[
        int | None, typer.Option(min=1, metavar="REV", help="Revision to apply.", show_default="the previous one")
    ] = None,
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


def _rollout(client: AdminClient) -> RolloutReport:
    return typed(client.get("rollout"), RolloutReport)


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
