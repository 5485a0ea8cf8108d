"""Parses one tool call: a JSON object with a name and arguments, in any order, or the arguments alone."""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

import msgspec

SPACE = " \t\n\r"
MAX_WORD_CHARACTERS = 400  # characters of a number; longer ones are of no use to a client
_HEX = frozenset("0123456789abcdefABCDEF")
_WORD_BEGINS = frozenset("-0123456789tfn")
_WORD_GOES_ON = frozenset("+-.0123456789eEtrufalsn")
_WORD = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
ARGUMENTS = ("arguments", "parameters")


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
                return CharacterRole.MORE if len(self._word) <= MAX_WORD_CHARACTERS else CharacterRole.BROKEN
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
