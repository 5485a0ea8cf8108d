"""Answers under a client's constraint, from a model with random weights, through the gateway and the batcher."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.checkpoints import EOS_ID
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.scripted import MARKS, ScriptedReplica, save_tools_tokenizer
from tests.workers.tables import TableEngine, table

pytest.importorskip("llguidance")

HELLO = [{"role": "user", "content": "x"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "parameters": ARGUMENTS}
FORMAT = {"type": "json_schema", "json_schema": {"name": "out", "schema": CITY}}
GRAMMAR = 'root ::= "x" [0-9] [0-9]'
TAG = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": CITY, "end": "</f>"}]}


class Place:
    """A gateway with one model for each format of calls."""

    def __init__(self, folder: Path) -> None:
        self.gateway = LiveGateway()
        self.replicas = []
        self.marks: dict[str, int] = {}
        served = []
        for name, mark in (("hermes", "<tool_call>"), ("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>")):
            path = folder / name
            path.mkdir()
            tokenizer = save_tools_tokenizer(path, mark)
            engine = TableEngine(table(tokenizer.vocab_size, spread=2.0), max_len=400, eos=[EOS_ID])
            self.marks[name] = tokenizer.encode(mark, add_special_tokens=False)[0]
            self.replicas.append(ScriptedReplica(engine, tokenizer))
            served.append(routes(name, self.replicas[-1], engine="cpu", source=str(path), max_len=400))  # type: ignore[arg-type]
        self.gateway.serve(*served)

    def ask(self, path: str = "chat/completions", **fields: Any) -> Any:
        body = {"model": "hermes", "max_tokens": 60, **fields}
        body |= {"prompt": "x"} if path == "completions" else {"messages": HELLO}
        return self.gateway.http.post(f"/v1/{path}", json=body)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("models"))
    yield place
    place.gateway.close()
    for replica in place.replicas:
        replica.close()


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object", "schema": CITY}}, CITY),  # llama.cpp, Together
    ({"response_format": {"type": "json_schema", "schema": CITY}}, CITY),
    ({"structured_outputs": {"json": CITY, "regex": None}, "guided_regex": None}, CITY),
    ({"structured_outputs": {"json": json.dumps(CITY)}}, CITY),
    ({"structured_outputs": {"json_object": False}, "guided_json": CITY}, CITY),
    ({"structured_outputs": {"choice": ["yes", 'n"o']}}, 'yes|n"o'),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"structured_outputs": {"grammar": GRAMMAR}}, "x[0-9]{2}"),
    ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, "x[0-9]{2}"),
]


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize(("form", "wanted"), FORMS)
def test_an_answer_matches_each_form_of_a_constraint(place: Place, path: str, form: Any, wanted: Any) -> None:
    answer = place.ask(path, n=4, seed=1, **form)

    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        if isinstance(wanted, str):
            assert re.fullmatch(wanted, text)
        else:
            jsonschema.validate(json.loads(text), wanted)


REFUSALS: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_json": CITY, "response_format": FORMAT}, "guided_json", "exclude each other"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.regex", "exclude each other"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "0 texts"),
    ({"structured_outputs": {"choice": ["a" * 5000]}}, "structured_outputs.choice", "4096 characters"),
    ({"structured_outputs": {"grammar": "a" * 9000}}, "structured_outputs.grammar", "9000 characters exceed"),
    ({"guided_grammar": 'start: %json {"multipleOf": 999983}'}, "guided_grammar", "%json is not supported"),
    ({"guided_grammar": "start: A\nA: ~/(a{1,300}){1,300}/"}, "guided_grammar", "~ is not supported"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern", "is not supported"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "structures"),
    (
        {"structured_outputs": {"structural_tag": json.dumps({**TAG, "triggers": ["<g"]})}},
        "structured_outputs.structural_tag",
        "structures[0].begin does not begin with one of the triggers",
    ),
    ({"guided_json": "{"}, "guided_json", "not a JSON object"),
    ({"guided_json": {"not": {"type": "null"}}}, "guided_json", "guided_json.not: is not supported"),
    ({"guided_regex": "("}, "guided_regex", "the regular expression is not supported"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "the JSON schema is not supported"),
    (
        {"guided_json": {"$ref": "https://a.example/x"}},
        "guided_json",
        "guided_json.$ref: 'https://a.example/x' is not in",
    ),
    ({"guided_json": {"items": {"type": "any"}}}, "guided_json", "guided_json.items.type: 'any' is not a type of JSON"),
    (
        {"model": "llama3", "tools": [{"type": "function", "function": FUNCTION}], "guided_regex": "a"},
        "guided_regex",
        "cannot be combined with this model's tool calls",
    ),
    (
        {
            "model": "llama3",
            "tools": [{"type": "function", "function": FUNCTION}],
            "guided_json": CITY,
            "response_format": {"type": "text"},
        },
        "guided_json",
        "cannot be combined with this model's tool calls",
    ),
]


@pytest.mark.parametrize(("fields", "param", "says"), REFUSALS)
def test_a_constraint_that_cannot_be_followed_is_refused_by_its_own_name(
    place: Place, fields: dict[str, Any], param: str, says: str
) -> None:
    """The gateway or the replica refuses it."""
    answer = place.ask(**fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]


def test_a_keyword_that_is_not_supported_is_named_with_its_tool(place: Place) -> None:
    """This applies to forced calls. Other calls are not constrained."""
    wrong = {"name": "g", "parameters": {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}}
    tools = [{"type": "function", "function": function} for function in (FUNCTION, wrong)]
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        error = place.ask(tools=tools, tool_choice=choice).json()["error"]
        assert error["param"] == "tools"
        assert error["message"].startswith("tools[1].function.parameters.properties.x.not: is not supported")
    assert place.ask(tools=tools).status_code == 200


LOOSE = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True},
        "mail": {"type": "string", "maxLength": 3, "format": "idn-email", "pattern": "^(?!a)."},
        "one": {"oneOf": [{"type": "integer"}, {"type": "null"}], "uniqueItems": False},
        "day": {"type": "integer", "format": "int32"},
    },
    "minProperties": 2,
    "maxProperties": 4,
    "additionalProperties": False,
}


def test_keywords_that_do_not_constrain_the_answer_are_named_in_a_header(place: Place) -> None:
    """The rest of the schema holds; an exact schema has no such header."""
    answer = place.ask(response_format={"type": "json_object", "schema": LOOSE}, max_tokens=200, seed=3)
    header = answer.headers["x-corewright-schema-relaxed"]
    assert header == "format, maxProperties, minProperties, oneOf, pattern, uniqueItems"
    loosened = json.loads(json.dumps(LOOSE).replace("minProperties", "x").replace("maxProperties", "y"))
    del loosened["properties"]["tags"]["uniqueItems"], loosened["properties"]["mail"]["pattern"]
    jsonschema.validate(json.loads(answer.json()["choices"][0]["message"]["content"]), loosened)
    assert "x-corewright-schema-relaxed" not in place.ask(response_format=FORMAT).headers


@pytest.mark.parametrize("model", ["hermes", "mistral", "llama3"])
def test_with_tools_the_answer_is_a_call_or_matches_the_schema(place: Place, model: str) -> None:
    """A call is free text after the family's opening text. Without an opening text, it matches its tool's schema."""
    fields: dict[str, Any] = {"tools": [{"type": "function", "function": FUNCTION}], "response_format": FORMAT}
    fields["model"] = model
    mark = {str(place.marks[model]): 100}
    for choice in place.ask(n=4, seed=1, logit_bias=mark, **fields).json()["choices"]:
        assert (choice["message"]["content"] or "").startswith(("<tool_call>", *MARKS))
    mark = {str(place.marks[model]): -100}
    kinds = set()
    for choice in place.ask(n=40, seed=1, logit_bias=mark, max_tokens=100, **fields).json()["choices"]:
        calls = choice["message"].get("tool_calls")
        kinds.add("call" if calls else choice["finish_reason"])
        if calls and choice["finish_reason"] == "tool_calls":
            jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), ARGUMENTS)
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    assert kinds >= ({"call", "stop"} if model == "llama3" else {"stop"})


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("messages", {"tools": [{"name": "f", "input_schema": ARGUMENTS}], "output_config": {"format": "FORMAT"}}),
        ("responses", {"input": "x", "tools": [{"type": "function", **FUNCTION}], "text": {"format": "FORMAT"}}),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_the_other_apis_take_tools_and_a_format_too(place: Place, path: str, fields: Any, forced: bool) -> None:
    """With a forced call, the answer is only the call: the format is for a later answer."""
    fields = json.loads(
        json.dumps(fields).replace('"FORMAT"', json.dumps({"type": "json_schema", "name": "x", "schema": CITY}))
    )
    choice = {"type": "any"} if path == "messages" else "required"
    body = {"model": "hermes", **fields, **({"tool_choice": choice} if forced else {})}
    body |= {"messages": HELLO, "max_tokens": 60} if path == "messages" else {"max_output_tokens": 60}
    answer = place.gateway.http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 200, answer.text
    blocks = answer.json()["content" if path == "messages" else "output"]
    called = [block for block in blocks if block["type"] in ("tool_use", "function_call")]
    assert bool(called) >= forced
