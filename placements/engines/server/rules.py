"""The rules of the engine ``server``, and of its command."""

from __future__ import annotations

from collections.abc import Iterator

from placements.engines.server.capabilities import (
    NO_CONTAINER,
    PLACEHOLDERS,
    STARTS_CONTAINER,
    container_in,
    placeholders,
)
from placements.rules.case import Case, EngineRules
from placements.spec.problems import Problem


def server_is_set(case: Case) -> Iterator[Problem]:
    """``server`` is set for the engine server."""
    if case.model.server is None:
        fact = f"{case.model.name} has no server, which the engine server runs"
        yield case.problem("missing-key", ("engine",), fact, "add server: {command: [...], slots: 4}")


def command_can_be_run(case: Case) -> Iterator[Problem]:
    """The command is not a container, and its placeholders can be filled."""
    server = case.model.server
    if server is None:
        return
    if (index := container_in(server.command)) is not None:
        fact = f"server.command {STARTS_CONTAINER.format(server.command[index])}"
        yield case.problem("server-container", ("server", "command", index), fact, NO_CONTAINER)
    own, other = ("socket", "port") if server.listen == "unix" else ("port", "socket")
    used: set[str] = set()
    for path, text in server.texts.items():
        names = set(placeholders(text))
        used |= names
        for name in sorted(names - set(PLACEHOLDERS) | names & {other}):
            fact = f"server: {{{name}}} in {text!r} is not a placeholder"
            hint = f"placeholders are {', '.join(f'{{{known}}}' for known in PLACEHOLDERS)}"
            if name == other:
                fact = f"server: {{{name}}} in {text!r} has no value with listen: {server.listen}"
                hint = f"use {{{own}}}, or set listen: {'port' if other == 'port' else 'unix'}"
            yield case.problem("unknown-placeholder", ("server", *path), fact, hint)
    if own not in used:
        fact = f"server: neither command nor env has {{{own}}}, where the server must listen with listen: "
        fact += server.listen
        hint = "for example --port {port}" if own == "port" else "for example --uds {socket}, or set listen: port"
        yield case.problem("placeholder-missing", ("server", "command"), fact, hint)
    if "model" not in used and case.model.source != case.model.engine and "source" not in case.model.broken:
        fact = "source has no effect: server has no {model}, which is its folder"
        yield case.problem("setting-unsupported", ("source",), fact, "use {model} in server.command, or remove source")


def slots_are_the_servers(case: Case) -> Iterator[Problem]:
    """``max_batch`` is that of the server."""
    model = case.model
    if model.server is not None and model.max_batch != model.server.slots:
        fact = f"max_batch is {model.max_batch}, but server.slots is {model.server.slots}"
        yield case.problem("setting-unsupported", ("max_batch",), fact, "remove max_batch; slots takes its place")


RULES = EngineRules(rules=(server_is_set, slots_are_the_servers), of_every_model=(command_can_be_run,))
