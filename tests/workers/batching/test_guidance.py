"""Answers under a JSON schema, from a model with random weights: only the guide makes them JSON."""

from __future__ import annotations

import builtins
import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from tests.checkpoints import EOS_ID, VOCAB_SIZE, byte_level_tokenizer, save_tokenizer
from tests.workers.tables import Answers, TableEngine, answers, table
from workers.batching.batcher import Batcher
from workers.batching.guidance import MAX_COMPILED, Guide, Guides
from workers.messages.requests import AnswerConstraint, AnswerMarkers, FinishReason, GenerateRequest, InvalidField
from workers.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

pytest.importorskip("llguidance")

MODEL = table(VOCAB_SIZE, spread=2.0)
OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FIELDS = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in "abcdef"},
    "required": [*"abcdef"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": OBJECT,
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 5},
    "enum": {"enum": ["red", "green", 7, None, {"a": [1]}]},
    "nested": {
        "type": "object",
        "properties": {
            "people": {"type": "array", "items": OBJECT, "minItems": 1, "maxItems": 3},
            "tag": {"$ref": "#/$defs/tag"},
        },
        "required": ["people", "tag"],
        "additionalProperties": False,
        "$defs": {"tag": {"anyOf": [{"type": "null"}, {"const": "yes"}]}},
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2,4}$"},
    "number": {"type": "integer", "minimum": -5, "maximum": 99},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(path)
    return load_tokenizer("cpu", str(path))


def constraint(schema: Any, **fields: Any) -> AnswerConstraint:
    return AnswerConstraint(schema if isinstance(schema, str) else json.dumps(schema), **fields)


def request(id: str = "a", schema: Any = None, **fields: Any) -> GenerateRequest:
    guide = None if schema is None else constraint(schema)
    settings: dict[str, Any] = {"prompt_ids": [17], "max_tokens": 1500, "temperature": 0.0}
    return GenerateRequest(id=id, guide=guide, **(settings | fields))


def engine(eos: int | None = EOS_ID, model: torch.Tensor = MODEL) -> TableEngine:
    return TableEngine(model, max_len=2048, eos=[] if eos is None else [eos])


def assert_follows(got: Answers, id: str, schema: dict[str, Any]) -> None:
    assert got.finish(id) is FinishReason.STOP, got.of(id)[-1]
    jsonschema.validate(json.loads(got.text(id)), schema)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("eos", [EOS_ID, None])
def test_every_answer_satisfies_its_schema(name: str, eos: int | None, tokenizer: Tokenizer) -> None:
    """Greedy and sampled, with and without an EOS of the model: it parses, validates, and ends by itself."""
    requests = [request("greedy", SCHEMAS[name])]
    requests += [request(str(seed), SCHEMAS[name], temperature=1.5, seed=seed) for seed in range(12)]
    got = answers(engine(eos), requests, tokenizer)
    for guided in requests:
        assert_follows(got, guided.id, SCHEMAS[name])


@pytest.mark.parametrize("mode", ["{}", '{"type": "object"}'])
def test_json_mode_gives_json(mode: str, tokenizer: Tokenizer) -> None:
    """Any value for an empty schema; a model of random weights that likes to end does so as soon as it may."""
    model = MODEL.clone()
    for closing in '"}]':
        model[:, byte_level_tokenizer().token_to_id(closing)] += 6.0
    model[:, EOS_ID] += 50.0
    got = answers(engine(model=model), [request(str(s), mode, temperature=1.0, seed=s) for s in range(12)], tokenizer)
    for seed in range(12):
        assert_follows(got, str(seed), json.loads(mode))


