from __future__ import annotations

import pickle

import jsonschema
import pytest
from pydantic import ValidationError

from placements.facts.core_range import CoreRange
from placements.spec.json_schema import json_schema
from placements.spec.notation import CorePin, source_kind
from placements.spec.parse import parse
from placements.spec.schema import ModelSpec, Replicas, Spec
from tests.placements.fleets import GPT2_XL, LLAMA_2_7B, model

TEXT = "models:\n  a: {source: ./a, cores: [0-7], tp_degree: 8}\n"


def read(text: str, base_dir: str | None = None) -> Spec:
    parsed = parse(text, "f.yaml", base_dir)
    assert parsed.spec is not None
    assert parsed.problems == ()
    return parsed.spec


def test_a_draft_is_resolved_like_the_source_and_starts_another_process() -> None:
    """k is 4 where it is not written; another draft, or another k, is another replica."""
    text = "models:\n  a: {source: ./a}\n  b: {source: ./a, draft: {source: ./d}}\n  c: {source: ./a, draft: "
    spec = read(text + "{source: ./d, k: 5}}\n", base_dir="/specs")
    alone, four, five = spec.models
    assert (alone.draft_path, four.draft_path, five.draft_path) == (None, "/specs/d", "/specs/d")
    assert four.draft is not None
    assert four.draft.k == 4
    assert len({alone.started_with, four.started_with, five.started_with}) == 3


def test_fields_of_the_weights_and_the_cache_change_the_process() -> None:
    """Their graphs differ; placement and host needs are not part of the process."""
    text = "models:\n  a: {source: ./a}\n  b: {source: ./a, quantize: int8}\n"
    text += "  c: {source: ./a, group_query_attention: replicated-heads}\n"
    text += "  d: {source: ./a, spread: host, host_memory_gib: 9}\n"
    plain, small, dealt, apart = (model.started_with for model in read(text).models)
    assert len({plain, small, dealt}) == 3
    assert apart == plain


def test_every_shape_changes_the_process_but_the_order_of_options_does_not() -> None:
    """Also of nested options."""
    text = "models:\n" + "".join(
        f"  m{i}: {{source: ./a, {fields}}}\n"
        for i, fields in enumerate(
            [
                "tp_degree: 1",
                "quantize_kv: fp8",
                "buckets: {prefill: [128]}",
                "sampling: device",
                "fuse_qkv: true",
                "compiler: {optlevel: 1}",
                "engine_options: {a: {b: 1, c: [2]}}",
                "engine_options: {a: {b: 1, c: [3]}}",
            ]
        )
    )
    assert len({model.started_with for model in read(text).models}) == 8
    first, second = (
        read(f"models: {{a: {{source: ./a, engine_options: {options}}}}}").models[0].started_with
        for options in ("{a: {b: 1, c: 2}, d: 3}", "{d: 3, a: {c: 2, b: 1}}")
    )
    assert first == second


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/m/a", "path"),
        ("./a", "path"),
        ("../a", "path"),
        ("~/a", "path"),
        ("s3://bucket/prefix", "s3"),
        ("s3://bucket", "s3"),
        ("gpt2", "hub"),
        ("meta-llama/Llama-2-7b-chat-hf", "hub"),
    ],
)
def test_the_beginning_of_a_source_decides_its_kind(source: str, kind: str) -> None:
    """The beginning decides."""
    assert source_kind(source) == kind


@pytest.mark.parametrize("source", ["http://x/y", "s3://", "s3://B_d/x", "a/b/c", "a b", "", "-x", "s3:/bucket/x"])
def test_an_invalid_source_is_rejected_with_its_text(source: str) -> None:
    with pytest.raises(ValueError) as caught:
        source_kind(source)
    assert f'"{source}"' in str(caught.value)


def test_a_relative_source_begins_at_the_spec_file() -> None:
    """base_dir is the folder of the file, not the current one."""
    (tiny,) = read("models: {a: {source: ../tiny, neff_cache: ./neffs}}", "/specs").models
    assert (tiny.source_path, tiny.neff_cache_location) == ("/specs/../tiny", "/specs/neffs")


def test_an_absolute_source_stays_and_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """~ is the user's home, for any folder of the spec."""
    monkeypatch.setenv("HOME", "/home/me")
    spec = read("models: {a: {source: /m/a}, b: {source: ~/b}}", "/specs")
    assert [entry.source_path for entry in spec.models] == ["/m/a", "/home/me/b"]


