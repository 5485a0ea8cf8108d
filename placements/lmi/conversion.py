"""The spec of one model while its settings are read, and what became of each setting."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from placements.lmi.settings import LmiSetting

Fate = Literal["mapped", "dropped", "refused"]
Read = Callable[[str], Any]
"""Returns the value of a setting. Raises ValueError with what it must be."""

TRUE = frozenset({"true", "1", "t", "yes", "y", "on"})
FALSE = frozenset({"false", "0", "f", "no", "n", "off"})


@dataclass(frozen=True)
class SettingOutcome:
    """What became of one setting: of the line ``where`` (FILE:LINE), ``what`` is the field, or the reason."""

    where: str
    written: str
    fate: Fate
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.written}: {self.fate}{' to' if self.fate == 'mapped' else ':'} {self.what}"


@dataclass
class Conversion:
    """One model. ``cores`` are those of the machine that it is for, ``alone`` that it is its only model."""

    cores: int
    smart: bool  # LMI from 0.30 on, which chooses some defaults by memory
    alone: bool
    trust_remote_code: bool
    settings: dict[str, LmiSetting] = field(default_factory=dict)  # those that count, by name
    fields: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, list[str]] = field(default_factory=dict)  # by line of the spec, see `line_of`
    origins: dict[str, list[LmiSetting]] = field(default_factory=dict)  # by line of the spec
    defaults: list[str] = field(default_factory=list)  # fields that no setting has set
    outcomes: list[SettingOutcome] = field(default_factory=list)

    def text(self, name: str) -> str:
        """Returns the value of a setting; empty without it."""
        return self.settings[name].value if name in self.settings else ""

    def put(self, path: str, value: Any, comment: str) -> None:
        """Set a field, `max_len` or `buckets.prefill`, and say by a comment where it is from."""
        name, _, key = path.partition(".")
        if key:
            self.fields.setdefault(name, {})[key] = value
        else:
            self.fields[name] = value
        self.comments.setdefault(line_of(path), []).append(comment)

    def map(self, setting: LmiSetting, path: str, value: Any) -> None:
        """Set the field that replaces a setting."""
        self.put(path, value, setting.written)
        self.origins.setdefault(line_of(path), []).append(setting)
        self.note(setting, "mapped", path)

    def refuse(self, line: str, reason: str) -> None:
        """Take a line of the spec out again, and refuse the settings that it is from."""
        name, _, key = line.partition(".")
        if key:
            del self.fields[name][key]
        if not key or not self.fields[name]:
            del self.fields[name]
        del self.comments[line]
        for setting in self.origins.pop(line, ()):
            self.outcomes = [
                outcome
                for outcome in self.outcomes
                if (outcome.where, outcome.written) != (setting.where, setting.written)
            ]
            self.note(setting, "refused", reason)

    def sorted_outcomes(self) -> list[SettingOutcome]:
        """Returns the outcomes in the order of their files' lines."""
        labels = list(dict.fromkeys(setting.label for setting in self.settings.values()))

        def place(outcome: SettingOutcome) -> tuple[int, int]:
            label, _, line = outcome.where.rpartition(":")
            return labels.index(label) if label in labels else len(labels), int(line)

        return sorted(self.outcomes, key=place)

    @property
    def refused(self) -> frozenset[str]:
        """The names of the settings that were refused, or that a refused field was from."""
        lost = {(outcome.where, outcome.written) for outcome in self.outcomes if outcome.fate == "refused"}
        return frozenset(setting.name for setting in self.settings.values() if (setting.where, setting.written) in lost)

    def note(self, setting: LmiSetting, fate: Fate, fact: str) -> None:
        """Record what became of a setting."""
        self.outcomes.append(SettingOutcome(setting.where, setting.written, fate, fact))


def line_of(path: str) -> str:
    """Returns what a line of the spec is known by: the path of an engine option, and otherwise the field."""
    return path if path.startswith("engine_options.") else path.partition(".")[0]


def text(value: str) -> str:
    """Returns a value as it is."""
    return value


def integer(value: str) -> int:
    """Reads a whole number."""
    if not re.fullmatch(r"[+-]?\d{1,18}", value):
        raise ValueError(f"{value[:40]!r} is not a whole number")
    return int(value)


def boolean(value: str) -> bool:
    """Reads a truth value as LMI's handler does."""
    if value.lower() not in TRUE | FALSE:
        raise ValueError(f"{value[:40]!r} is neither true nor false")
    return value.lower() in TRUE


def lengths(value: str) -> list[int]:
    """Reads lengths: `256,512`, or a list `[256, 512]` as in the variables of the Neuron SDK."""
    return sorted({integer(part.strip()) for part in value.strip("[]").split(",")})


def one_of(*values: str) -> Read:
    """Returns a reader that accepts these values."""

    def read(value: str) -> str:
        if value not in values:
            raise ValueError(f"{value[:40]!r} is none of {', '.join(values)}")
        return value

    return read
