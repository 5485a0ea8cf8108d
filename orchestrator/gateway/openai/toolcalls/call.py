"""Parses one tool call: a JSON object with a name and arguments, in any order, or the arguments alone."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import msgspec

from orchestrator.gateway.openai.toolcalls.json_scanner import SPACE, CharacterRole, JsonScan

ARGUMENTS = ("arguments", "parameters")


class _At(Enum):
    OPENING = auto()
    FIRST_KEY = auto()  # or the end
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()  # or the end


class CallText:
    """Reads one call, character by character.

    It counts as a call when its name is known and its arguments have started (``begun``), and is ``complete`` with
    both: errors after that point are ignored, since small models often omit the last brace. ``keys`` are the allowed
    keys; None: any.
    """

    def __init__(self, name: str | None = None, keys: Collection[str] | None = None) -> None:
        """With a ``name``, the text is the arguments alone."""
        self.name = name
        self.arguments: list[str] = []  # their characters, as written
        self.complete = False
        self._only_arguments = name is not None
        self._keys = keys
        self._at = _At.OPENING if name is None else _At.VALUE
        self._key = "" if name is None else ARGUMENTS[0]
        self._scan = JsonScan()
        self._value: list[str] = []
        self._has_arguments = False
        self._raw: list[str] = []

    @property
    def raw(self) -> str:
        """The text that was taken."""
        return "".join(self._raw)

    @property
    def begun(self) -> bool:
        return self.name is not None and bool(self.arguments)

    def take(self, char: str) -> CharacterRole:
        """Reads a character; ``BROKEN`` and ``BEHIND`` have not taken it."""
        was_complete = self.complete
        result = self._step(char)
        if result is CharacterRole.BROKEN and was_complete:
            return CharacterRole.BEHIND
        if result in (CharacterRole.MORE, CharacterRole.LAST):
            self._raw.append(char)
        return result

    def _step(self, char: str) -> CharacterRole:
        at = self._at
        if at is _At.IN_VALUE:
            return self._in_value(char)
        if at is _At.IN_KEY:
            return self._in_key(char)
        if char in SPACE:
            return CharacterRole.MORE
        if at is _At.VALUE:
            return self._first_of_value(char)
        if at is _At.COLON and char == ":":
            self._at = _At.VALUE
        elif at is _At.OPENING and char == "{":
            self._at = _At.FIRST_KEY
        elif at in (_At.FIRST_KEY, _At.KEY) and char == '"':
            self._at, self._scan, self._value = _At.IN_KEY, JsonScan(), [char]
            self._scan.take(char)
        elif at is _At.COMMA and char == ",":
            self._at = _At.KEY
        elif at is _At.COMMA and char == "}" and self.complete:
            return CharacterRole.LAST
        else:
            return CharacterRole.BROKEN
        return CharacterRole.MORE

    def _in_key(self, char: str) -> CharacterRole:
        result = self._scan.take(char)
        self._value.append(char)
        if result is CharacterRole.LAST:
            self._key = _text(self._value) or ""
            self._at = _At.COLON
            return CharacterRole.MORE if self._keys is None or self._key in self._keys else CharacterRole.BROKEN
        return result

    def _first_of_value(self, char: str) -> CharacterRole:
        first = {"name": '"', **dict.fromkeys(ARGUMENTS, "{")}.get(self._key)
        if first is not None and char != first and not self.complete:
            return CharacterRole.BROKEN
        self._at, self._scan, self._value = _At.IN_VALUE, JsonScan(), []
        return self._in_value(char)

    def _in_value(self, char: str) -> CharacterRole:
        result = self._scan.take(char)
        if result is CharacterRole.BROKEN:
            return result
        is_arguments = self._key in ARGUMENTS and not self._has_arguments
        if result is CharacterRole.BEHIND:
            self._at = _At.COMMA
            return self._step(char)
        if is_arguments:
            self.arguments.append(char)
        elif self._key == "name":
            self._value.append(char)
        if result is CharacterRole.LAST:
            return self._value_ended(is_arguments)
        return CharacterRole.MORE

    def _value_ended(self, is_arguments: bool) -> CharacterRole:
        self._at = _At.COMMA
        if is_arguments:
            self._has_arguments = True
        elif self._key == "name" and self.name is None:
            self.name = _text(self._value)
            if not self.name:
                return CharacterRole.BROKEN
        self.complete = self.name is not None and self._has_arguments
        return CharacterRole.LAST if self._only_arguments else CharacterRole.MORE


def _text(literal: list[str]) -> str | None:
    """Returns the value of a JSON string; None for one with half a surrogate pair, which an answer cannot hold."""
    try:
        return msgspec.json.decode("".join(literal), type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None