def test_s3_and_hub_sources_have_no_path() -> None:
    """Only a path source has one."""
    spec = read("models: {a: {source: s3://bucket/x, neff_cache: s3://neffs/x}, b: {source: org/b}}")
    assert [(m.source_kind, m.source_path, m.neff_cache_location) for m in spec.models] == [
        ("s3", None, "s3://neffs/x"),
        ("hub", None, None),
    ]


def test_defaults_of_a_model() -> None:
    """With only its source given."""
    (m,) = read("models: {a: {source: ./a}}").models
    assert (m.engine, m.dtype, m.tp_degree, m.max_batch, m.max_len, m.cores) == ("auto", None, 1, 4, None, ())
    assert (m.replicas, m.neff_cache, m.priority, m.max_queue, m.threads) == (
        Replicas(min=1, max=1),
        None,
        0,
        256,
        "share",
    )
    assert (m.allow_head_padding, m.allow_degrees, m.hbm_overhead_gib) == (False, (), None)
    assert m.allow_pickle is False


def test_allow_pickle_is_a_default_too_and_starts_another_process() -> None:
    """A model's own word counts more than the default's."""
    spec = read("defaults: {allow_pickle: true}\nmodels: {a: {source: ./a}, b: {source: ./a, allow_pickle: false}}\n")
    allowed, refused = spec.models
    assert (allowed.allow_pickle, refused.allow_pickle) == (True, False)
    assert allowed.started_with != refused.started_with


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("2", (2, 2)),
        ("{min: 0, max: 4}", (0, 4)),
        ("{min: 3}", (3, 3)),
        ("{min: 0}", (0, 1)),
        ("{max: 3}", (1, 3)),
        ("{}", (1, 1)),
    ],
)
def test_replicas_may_be_written_short(text: str, bounds: tuple[int, int]) -> None:
    """A number is both bounds; max defaults to min, and min to 1."""
    (m,) = read(f"models: {{a: {{source: ./a, replicas: {text}}}}}").models
    assert (m.replicas.min, m.replicas.max) == bounds


def test_length_is_max_len_or_2048_or_what_the_checkpoint_allows() -> None:
    """An explicit length is kept; the default is reduced to the checkpoint's positions."""
    given, default = model("m", max_len=4000), model("m")
    assert (given.length(GPT2_XL), default.length(GPT2_XL), default.length(LLAMA_2_7B), default.length(None)) == (
        4000,
        1024,
        2048,
        2048,
    )


@pytest.mark.parametrize(
    ("text", "pin"),
    [
        ("0-7", CorePin(CoreRange(0, 7))),
        ("5", CorePin(CoreRange(5, 5))),
        ("inf2.48xlarge/0:0-7", CorePin(CoreRange(0, 7), "inf2.48xlarge/0")),
        ("fd00::1:0-7", CorePin(CoreRange(0, 7), "fd00::1")),
    ],
)
def test_a_pin_names_cores_and_perhaps_a_host(text: str, pin: CorePin) -> None:
    """Pins read and print the same."""
    assert (CorePin.parse(text), str(pin)) == (pin, text)


def test_a_pin_without_a_host_before_its_colon_is_rejected() -> None:
    """ ":0-7" has no host."""
    with pytest.raises(ValueError, match="has no host"):
        CorePin.parse(":0-7")


def test_specs_are_frozen() -> None:
    """Nothing in a spec can be set."""
    spec = read(TEXT)
    with pytest.raises(ValidationError):
        spec.models[0].tp_degree = 4  # type: ignore[misc]


def test_the_place_of_a_value_is_not_part_of_it() -> None:
    """Two texts with the same content give equal specs."""
    assert read(TEXT) == read("# other lines\n\n" + TEXT)


def test_a_spec_survives_pickling_with_its_places() -> None:
    """The controller gets it unchanged."""
    spec = pickle.loads(pickle.dumps(read(TEXT)))
    assert (spec, spec.where("models", "a", "cores", 0)) == (read(TEXT), "f.yaml:2:28")


def test_the_json_of_a_model_gives_the_same_model() -> None:
    """It can be validated again."""
    (m,) = read(TEXT).models
    assert ModelSpec.model_validate_json(m.model_dump_json()) == m


def test_the_place_of_a_missing_key_is_that_of_the_key_above() -> None:
    """A missing field has the place of its model, a model without a file none."""
    spec = read(TEXT)
    assert (spec.where("models", "a", "max_len"), spec.where("hosts"), Spec().where("hosts")) == (
        "f.yaml:2:3",
        "f.yaml:1:1",
        "",
    )


