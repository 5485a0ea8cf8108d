"""Reads YAML text into plain data with the position of each key.

PyYAML's safe loader composes the node graph without constructing objects; the walk below turns nodes into dicts, lists
and scalars, with a position for each key and the text of each value. It reports what a loader would hide: duplicate
keys, surprising numbers of YAML 1.1, tags, recursive and exploding aliases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from placements.spec.problems import Path, Problem, SourcePosition

MAX_CHARACTERS = 1 << 18
MAX_NODES = 20_000  # with aliases expanded; a spec of 200 models has about 3,000
MAX_TEXT = 1 << 20  # characters of all values, with aliases expanded
SHOWN = 60  # characters of a value in a problem
MAX_DEPTH = 20

Kind = Literal["text", "a number", "a boolean", "empty", "a list", "a mapping"]

_PREFIX = "tag:yaml.org,2002:"
_OCTAL = re.compile(r"[-+]?0[0-7_]*[0-7]")
_NUMBER = re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]{0,39})")
_TRUE = ("yes", "true", "on")


@dataclass(frozen=True)
class Written:
    """A value as written in the file."""

    text: str  # one line, shortened
    kind: Kind
    plain: bool  # a scalar without quotes


class Broken:
    """Replaces a value whose problem has been reported."""


BROKEN = Broken()


@dataclass
class Tree:
    """The data of one document, and its problems. ``value`` is BROKEN if nothing could be read."""

    filename: str
    value: Any = BROKEN
    places: dict[Path, SourcePosition] = field(default_factory=dict)
    written: dict[Path, Written] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def report(self, id: str, position: SourcePosition | None, fact: str, hint: str = "") -> None:
        """Adds an error at a position, by default the beginning of the file."""
        position = position or SourcePosition(1, 1)
        where = f"{self.filename}:{position.line}:{position.column}"
        self.problems.append(Problem(id, "error", where, fact, hint))


class _Unreadable(Exception):
    """Aborts the walk. The arguments are those of `Tree.report`."""


def read(text: str | bytes, filename: str) -> Tree:
    """Reads one document. Reports all problems of the text in the tree, and raises none."""
    tree = Tree(filename)
    try:
        decoded = _decoded(text)
        node = _composed(decoded, tree)
        tree.value = _Walk(decoded, tree).value(node, (), 0)
    except _Unreadable as error:
        tree.report(*error.args)
    except RecursionError:
        tree.report("yaml-too-large", None, f"the document is nested more than {MAX_DEPTH} levels deep", _SHRINK)
    return tree


_SHRINK = "write a flat file of a few hundred lines, without deep nesting or aliases"


def _decoded(text: str | bytes) -> str:
    if isinstance(text, bytes):
        raw = text
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            fact = f"byte 0x{raw[error.start]:02x} is not UTF-8"
            position = _position_after(raw[: error.start].decode("utf-8"))
            raise _Unreadable("yaml-syntax", position, fact, "save the file as UTF-8") from None
    if len(text) > MAX_CHARACTERS:
        fact = f"the file has {len(text)} characters, more than {MAX_CHARACTERS}"
        raise _Unreadable("yaml-too-large", None, fact, _SHRINK)
    return text


def _composed(text: str, tree: Tree) -> yaml.Node:
    try:
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_node() if loader.check_node() else None
            if node is not None and loader.check_node():
                second = loader.get_node()
                position = _position(second.start_mark) if second is not None else None
                tree.report(
                    "yaml-many-documents",
                    position,
                    "a second document begins here; a spec is one document",
                    'remove the line "---", or move the document to another file',
                )
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        code = error.character if isinstance(error.character, int) else ord(str(error.character))
        fact = f"the character U+{code:04X} is not allowed in YAML"
        raise _Unreadable("yaml-syntax", _position_after(text[: error.position]), fact, "remove it") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        fact = _syntax_fact(error)
        raise _Unreadable("yaml-syntax", _position(mark) if mark else None, fact, _syntax_hint(fact)) from None
    except (yaml.YAMLError, ValueError, IndexError, OverflowError) as error:  # PyYAML leaks some of its internal errors
        fact = f"the file is not YAML: {error}"
        raise _Unreadable("yaml-syntax", None, fact, _syntax_hint(str(error))) from None
    if node is None or (isinstance(node, yaml.ScalarNode) and _kind(node) == "empty"):
        raise _Unreadable("spec-empty", None, "the file has no content", "begin with: models: {NAME: {source: ...}}")
    return node


_PLAIN_WORDS = {
    "'<stream end>'": "the end of the file",
    "<block end>": "the end of this block",
    "'<block mapping start>'": "another indentation",
    "'<block sequence start>'": "another indentation",
    "end of stream": "end of the file",
    "the node content": "a value",
    "a flow node": "a value in brackets",
    "a flow sequence": "a list in [ ]",
    "a flow mapping": "a mapping in { }",
    "a block collection": "a list",
    "a block mapping": "a mapping",
    "scalar": "text",
}


def _syntax_fact(error: yaml.MarkedYAMLError) -> str:
    """Returns PyYAML's message, the problem before its context, without its jargon."""
    fact = error.problem or error.context or "the file is not YAML"
    if "'\\t'" in fact:
        return "a tab is used for indentation"
    if error.problem and error.context:
        begin = f", which begins at line {error.context_mark.line + 1}" if error.context_mark else ""
        fact = f"{error.problem}, {error.context}{begin}"
    for jargon, word in _PLAIN_WORDS.items():
        fact = fact.replace(jargon, word)
    return fact


