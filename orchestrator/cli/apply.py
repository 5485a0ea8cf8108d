"""Commands that change what the fleet should be, or say how far it is: apply, diff, rollout."""

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

rollout = group("rollout", "How far the newest revision is, and what to do about it.")


@app.command()
def apply(
    spec: SpecArgument,
    check_index: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Refuse when the fleet changed since `plan` gave this index.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would do, as `plan` does.")] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = None,
    canary: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Give the new version this share of the requests, 0 to 1.")
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Make a spec the fleet's new revision."""
    from orchestrator.cli.plan import make_plan, model_lines, problems_of, text_of
    from orchestrator.revisions.spec_file import load

    if canary is not None and not 0 < canary < 1:
        raise typer.BadParameter("between 0 and 1", param_hint="--canary")
    client, file = the_fleet(), load(spec)
    if dry_run:
        text_of(file)
        result = make_plan(file, client)
        if check_index is not None and result.data["index"] not in (None, check_index):
            what = f"the fleet's index is {result.data['index']}, not {check_index}"
            raise Failed("index-changed", what, "look at the new plan: corewright plan SPEC")
        if output is Format.TABLE:
            complain(result.problems)
        show(result.data, output, result.table)
        raise typer.Exit(FAILED if result.failed else CHANGES if result.changes else 0)
    previewed = on_terminal() and not yes
    if previewed:
        index = _previewed(client, text_of(file), output, yes)
        check_index = index if check_index is None else check_index
    more = {"check_index": check_index, "canary": canary}
    answer = client.post_spec(
        "apply", text_of(file), **{key: value for key, value in more.items() if value is not None}
    )
    lines = []
    if output is Format.TABLE:
        complain(problems_of(answer["plan"]))
        lines = [] if previewed else [line for model in answer["plan"]["models"] for line in model_lines(model)]
    code = _told(client, answer, output, lines, wait, timeout)
    raise typer.Exit(code)


def _previewed(client: AdminClient, spec: tuple[str, str, str], output: Format, yes: bool) -> int | None:
    """Print what applying a spec would do. Where it deletes or interrupts a model, prompt, and abort without a yes.

    Returns the index of that preview, None where there was no prompt."""
    from orchestrator.cli.plan import model_lines, risks

    data = client.post_spec("plan", spec)
    if output is Format.TABLE:
        show(None, output, "\n".join(line for model in data["models"] for line in model_lines(model)))
    warnings = risks(data["models"])
    if yes or not warnings or not on_terminal():
        return None
    say("\n".join(warnings))
    if not confirmed("Go on?", yes):
        raise typer.Abort
    return int(data["index"])


def _told(
    client: AdminClient, answer: dict[str, Any], output: Format, lines: list[str], wait: bool, timeout: float | None
) -> int:
    """Show what an apply gave, and follow its rollout if asked to; gives the exit code."""
    number = answer["revision"]
    if answer["changed"]:
        of = f" is revision {answer['of']} again" if answer.get("of") else ""
        lines = [*lines, f"revision {number} (index {answer['index']}){of}"]
    else:
        lines = [f"nothing to do: revision {number} says the same"]
    if not wait:
        show(answer, output, "\n".join(lines))
        return 0
    if output is Format.TABLE:
        show(None, output, "\n".join(lines))
    ended = _followed(client, number, answer["index"], timeout)
    if ended is None:
        return INTERRUPTED
    from orchestrator.cli.tables import rollout_line

    show({**answer, "rollout": ended}, output, rollout_line(ended))
    return _code(ended)


def _followed(client: AdminClient, revision: int, after: int, timeout: float | None) -> dict[str, Any] | None:
    """The rollout at its end; None after Ctrl-C."""
    from orchestrator.cli.follow import follow_rollout

    try:
        return follow_rollout(client, revision, after, timeout)
    except KeyboardInterrupt:
        say("not waiting any longer: the rollout goes on, see `corewright rollout status`")
        return None


def _code(ended: dict[str, Any]) -> int:
    from orchestrator.cli.follow import SUCCEEDED

    return 0 if ended["state"] in SUCCEEDED else FAILED


@app.command()
def diff(spec: SpecArgument, output: FormatOption = Format.TABLE) -> None:
    """Say what separates a spec from the one that runs."""
    from orchestrator.cli.plan import make_plan, model_lines, text_of
    from orchestrator.revisions.spec_file import load
    from placements.spec.problems import has_errors

    client, file = the_fleet(), load(spec)
    after, name, _ = text_of(file)
    before = client.get("spec")
    running = f"{before['file']} (revision {before['revision']})" if before.get("revision") else before["file"]
    ends = (text if text.endswith("\n") or not text else f"{text}\n" for text in (before["text"], after))
    old, new = (text.splitlines(keepends=True) for text in ends)
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
    """Say how far the newest revision is."""
    from orchestrator.cli.tables import rollout_text

    client = the_fleet()
    now, code = client.get("rollout"), 0
    if wait:
        index = client.get("status").get("index") or 0
        ended = _followed(client, now["revision"], index, timeout)
        if ended is None:
            raise typer.Exit(INTERRUPTED)
        now, code = ended, _code(ended)
    show(now, output, rollout_text(now))
    raise typer.Exit(code)


@rollout.command("history")
def rollout_history(output: FormatOption = Format.TABLE) -> None:
    """List the revisions, newest first."""
    from orchestrator.cli.tables import listing

    data = the_fleet().get("revisions")
    show(data, output, listing("revisions", data["revisions"]))


@rollout.command("undo")
def rollout_undo(
    to: Annotated[
        int | None, typer.Option(min=1, metavar="REV", help="This revision, not the one before the current.")
    ] = None,
    yes: YesOption = False,
    output: FormatOption = Format.TABLE,
) -> None:
    """Apply an earlier revision again."""
    from orchestrator.cli.client import PLAN_DEADLINE_S

    client = the_fleet()
    to = to or client.get("rollout").get("undo")
    if to is not None:
        revision = client.get(f"revisions/{to}")
        if output is Format.TABLE:
            show(None, output, f"applying revision {to} again")
        _previewed(client, (revision["text"], revision["file"], revision["base_dir"]), output, yes)
    answer = client.post("rollout/undo", {"to": to}, PLAN_DEADLINE_S)
    raise typer.Exit(_told(client, answer, output, [], wait=False, timeout=None))


def _simply(name: str, does: str) -> Callable[[FormatOption], None]:
    def command(output: FormatOption = Format.TABLE) -> None:
        _show_rollout(the_fleet().post(f"rollout/{name}"), output)

    command.__doc__ = does
    return command


def _show_rollout(answer: dict[str, Any], output: Format) -> None:
    from orchestrator.cli.tables import rollout_text

    show(answer, output, rollout_text(answer))


rollout.command("pause")(_simply("pause", "Begin no further replica of the rollout."))
rollout.command("resume")(_simply("resume", "Go on with a paused rollout."))


@rollout.command("promote")
def rollout_promote(output: FormatOption = Format.TABLE) -> None:
    """End the canary: every replica becomes new."""
    client = the_fleet()
    now = client.get("rollout")
    if output is Format.TABLE and now.get("canary") is not None:
        old = [f"{model['model']}: {model['old']} old to replace" for model in now["models"] if model["old"]]
        share = f"promoting the canary of revision {now['revision']}, which gets {now['canary']:.0%} of the requests"
        show(None, output, "\n".join([share, *old, ""]))
    _show_rollout(client.post("rollout/promote"), output)


@rollout.command("restart")
def rollout_restart(model: ModelArgument, output: FormatOption = Format.TABLE) -> None:
    """Replace every replica of a model by a new process, as an update would."""
    _show_rollout(the_fleet().post("rollout/restart", {"model": model}), output)