TEXTS: dict[str, tuple[AnswerConstraint, str]] = {
    "regex": (AnswerConstraint(r"^[a-c]{3}-[0-9]+!$", "regex"), r"[a-c]{3}-[0-9]+!"),
    "lark": (AnswerConstraint('start: "x" /[0-9]{2}/ | "é\\n"', "grammar"), r"x[0-9]{2}|é\n"),
    "gbnf": (AnswerConstraint('root ::= "if " name\nname ::= [a-z] [a-z]', "grammar"), "if [a-z]{2}"),
    "choice": (AnswerConstraint('["yes", "no \\"é\\n"]', "choice"), 'yes|no "é\n'),
}


@pytest.mark.parametrize("name", TEXTS)
def test_every_answer_matches_its_grammar(name: str, tokenizer: Tokenizer) -> None:
    """A regular expression, a grammar of either form, or a choice, as text and not as JSON."""
    constraint, pattern = TEXTS[name]
    requests = [
        GenerateRequest(id=str(seed), prompt_ids=[17], max_tokens=200, temperature=1.5, seed=seed, guide=constraint)
        for seed in range(12)
    ]
    got = answers(engine(), requests, tokenizer)
    for guided in requests:
        assert got.finish(guided.id) is FinishReason.STOP
        assert re.fullmatch(pattern, got.text(guided.id))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (AnswerConstraint("(", "regex"), "the regular expression is not supported: .*unclosed group"),
        (AnswerConstraint(r"(a)\1", "regex"), "the regular expression is not supported"),
        (AnswerConstraint("root ::= (", "grammar"), "the grammar cannot be read"),
        (AnswerConstraint("root ::= " + "(" * 9000, "grammar"), "the grammar cannot be read"),
        (AnswerConstraint("start: x", "grammar"), "the grammar is not supported"),
        (AnswerConstraint("start: start", "grammar"), "the grammar is not supported: no answer can begin"),
    ],
)
def test_an_unsupported_grammar_is_refused_with_the_reason(
    constraint: AnswerConstraint, message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidField, match=f"(?s){message}"):
        Guides(tokenizer, VOCAB_SIZE, [EOS_ID]).start(constraint)


