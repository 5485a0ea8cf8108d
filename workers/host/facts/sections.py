"""Reads objects of untrusted JSON from other programs, and collects problems instead of raising."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

MOST_PROBLEMS = 20  # per text; the rest is counted, since garbage has thousands
LARGEST = 2**63 - 1  # the largest integer that is sent between processes
LONGEST_NUMBER = 5  # digits of a core or device id


T = TypeVar("T")


class Findings:
    """The problems of one text, in order. A problem in several places is listed once, with the number of places."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, where: str, problem: str) -> None:
        places = self._found.setdefault((re.sub(r"[0-9]+", "#", where), re.sub(r"[0-9]+", "#", problem)), [])
        text = f"{where.rstrip()} {problem}"
        if text not in places[:1]:
            places.append(text)

    def __call__(self) -> tuple[str, ...]:
        """Returns the problems; beyond the maximum, only their number."""
        texts = [
            places[0] if len(places) == 1 else f"{places[0]} (in {len(places)} places)"
            for places in self._found.values()
        ]
        more = len(texts) - MOST_PROBLEMS
        return (*texts[:MOST_PROBLEMS], f"{more} more in the same text") if more > 0 else tuple(texts)


def decode(text: str | bytes, where: str, findings: Findings) -> object:
    """Returns the value of a JSON text; None with a finding if it is not JSON."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    try:
        return json.loads(text)
    except ValueError:
        findings.add(where, f"is not JSON: it begins with {excerpt(text)}" if text.strip() else "is empty")
    except RecursionError:
        findings.add(where, "is nested too deeply to be read")
    return None


class Section:
    """A JSON object with its place. A value that is missing or has another type is None and becomes a finding.

    An absent section has no values and adds no findings: its absence was reported once, by its parent.
    """

    def __init__(self, value: object, where: str, findings: Findings) -> None:
        self.where = where
        self.findings = findings
        self.present = isinstance(value, dict)
        self._value: Mapping[str, object] = value if isinstance(value, dict) else {}
        if value is not None and not self.present:
            findings.add(where, f"is {kind(value)}, not an object")

    def has(self, key: str) -> bool:
        return self._value.get(key) is not None

    def raw(self, key: str) -> object:
        """Returns the value of a key, of any type; None if it is missing."""
        return self._value.get(key)

    def place(self, key: str) -> str:
        """Returns the place of a key, such as "neuron-monitor: system_data.memory_info"."""
        return f"{self.where}{'' if self.where.endswith(': ') else '.'}{key}"

    def section(self, key: str) -> Section:
        """Returns the object of a required key; its ``error``, if any, becomes a finding."""
        value = self._get(key)
        section = Section(value, self.place(key), self.findings)
        section.report_error()
        return section

    def sections(self, key: str, *, may_be_absent: bool = False) -> list[Section]:
        """Returns the objects of an array."""
        if may_be_absent and not self.has(key):
            return []
        return objects(self._get(key), self.place(key), self.findings)

    def numbered(self, key: str) -> dict[int, Section]:
        """Returns the objects of an object whose keys are ids: {"0": {...}, "1": {...}}. Ascending."""
        inside = self.section(key)
        sections = {}
        for name, value in inside._value.items():
            if not (name.isascii() and name.isdecimal() and len(name) <= LONGEST_NUMBER):
                if name not in ("error", "period"):
                    self.findings.add(inside.where, f"has the key {excerpt(name)}, which is not an id")
                continue
            section = Section(value, inside.place(name), self.findings)
            if section.present:
                sections[int(name)] = section
        return dict(sorted(sections.items()))

    def report_error(self) -> None:
        """Adds the block's ``error`` to the findings; empty means no error."""
        if error := self._value.get("error"):
            self.findings.add(self.where, f"reports an error: {excerpt(error)}")

    def integer(self, key: str, *, may_be_absent: bool = False) -> int | None:
        """Returns a non-negative integer."""
        return self._read(key, whole, "a non-negative integer", may_be_absent)

    def integers(self, key: str) -> tuple[int, ...]:
        """Returns an array of non-negative integers, which may be absent; skips other elements."""
        value = self._value.get(key)
        if value is not None and not isinstance(value, list):
            self.findings.add(self.place(key), f"is {described(value)}, not an array of non-negative integers")
        numbers = [whole(element) for element in value] if isinstance(value, list) else []
        if None in numbers:
            self.findings.add(self.place(key), "has an element that is not a non-negative integer")
        return tuple(number for number in numbers if number is not None)

    def amounts(self) -> dict[str, int]:
        """Returns all keys with a non-negative integer, such as memory classes, unknown ones included."""
        amounts = {}
        for name, value in self._value.items():
            if name in ("error", "period") or isinstance(value, dict | list):
                continue
            number = whole(value)
            if number is None:
                self.findings.add(self.place(clean(name)), f"is {described(value)}, not a non-negative integer")
            else:
                amounts[clean(name)] = number
        return amounts

    def number(self, key: str) -> float | None:
        """Returns a finite non-negative number."""
        return self._read(key, _amount, "a non-negative number")

    def text(self, key: str, *, may_be_absent: bool = False) -> str | None:
        """Returns a string; None if it is empty."""
        text = self._read(key, lambda value: value if isinstance(value, str) else None, "a string", may_be_absent)
        return clean(text or "") or None

    def _read(
        self, key: str, convert: Callable[[object], T | None], expected: str, may_be_absent: bool = False
    ) -> T | None:
        """Returns the converted value; None if it is missing, or with a finding if it cannot be converted."""
        value = self._get(key, may_be_absent=may_be_absent)
        converted = None if value is None else convert(value)
        if value is not None and converted is None:
            self.findings.add(self.place(key), f"is {described(value)}, not {expected}")
        return converted

    def _get(self, key: str, *, may_be_absent: bool = False) -> object:
        value = self._value.get(key)
        if value is None and self.present and not may_be_absent:
            self.findings.add(self.place(key), "is null" if key in self._value else "is missing")
        return value


def objects(value: object, where: str, findings: Findings) -> list[Section]:
    """Returns the objects in a JSON array; none if it is not an array."""
    if value is None:
        return []
    if not isinstance(value, list):
        findings.add(where, f"is {described(value)}, not an array")
        return []
    sections = [Section(element, f"{where}[{i}]", findings) for i, element in enumerate(value)]
    return [section for section in sections if section.present]


def whole(value: object) -> int | None:
    """Returns a non-negative integer of at most 63 bits; accepts 2.0, but not true."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None


def _amount(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST:
        return float(value)
    return None


def clean(text: str) -> str:
    """Returns the text without characters that UTF-8 cannot encode (JSON may escape half of a surrogate pair)."""
    return text.encode(errors="replace").decode()


def excerpt(value: object) -> str:
    """Returns the beginning of an untrusted value on one line."""
    text = " ".join(clean(value if isinstance(value, str) else str(value)[:200]).split())
    return f'"{text[:100]}..."' if len(text) > 100 else f'"{text}"'


def kind(value: object) -> str:
    """Returns the type of a JSON value for display."""
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def described(value: object) -> str:
    """Returns the value if it is a scalar, else its type."""
    return kind(value) if isinstance(value, dict | list | None) else excerpt(value)
