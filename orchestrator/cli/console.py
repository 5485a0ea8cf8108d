"""The command `console`."""

from __future__ import annotations

from orchestrator.cli.app import FormatOption, app
from orchestrator.cli.client import the_fleet
from orchestrator.cli.output import Format, show


@app.command()
def console(output: FormatOption = Format.TABLE) -> None:
    """Show the address of the web console, and the key to log in with."""
    fleet = the_fleet()
    url = fleet.record.console if fleet.record else f"{fleet.url}/console/"
    show({"url": url, "key": fleet.token}, output, f"console  {url}\nkey      {fleet.token}")
