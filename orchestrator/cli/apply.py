"""The commands `apply`, `diff` and `rollout`: change the fleet's spec and follow rollouts."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.cli.app import (
    CHANGES,
    FAILED,
    INTERRUPTED,
    FormatOption,
    ModelArgument,
    SpecArgument,
    TimeoutOption,
    WaitOption,
    YesOption,
    app,
    group,
    the_fleet,
)
from orchestrator.cli.output import Format, complain, confirmed, on_terminal, paint_diff, say, show
from orchestrator.process.failure import Failed

if TYPE_CHECKING:
    from orchestrator.cli.client import AdminClient

rollout = group("rollout", "Show and control the rollout of the newest revision.")


@app.command()
def apply(
    spec: SpecArgument,
    check_index: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Fail if the fleet has changed since `plan` printed this index."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan, and apply nothing.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    canary: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Send this share of the requests (0 to 1) to the new version."),
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Apply a spec to the running fleet as a new revision."""
    from orchestrator.cli.plan import make_plan, model_lines, problems_of, text_of
    from orchestrator.revisions.spec_file import load

    if canary is not None and not 0 < canary < 1:
        raise typer.BadParameter("must be above 0 and below 1", param_hint="--canary")
    client, file = the_fleet(), load(spec)
    if dry_run:
        text_of(file)
        result = make_plan(file, client)
        if check_index is not None and result.data["index"] not in (None, check_index):
            message = f"the fleet's index is {result.data['index']}, not {check_index}"
            raise Failed("index-changed", message, "review the new plan: corewright plan SPEC")
        if output is Format.TABLE:
            complain(result.problems)
        show(result.data, output, result.table)
        raise typer.Exit(FAILED if result.failed else CHANGES if result.changes else 0)
    previewed = on_terminal() and not yes
    if previewed:
        index = _previewed(client, text_of(file), output, yes)
        check_index = index if check_index is None else check_index
    options = {"check_index": check_index, "canary": canary}
    reply = client.post_spec(
        "apply", text_of(file), **{key: value for key, value in options.items() if value is not None}
    )
    lines = []
    if output is Format.TABLE:
        complain(problems_of(reply["plan"]))
        lines = [] if previewed else [line for model in reply["plan"]["models"] for line in model_lines(model)]
    raise typer.Exit(_show_applied(client, reply, output, lines, wait, timeout))


def _previewed(client: AdminClient, spec: tuple[str, str, str], output: Format, yes: bool) -> int | None:
    """Print the changes of a spec. If it deletes or interrupts a model, prompt, and abort unless confirmed.

    Returns the index of the preview, or None if there was no prompt."""
    from orchestrator.cli.plan import model_lines, risks

    data = client.post_spec("plan", spec)
    if output is Format.TABLE:
        show(None, output, "\n".join(line for model in data["models"] for line in model_lines(model)))
    warnings = risks(data["models"])
    if yes or not warnings or not on_terminal():
        return None
    say("\n".join(warnings))
    if not confirmed("Continue?", yes):
        raise typer.Abort
    return int(data["index"])