NUMBER = AnswerConstraint('{"type": "integer"}')
THINK = AnswerMarkers(open="<think>", close="</think>")
OPENED = AnswerMarkers(close="</think>", opened=True)
CHANNELS = AnswerMarkers(("<|channel|>commentary",), close="<|channel|>final<|message|>", opened=True)
TAG = AnswerConstraint(
    '{"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}',
    "structural_tag",
)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "not special"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with markers as added tokens."""
    path = tmp_path_factory.mktemp("marked")
    save_tokenizer(path)
    fields = json.loads((path / "tokenizer.json").read_text())
    first = VOCAB_SIZE
    for id, content in enumerate(("<think>", "</think>", "[TOOL_CALLS]", "<|channel|>", "<|message|>"), first):
        token = {"id": id, "content": content, "special": request.param, "normalized": False}
        fields["added_tokens"].append({**token, "single_word": False, "lstrip": False, "rstrip": False})
    (path / "tokenizer.json").write_text(json.dumps(fields))
    return load_tokenizer("cpu", str(path))


@pytest.mark.parametrize(
    ("markers", "constraint", "text", "good"),
    [
        (AnswerMarkers(), NUMBER, "7", True),
        (AnswerMarkers(), NUMBER, "seven", False),
        (THINK, NUMBER, "7", True),
        (THINK, NUMBER, "<think>It is\n\n7?</think>7", True),
        (THINK, NUMBER, "<think></think>7", True),
        (THINK, NUMBER, "<think>a</think>\n\n7", True),
        (THINK, NUMBER, "<think>a</think>\n\n\n7", False),
        (AnswerMarkers(), NUMBER, "\n7", False),
        (THINK, NUMBER, "<think>It is 7", False),
        (THINK, NUMBER, "<think>a</think>seven", False),
        (THINK, NUMBER, "<think>a</think><think>b</think>7", False),
        (THINK, NUMBER, "It is 7</think>7", False),
        (OPENED, NUMBER, "It is 7</think>7", True),
        (OPENED, NUMBER, "It is 7</think>", False),
        (AnswerMarkers(("[TOOL_CALLS]",)), NUMBER, '[TOOL_CALLS][{"name', True),
        (AnswerMarkers(("[TOOL_CALLS]",)), NUMBER, "7", True),
        (AnswerMarkers(("[TOOL_CALLS]",)), NUMBER, "7[TOOL_CALLS]", False),
        (AnswerMarkers(("(call)",)), AnswerConstraint("[(][a-c]+[)]!", "regex"), "(call)(f", True),
        (AnswerMarkers(("(call)",)), AnswerConstraint("[(][a-c]+[)]!", "regex"), "(cab)!", True),
        (AnswerMarkers(("(call)",)), AnswerConstraint("[(][a-c]+[)]!", "regex"), "(cal)!", False),
        (AnswerMarkers(("[TOOL_CALLS]",), close="</think>", opened=True), NUMBER, "a</think>[TOOL_CALLS]f{", True),
        (AnswerMarkers(("[TOOL_CALLS]",), close="</think>", opened=True), NUMBER, "a[TOOL_CALLS]f{", True),
        (CHANNELS, NUMBER, "<|channel|>analysis<|message|>7?<|channel|>final<|message|>7", True),
        (CHANNELS, NUMBER, "<|channel|>analysis<|message|>7?<|channel|>final<|message|>seven", False),
        (CHANNELS, NUMBER, "<|channel|>commentary to=f<|message|>{}", True),
        (AnswerMarkers(), TAG, "It is <f>7</f> or <f>8</f>.", True),
        (AnswerMarkers(), TAG, "It is <f>seven</f>.", False),
        (THINK, TAG, "<think>It is <f>seven</f></think><f>7</f>", True),
    ],
)
def test_a_constraint_begins_after_the_reasoning_and_leaves_room_for_calls(
    markers: AnswerMarkers, constraint: AnswerConstraint, text: str, good: bool, marked: Tokenizer
) -> None:
    """Token by token, up to an EOS."""
    size = VOCAB_SIZE + 5
    guide = Guides(marked, size, [EOS_ID]).start(msgspec.structs.replace(constraint, markers=markers))
    for token in [*marked.encode(text, add_special_tokens=False), EOS_ID]:
        forbidden = guide.forbidden(size)
        assert forbidden is not None
        if forbidden[token] and not (token == EOS_ID and guide.ended):
            assert not good
            return
        if token != EOS_ID:
            guide.advance(token)
    assert good


def test_an_answer_cut_by_its_length_finishes_with_length(tokenizer: Tokenizer) -> None:
    """The text is the beginning of an answer that would have followed the schema."""
    complete = answers(engine(), [request(schema=OBJECT)], tokenizer)
    cut = answers(engine(), [request(schema=OBJECT, max_tokens=6)], tokenizer)
    assert cut.finish("a") is FinishReason.LENGTH
    assert cut.ids("a") == complete.ids("a")[:6]


def test_unguided_requests_beside_guided_ones_are_unchanged(tokenizer: Tokenizer) -> None:
    """Both kinds give token for token the answers that they give alone."""
    requests = []
    for index, schema in enumerate(SCHEMAS.values()):
        how = {"temperature": 1.2, "top_p": 0.9, "seed": index}
        requests += [request(f"guided {index}", schema, **how), request(f"free {index}", max_tokens=60, **how)]
    together = answers(engine(), requests, tokenizer)
    for single in requests:
        assert together.of(single.id) == answers(engine(), [single], tokenizer).of(single.id)


@pytest.mark.parametrize(
    "how",
    [
        {"no_repeat_ngram_size": 1},
        {"min_tokens": 1000},
        {"ignore_eos": True},
        {"logit_bias": dict.fromkeys(range(6, 40), 100.0)},
        {"repetition_penalty": 3.0, "presence_penalty": 2.0, "top_k": 2, "temperature": 1.0, "seed": 4},
    ],
    ids=str,
)
def test_the_guide_takes_precedence_over_other_parameters(how: dict[str, Any], tokenizer: Tokenizer) -> None:
    """What they would forbid comes after all where the schema leaves nothing else, and its end is the answer's end."""
    for schema in SCHEMAS.values():
        assert_follows(answers(engine(), [request(schema=schema, **how)], tokenizer), "a", schema)


