"""No text makes a parser raise, and whatever they make of it can be put together, stored and asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workers.host.facts.machine import HostFacts, ProcessDetail, Readings, combine, owners
from workers.host.facts.neuron_ls import parse_neuron_ls
from workers.host.facts.neuron_monitor import parse_neuron_monitor
from workers.host.facts.numa import parse_numa
from workers.host.facts.sections import MOST_PROBLEMS
from workers.host.facts.sysfs import parse_sysfs
from workers.host.facts.versions import parse_packages

SAMPLES = Path(__file__).parent / "samples"
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
    """Parse all, put it together, ask it, and send it to another process and back."""
    neuron_ls, monitor, sysfs = parse_neuron_ls(listing), parse_neuron_monitor(line), parse_sysfs(files)
    for parsed in (neuron_ls, monitor, sysfs):
        assert len(parsed.problems) <= MOST_PROBLEMS + 1
    pids = [process.pid for process in neuron_ls.processes] + [runtime.pid for runtime in monitor.runtimes]
    facts = combine(
        Readings(
            cpus=(0,),
            memory_bytes=1,
            neuron_ls=neuron_ls,
            monitor=monitor,
            sysfs=sysfs,
            processes={pid: ProcessDetail(visible_cores=visible) for pid in pids},
        )
    )
    assert {owner.pid for owner in owners(facts).values()} <= set(pids)
    assert len(facts.cores) <= 100_000
    amounts = [device.memory_bytes or 0 for device in facts.devices] + [monitor.memory_used_bytes or 0]
    assert all(0 <= number < 2**63 for number in (*facts.cores, *amounts))
    assert len(facts.ecc) <= len(monitor.ecc) + len(sysfs.devices)
    assert msgspec.json.decode(msgspec.json.encode(facts), type=HostFacts) == facts


@settings(max_examples=150, deadline=None)
@given(VALUES, VALUES)
def test_any_json_is_read_without_raising(listing: Any, line: Any) -> None:
    """Whatever a tool writes, there are facts and problems."""
    whole_path(json.dumps(listing), json.dumps(line), {}, "0-1")


@settings(max_examples=150, deadline=None)
@given(damaged(NEURON_LS), damaged(MONITOR), st.sampled_from(["0-7", "8", "x", ""]))
def test_any_damage_to_a_sample_is_read_without_raising(listing: Any, line: Any, visible: str) -> None:
    """Damage in one place at a time reaches deeper than arbitrary values."""
    whole_path(json.dumps(listing), json.dumps(line), FILES, visible)


@settings(max_examples=150, deadline=None)
@given(hostile(NEURON_LS), hostile(MONITOR))
def test_any_value_of_a_key_is_read_without_raising(listing: Any, line: Any) -> None:
    """Too large, negative, half a surrogate pair, another type: under each key that the tools have."""
    whole_path(json.dumps(listing), json.dumps(line), FILES, "0-7")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64) | st.text(max_size=64), st.binary(max_size=64))
@example(b"[" * 100_000, b"{")
@example('[{"neuron_device": ' + "9" * 5000 + "}]", b"NaN")
def test_any_bytes_are_read_without_raising(listing: str | bytes, line: bytes) -> None:
    """Text that is no JSON, and bytes that are no text."""
    whole_path(listing, line, {}, "")
    parse_packages(listing)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(sorted(FILES)) | st.text(max_size=20), st.text(max_size=12), max_size=6),
    st.dictionaries(st.sampled_from(["node0", "node1", "nodex"]), st.text("0123456789-,x\n", max_size=12)),
)
def test_any_files_are_read_without_raising(files: dict[str, str], cpulists: dict[str, str]) -> None:
    """Whatever the kernel's files hold."""
    whole_path("[]", "{}", FILES | files, "0")
    parse_numa(cpulists, usable=(0, 1))
