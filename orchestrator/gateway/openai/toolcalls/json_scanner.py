"""Scans a JSON value character by character, to find its end or its first error."""

from __future__ import annotations

import re
from enum import Enum, auto

SPACE = " \t\n\r"
LONGEST_WORD = 400  # characters of a number; longer ones are of no use to a client
_HEX = frozenset("0123456789abcdefABCDEF")
_WORD_BEGINS = frozenset("-0123456789tfn")
_WORD_GOES_ON = frozenset("+-.0123456789eEtrufalsn")
_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


class CharacterRole(Enum):
    """The role of a character in a value."""

    MORE = auto()  # inside the value
    LAST = auto()  # the end of the value
    BEHIND = auto()  # after the end of the value
    BROKEN = auto()  # not valid JSON


class _Wants(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after [
    KEY_OR_END = auto()  # after {
    KEY = auto()  # after a comma in an object
    COLON = auto()
    COMMA_OR_END = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()


class JsonScan:
    """Reads one value, from its first character, which is not a space."""

    __slots__ = ("_hex_left", "_key", "_stack", "_wants", "_word")

    def __init__(self) -> None:
        self._wants = _Wants.VALUE
        self._stack: list[str] = []  # the closing characters of the open objects and arrays
        self._key = False  # the string is a key
        self._hex_left = 0
        self._word = ""

    def take(self, char: str) -> CharacterRole:
        wants = self._wants
        if wants is _Wants.STRING:
            if char == '"':
                if self._key:
                    self._wants = _Wants.COLON
                    return CharacterRole.MORE
                return self._ended()
            if char == "\\":
                self._wants = _Wants.ESCAPE
            return CharacterRole.BROKEN if char < " " else CharacterRole.MORE
        if wants is _Wants.ESCAPE:
            self._wants, self._hex_left = (_Wants.HEX, 4) if char == "u" else (_Wants.STRING, 0)
            return CharacterRole.MORE if char in '"\\/bfnrtu' else CharacterRole.BROKEN
        if wants is _Wants.HEX:
            self._hex_left -= 1
            if not self._hex_left:
                self._wants = _Wants.STRING
            return CharacterRole.MORE if char in _HEX else CharacterRole.BROKEN
        if wants is _Wants.WORD:
            if char in _WORD_GOES_ON:
                self._word += char
                return CharacterRole.MORE if len(self._word) <= LONGEST_WORD else CharacterRole.BROKEN
            if not _WORD.fullmatch(self._word):
                return CharacterRole.BROKEN
            if self._ended() is CharacterRole.LAST:
                return CharacterRole.BEHIND
        return CharacterRole.MORE if char in SPACE else self._structure(char)

    @property
    def closing(self) -> str | None:
        """The characters that would end the value here, or before the comma that was just read; None where it cannot
        end, such as inside a string."""
        inside = self._wants in (_Wants.STRING, _Wants.ESCAPE, _Wants.HEX, _Wants.WORD, _Wants.COLON)
        return None if inside else "".join(reversed(self._stack))

    def _structure(self, char: str) -> CharacterRole:
        wants = self._wants
        if wants is _Wants.COLON:
            self._wants = _Wants.VALUE
            return CharacterRole.MORE if char == ":" else CharacterRole.BROKEN
        if wants in (_Wants.KEY, _Wants.KEY_OR_END) and char == '"':
            self._wants, self._key = _Wants.STRING, True
            return CharacterRole.MORE
        if wants in (_Wants.KEY_OR_END, _Wants.VALUE_OR_END, _Wants.COMMA_OR_END) and char == self._stack[-1]:
            self._stack.pop()
            return self._ended()
        if wants is _Wants.COMMA_OR_END and char == ",":
            self._wants = _Wants.KEY if self._stack[-1] == "}" else _Wants.VALUE
            return CharacterRole.MORE
        return self._value(char) if wants in (_Wants.VALUE, _Wants.VALUE_OR_END) else CharacterRole.BROKEN

    def _value(self, char: str) -> CharacterRole:
        if char == "{":
            self._stack.append("}")
            self._wants = _Wants.KEY_OR_END
        elif char == "[":
            self._stack.append("]")
            self._wants = _Wants.VALUE_OR_END
        elif char == '"':
            self._wants, self._key = _Wants.STRING, False
        elif char in _WORD_BEGINS:
            self._wants, self._word = _Wants.WORD, char
        else:
            return CharacterRole.BROKEN
        return CharacterRole.MORE

    def _ended(self) -> CharacterRole:
        self._wants = _Wants.COMMA_OR_END
        return CharacterRole.MORE if self._stack else CharacterRole.LAST


def completed_object(text: str) -> str:
    """Returns the JSON object that ``text`` is or begins, without the members and items that are not complete; an empty
    object for any other text."""
    text = text.lstrip(SPACE)
    scan, end, closing = JsonScan(), 0, "{}"
    for at, char in enumerate(text if text.startswith("{") else ""):
        taken = scan.take(char)
        if taken is CharacterRole.LAST:
            return text[: at + 1]
        if taken is CharacterRole.BROKEN:
            break
        if char not in SPACE + ":" and (closes := scan.closing) is not None:
            end, closing = at + (char != ","), closes
    return text[:end] + closing