@pytest.mark.parametrize("likes", ["Ġ", "Ċ", "ĠĊ"])
def test_white_space_between_two_parts_is_bounded(likes: str, tokenizer: Tokenizer) -> None:
    """One space, or one new line and its indentation; the answer has room for all of its fields."""
    model = MODEL.clone()
    for bonus, space in enumerate(reversed(likes)):
        model[:, byte_level_tokenizer().token_to_id(space)] += 50.0 + 50.0 * bonus
    got = answers(engine(model=model), [request(schema=FIELDS, max_tokens=600)], tokenizer)
    assert_follows(got, "a", FIELDS)
    gaps = {"".join(run) for is_space, run in groupby(got.text("a"), str.isspace) if is_space}
    assert gaps
    assert all(re.fullmatch(r" |\n {0,16}", gap) for gap in gaps)


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
def test_json_as_programs_print_it_follows_a_schema(indent: int | str | None, tokenizer: Tokenizer) -> None:
    """Compact, with spaces behind commas and colons, or indented."""
    value = {"people": [{"name": "", "age": 7}], "tag": None}
    for text in (json.dumps(value, indent=indent), json.dumps(value, separators=(",", ":"))):
        guide = Guides(tokenizer, VOCAB_SIZE, [EOS_ID]).start(constraint(SCHEMAS["nested"]))
        for token in [*tokenizer.encode(text)[1:], EOS_ID]:
            forbidden = guide.forbidden(VOCAB_SIZE)
            assert forbidden is not None
            assert not forbidden[token], text
            guide.advance(token)


def test_logprobs_are_those_of_the_model_not_of_the_guide(tokenizer: Tokenizer) -> None:
    """The guide chooses other tokens than the model's most probable ones."""
    got = answers(engine(), [request(schema=OBJECT, logprobs=1)], tokenizer)
    first = got.of("a")[0].logprobs[0]
    assert first.logprob == float(MODEL[17].log_softmax(-1)[first.id])
    assert first.top[0][0] == int(MODEL[17].argmax()) != first.id


def test_a_padded_vocabulary_never_produces_padding(tokenizer: Tokenizer) -> None:
    """Ids that the tokenizer does not know have no text."""
    model = table(VOCAB_SIZE + 64)
    model[:, VOCAB_SIZE:] += 50.0
    assert_follows(answers(engine(model=model), [request(schema=OBJECT)], tokenizer), "a", OBJECT)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read: Expecting object"),
        ('{"type": "objekt"}', "is not supported: Invalid type: objekt"),
        ('{"type": "string", "pattern": "("}', "unclosed group"),
        ('{"minimum": 5, "maximum": 3, "type": "integer"}', "minimum .5. is greater than maximum .3."),
        ('{"not": {"type": "string"}}', 'Unimplemented keys: ."not".'),
        ('{"$ref": "https://example.com/schema"}', "not present in a registry"),
    ],
)
def test_an_unsupported_schema_is_refused_with_the_reason(schema: str, message: str, tokenizer: Tokenizer) -> None:
    """At submission, with llguidance's message; the batcher continues."""
    batcher = Batcher(engine(), tokenizer, Answers())
    with pytest.raises(ValueError, match=message):
        batcher.submit(request(schema=schema))
    assert batcher.stats.waiting == 0


