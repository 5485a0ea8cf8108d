"""What the engine ``server`` can do, and facts about commands: placeholders, and those that cannot be supervised."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from placements.engines.capabilities import Capabilities, Unused

PLACEHOLDERS = ("socket", "port", "model", "cores", "first", "tp")
"""The unix socket or the port to listen on, the folder of the checkpoint, the range of cores such as "4-7", its first
core, and the number of cores."""

CONTAINERS = ("ctr", "docker", "docker-compose", "finch", "nerdctl", "podman")
"""Commands whose processes run below another process than the replica's, where they cannot be supervised."""

STARTS_CONTAINER = "starts a container with {}, and containers are not supported yet"
NO_CONTAINER = "their processes are not the replica's, so their cores would not be free for certain; use a command"

_IMAGE = re.compile(r"([\w-]+\.)+[a-z]+(:\d+)?/\S+|[\w.-]+(/[\w.-]+)*(:[\w.-]+|@sha256:\w+)")

_PLACEHOLDER = re.compile(r"\{([A-Za-z_]+)\}")


def container_in(command: Sequence[str]) -> int | None:
    """Returns the index of the text that starts a container: such a command, also of `sudo` or a shell, or an image."""
    if command and _IMAGE.fullmatch(command[0]):
        return 0
    for i, text in enumerate(command):
        words = text.split()
        for word in words if i == 0 or len(words) > 1 else [text]:
            folder, _, name = word.rpartition("/")
            if name in CONTAINERS and (i == 0 or not folder or folder.endswith("bin")):
                return i
    return None


def placeholders(text: str) -> list[str]:
    """Returns the names of the placeholders in a text, known or not: braces around anything but a name are text."""
    return _PLACEHOLDER.findall(text)


def filled(text: str, values: Mapping[str, str]) -> str:
    """Returns the text with its placeholders replaced."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text)


CAPABILITIES = Capabilities(
    engine="server",
    runs_on="server",
    tokenizer=None,
    imports_long=False,
    unused=(
        Unused(
            (
                *("sampling", "buckets", "fuse_qkv", "compiler", "quantize_kv", "quantize", "group_query_attention"),
                "engine_options",
            ),
            "the command decides it: write it into server.command",
        ),
    ),
)
