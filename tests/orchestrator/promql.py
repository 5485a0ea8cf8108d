"""What a PromQL expression selects. Not a parser: our expressions and vLLM's are simple."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

_NAME = re.compile(r"(?<![\w:$])([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan", "by", "without", "on", "ignoring", "group_left"}


@dataclass(frozen=True)
class Selector:
    """One selector: a metric's name, as in the page, and what its labels must be."""

    name: str
    matchers: tuple[tuple[str, str, str], ...] = ()


def selectors(expression: str) -> list[Selector]:
    """All of an expression, functions and keywords left out."""
    text = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub(" ", expression))
    read = []
    for match in _NAME.finditer(re.sub(r'"[^"]*"(?![^{]*\})', '""', text)):
        name, braces = match.groups()
        rest = text[match.end() :].lstrip()
        if name in _WORDS or (braces is None and rest.startswith("(")) or _inside_braces(text, match.start()):
            continue
        read.append(Selector(name, tuple(_MATCHER.findall(braces or ""))))
    return read


def grouped(expression: str) -> set[str]:
    """The labels that the expression groups or joins by."""
    return {
        label.strip() for _, labels in _GROUPING.findall(expression) for label in labels.split(",") if label.strip()
    }


def _inside_braces(text: str, at: int) -> bool:
    return text.rfind("{", 0, at) > text.rfind("}", 0, at)


@dataclass
class Page:
    """The series of a page of `/metrics`."""

    series: dict[str, list[Mapping[str, str]]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)  # by family, a counter's without _total
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str) -> Page:
        page = cls()
        for family in text_string_to_metric_families(text):
            page.kinds[family.name] = family.type
            for name, labels, value in _samples(family):
                page.series.setdefault(name, []).append(labels)
                page.values[(name, frozenset(labels.items()))] = value
        return page

    def value(self, name: str, **labels: str) -> float:
        return self.values[(name, frozenset(labels.items()))]

    def selected(self, selector: Selector, variables: Mapping[str, str]) -> list[Mapping[str, str]]:
        """The series that it selects, with Grafana's variables replaced."""
        return [labels for labels in self.series.get(selector.name, ()) if _fits(labels, selector.matchers, variables)]


def _samples(family: Metric) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for sample in family.samples:
        yield sample.name, sample.labels, sample.value


def _fits(labels: Mapping[str, str], matchers: Iterable[tuple[str, str, str]], variables: Mapping[str, str]) -> bool:
    for label, operator, pattern in matchers:
        for variable, value in variables.items():
            pattern = pattern.replace(f"${variable}", value)
        actual = labels.get(label, "")
        same = re.fullmatch(pattern, actual) is not None if "~" in operator else actual == pattern
        if same == operator.startswith("!"):
            return False
    return True