def test_unknown_fields_are_refused_by_the_schema_itself() -> None:
    """extra="forbid" holds for specs built in Python, too."""
    with pytest.raises(ValidationError):
        ModelSpec.model_validate({"name": "a", "source": "./a", "tp": 8})


@pytest.mark.parametrize("name", ["a b", "", "a/b", "-a", ".a", "a" * 64, "ä"])
def test_a_model_s_name_is_safe_for_paths_and_actors(name: str) -> None:
    """Letters, digits, dot, underscore and dash."""
    with pytest.raises(ValidationError, match="is not a usable name"):
        model(name)


def test_the_json_schema_is_valid() -> None:
    """Draft 2020-12."""
    jsonschema.Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize(
    ("document", "valid"),
    [
        ({"models": {"a": {"source": "./a", "replicas": 2, "cores": ["0-7", 8], "threads": 4}}}, True),
        ({"models": {"a": {"source": "./a", "replicas": {"min": 0, "max": 2}}}, "defaults": {"engine": "cpu"}}, True),
        ({"hosts": {"instance": "inf2.xlarge", "reserve": {"cores": [1]}}, "models": {"a": {"source": "./a"}}}, True),
        ({"hosts": [{"instance": "trn2.48xlarge", "lnc": 1}], "models": {"a": {"source": "./a"}}}, True),
        ({"models": {"a": {"source": "./a", "spread": "host", "quantize": "int8"}}}, True),
        ({"models": {"a": {"source": "./a", "spread": {"host": 2}, "host_memory_gib": 2.5}}, "defaults": None}, True),
        ({"engines": {"nxd-inference": {"python": "/p"}}, "models": {"a": {"source": "./a"}}}, True),
        ({"engines": None, "models": {"a": {"source": "./a"}}}, True),
        ({"engines": {"auto": {"python": "/p"}}, "models": {"a": {"source": "./a"}}}, False),
        ({"engines": {"nxd-inference": {"pyhton": "/p"}}, "models": {"a": {"source": "./a"}}}, False),
        ({"models": {"a": {"source": "./a", "buckets": {"prefill": [1, 2]}, "compiler": {"optlevel": 1}}}}, True),
        ({"models": {"a": {"source": "./a", "engine_options": {"a": {"b": [1, None]}}}}}, True),
        ({"models": {"a": {"source": "./a", "buckets": {"prefill": [0]}}}}, False),
        ({"models": {"a": {"source": "./a", "sampling": "gpu"}}}, False),
        ({"models": {"a": {"source": "./a", "compiler": {"optlevel": 5}}}}, False),
        ({"hosts": [], "models": {"a": {"source": "./a"}}}, False),
        ({"hosts": {"instance": "inf2.tiny"}, "models": {"a": {"source": "./a"}}}, False),
        ({"hosts": {"instance": "trn2.48xlarge", "lnc": 3}, "models": {"a": {"source": "./a"}}}, False),
        ({"models": {"a": {"source": "./a", "spread": "device"}}}, False),
        ({"models": {"a": {"source": "./a", "quantize": "int4"}}}, False),
        ({"models": {"a": {"source": "./a", "group_query_attention": "heads"}}}, False),
        ({"models": {"a": {"source": "./a", "tp": 2}}}, False),
        ({"models": {"a b": {"source": "./a"}}}, False),
        ({"models": {"a": {"source": "./a", "engine": "tnx"}}}, False),
        ({"defaults": {"source": "./a"}, "models": {"a": {"source": "./a"}}}, False),
        ({"models": {}}, True),
        ({}, False),
    ],
)
def test_the_json_schema_agrees_with_the_parser(document: dict[str, object], valid: bool) -> None:
    """Editors and `validate` agree on these documents."""
    import json

    by_schema = jsonschema.Draft202012Validator(json_schema()).is_valid(document)
    assert (by_schema, parse(json.dumps(document)).ok) == (valid, valid)


def test_the_folder_of_a_quantized_checkpoint_is_relative_to_the_spec() -> None:
    """Like the source; the options as they are written stay."""
    options = {"quantized_checkpoints_path": "../q", "vocab_parallel": True}
    quantized = ModelSpec(name="m", source="./m", base_dir="/specs", engine_options=options)
    assert quantized.given_options == {"quantized_checkpoints_path": "/specs/../q", "vocab_parallel": True}
    assert quantized.engine_options == options
    other = quantized.model_copy(update={"base_dir": "/elsewhere"})
    assert other.started_with != quantized.started_with
