"""What a run of the packages' own code has compared: each configuration with its tokens; and what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import metadata

import pytest
from _pytest.terminal import TerminalReporter

_TOKENS = "compared tokens"
_compared: list[int] = []


def count_compared(tokens: int) -> None:
    """Adds to the tokens that the running test has compared with the expected ones."""
    _compared.append(tokens)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Gives the tokens of a test to its report, which also comes from other processes of pytest."""
    _compared.clear()
    try:
        return (yield)
    finally:
        item.user_properties.append((_TOKENS, sum(_compared)))


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Lists the tests that ran the packages' own code; without their sources there are none."""
    ran = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    tokens = {report.nodeid: dict(report.user_properties)[_TOKENS] for report in ran if "real" in report.keywords}
    if not tokens:
        return
    write = terminalreporter.write_line
    terminalreporter.section(f"tokens compared beside transformers {metadata.version('transformers')}")
    for name, count in sorted(tokens.items()):
        if count:
            write(f"{count:6}  {name.removeprefix('tests/')}")
    write(f"{sum(tokens.values()):6}  in {sum(map(bool, tokens.values()))} tests")
    write(f"     0  in {sum(not count for count in tokens.values())} tests of errors, files, memory or calls")
    skipped = [report.longrepr for report in terminalreporter.getreports("skipped") if "real" in report.keywords]
    for reason, count in sorted(Counter(reason for _, _, reason in skipped).items()):
        write(f"{count:6}  {reason.replace('Skipped', 'skipped', 1)}")
