"""The command `completion`: prints the script with which a shell completes commands, options and names."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]  # it has no __all__

from orchestrator.cli.app import COMPLETE, app
from orchestrator.cli.output import Format, show


class Shell(str, Enum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="bash|zsh|fish", help="The shell that reads the script.")],
) -> None:
    """Print a script that completes commands, options, and the names of models, replicas and hosts."""
    script = get_completion_script(prog_name="corewright", complete_var=COMPLETE, shell=shell.value)
    show(None, Format.TABLE, script)
