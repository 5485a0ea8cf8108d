"""The list of commands in `corewright --help`: in groups, with the whole first sentence of each."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

GROUPS = {
    "Fleet": ("up", "demo", "serve-sagemaker", "down"),
    "Spec": ("init", "validate", "schema", "plan", "explain", "import", "advise", "simulate"),
    "Changes": ("apply", "diff", "rollout", "scale", "load", "unload"),
    "View": ("status", "get", "describe", "events", "logs", "config", "console", "top", "trace"),
    "Hosts": ("cordon", "uncordon", "drain", "hosts", "doctor", "node-resources"),
    "Models": ("generate", "bench", "compile", "cache"),
    "Access": ("keys", "audit"),
    "Other": ("completion", "version"),
}
LONGEST = 200  # characters of a first sentence, which wraps


class GroupedHelp(TyperGroup):
    """The group of all commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in GROUPS.items():
            rows = [(name, self.commands[name].get_short_help_str(LONGEST)) for name in names if name in self.commands]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
