"""Commands and options that were removed, with what to use instead: answered by an error for one release."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placements.spec.problems import Problem

LEFT: Mapping[str, str] = {
    "up --upgrade": "stop the fleet with `corewright down`, and start it with `corewright up` of the other version; "
    "or start a second fleet beside it",
    **dict.fromkeys(
        ("hosts roll", "hosts continue", "hosts stop"),
        "use `corewright drain HOST --wait`, `hosts wait HOST` and `uncordon HOST` for one host after the other",
    ),
    **dict.fromkeys(
        ("bench latency", "bench throughput"), "use `corewright bench`, which measures latency and tokens/s together"
    ),
    **dict.fromkeys(
        ("bench serving", "bench encoding"), "use guidellm or `vllm bench serve`; docs/bench.md has the commands"
    ),
}
"""The words that begin a command line, and an option anywhere after them -> what to use instead."""


def removal(arguments: Sequence[str]) -> Problem | None:
    """Returns the problem of a command line that was removed; None if it was not."""
    for line, hint in LEFT.items():
        words = [word for word in line.split() if not word.startswith("-")]
        options = set(line.split()) - set(words)
        given = {argument.partition("=")[0] for argument in arguments[len(words) :]}
        if list(arguments[: len(words)]) == words and options <= given:
            return Problem("command-removed", "error", "", f"`corewright {line}` was removed", hint)
    return None