def test_without_llguidance_the_error_names_the_package(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra."""
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    batcher = Batcher(engine(), tokenizer, Answers())
    with pytest.raises(ValueError, match="pip install 'llguidance>="):
        batcher.submit(request(schema="{}"))
    batcher.submit(request("free"))


def test_a_tokenizer_without_a_tokenizer_json_cannot_guide() -> None:
    """The request is refused at submission."""
    with pytest.raises(ValueError, match="tokenizer cannot be used for structured outputs"):
        Batcher(engine(), ByteTokenizer(), Answers()).submit(request(schema="{}"))


def test_a_real_model_answers_in_json(checkpoint: Any) -> None:
    """Through the CPU engine, guided and free requests in one batch."""
    from workers.engines.cpu.engine import CpuEngine

    path: Path = checkpoint("llama")
    cpu = CpuEngine(path, slots=4, max_len=256)
    cpu.load()
    requests = [request(name, schema, max_tokens=250) for name, schema in SCHEMAS.items() if name != "nested"]
    got = answers(cpu, [*requests, request("free", max_tokens=20)], load_tokenizer("cpu", str(path)))
    for guided in requests:
        assert_follows(got, guided.id, SCHEMAS[guided.id])
    assert len(got.ids("free")) == 20


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The schemas that llguidance compiles, in order."""
    import llguidance

    schemas: list[str] = []
    matcher = llguidance.LLMatcher

    class Recorded:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            return matcher(*arguments, **options)

        @staticmethod
        def grammar_from_json_schema(schema: str, **options: Any) -> str:
            schemas.append(schema)
            return matcher.grammar_from_json_schema(schema, **options)

    monkeypatch.setattr(llguidance, "LLMatcher", Recorded)
    return schemas


def test_the_choices_of_a_request_share_one_compilation(tokenizer: Tokenizer, compiled: list[str]) -> None:
    """A schema is compiled once, also one that is refused, and each choice goes its own way."""
    guides = Guides(tokenizer, VOCAB_SIZE, [EOS_ID])
    first, second = (
        guides.start(AnswerConstraint('{"enum": [true, 1]}')),
        guides.start(AnswerConstraint('{"enum": [true, 1]}')),
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="Invalid type"):
            guides.start(AnswerConstraint('{"type": "objekt"}'))

    first.advance(byte_level_tokenizer().token_to_id("1"))  # type: ignore[arg-type]

    assert compiled == ['{"enum": [true, 1]}', '{"type": "objekt"}']
    assert (first.ended, second.ended) == (True, False)


def test_the_least_recently_used_schemas_are_evicted(tokenizer: Tokenizer, compiled: list[str]) -> None:
    """The cache holds MAX_COMPILED schemas."""
    guides = Guides(tokenizer, VOCAB_SIZE, [EOS_ID])
    for number in [*range(MAX_COMPILED), 0, MAX_COMPILED, 0, 1]:
        guides.start(AnswerConstraint(f'{{"const": {number}}}'))
    assert compiled[MAX_COMPILED:] == [f'{{"const": {number}}}' for number in (MAX_COMPILED, 1)]


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_an_endless_reference_is_refused(schema: Any, tokenizer: Tokenizer) -> None:
    """No answer could satisfy it. The client made it, so that it is not an error of the engine."""
    batcher = Batcher(engine(), tokenizer, Answers())
    with pytest.raises(ValueError, match=r"the JSON schema is not supported: no answer can begin under it"):
        batcher.submit(request(schema=schema))


def test_a_schema_beyond_its_limits_ends_the_answer_as_invalid(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer ends as invalid, with one line of the reason; the engine continues."""
    monkeypatch.setattr(Guide, "forbidden", lambda self, size: None)
    monkeypatch.setattr(Guide, "error", property(lambda self: "the JSON schema is not supported: too many items"))
    got = answers(engine(), [request("guided", OBJECT), request("free", max_tokens=5)], tokenizer)
    assert (got.finish("guided"), got.finish("free")) == (FinishReason.INVALID, FinishReason.LENGTH)
    assert got.of("guided")[-1].error == "the JSON schema is not supported: too many items"
