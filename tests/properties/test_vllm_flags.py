"""The command line of `vllm serve`, for any engine_options that the plan accepts."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from placements.engines.options import Option, ValueKind
from placements.engines.vllm.capabilities import Plugin, Version
from placements.engines.vllm.flags import FLAGS, check_flags
from tests.workers.engines.test_vllm_command import command_line

TEXTS = st.sampled_from(["x", "-x", "--uds=/other", "--max-num-seqs", "a b", ""])
SCALARS = TEXTS | st.integers(-9, 9) | st.booleans()
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(TEXTS, SCALARS, max_size=2)
INSTALLED: list[tuple[Plugin, Version]] = [("cpu", (0, 32)), ("nxd", (0, 13)), ("neuron", (0, 24))]

GIVEN = {
    *("--additional-config", "--enable-prefix-caching", "--no-enable-prefix-caching", "--max-loras"),
    *("--enable-lora", "--max-cpu-loras", "--max-lora-rank"),
    *("--block-size", "--num-gpu-blocks-override", "--enforce-eager", "--no-enforce-eager", "--prefix-cache"),
    "--no-prefix-cache",
}
"""Flags whose defaults an option changes, or that a test of its own has."""


def flag_of(name: str, value: Any) -> str:
    return ("--no-" if value is False else "--") + name.replace("_", "-")


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Mostly of its kind."""
    option = FLAGS.get(name, Option.read("bool"))
    by_kind = {
        ValueKind.BOOL: st.booleans(),
        ValueKind.INT: st.integers(1, 99),
        ValueKind.STR: TEXTS,
        ValueKind.LIST: st.lists(TEXTS, min_size=1),
    }
    return st.sampled_from(option.choices) if option.choices else by_kind.get(option.kinds[0], VALUES) | VALUES


SET_BY_US = sorted(word[2:].replace("-", "_") for word in command_line("cpu", (0, 32)) if word.startswith("--"))
LISTS = [name for name, option in FLAGS.items() if option.kinds == (ValueKind.LIST,)]
NAMES = st.sampled_from([name for name in SET_BY_US if name in FLAGS] + LISTS) | st.sampled_from(
    [*FLAGS, "prefix_cache"]
)
OPTIONS = st.lists(NAMES, unique=True, max_size=8).flatmap(
    lambda names: st.fixed_dictionaries({name: values_of(name) for name in names})
)


def parsed(line: list[str]) -> dict[str, list[str]]:
    """Flag -> its values, as argparse reads them. A flag that is repeated fails."""
    values: dict[str, list[str]] = {}
    for word in line:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            assert name not in values
            assert name.replace("--no-", "--", 1) not in values
            values[name] = [value] if equals else []
        else:
            values[name].append(word)
    return values


@example({"max_loras": 1}, ("cpu", (0, 32)))
@given(OPTIONS, st.sampled_from(INSTALLED))
def test_accepted_options_change_no_flag_of_corewright(
    options: dict[str, Any], installed: tuple[Plugin, Version]
) -> None:
    """Each flag is there once, with the value of the option or of the field."""
    refused = {finding.path[0] for finding in check_flags(options)}
    accepted = {name: value for name, value in options.items() if name not in refused}

    plain, line = parsed(command_line(*installed)), parsed(command_line(*installed, engine_options=accepted))
    has_room = installed[0] == "cpu" and "max_loras" in accepted  # for adapters, beside which the model is renamed
    if has_room:
        plain["--served-model-name"] = [f"{plain['--served-model-name'][0]}@base"]

    assert {name: words for name, words in plain.items() if name not in GIVEN} == {
        name: line.get(name) for name in plain if name not in GIVEN
    }
    assert line.keys() - plain.keys() - GIVEN == {
        flag_of(name, value) for name, value in accepted.items() if flag_of(name, value) not in GIVEN
    } | ({"--lora-modules"} if has_room else set())