def _syntax_hint(fact: str) -> str:
    if fact.startswith("a tab"):
        return "indent with spaces, not with tabs"
    if "mapping values are not allowed" in fact:
        return 'quote a value that contains ": "; otherwise check the indentation of this line and the one before'
    if "undefined alias" in fact:
        return "write *name only after &name, and quote a value that begins with *"
    return "check quotes, brackets and indentation of this line and the one before"


def _position(mark: yaml.Mark) -> SourcePosition:
    return SourcePosition(mark.line + 1, mark.column + 1)


def _position_after(text: str) -> SourcePosition:
    line_start = text.rfind("\n") + 1
    return SourcePosition(text.count("\n") + 1, len(text) - line_start + 1)


class _Walk:
    def __init__(self, text: str, tree: Tree) -> None:
        self._text = text
        self._tree = tree
        self._nodes = 0
        self._characters_left = MAX_TEXT
        self._above: list[yaml.Node] = []

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self._nodes += 1
        position = _position(node.start_mark)
        self._tree.places.setdefault(path, position)
        if any(node is above for above in self._above):
            hint = "write the value without an alias"
            raise _Unreadable("yaml-too-large", position, "this alias contains itself", hint)
        self._check_nodes(position, depth)
        if isinstance(node, yaml.ScalarNode):
            self._characters_left -= len(node.value)
            if self._characters_left < 0:
                fact = f"the values have more than {MAX_TEXT} characters with aliases expanded"
                raise _Unreadable("yaml-too-large", position, fact, _SHRINK)
        self._tree.written[path] = self._written(node)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, position)
        if node.tag not in (_PREFIX + "map", _PREFIX + "seq"):
            return self._tagged(node, position)
        self._above.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, i), depth + 1) for i, item in enumerate(node.value)]
            return self._mapping(node, path, depth)
        finally:
            self._above.pop()

    def _check_nodes(self, position: SourcePosition, depth: int) -> None:
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            limit = f"more than {MAX_NODES} values" if self._nodes > MAX_NODES else f"more than {MAX_DEPTH} levels"
            fact = f"the document has {limit} with aliases expanded"
            raise _Unreadable("yaml-too-large", position, fact, _SHRINK)

    def _mapping(self, node: yaml.Node, path: Path, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[tuple[yaml.Node, yaml.Node]] = []
        for key_node, value_node in node.value:
            position = _position(key_node.start_mark)
            self._check_nodes(position, depth)
            if not isinstance(key_node, yaml.ScalarNode):
                self._nodes += 1
                self._tree.report("wrong-type", position, f"the key {self._written(key_node).text} is not a word", "")
                continue
            if key_node.tag == _PREFIX + "merge":
                merged.extend(self._merged(value_node, depth))
                continue
            key = self._characters(key_node, position)
            if key is BROKEN:
                continue
            where = (*path, key)
            if key in result:
                self._nodes += 1
                first = self._tree.places[where]
                fact = f'"{key}" is a duplicate; the first is at line {first.line}'
                self._tree.report("duplicate-key", position, fact, "keep one of the two")
                continue
            self._check_key(key_node, position)
            self._tree.places[where] = position
            result[key] = self.value(value_node, where, depth + 1)
        for key_node, value_node in merged:  # a mapping's own keys override merged ones
            key = key_node.value
            if isinstance(key_node, yaml.ScalarNode) and key not in result:
                where = (*path, key)
                self._tree.places[where] = _position(key_node.start_mark)
                result[key] = self.value(value_node, where, depth + 1)
        return result

    def _merged(self, node: yaml.Node, depth: int) -> list[tuple[yaml.Node, yaml.Node]]:
        """Returns the pairs that "<<: *alias" or "<<: [*alias, *alias]" merges; earlier ones override later ones."""
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _Unreadable("yaml-too-large", _position(node.start_mark), "too many merged mappings", _SHRINK)
        if isinstance(node, yaml.SequenceNode):
            return [pair for item in node.value for pair in self._merged(item, depth + 1)]
        if not isinstance(node, yaml.MappingNode):
            fact = f'"<<" merges mappings, but {self._written(node).text} is not a mapping'
            self._tree.report("wrong-type", _position(node.start_mark), fact, 'write "<<: *name" after "&name"')
            return []
        own = [pair for pair in node.value if pair[0].tag != _PREFIX + "merge"]
        self._nodes += len(own)
        further = [pair[1] for pair in node.value if pair[0].tag == _PREFIX + "merge"]
        return own + [pair for deeper in further for pair in self._merged(deeper, depth + 1)]

    def _check_key(self, node: yaml.ScalarNode, position: SourcePosition) -> None:
        kind = _kind(node)
        if kind not in ("text", None):
            fact = f"the key {node.value or '~'} is {_reading(node)} in YAML, not text"
            self._tree.report("yaml-unquoted", position, fact, f'write "{node.value}" in quotes')

    def _scalar(self, node: yaml.ScalarNode, position: SourcePosition) -> Any:
        kind = _kind(node)
        if kind is None:
            return self._tagged(node, position)
        if kind == "text":
            return self._characters(node, position)
        if kind == "empty":
            return None
        if kind == "a boolean":
            return node.value.lower() in _TRUE
        return self._number(node, position)

    def _characters(self, node: yaml.ScalarNode, position: SourcePosition) -> Any:
        r"""Returns the text, with surrogate pairs of JSON escapes ("\ud83d\ude00") joined."""
        text: str = node.value
        if "\0" in text:  # no path, argument or variable of a process can have it
            self._tree.report(
                "yaml-syntax", position, f"{self._written(node).text} contains a NUL character", "remove it"
            )
            return BROKEN
        try:
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            fact = f"{self._written(node).text} contains an unpaired surrogate"
            self._tree.report("yaml-syntax", position, fact, "write the character itself")
            return BROKEN

    def _number(self, node: yaml.ScalarNode, position: SourcePosition) -> Any:
        text = node.value
        if _OCTAL.fullmatch(text):
            decimal = int(text.replace("_", ""), 8)
            hint = f"write {text.replace('_', '').lstrip('+-0') or '0'} without leading zeros, or the text in quotes"
            self._tree.report("yaml-number", position, f"{text} is octal in YAML, which is {decimal}", hint)
            return BROKEN
        if ":" in text:
            fact = f"{text} is a base-60 number in YAML"
            self._tree.report("yaml-number", position, fact, f'write "{text}" in quotes')
            return BROKEN
        if node.tag == _PREFIX + "float":
            try:
                return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
            except ValueError:
                pass
        elif _NUMBER.fullmatch(text):
            return int(text.replace("_", ""), 0)
        self._tree.report("yaml-number", position, f"{self._written(node).text} is not a supported number", "")
        return BROKEN

    def _tagged(self, node: yaml.Node, position: SourcePosition) -> Broken:
        tag = "!!" + node.tag[len(_PREFIX) :] if node.tag.startswith(_PREFIX) else node.tag
        self._tree.report("yaml-tag", position, f'the tag "{tag}" is not supported', "remove the tag")
        return BROKEN

    def _written(self, node: yaml.Node) -> Written:
        start, end = node.start_mark.index, node.end_mark.index
        read = min(end, start + 10 * SHOWN)  # an alias may show the same long text thousands of times
        source = " ".join(self._text[start:read].split())
        shortened = source if len(source) <= SHOWN and read == end else source[: SHOWN - 3] + "..."
        if isinstance(node, yaml.ScalarNode):
            kind = _kind(node) or "text"
            return Written(shortened, kind, node.style is None)
        return Written(shortened, "a list" if isinstance(node, yaml.SequenceNode) else "a mapping", False)


def _kind(node: yaml.ScalarNode) -> Kind | None:
    """Returns the kind of the scalar in YAML 1.1; None for an unknown tag. Dates are text."""
    if not node.tag.startswith(_PREFIX):
        return None
    name = node.tag[len(_PREFIX) :]
    if name == "bool" and node.value.lower() not in (*_TRUE, "no", "false", "off"):
        return None
    return _KINDS.get(name)


_KINDS: dict[str, Kind] = {
    **dict.fromkeys(("str", "timestamp", "value", "merge"), "text"),
    **dict.fromkeys(("int", "float"), "a number"),
    "bool": "a boolean",
    "null": "empty",
}


def _reading(node: yaml.ScalarNode) -> str:
    if _kind(node) == "a boolean":
        return "true" if node.value.lower() in _TRUE else "false"
    return {"a number": "a number", "empty": "nothing"}.get(_kind(node) or "", "something else")
