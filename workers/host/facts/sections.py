"""Section: one object of a JSON text that another program wrote, of which nothing is certain."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping

MOST_PROBLEMS = 20  # of one text; what follows is counted, since a text of garbage has thousands
LARGEST = 2**63 - 1  # what travels between processes as an integer
LONGEST_NUMBER = 5  # digits of a core or device id


class Findings:
    """Problems of one text, in order. The same problem in many places is named at the first, with their number."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[str]] = {}

    def add(self, where: str, what: str) -> None:
        places = self._found.setdefault((re.sub(r"[0-9]+", "#", where), re.sub(r"[0-9]+", "#", what)), [])
        text = f"{where.rstrip()} {what}"
        if text not in places[:1]:
            places.append(text)

    def __call__(self) -> tuple[str, ...]:
        """All of them, or the first few and how many more there are."""
        found = [
            places[0] if len(places) == 1 else f"{places[0]} (so in {len(places)} places)"
            for places in self._found.values()
        ]
        more = len(found) - MOST_PROBLEMS
        return (*found[:MOST_PROBLEMS], f"{more} more in the same text") if more > 0 else tuple(found)


def decode(text: str | bytes, where: str, findings: Findings) -> object:
    """The value of a JSON text; None with a finding when it is none."""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    try:
        return json.loads(text)
    except ValueError:
        findings.add(where, f"is not JSON: it begins with {excerpt(text)}" if text.strip() else "is empty")
    except RecursionError:
        findings.add(where, "is nested too deeply to be read")
    return None


class Section:
    """One JSON object with its place. What is missing or of another type is None, and is named in the findings.

    An absent section gives nothing and reports nothing: its absence was reported once, by whoever asked for it.
    """

    def __init__(self, value: object, where: str, findings: Findings) -> None:
        self.where = where
        self.findings = findings
        self._value: Mapping[str, object] | None = None
        if isinstance(value, dict):
            self._value = value
        elif value is not None:
            findings.add(where, f"is {kind(value)}, not an object")

    @property
    def present(self) -> bool:
        return self._value is not None

    def has(self, key: str) -> bool:
        return self._value is not None and self._value.get(key) is not None

    def raw(self, key: str) -> object:
        """The value under a key, of any type; None where there is none."""
        return self._value.get(key) if self._value is not None else None

    def place(self, key: str) -> str:
        """Where a key of it is: "neuron-monitor: system_data.memory_info"."""
        return f"{self.where}{'' if self.where.endswith(': ') else '.'}{key}"

    def section(self, key: str) -> Section:
        """The object under a key that should be there, its ``error`` reported where it carries one."""
        value = self._get(key)
        found = Section(value, self.place(key), self.findings)
        found.report_error()
        return found

    def sections(self, key: str, *, may_be_absent: bool = False) -> list[Section]:
        """The objects of the array under a key."""
        if may_be_absent and not self.has(key):
            return []
        found = elements(self._get(key), self.place(key), self.findings)
        return [section for section in found if section.present]

    def numbered(self, key: str) -> dict[int, Section]:
        """The objects under a key whose own keys are ids: {"0": {...}, "1": {...}}. Ascending."""
        inside = self.section(key)
        found = {}
        for name, value in (inside._value or {}).items():
            if not (name.isascii() and name.isdecimal() and len(name) <= LONGEST_NUMBER):
                if name not in ("error", "period"):
                    self.findings.add(inside.where, f"has the key {excerpt(name)}, which is not an id")
                continue
            section = Section(value, inside.place(name), self.findings)
            if section.present:
                found[int(name)] = section
        return dict(sorted(found.items()))

    def report_error(self) -> None:
        """Every block of the tools may carry an ``error``; empty means that all is well."""
        error = self._value.get("error") if self._value is not None else None
        if error:
            self.findings.add(self.where, f"reports an error: {excerpt(error)}")

    def integer(self, key: str, *, may_be_absent: bool = False) -> int | None:
        """A whole number from 0 on."""
        value = self._get(key, may_be_absent=may_be_absent)
        if value is None:
            return None
        number = whole(value)
        if number is None:
            self.findings.add(self.place(key), f"is {described(value)}, not a whole number from 0 on")
        return number

    def integers(self, key: str, *, may_be_absent: bool = False) -> tuple[int, ...]:
        """An array of whole numbers from 0 on; what is none is left out."""
        value = self._get(key, may_be_absent=may_be_absent)
        if value is None:
            return ()
        if not isinstance(value, list):
            self.findings.add(self.place(key), f"is {described(value)}, not an array of whole numbers")
            return ()
        numbers = [whole(element) for element in value]
        if None in numbers:
            self.findings.add(self.place(key), "holds what is not a whole number from 0 on")
        return tuple(number for number in numbers if number is not None)

    def amounts(self) -> dict[str, int]:
        """The section's own keys with a whole number from 0 on, as memory classes are given. Unknown ones too."""
        found = {}
        for name, value in (self._value or {}).items():
            if name in ("error", "period") or isinstance(value, dict | list):
                continue
            number = whole(value)
            if number is None:
                self.findings.add(self.place(clean(name)), f"is {described(value)}, not a whole number from 0 on")
            else:
                found[clean(name)] = number
        return found

    def number(self, key: str, *, may_be_absent: bool = False) -> float | None:
        """A finite number from 0 on."""
        value = self._get(key, may_be_absent=may_be_absent)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LARGEST:
            return float(value)
        self.findings.add(self.place(key), f"is {described(value)}, not a number from 0 on")
        return None

    def text(self, key: str, *, may_be_absent: bool = False) -> str | None:
        """A text; None also where it is empty."""
        value = self._get(key, may_be_absent=may_be_absent)
        if value is None:
            return None
        if not isinstance(value, str):
            self.findings.add(self.place(key), f"is {described(value)}, not a text")
            return None
        return clean(value) or None

    def _get(self, key: str, *, may_be_absent: bool = False) -> object:
        if self._value is None:
            return None
        value = self._value.get(key)
        if value is None and not may_be_absent:
            self.findings.add(self.place(key), "is null" if key in self._value else "is missing")
        return value


def elements(value: object, where: str, findings: Findings) -> list[Section]:
    """The elements of a JSON array, each as a section. Nothing where there is no array."""
    if value is None:
        return []
    if not isinstance(value, list):
        findings.add(where, f"is {described(value)}, not an array")
        return []
    return [Section(element, f"{where}[{i}]", findings) for i, element in enumerate(value)]


def whole(value: object) -> int | None:
    """A whole number from 0 on that fits in 63 bits; 2.0 counts, true does not."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST else None


def clean(text: str) -> str:
    """The text without what cannot be written as UTF-8 (JSON may escape half of a surrogate pair)."""
    return text.encode(errors="replace").decode()


def excerpt(value: object) -> str:
    """The beginning of a foreign value, on one line."""
    text = " ".join(clean(value if isinstance(value, str) else str(value)[:200]).split())
    return f'"{text[:100]}..."' if len(text) > 100 else f'"{text}"'


def kind(value: object) -> str:
    """What sort of JSON value it is."""
    if isinstance(value, bool):
        return "a boolean"
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a text", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def described(value: object) -> str:
    """The value where it is short to say, else its sort."""
    return kind(value) if isinstance(value, dict | list | None) else excerpt(value)
