"""The command `version`."""

from __future__ import annotations

from orchestrator.cli.app import FormatOption, app
from orchestrator.cli.output import Format, show
from orchestrator.process.version import corewright_version


@app.command()
def version(output: FormatOption = Format.TABLE) -> None:
    """Show the version."""
    show({"version": corewright_version()}, output, corewright_version())
