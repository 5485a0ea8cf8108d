"""Checks the command of a model's server, with one function for each rule."""

from __future__ import annotations

from collections.abc import Iterator

from placements.facts.server_commands import PLACEHOLDERS, container_in, placeholders
from placements.rules.case import Case, Rule
from placements.spec.problems import Problem
from placements.spec.schema import Spec

_STARTS_CONTAINER = "starts a container with {}, and containers are not supported yet"
_NO_CONTAINER = "their processes are not the replica's, so their cores would not be free for certain; use a command"


def server_is_set(case: Case) -> Iterator[Problem]:
    """``server`` is set for the engine server."""
    model = case.model
    if model.engine == "server" and model.server is None:
        fact = f"{model.name} has no server, which the engine server runs"
        yield case.problem("missing-key", ("engine",), fact, "add server: {command: [...], slots: 4}")


def command_can_be_run(case: Case) -> Iterator[Problem]:
    """The command is not a container, and its placeholders can be filled."""
    server = case.model.server
    if server is None:
        return
    if (index := container_in(server.command)) is not None:
        fact = f"server.command {_STARTS_CONTAINER.format(server.command[index])}"
        yield case.problem("server-container", ("server", "command", index), fact, _NO_CONTAINER)
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
    if model.engine == "server" and model.server is not None and model.max_batch != model.server.slots:
        fact = f"max_batch is {model.max_batch}, but server.slots is {model.server.slots}"
        yield case.problem("setting-unsupported", ("max_batch",), fact, "remove max_batch; slots takes its place")


def launches_can_be_run(spec: Spec) -> Iterator[Problem]:
    """``command`` of an engine is that of vLLM, beside its interpreter, and not a container."""
    for engine, settings in spec.engines.items():
        where, name = spec.where("engines", engine, "command"), f"engines.{engine}.command"
        if not settings.command:
            continue
        if engine != "vllm":
            fact = f"{name} has no effect: only vllm has a command"
            yield Problem("setting-unsupported", "error", where, fact, "remove it")
            continue
        if settings.python is None:
            fact = f"engines.{engine} has a command, but no python, whose vLLM it runs"
            yield Problem("missing-key", "error", where, fact, "add python: /path/to/bin/python")
        if (index := container_in(settings.command)) is not None:
            fact = f"{name} {_STARTS_CONTAINER.format(settings.command[index])}"
            yield Problem("server-container", "error", where, fact, _NO_CONTAINER)


def vllm_has_an_interpreter(spec: Spec) -> Iterator[Problem]:
    """The spec names the interpreter of vLLM, which is rarely that of the fleet."""
    names = [model.name for model in spec.models if model.engine == "vllm"]
    if names and spec.python_for("vllm") is None and "engines" not in spec.broken:
        fact = "engines.vllm.python is not set: vLLM must then be installed in the fleet's own Python"
        hint = "set it to the interpreter that has vLLM"
        yield Problem("interpreter-unset", "warning", spec.where("models", names[0], "engine"), fact, hint)


SERVER_RULES: tuple[Rule, ...] = (
    server_is_set,
    command_can_be_run,
    slots_are_the_servers,
)