def _show_applied(
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
    final = _follow(client, number, reply["index"], timeout)
    if final is None:
        return INTERRUPTED
    from orchestrator.cli.tables import rollout_line

    show({**reply, "rollout": final}, output, rollout_line(final))
    return _exit_code(final)


def _follow(client: AdminClient, revision: int, after: int, timeout: float | None) -> dict[str, Any] | None:
    """Returns the final state of the rollout; None after Ctrl-C."""
    from orchestrator.cli.follow import follow_rollout

    try:
        return follow_rollout(client, revision, after, timeout)
    except KeyboardInterrupt:
        say("stopped waiting; the rollout continues: see `corewright rollout status`")
        return None


def _exit_code(final: dict[str, Any]) -> int:
    from orchestrator.cli.follow import SUCCEEDED

    return 0 if final["state"] in SUCCEEDED else FAILED


@app.command()
def diff(spec: SpecArgument, output: FormatOption = Format.TABLE) -> None:
    """Show the differences between a spec and the running revision."""
    from orchestrator.cli.plan import make_plan, model_lines, text_of
    from orchestrator.revisions.spec_file import load
    from placements.spec.problems import has_errors

    client, file = the_fleet(), load(spec)
    after, name, _ = text_of(file)
    before = client.get("spec")
    running = f"{before['file']} (revision {before['revision']})" if before.get("revision") else before["file"]
    terminated = (text if text.endswith("\n") or not text else f"{text}\n" for text in (before["text"], after))
    old, new = (text.splitlines(keepends=True) for text in terminated)
    text = "".join(difflib.unified_diff(old, new, running, name))
    result = make_plan(file, client)
    failed = has_errors(result.problems)
    if output is Format.TABLE:
        complain(result.problems)
    models = [model for model in result.data["models"] if model_lines(model)]
    tags = "\n".join(line for model in models for line in model_lines(model))
    data = {"revision": before.get("revision"), "diff": text, "models": result.data["models"]}
    table = "\n".join(part for part in (paint_diff(text), tags if text else "") if part)
    show(data, output, table)
    raise typer.Exit(FAILED if failed else CHANGES if text else 0)


@rollout.command("status")
def rollout_status(
    wait: WaitOption = False, timeout: TimeoutOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show the progress of the newest revision."""
    from orchestrator.cli.tables import rollout_text

    client = the_fleet()
    state, code = client.get("rollout"), 0
    if wait:
        index = client.get("status").get("index") or 0
        final = _follow(client, state["revision"], index, timeout)
        if final is None:
            raise typer.Exit(INTERRUPTED)
        state, code = final, _exit_code(final)
    show(state, output, rollout_text(state))
    raise typer.Exit(code)


@rollout.command("history")
def rollout_history(output: FormatOption = Format.TABLE) -> None:
    """List revisions, newest first."""
    from orchestrator.cli.tables import listing

    data = the_fleet().get("revisions")
    show(data, output, listing("revisions", data["revisions"]))


@rollout.command("undo")
def rollout_undo(
    to: Annotated[
        int | None, typer.Option(min=1, metavar="REV", help="Revision to apply.", show_default="the previous one")
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Roll back to an earlier revision."""
    from orchestrator.cli.client import PLAN_DEADLINE_S

    client = the_fleet()
    to = to or client.get("rollout").get("undo")
    if to is not None:
        revision = client.get(f"revisions/{to}")
        if output is Format.TABLE:
            show(None, output, f"applying revision {to} again")
        _previewed(client, (revision["text"], revision["file"], revision["base_dir"]), output, yes)
    reply = client.post("rollout/undo", {"to": to}, PLAN_DEADLINE_S)
    raise typer.Exit(_show_applied(client, reply, output, [], wait=False, timeout=None))


def _post_command(name: str, doc: str) -> Callable[[FormatOption], None]:
    def command(output: FormatOption = Format.TABLE) -> None:
        _show_rollout(the_fleet().post(f"rollout/{name}"), output)

    command.__doc__ = doc
    return command


def _show_rollout(reply: dict[str, Any], output: Format) -> None:
    from orchestrator.cli.tables import rollout_text

    show(reply, output, rollout_text(reply))


rollout.command("pause")(_post_command("pause", "Pause the rollout: replace no further replicas."))
rollout.command("resume")(_post_command("resume", "Resume a paused or failed rollout."))


@rollout.command("promote")
def rollout_promote(output: FormatOption = Format.TABLE) -> None:
    """Promote the canary: update all remaining replicas."""
    client = the_fleet()
    state = client.get("rollout")
    if output is Format.TABLE and state.get("canary") is not None:
        old = [f"{model['model']}: {model['old']} old to replace" for model in state["models"] if model["old"]]
        canary = f"the canary of revision {state['revision']}, which gets {state['canary']:.0%} of the requests"
        share = f"promoting {canary}"
        show(None, output, "\n".join([share, *old, ""]))
    _show_rollout(client.post("rollout/promote"), output)


@rollout.command("restart")
def rollout_restart(model: ModelArgument, output: FormatOption = Format.TABLE) -> None:
    """Restart all replicas of a model, with its update strategy."""
    _show_rollout(the_fleet().post("rollout/restart", {"model": model}), output)
