"""Parsers of host facts never raise, and their results can always be combined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.searches import search
from workers.host.facts.machine import ProcessDetail, SourceReadings, combine, owners
from workers.host.facts.neuron_ls import parse_neuron_ls
from workers.host.facts.neuron_monitor import parse_neuron_monitor
from workers.host.facts.sections import MOST_PROBLEMS
from workers.host.facts.sysfs import parse_sysfs
from workers.host.facts.tools import parse_packages

SAMPLES = Path(__file__).parents[1] / "samples"
NEURON_LS = [json.loads(path.read_text()) for path in sorted(SAMPLES.glob("neuron-ls-*.json"))]
MONITOR = [json.loads(line) for path in sorted(SAMPLES.glob("*.jsonl")) for line in path.read_text().splitlines()]
FILES: dict[str, str] = json.loads((SAMPLES / "sysfs-inf2.json").read_text())

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-2, max_value=70)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=8)
    | st.sampled_from(["", "0", "-1", "0-3", 2**63, 2**64, -(2**70), 1e300, "\ud800", "NA"])
)
KEYS = st.text(st.characters(exclude_categories=()), max_size=4) | st.sampled_from(
    ["error", "0", "neuron_device", "nc_count", "neuroncore_ids", "neuron_runtime_data", "pid", "report", "system_data"]
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


@st.composite
def damaged(draw: st.DrawFn, samples: list[Any]) -> Any:
    """A sample with up to four values anywhere replaced, left out, or added."""
    value = json.loads(json.dumps(draw(st.sampled_from(samples))))
    for _ in range(draw(st.integers(1, 4))):
        inside = value
        while True:
            keys: list[Any] = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if not isinstance(inside[key], dict | list) or draw(st.integers(0, 3)) == 0:
                action = draw(st.sampled_from(["replace", "remove", "add"]))
                if action == "remove":
                    del inside[key]
                elif action == "replace":
                    inside[key] = draw(VALUES)
                elif isinstance(inside, dict):
                    inside[draw(KEYS)] = draw(VALUES)
                break
            inside = inside[key]
    return value


def keys_of(value: Any) -> set[str]:
    """All keys anywhere in a JSON value."""
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def replaced(value: Any, changes: dict[str, Any]) -> Any:
    """The value with other values under some keys, wherever they are; ``...`` leaves the key out."""
    if isinstance(value, list):
        return [replaced(element, changes) for element in value]
    if not isinstance(value, dict):
        return value
    merged = {key: changes.get(key, replaced(inside, changes)) for key, inside in value.items()}
    return {key: inside for key, inside in merged.items() if inside is not ...}


HOSTILE = st.sampled_from(
    [..., None, [], {}, "", "\ud800", 2**63, 2**64, -1, 2.5, 1e300, True, 10**6, [2**64], {"0": 1}]
)


@st.composite
def hostile(draw: st.DrawFn, samples: list[Any]) -> Any:
    """A sample in which two keys have another value in every place."""
    sample = draw(st.sampled_from(samples))
    keys = st.sampled_from(sorted(keys_of(sample)))
    return replaced(sample, draw(st.dictionaries(keys, HOSTILE, min_size=1, max_size=2)))


def whole_path(listing: str | bytes, line: str | bytes, files: dict[str, str], visible: str) -> None:
    """Parses and combines all sources, and determines the owners."""
    neuron_ls, monitor, sysfs = parse_neuron_ls(listing), parse_neuron_monitor(line), parse_sysfs(files)
    for parsed in (neuron_ls, monitor, sysfs):
        assert len(parsed.problems) <= MOST_PROBLEMS + 1
    pids = [process.pid for process in neuron_ls.processes] + [runtime.pid for runtime in monitor.runtimes]
    facts = combine(
        SourceReadings(
            neuron_ls=neuron_ls,
            monitor=monitor,
            sysfs=sysfs,
            processes={pid: ProcessDetail(visible_cores=visible) for pid in pids},
        )
    )
    assert {owner.pid for owner in owners(facts).values()} <= set(pids)
    assert len(facts.cores) <= 100_000
    assert all(0 <= number < 2**63 for number in (*facts.cores, monitor.memory_used_bytes or 0))


@search(40)
@given(VALUES, VALUES)
def test_any_json_is_read_without_raising(listing: Any, line: Any) -> None:
    """The result has facts and problems."""
    whole_path(json.dumps(listing), json.dumps(line), {}, "0-1")


@search(40)
@given(damaged(NEURON_LS), damaged(MONITOR), st.sampled_from(["0-7", "8", "x", ""]))
def test_any_damage_to_a_sample_is_read_without_raising(listing: Any, line: Any, visible: str) -> None:
    """Damage in one place at a time reaches deeper than arbitrary values."""
    whole_path(json.dumps(listing), json.dumps(line), FILES, visible)


@search(40)
@given(hostile(NEURON_LS), hostile(MONITOR))
def test_any_value_of_a_key_is_read_without_raising(listing: Any, line: Any) -> None:
    """Too large, negative, half a surrogate pair, another type: at each key of the tools' outputs."""
    whole_path(json.dumps(listing), json.dumps(line), FILES, "0-7")


@search(30)
@given(st.binary(max_size=64) | st.text(max_size=64), st.binary(max_size=64))
@example(b"[" * 100_000, b"{")
@example('[{"neuron_device": ' + "9" * 5000 + "}]", b"NaN")
def test_any_bytes_are_read_without_raising(listing: str | bytes, line: bytes) -> None:
    """Text that is not JSON, and bytes that are not text."""
    whole_path(listing, line, {}, "")
    parse_packages(listing)


@search(30)
@given(st.dictionaries(st.sampled_from(sorted(FILES)) | st.text(max_size=20), st.text(max_size=12), max_size=6))
def test_any_files_of_the_driver_are_read_without_raising(files: dict[str, str]) -> None:
    whole_path("[]", "{}", FILES | files, "0")
