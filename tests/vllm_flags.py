"""Records the flags of an installed vLLM: ``PYTHON tests/vllm_flags.py``, in its interpreter, prints them as JSON.

tests/contracts/vllm.json has the result for the vLLM of each release of its Neuron plugin, and of the CPU build.
``python -m tests.vllm_flags --table`` derives placements/engines/vllm/flags.json from it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONTRACT = ROOT / "tests" / "contracts" / "vllm.json"
TABLE = ROOT / "placements" / "engines" / "vllm" / "flags.json"

PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # the former from 0.25 on
ARGUMENTS = ("vllm.utils.argparse_utils", "vllm.utils")
KINDS = {
    "float": "float",
    "human_readable_int": "int|str",
    "human_readable_int_or_auto": "int|str",
    "int": "int",
    "loads": "mapping",
    "parse_dataclass": "mapping",
    "union_dict_and_str": "mapping|str",
}


def module(*names: str) -> Any:
    """The first module that can be imported."""
    for name in names:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise ImportError(" or ".join(names))


def converter(type_: Any) -> Any:
    """What converts the text of a flag, without vLLM's wrappers for None and errors."""
    while getattr(type_, "__name__", "") in ("_optional_type", "_parse_type"):
        type_ = next(
            cell.cell_contents for cell in type_.__closure__ if isinstance(cell.cell_contents, type | Callable)
        )
    return type_


def kind(action: argparse.Action) -> str:
    """The kind of its values, in the notation of ``Option.read``."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "bool"
    if action.nargs == 0:
        return "true"
    if action.nargs == "+" or type(action).__name__ == "_AppendAction":
        return "list"
    name = getattr(converter(action.type), "__name__", "str")
    if action.choices and name != "int":
        return "enum:" + ",".join(sorted({str(choice) for choice in action.choices} - {"None"}))
    return KINDS.get(name, "str")


def flags() -> dict[str, str]:
    """The flags of `vllm serve` without dashes, and the kinds of their values."""
    parser = module(*PARSERS).make_arg_parser(module(*ARGUMENTS).FlexibleArgumentParser())
    found: dict[str, str] = {}
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--") and not option.startswith("--no-") and option != "--help":
                found[option[2:]] = kind(action)
    return found


def text() -> str:
    """The product's table: one line for each flag, with the kind in its newest version, but the values of all."""
    recorded = json.loads(CONTRACT.read_text())
    versions = list(recorded)
    lines = []
    for name in sorted({name for version in recorded.values() for name in version}):
        kinds = {version: recorded[version][name] for version in versions if name in recorded[version]}
        newest = list(kinds.values())[-1]
        if newest.startswith("enum:"):
            listed = [kind.removeprefix("enum:").split(",") for kind in kinds.values() if kind.startswith("enum:")]
            newest = "enum:" + ",".join(sorted(set().union(*listed)))
        row = {"kind": newest}
        if list(kinds) != versions:
            row |= {"first": min(kinds, key=versions.index), "last": max(kinds, key=versions.index)}
        lines.append(f"  {json.dumps(name)}: {json.dumps(row)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--table"]:
        TABLE.write_text(text())
    else:
        json.dump(flags(), sys.stdout, indent=1, sort_keys=True)
