"""The routes of an HTTP API in one table: routing, the scopes of keys, CORS, OpenAPI and the docs follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar
from urllib.parse import unquote

import msgspec

ANY_SCOPE = "any"


@dataclass(frozen=True)
class HttpRoute:
    """One method of one path."""

    method: str
    path: str  # "{name}" is a parameter: one segment, percent-encoded
    summary: str
    handler: Any  # what the server of the table calls
    _: KW_ONLY
    takes_rest: bool = False  # the last parameter is the rest of the path, slashes included
    listed: bool = True  # in the OpenAPI document
    body: tuple[type, ...] = ()  # the types that the JSON of a request may have
    query: type | None = None  # the type of the path's parameters and the query
    answer: type | None = dict  # the type of the JSON; dict: any object, object: any JSON, None: text
    answer_text: str = ""  # what the answer contains, in words; the summary by default
    status: int = 200
    scope: str | None = ANY_SCOPE  # that a key must have; ``ANY_SCOPE``: a key of any scope; None: no key is needed
    refusals: tuple[int, ...] = ()  # statuses of errors besides those of every route
    refusal_texts: Mapping[int, str] = field(default_factory=dict)  # the meanings of statuses, if not as elsewhere

    @property
    def path_parameters(self) -> list[str]:
        """The names of the parameters in the path."""
        return re.findall(r"\{(\w+)\}", self.path)


R = TypeVar("R", bound=HttpRoute)


class HttpRoutes(Generic[R]):
    """Finds the routes of a path."""

    def __init__(self, routes: Sequence[R]) -> None:
        self.all = tuple(routes)
        self.methods = tuple(sorted({route.method for route in routes}))
        self._fixed: dict[str, dict[str, R]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, R]]] = {}
        for route in routes:
            if "{" in route.path:
                pattern = _pattern(route)
                self._patterns.setdefault(pattern.pattern, (pattern, {}))[1][route.method] = route
            else:
                self._fixed.setdefault(route.path, {})[route.method] = route

    def at(self, path: str) -> tuple[Mapping[str, R], Mapping[str, str]]:
        """Returns the routes of a path by method, none for an unknown path, and the values of its parameters."""
        if (fixed := self._fixed.get(path)) is not None:
            return fixed, _NO_VALUES
        for pattern, routes in self._patterns.values():
            if (match := pattern.fullmatch(path)) is not None:
                return routes, {name: unquote(value) for name, value in match.groupdict().items()}
        return _NO_ROUTES, _NO_VALUES

    def meant(self, path: str) -> str | None:
        """Returns the path of inference that a client means whose base URL has a `/v1` or a slash too few or too many;
        None for another path."""
        plain = "/" + "/".join(part for part in path.split("/") if part)
        for guess in (plain, f"/v1{plain}", plain.removeprefix("/v1")):
            if any(route.scope == "inference" for route in self._fixed.get(guess, _NO_ROUTES).values()):
                return guess
        return None


_NO_ROUTES: Mapping[str, Any] = MappingProxyType({})
_NO_VALUES: Mapping[str, str] = MappingProxyType({})


def _pattern(route: HttpRoute) -> re.Pattern[str]:
    texts = re.split(r"\{(\w+)\}", route.path)  # every second one is a name
    rest = len(texts) - 2 if route.takes_rest else -1
    parts = [
        f"(?P<{text}>{'.+' if position == rest else '[^/]+'})" if position % 2 else re.escape(text)
        for position, text in enumerate(texts)
    ]
    return re.compile("".join(parts))


Schema = dict[str, Any]


def components(kinds: Sequence[Any]) -> tuple[dict[type, Schema], dict[str, Schema]]:
    """Returns a reference to each type, and the schemas of these types and all nested ones, by name."""
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(kinds, references, strict=True)), schemas


def operation_id(method: str, path: str) -> str:
    """Returns an operation id such as `postRolloutUndo`."""
    words = re.findall(r"[a-z]+[0-9]*", path)
    return "".join([method.lower(), *(word.capitalize() for word in words)])


def json_content(schema: Schema) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def json_response(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": json_content(schema)}
