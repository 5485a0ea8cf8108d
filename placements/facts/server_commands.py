"""Facts about the commands of servers: their placeholders, and commands that cannot be supervised."""

from __future__ import annotations

import re
from collections.abc import Mapping

PLACEHOLDERS = ("socket", "port", "model", "cores", "first", "tp")
"""The unix socket or the port to listen on, the folder of the checkpoint, the range of cores such as "4-7", its first
core, and the number of cores."""

CONTAINERS = ("docker", "finch", "nerdctl", "podman")
"""Commands whose processes run below another process than the replica's, where they cannot be supervised."""

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


def placeholders(text: str) -> list[str]:
    """Returns the names of the placeholders in a text, known or not: braces around anything but a name are text."""
    return _PLACEHOLDER.findall(text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Returns the text with its placeholders replaced."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)
