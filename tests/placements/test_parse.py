"""What a spec's text may do wrong, and what is said about it. Rules about values are in test_checks."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from placements.spec.parse import parse
from placements.spec.problems import Problem
from placements.spec.schema import HostsSpec, Spec, Spread
from tests.placements.fleets import brief
from tests.tiers import everyday

MODELS = "models: {a: {source: ./a}}\n"


def problems(text: str | bytes) -> tuple[Problem, ...]:
    return parse(text, "f.yaml").problems


def only(text: str | bytes) -> Problem:
    (problem,) = problems(text)
    return problem


def model(fields: str) -> str:
    """A spec of one model; its fields begin at line 3, column 5."""
    return f"models:\n  a:\n    {fields}\n    source: ./a\n"


def test_a_valid_spec_has_no_problems() -> None:
    """Everything that DESIGN shows in one file."""
    text = """
    version: 1
    name: chat-fleet
    hosts: {instance: inf2.48xlarge, count: 1, reserve: {vcpus: 8, cores: [23]}}
    defaults: {engine: transformers-neuronx, dtype: bf16}
    models:
      llama-2-7b-chat:
        source: s3://models/llama-2-7b-chat-hf
        tp_degree: 8
        max_batch: 8
        max_len: 4096
        cores: ["0-7"]
        replicas: {min: 1, max: 2}
        neff_cache: s3://neffs/llama-2-7b-chat
        priority: 10
      tiny: {source: ./models/tiny, engine: cpu, replicas: {min: 0, max: 4}}
    """
    assert problems(text) == ()


def test_defaults_apply_to_models_without_the_field() -> None:
    """A model's own value takes precedence."""
    spec = parse(
        "defaults: {engine: cpu, tp_degree: 2}\nmodels: {a: {source: ./a}, b: {source: ./b, tp_degree: 4}}"
    ).spec
    assert spec is not None
    assert [(m.engine, m.tp_degree) for m in spec.models] == [("cpu", 2), ("cpu", 4)]


def test_where_a_default_is_written_is_the_place_of_the_field() -> None:
    """Checks point at the defaults when the value comes from there."""
    spec = parse("defaults:\n  tp_degree: 3\nmodels: {a: {source: ./a}}", "f.yaml").spec
    assert spec is not None
    assert spec.where("models", "a", "tp_degree") == "f.yaml:2:3"


@pytest.mark.parametrize(
    ("text", "id", "where", "part"),
    [
        # YAML itself
        ("models: [", "yaml-syntax", "1:10", "expected"),
        ("models:\n\ta: 1", "yaml-syntax", "2:1", "a tab is used"),
        ("a: b: c", "yaml-syntax", "1:5", "mapping values are not allowed"),
        ("models: *x", "yaml-syntax", "1:9", "undefined alias"),
        ("models: \x00", "yaml-syntax", "1:9", "U+0000"),
        (b"models:\n a\xff", "yaml-syntax", "2:3", "0xff is not UTF-8"),
        ("", "spec-empty", "1:1", "no content"),
        ("# only a comment\n", "spec-empty", "1:1", "no content"),
        ("---\n...\n", "spec-empty", "1:1", "no content"),
        ("- a\n", "wrong-type", "1:1", "the spec is - a, a list"),
        ("hello", "wrong-type", "1:1", 'the spec is "hello", text'),
        (MODELS + "---\n" + MODELS, "yaml-many-documents", "3:1", "second document"),
        ("models:\n  a: {source: !x y}", "yaml-tag", "2:15", '"!x"'),
        (model("max_len: !!python/name:os.system x"), "yaml-tag", "3:14", "python/name:os.system"),
        (model("max_len: !secret x"), "yaml-tag", "3:14", '"!secret"'),
        # keys
        (model("tp_degre: 8"), "unknown-key", "3:5", '"tp_degre"'),
        (model("source: ./b"), "duplicate-key", "4:5", "the first is at line 3"),
        (MODELS + MODELS, "duplicate-key", "2:1", '"models" is a duplicate; the first is at line 1'),
        ("models:\n  a: {source: ./a}\n  a: {source: ./b}", "duplicate-key", "3:3", '"a"'),
        ("nmae: x\n" + MODELS, "unknown-key", "1:1", '"nmae"'),
        ("models:\n  on: {source: ./a}", "yaml-unquoted", "2:3", "the key on is true in YAML"),
        ("models:\n  7: {source: ./a}", "yaml-unquoted", "2:3", "the key 7 is a number in YAML"),
        ("models:\n  ? [a]\n  : {}\n  b: {source: ./a}", "wrong-type", "2:5", "the key [a] is not a word"),
        # what must be there
        ("version: 1", "missing-key", "1:1", "lists no models"),
        ("{}", "missing-key", "1:1", "lists no models"),
        ("models:\n", "missing-key", "1:1", "lists no models"),
        ("models:\n  a: {tp_degree: 2}", "missing-key", "2:3", 'model "a" has no source'),
        ("models:\n  a: {}", "missing-key", "2:3", 'model "a" has no source'),
        # shapes
        ("models:\n  - name: a", "wrong-type", "1:1", "models is - name: a, a list"),
        ("models: 3", "wrong-type", "1:1", "models is 3, a number"),
        ("models:\n  a: ./a", "wrong-type", "2:3", 'model "a" is "./a", text'),
        ("models:\n  a:", "wrong-type", "2:3", 'model "a" is empty'),
        ("hosts: inf2.48xlarge\n" + MODELS, "wrong-type", "1:1", 'hosts is "inf2.48xlarge", text'),
        ("hosts:\n" + MODELS, "wrong-type", "1:1", "hosts is empty"),
        ("defaults: [cpu]\n" + MODELS, "wrong-type", "1:1", "defaults is [cpu], a list"),
        # values
        ("version: true\n" + MODELS, "wrong-type", "1:1", "version: true is a boolean; it must be 1"),
        ("version: 2\n" + MODELS, "unknown-value", "1:1", "version is 2; it must be 1"),
        ("name: my fleet\n" + MODELS, "bad-name", "1:1", '"my fleet"'),
        ("models:\n  a b: {source: ./a}", "bad-name", "2:3", '"a b"'),
        (model("tp_degree: eight"), "wrong-type", "3:5", 'tp_degree is "eight", text; it must be a whole number'),
        (model('tp_degree: "8"'), "wrong-type", "3:5", 'tp_degree is "8", text'),
        (model("tp_degree: 8.0"), "wrong-type", "3:5", "tp_degree is 8.0, a number"),
        (model("tp_degree: yes"), "wrong-type", "3:5", "tp_degree is yes, a boolean"),
        (model("tp_degree: [8]"), "wrong-type", "3:5", "tp_degree is [8], a list"),
        (model("tp_degree:"), "wrong-type", "3:5", "tp_degree is empty"),
        (model("tp_degree: 0"), "out-of-range", "3:5", "tp_degree is 0; it must be at least 1"),
        (model("tp_degree: 1000"), "out-of-range", "3:5", "tp_degree is 1000; it must be at most 128"),
        (model("tp_degree: 010"), "yaml-number", "3:16", "010 is octal in YAML, which is 8"),
        (model("max_len: 1:30"), "yaml-number", "3:14", "base-60"),
        (model("max_len: " + "9" * 5000), "yaml-number", "3:14", "not a supported number"),
        (model("engine: tnx"), "unknown-value", "3:5", 'engine is "tnx"; it must be one of auto, cpu, echo'),
        (model("engine: on"), "yaml-unquoted", "3:5", "engine is on, which YAML reads as true"),
        (model("dtype: bfloat16"), "unknown-value", "3:5", 'dtype is "bfloat16"'),
        (model("threads: many"), "wrong-type", "3:5", 'threads is "many", text; it must be share, lmi or'),
        (model("threads: 0"), "wrong-type", "3:5", "threads is 0"),
        (model("allow_head_padding: 1"), "wrong-type", "3:5", "it must be true or false"),
        (model("allow_pickle: safetensors"), "wrong-type", "3:5", "it must be true or false"),
        (model("allow_degrees: 6"), "wrong-type", "3:5", "it must be a list of whole numbers"),
        (model("allow_degrees: [6, x]"), "wrong-type", "3:24", 'allow_degrees[1] is "x"'),
        (model("hbm_overhead_gib: .nan"), "out-of-range", "3:5", "hbm_overhead_gib is .nan"),
        (model("hbm_overhead_gib: -1"), "out-of-range", "3:5", "it must be at least 0"),
        (model("engine_options: 3"), "wrong-type", "3:5", "engine_options is 3, a number; it must be a mapping"),
        (model("engine_options: [a]"), "wrong-type", "3:5", "engine_options is [a], a list; it must be a mapping"),
        (model("engine_options: {a: {b: 010}}"), "yaml-number", "3:29", "010 is octal"),
        (model("engine_options: {a: [1, !x 2]}"), "yaml-tag", "3:29", "!x"),
        (model("quantize_kv: f8"), "unknown-value", "3:5", 'quantize_kv is "f8"; it must be int8 or fp8'),
        (model("buckets: [128]"), "wrong-type", "3:5", "buckets is [128], a list; it must be a mapping, like"),
        (model("buckets: {prefill: 128}"), "wrong-type", "3:15", "it must be a list of whole numbers, like"),
        (model("buckets: {prefill: [128, x]}"), "wrong-type", "3:30", 'buckets.prefill[1] is "x"'),
        (model("buckets: {decode: [0]}"), "out-of-range", "3:24", "buckets.decode[0] is 0; it must be at least 1"),
        (model("buckets: {context: [128]}"), "unknown-key", "3:15", '"context" is not a known key of buckets'),
        (model("context_length_estimate: [8]"), "unknown-key", "3:5", '"context_length_estimate"'),
        (model("sampling: gpu"), "unknown-value", "3:5", 'sampling is "gpu"; it must be host or device'),
        (model("on_device_sampling: true"), "unknown-key", "3:5", '"on_device_sampling"'),
        (model("fuse_qkv: 1"), "wrong-type", "3:5", "fuse_qkv is 1, a number; it must be true or false"),
        (model("compiler: -O2"), "wrong-type", "3:5", "it must be a mapping, like {optlevel: 1}"),
        (
            model("compiler: {optlevel: 4}"),
            "unknown-value",
            "3:16",
            "compiler.optlevel is 4; it must be 1, 2 or 3",
        ),
        (model('compiler: {optlevel: "2"}'), "wrong-type", "3:16", "it must be 1, 2 or 3"),
        (model("compiler: {optlevel: true}"), "wrong-type", "3:16", "it must be 1, 2 or 3"),
        (model("compiler: {flags: [a]}"), "wrong-type", "3:16", "compiler.flags is [a], a list; it must be text"),
        (model("compiler: {jobs: 2}"), "unknown-key", "3:16", '"jobs" is not a known key of compiler'),
        (model("compiler: {workers: 0}"), "out-of-range", "3:16", "compiler.workers is 0; it must be at least 1"),
        # engines
        ("engines: {tnx: {python: /p}}\n" + MODELS, "unknown-key", "1:11", '"tnx" is not a known key of engines'),
        ("engines: {auto: {python: /p}}\n" + MODELS, "unknown-key", "1:11", '"auto" is not a known key of engines'),
        ("engines: {nxd-inference: /p}\n" + MODELS, "wrong-type", "1:11", "a mapping, like {python:"),
        ("engines: {nxd-inference: {python: 3}}\n" + MODELS, "wrong-type", "1:27", "python is 3, a number; it must be"),
        ("engines: {nxd-inference: {python: ' '}}\n" + MODELS, "wrong-type", "1:27", "an interpreter is a path"),
        ("engines: {nxd-inference: {interpreter: /p}}\n" + MODELS, "unknown-key", "1:27", '"interpreter"'),
        ("engines: [nxd-inference]\n" + MODELS, "wrong-type", "1:1", "a mapping from engines to settings"),
        ("engine: cpu\n" + MODELS, "unknown-key", "1:1", '"engine" is not a known key of a spec'),
        (model("draft: 3"), "wrong-type", "3:5", "draft is 3, a number; it must be a mapping with a source"),
        (model("draft: {k: 3}"), "wrong-type", "3:5", "it must be a mapping with a source"),
        (model("draft: {source: ./d, k: 0}"), "out-of-range", "3:26", "draft.k is 0; it must be at least 1"),
        (model("draft: {source: ./d, k: 17}"), "out-of-range", "3:26", "draft.k is 17; it must be at most 16"),
        (model("draft: {source: ./d, k: two}"), "wrong-type", "3:26", 'draft.k is "two", text; it must be a whole'),
        (model('draft: {source: "ftp://d"}'), "bad-source", "3:13", "unknown scheme"),
        (model("draft: {source: ./d, tokens: 2}"), "unknown-key", "3:26", '"tokens" is not a known key'),
        ("defaults: {draft: {source: ./d}}\n" + MODELS, "unknown-key", "1:12", '"draft" is not a known key'),
        (model("neff_cache: gpt2"), "bad-source", "3:5", '"gpt2" is not a path'),
        (model("replicas: 0"), "out-of-range", "3:5", "replicas is 0; it must be at least 1"),
        (model("replicas: many"), "wrong-type", "3:5", "a whole number, or {min: 1, max: 2}"),
        (model("replicas: {min: 0, max: 0}"), "out-of-range", "3:24", "replicas.max is 0"),
        (model("update: {hold_s: 5}"), "unknown-key", "3:14", '"hold_s" is not a known key of update'),
        (model("replicas: {min: 0, mxa: 2}"), "unknown-key", "3:24", '"mxa" is not a known key of replicas'),
        (model("cores: 0-7"), "wrong-type", "3:5", 'cores is "0-7", text; it must be a list of ranges'),
        (model('cores: ["7-0"]'), "bad-range", "3:13", '"7-0" runs backwards'),
        (model('cores: ["0-7", "8-x"]'), "bad-range", "3:20", '"8-x" is not a core range'),
        (model('cores: ["0,1"]'), "bad-range", "3:13", '"0,1" is a list'),
        (model('cores: [":0-7"]'), "bad-range", "3:13", '":0-7" has no host'),
        (model("cores: [4.5]"), "wrong-type", "3:13", "cores[0] is 4.5, a number; it must be a range"),
        (model("cores: [-1]"), "bad-range", "3:13", '"-1" is not a core range'),
        (model("cores: [true]"), "wrong-type", "3:13", "cores[0] is true"),
        ("models:\n  a: {source: http://x/y}", "bad-source", "2:7", '"http://x/y" has an unknown scheme'),
        ("models:\n  a: {source: yes}", "yaml-unquoted", "2:7", "source is yes, which YAML reads as true"),
        ("models:\n  a: {source: 7}", "yaml-unquoted", "2:7", "source is 7, which YAML reads as a number"),
        ("models:\n  a: {source: }", "wrong-type", "2:7", "source is empty"),
        ("models:\n  a: {source: ''}", "bad-source", "2:7", '"" is not a hub id'),
        # hosts
        ("hosts: {count: 2}\n" + MODELS, "hosts-ambiguous", "1:1", "has no instance type"),
        (
            "hosts: {instance: inf2.xlarge, emulate: inf2.xlarge}\n" + MODELS,
            "hosts-ambiguous",
            "1:1",
            "has both instance and emulate",
        ),
        ("hosts: {instance: inf2.4xlarge}\n" + MODELS, "unknown-instance", "1:9", '"inf2.4xlarge"'),
        ("hosts: {emulate: inf1.24xlarge}\n" + MODELS, "unsupported-instance", "1:9", "supported are inf2.xlarge"),
        ('engines: {vllm: {plugin: "0.1"}}\n' + MODELS, "unknown-value", "1:18", 'the first supported one is "0.2"'),
        ('engines: {vllm: {plugin: "newest"}}\n' + MODELS, "unknown-value", "1:18", "not a release of vllm-neuron"),
        ("engines: {vllm: {plugin: 0.33}}\n" + MODELS, "wrong-type", "1:18", "a release in quotes"),
        ("hosts: {instance: trn9.48xlarge}\n" + MODELS, "unknown-instance", "1:9", '"trn9.48xlarge"'),
        ("hosts: {instance: }\n" + MODELS, "wrong-type", "1:9", "instance is empty; it must be an instance type"),
        (
            "hosts: {instance: inf2.xlarge, lnc: 2}\n" + MODELS,
            "lnc-without-choice",
            "1:32",
            "inf2.xlarge does not support it",
        ),
        ("hosts: {emulate: trn1.32xlarge, lnc: 1}\n" + MODELS, "lnc-without-choice", "1:33", "only trn2 and trn3 do"),
        ("hosts: {instance: trn2.48xlarge, lnc: 3}\n" + MODELS, "unknown-value", "1:34", "lnc is 3; it must be 1 or 2"),
        ("hosts: {instance: trn2.48xlarge, lnc: '2'}\n" + MODELS, "wrong-type", "1:34", "it must be 1 or 2"),
        ("hosts: {instance: trn2.48xlarge, lnc: true}\n" + MODELS, "wrong-type", "1:34", "it must be 1 or 2"),
        ("hosts: {instance: inf2.xlarge, count: 4097}\n" + MODELS, "out-of-range", "1:32", "it must be at most 4096"),
        ("hosts: {instance: inf2.xlarge, reserve: {memory_gib: -1}}\n" + MODELS, "out-of-range", "1:42", "at least 0"),
        ("hosts: {instance: inf2.xlarge, reserve: {memory_gib: a}}\n" + MODELS, "wrong-type", "1:42", "number of GiB"),
        # hosts of several types
        ("hosts: []\n" + MODELS, "wrong-type", "1:1", "hosts is an empty list"),
        ("hosts: [inf2.xlarge]\n" + MODELS, "wrong-type", "1:9", 'hosts[0] is "inf2.xlarge", text'),
        ("hosts: [[]]\n" + MODELS, "wrong-type", "1:9", "hosts[0] is [], a list; it must be a mapping"),
        (
            "hosts: [{instance: inf2.xlarge}, {}]\n" + MODELS,
            "hosts-ambiguous",
            "1:34",
            "hosts[1] has no instance type",
        ),
        (
            "hosts:\n  - {instance: inf2.xlarge}\n  - {instance: trn1.2xlarge, count: 0}\n" + MODELS,
            "out-of-range",
            "3:30",
            "hosts[1].count is 0",
        ),
        (
            "hosts:\n  - {instance: inf2.xlarge}\n  - {instance: trn1.2xlarge, cuont: 2}\n" + MODELS,
            "unknown-key",
            "3:30",
            '"cuont" is not a known key of hosts[1]',
        ),
        (
            "hosts:\n  - {instance: inf2.xlarge}\n  - {instance: trn1.3xlarge}\n" + MODELS,
            "unknown-instance",
            "3:6",
            '"trn1.3xlarge"',
        ),
        (
            "hosts:\n  - {instance: inf2.xlarge}\n  - {instance: trn1.2xlarge, reserve: {cores: [x]}}\n" + MODELS,
            "bad-range",
            "3:40",
            "hosts[1].reserve.cores",
        ),
        (
            "hosts:\n  - {instance: inf2.xlarge}\n  - {instance: trn1.2xlarge, reserve: {cpus: 1}}\n" + MODELS,
            "unknown-key",
            "3:40",
            "hosts[1].reserve",
        ),
        (
            "hosts:\n  - {instance: trn2.48xlarge, lnc: 1}\n  - {instance: trn1.2xlarge, lnc: 1}\n" + MODELS,
            "lnc-without-choice",
            "3:30",
            "trn1.2xlarge does not support it",
        ),
        (
            "hosts: [{instance: inf2.xlarge}, {emulate: trn1.2xlarge}]\n" + MODELS,
            "hosts-mixed",
            "1:35",
            "real machines (instance) and emulated ones (emulate)",
        ),
        (
            "hosts: [{instance: inf2.xlarge, count: 4000}, {instance: trn1.2xlarge, count: 97}]\n" + MODELS,
            "out-of-range",
            "1:72",
            "more than 4096 machines in total",
        ),
        ("hosts: {instance: 7}\n" + MODELS, "yaml-unquoted", "1:9", "instance is 7"),
        ("hosts: {instance: inf2.xlarge, count: 0}\n" + MODELS, "out-of-range", "1:32", "count is 0"),
        ("hosts: {instance: inf2.xlarge, reserve: 8}\n" + MODELS, "wrong-type", "1:32", "reserve is 8"),
        (
            "hosts: {instance: inf2.xlarge, reserve: {cores: 1}}\n" + MODELS,
            "wrong-type",
            "1:42",
            "reserve.cores is 1, a number; it must be a list of core ids",
        ),
        (
            'hosts: {instance: inf2.xlarge, reserve: {cores: ["x"]}}\n' + MODELS,
            "bad-range",
            "1:42",
            '"x" is not a core range',
        ),
        ("hosts: {instance: inf2.xlarge, reserve: {cpus: 1}}\n" + MODELS, "unknown-key", "1:42", "hosts.reserve"),
        # spreading, host memory, quantized weights, and how KV heads are dealt out
        (model("spread: device"), "wrong-type", "3:5", 'spread is "device", text; it must be host, or a mapping'),
        (model("spread: 2"), "wrong-type", "3:5", "spread is 2, a number"),
        (model("spread: {host: 0}"), "out-of-range", "3:14", "spread.host is 0; it must be at least 1"),
        (model("spread: {host: many}"), "wrong-type", "3:14", 'spread.host is "many"'),
        (model("spread: {device: 1}"), "unknown-key", "3:14", '"device" is not a known key of spread'),
        (model("host_memory_gib: 1 GiB"), "wrong-type", "3:5", "it must be a number of GiB"),
        (model("host_memory_gib: -0.5"), "out-of-range", "3:5", "it must be at least 0"),
        (model("quantize: s8"), "unknown-value", "3:5", 'quantize is "s8"; it must be int8 or fp8'),
        (model("quantize: 8"), "unknown-value", "3:5", "quantize is 8; it must be int8 or fp8"),
        (model("quantize: true"), "wrong-type", "3:5", "quantize is true, a boolean; it must be int8"),
        (
            model("group_query_attention: heads"),
            "unknown-value",
            "3:5",
            "it must be one of shard-over-heads, shard-over-batch",
        ),
        (model("load_in_8bit: true"), "unknown-key", "3:5", '"load_in_8bit"'),
        (model("anti_affinity: false"), "unknown-key", "3:5", '"anti_affinity"'),
        (model("spread: {max_per_host: 2}"), "unknown-key", "3:14", '"max_per_host"'),
        # defaults
        ("defaults: {source: ./a}\n" + MODELS, "unknown-key", "1:12", '"source" is not a known key of defaults'),
        ("defaults: {engine: tnx}\n" + MODELS, "unknown-value", "1:12", 'engine is "tnx"'),
        ("defaults: {replicas: {min: x}}\n" + MODELS, "wrong-type", "1:23", 'replicas.min is "x"'),
        (
            "version: 1\nengines: {vllm: {warm: true}, cpu: {warm: true}}\nmodels: {}\n",
            "setting-unsupported",
            "2:18",
            "engines.vllm.warm has no effect",
        ),
    ],
)
def test_each_error_is_reported_once_at_its_place(text: str | bytes, id: str, where: str, part: str) -> None:
    """With line and column, and the value as written."""
    problem = only(text)
    assert (problem.id, problem.severity, problem.where) == (id, "error", f"f.yaml:{where}")
    assert part in problem.what


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (model("tp: 8"), 'did you mean "tp_degree"?'),
        (model("tensor_parallel_degree: 8"), 'did you mean "tp_degree"?'),
        (model("TP-Degree: 8"), 'did you mean "tp_degree"?'),
        (model("update: {hold_s: 5}"), 'did you mean "max_swap_s"?'),
        (model("batch_size: 8"), 'did you mean "max_batch"?'),
        (model("n_positions: 512"), 'did you mean "max_len"?'),
        (model("amp: bf16"), 'did you mean "dtype"?'),
        (model("replica: 2"), 'did you mean "replicas"?'),
        (model("max_lenn: 512"), 'did you mean "max_len"?'),
        (model("load_in_8bit: true"), "write quantize: int8"),
        (model("gqa: shard-over-heads"), 'did you mean "group_query_attention"?'),
        (model("anti_affinity: true"), "write spread: host"),
        (model("max_per_host: 2"), "write spread: {host: 2}"),
        (model("spread: {max_per_host: 2}"), 'did you mean "host"?'),
        (model("memory: 12"), 'did you mean "host_memory_gib"?'),
        ("hosts: {instance: inf2.xlarge, reserve: {memory: 4}}\n" + MODELS, 'did you mean "memory_gib"?'),
        ("hosts: {instance: trn2.48xlarge, virtual_core_size: 1}\n" + MODELS, 'did you mean "lnc"?'),
        (model("quantize: static_int8"), 'did you mean "int8"?'),
        (model("quantize: s8"), 'did you mean "int8"?'),
        (model("group_query_attention: shard_over_batch"), 'did you mean "shard-over-batch"?'),
        (model("name: x"), "the name of a model is the key of its fields"),
        ("tp_degree: 8\n" + MODELS, "set tp_degree in a model or in defaults"),
        ("instance: inf2.xlarge\n" + MODELS, "set instance in hosts"),
        ("defaults: {cores: []}\n" + MODELS, "set cores in each model"),
        ("model: {a: {source: ./a}}", 'did you mean "models"?'),
        ("hosts: {instance: inf2.48xl}\n" + MODELS, 'did you mean "inf2.48xlarge"?'),
        (model("engine: transformers_neuronx"), 'did you mean "transformers-neuronx"?'),
        (model("dtype: float16"), 'did you mean "fp16"?'),
        (model('max_len: "512"'), "write the number without quotes"),
        (model("max_len: 0512"), "write 512 without leading zeros"),
        (model("revision: no"), 'write "no" in quotes'),
        ("models:\n\ta: 1", "indent with spaces, not with tabs"),
        ("a: b: c", "quote a value"),
        ("models: [{source: ./a}]", "write each model as NAME: {source: ...} instead of a list item"),
        (model("tp_degree: 999"), "tp_degree can be 1, 2, 4, 8, 12, 16, 24 on inf2; 1, 2, 8, 16, 32 on trn1; "),
        ("hosts: {emulate: inf2.xlarge}\n" + model("tp_degree: 0"), "tp_degree can be 1, 2 on inf2.xlarge"),
    ],
)
def test_the_hint_suggests_the_intended_key(text: str, hint: str) -> None:
    """From common names of other tools, then by similarity."""
    assert any(hint in problem.hint for problem in problems(text))


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (model("pending_queue: 8"), "the nearest known keys are max_queue, engine, max_queue_bytes"),
        (model("scaling: {hold_time: 8}"), "the nearest known keys are hold_s, auto, idle_s"),
        ("hosts: {emulate: inf2.xlarge, reserve: {disk: 8}}\n" + MODELS, "known keys are vcpus, memory_gib, cores"),
    ],
)
def test_an_unknown_key_lists_the_three_nearest_keys(text: str, hint: str) -> None:
    """A model has some forty keys, too many to read."""
    assert only(text).hint == hint


LLAMA_SWAP = """\
healthCheckTimeout: 120
models:
  "qwen2.5:7b": {cmd: "llama-server --port ${PORT} -m q.gguf", proxy: "http://a", ttl: 300, checkEndpoint: /health}
groups: {small: {swap: false, members: ["qwen2.5:7b"]}}
"""
VLLM = "model: org/m\ntensor-parallel-size: 8\nmax-num-seqs: 4\nmax-model-len: 4096\ndevice: neuron\n"


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        (
            "apiVersion: apps/v1\nkind: Deployment\nspec: {}\n",
            "a Kubernetes manifest of kind Deployment",
            "write a spec",
        ),
        ("kind: [1]\napiVersion: v1\n---\nkind: Service\n", "a Kubernetes manifest, not", "write a spec"),
        ("cluster_name: a\nprovider: {type: aws}\n", "for Ray's cluster launcher", "docs/deploy-ec2.md"),
        ("applications:\n- import_path: a:b\n", "a config of Ray Serve", "write a spec"),
        ("services:\n  vllm: {image: v}\n", "for docker compose", "docs/from-vllm-and-lmi.md"),
        (LLAMA_SWAP, "of llama-swap", "cmd is server.command, ttl is scaling.idle_s, checkEndpoint is server.ready"),
        (LLAMA_SWAP, "of llama-swap", "a name with : or / becomes an alias"),
        (
            VLLM,
            "of vLLM",
            "model is source, tensor-parallel-size is tp_degree, max-num-seqs is max_batch, max-model-len",
        ),
        ("max_num_seqs: 4\ntensor_parallel_size: 8\n", "of vLLM", "tensor_parallel_size is tp_degree"),
        ("engine=Python\noption.model_id=x\n", "like serving.properties of LMI", "docs/from-vllm-and-lmi.md"),
        ("# LMI\n\noption.model_id = a: b\nx=1\n", "like serving.properties of LMI", "docs/from-vllm-and-lmi.md"),
        (b"option.model_id=\xff\n", "like serving.properties of LMI", "docs/from-vllm-and-lmi.md"),
    ],
)
def test_a_file_of_another_tool_is_one_error_with_its_format(text: str | bytes, what: str, hint: str) -> None:
    """Its keys are not listed individually."""
    problem = only(text)
    assert (problem.id, problem.severity, problem.where) == ("not-a-spec", "error", "f.yaml:1:1")
    assert what in problem.what
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("cores", "hint"),
    [
        ('"0-7"', 'write cores: ["0-7"]'),
        ('"0,1,2,3,4,5,6,7"', 'write cores: ["0-7"]'),
        ("[[0, 1, 2, 3, 4, 5, 6, 7]]", 'write "0-7"'),
        ('["0,1,2,3,4,5,6,7"]', 'write "0-7"'),
        ('["0..7"]', 'write "0-7"'),
        ('["7-0"]', 'write "0-7"'),
        ("{first: 0}", ""),
        ("0", ""),
    ],
)
def test_cores_in_another_notation_are_one_error_with_the_right_one(cores: str, hint: str) -> None:
    problem = only(f"models: {{a: {{engine: echo, tp_degree: 8, cores: {cores}}}}}\n")
    assert problem.hint == hint


@pytest.mark.parametrize("text", [MODELS + "hosts: {emulate: inf2.xlarge}\n", model("cmd: x") + "version: 1\n"])
def test_a_spec_with_keys_of_another_tool_is_still_a_spec(text: str) -> None:
    assert all(problem.id != "not-a-spec" for problem in problems(text))


def test_all_problems_are_reported_at_once_in_the_order_of_the_file() -> None:
    """None hides another."""
    text = """\
version: 3
hosts: {instance: inf2.4xl, reserve: {cpu: 1}}
defaults: {engine: nope, source: x}
models:
  a: {tp: 8, cores: [x, 4.5, "0-7"], replicas: {max: no}}
  a: {source: ./a}
  "b c": {max_len: "9"}
extra: 1
"""
    assert brief(problems(text)) == [
        "unknown-value 1:1",
        "unknown-instance 2:9",
        "unknown-key 2:39",
        "unknown-value 3:12",
        "unknown-key 3:26",
        "missing-key 5:3",
        "unknown-key 5:7",
        "bad-range 5:22",
        "wrong-type 5:25",
        "wrong-type 5:49",
        "duplicate-key 6:3",
        "bad-name 7:3",
        "missing-key 7:3",
        "wrong-type 7:11",
        "unknown-key 8:1",
    ]


def test_readable_parts_are_kept() -> None:
    """Rules about the rest can be checked; unreadable parts are listed."""
    parsed = parse('models:\n  a: {source: ./a, tp: 8, max_len: x, cores: ["0-x", "8-15"]}', "f.yaml")
    assert parsed.spec is not None
    (a,) = parsed.spec.models
    assert (parsed.ok, a.tp_degree, a.broken, [str(pin) for pin in a.cores]) == (
        False,
        8,
        {"max_len", "cores"},
        ["8-15"],
    )


def test_a_pin_keeps_its_place_after_an_invalid_one() -> None:
    """The place of the second pin moves with it."""
    spec = parse('models:\n  a: {source: ./a, cores: ["0-x", "8-15"]}', "f.yaml").spec
    assert spec is not None
    assert spec.where("models", "a", "cores", 0) == "f.yaml:2:35"


@pytest.mark.parametrize(
    "text",
    [
        model("cores: [010]"),
        model("allow_degrees: [6, 010]"),
        model("replicas: {min: 010}"),
        model("replicas: 010"),
        model("threads: 010"),
        "hosts: {instance: inf2.xlarge, reserve: {cores: [010]}}\n" + MODELS,
        "hosts: {instance: inf2.xlarge, reserve: {vcpus: 010}}\n" + MODELS,
        "hosts: {instance: inf2.xlarge, reserve: 010}\n" + MODELS,
        "hosts: 010\n" + MODELS,
        "defaults: 010\n" + MODELS,
        "defaults: {tp_degree: 010}\n" + MODELS,
        "version: 010\n" + MODELS,
        "models: 010\n",
        "models: {a: 010}\n",
        "010",
    ],
)
def test_a_value_that_is_not_yaml_is_reported_once(text: str) -> None:
    """Problems of the YAML reader are not reported again by the schema."""
    assert only(text).id == "yaml-number"


def test_a_value_that_is_not_yaml_is_marked_as_invalid() -> None:
    """So that no rule checks the default in its place."""
    spec = parse(model("tp_degree: 010")).spec
    assert spec is not None
    assert spec.models[0].broken == {"tp_degree"}


def test_an_invalid_default_is_reported_once() -> None:
    """Not once for each model that uses it."""
    text = "defaults: {tp_degree: x}\nmodels: {a: {source: ./a}, b: {source: ./b}}"
    parsed = parse(text, "f.yaml")
    assert parsed.spec is not None
    assert (brief(parsed.problems), [m.broken for m in parsed.spec.models]) == (
        ["wrong-type 1:12"],
        [{"tp_degree"}, {"tp_degree"}],
    )


def test_anchors_and_merges_work_and_problems_point_at_the_written_place() -> None:
    """The mapping's own keys take precedence over merged ones."""
    text = """\
models:
  a: &small
    source: ./a
    tp_degree: 2
  b:
    <<: *small
    tp_degree: x
"""
    parsed = parse(text, "f.yaml")
    assert parsed.spec is not None
    assert (brief(parsed.problems), [m.source for m in parsed.spec.models]) == (["wrong-type 7:5"], ["./a", "./a"])


def test_a_list_of_merges_prefers_the_earlier() -> None:
    """As YAML's merge key is defined."""
    text = "models:\n  a: &a {source: ./a}\n  b: &b {source: ./b, tp_degree: 2}\n  c: {<<: [*a, *b]}\n"
    spec = parse(text).spec
    assert spec is not None
    assert (spec.models[2].source, spec.models[2].tp_degree) == ("./a", 2)


def test_merging_a_value_that_is_not_a_mapping_is_reported() -> None:
    """ "<<: 3"."""
    assert only("models:\n  a: {<<: 3, source: ./a}").what == '"<<" merges mappings, but 3 is not a mapping'


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "a: &a {k: v}\n"
        + "".join(
            f"{new}: &{new} {{<<: [{', '.join(['*' + old] * 9)}]}}\n"
            for old, new in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "models: &a {a: *a}",
        "models: &a [*a]",
        "models: &a {<<: *a}",
        "[" * 1000,
        "[" * 30 + "]" * 30,
        "models: " + "{a: " * 200 + "1" + "}" * 200,
        "# " + "x" * 300_000,
    ],
    ids=["laughs", "merged laughs", "self", "self list", "self merge", "open", "deep", "deep maps", "long"],
)
def test_hostile_documents_are_refused(text: str) -> None:
    """Aliases that explode, hold themselves, endless nesting and size end in one plain problem."""
    ids = {problem.id for problem in problems(text)}
    assert ids
    assert ids <= {"yaml-too-large", "yaml-syntax"}


ONE = "models: {a: {source: ./a}}\n"
BOMBS: dict[str, tuple[str | bytes, str]] = {
    "many models": (
        "models:\n" + "".join(f"  m{i}: {{sorce: ./a, tpdegree: 2}}\n" for i in range(2000)),
        "unknown-key",
    ),
    "many unknown keys": (
        f"models: {{a: {{source: ./a,{','.join(f'key{i}: 1' for i in range(4000))}}}}}",
        "unknown-key",
    ),
    "one key again and again": ("{" + "a: 1," * 17_000 + "}", "duplicate-key"),
    "duplicate keys in an alias": (
        f"x: &x {{{'a: 1,' * 20_000}}}\nmodels: {{{','.join(f'm{i}: *x' for i in range(20))}}}",
        "yaml-too-large",
    ),
    "a long text with many aliases": (
        f"a: &a {'x' * 100_000}\nmodels: {{{','.join(f'm{i}: {{source: *a}}' for i in range(2000))}}}",
        "yaml-too-large",
    ),
    "a long comment with many aliases": (
        f"a: &a [ # {'x' * 100_000}\n]\nmodels: {{{','.join(f'm{i}: *a' for i in range(2000))}}}",
        "wrong-type",
    ),
    "a list with many aliases": ("a: &a [" + "x," * 15_000 + "]\nmodels: *a", "yaml-too-large"),
    "a wide merge": (
        f"x: &x {{{','.join(f'k{i}: 1' for i in range(15_000))}}}\nmodels: {{a: {{<<: [{'*x,' * 8}]}}}}",
        "yaml-too-large",
    ),
    "keys that are lists": ("".join(f"? [a, b{i}]\n: 1\n" for i in range(5000)), "wrong-type"),
    "a long scalar": (f"name: {'x' * 260_000}\n" + ONE, "bad-name"),
    "a long number": (f"version: {'9' * 250_000}\n" + ONE, "yaml-number"),
    "a long number to the base of 16": (f"version: 0x{'f' * 250_000}\n" + ONE, "wrong-type"),
    "a long number to the base of 60": (f"version: 1{':59' * 80_000}\n" + ONE, "yaml-number"),
    "a long anchor": ("&" + "a" * 250_000 + " x", "wrong-type"),
    "nested blocks": ("".join(" " * i + "a:\n" for i in range(700)), "yaml-too-large"),
    "nested items": ("- " * 100_000, "yaml-too-large"),
    "nested keys": ("? " * 100_000, "yaml-too-large"),
    "nested brackets": ("[{" * 60_000, "yaml-too-large"),
    "many documents": ("--- 1\n" * 40_000, "yaml-many-documents"),
    "tags of Python": ("[" + "!!python/name:os.system a," * 9000 + "]", "yaml-tag"),
    "a call": ("models: !!python/object/apply:os.system ['id']", "yaml-tag"),
    "no UTF-8": (b"models: \xff" * 20_000, "yaml-syntax"),
    "a character beyond Unicode": ('a: "\\UFFFFFFFF"', "yaml-syntax"),
    "a version of YAML": ("%YAML 9999999999999.1\n---\na: 1", "yaml-syntax"),
    "8 MiB": ("# " + "x" * 2**23, "yaml-too-large"),
    "a hundred billion hosts": ("hosts: {instance: inf2.48xlarge, count: 99999999999}\n" + ONE, "out-of-range"),
    "a hundred billion replicas": ("models: {a: {source: ./a, replicas: 99999999999}}", "out-of-range"),
    "a hundred billion cores": ("models: {a: {source: ./a, cores: ['0-99999999999']}}", "bad-range"),
}


EVERYDAY_BOMBS = (  # one for each defence
    "many unknown keys",
    "duplicate keys in an alias",
    "a list with many aliases",
    "a long scalar",
    "a long number",
    "nested blocks",
    "many documents",
    "a call",
    "no UTF-8",
    "8 MiB",
    "a hundred billion cores",
)


@pytest.mark.parametrize("name", everyday(BOMBS, EVERYDAY_BOMBS))
def test_a_bomb_is_refused_within_seconds_of_cpu(name: str) -> None:
    """A third of a second on an idle machine, most of it PyYAML's; what grows with the square takes seven."""
    text, id = BOMBS[name]
    began = time.process_time()
    reported = problems(text)
    assert time.process_time() - began < 3
    assert id in {problem.id for problem in reported}
    assert max(len(problem.what) for problem in reported) < 2100


@pytest.mark.parametrize("name", everyday([name for name in BOMBS if "aliases" in name], ("a list with many aliases",)))
def test_aliases_share_memory(name: str) -> None:
    """Their repeated content, 200 MB here, is not copied."""
    tracemalloc.start()
    try:
        problems(BOMBS[name][0])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**25


def test_dates_and_versions_are_text_if_text_is_needed() -> None:
    """A model may be called 2024-05-01; YAML's dates are not used."""
    spec = parse("models: {2024-05-01: {source: org/2024-05-01}}").spec
    assert spec is not None
    assert [m.name for m in spec.models] == ["2024-05-01"]


def test_a_core_may_be_written_as_a_number() -> None:
    """cores: [5] is the range "5"."""
    spec = parse(model("cores: [5]")).spec
    assert spec is not None
    assert str(spec.models[0].cores[0]) == "5"


def test_a_byte_order_mark_is_accepted() -> None:
    """Some editors write one."""
    assert problems("\ufeff" + MODELS) == problems(b"\xef\xbb\xbf" + MODELS.encode()) == ()


def test_windows_line_ends_do_not_shift_lines() -> None:
    """Line and column count as editors do."""
    assert only("version: 1\r\nnmae: x\r\n" + MODELS).where == "f.yaml:2:1"


def test_the_spec_has_its_file_name_and_folder() -> None:
    """For places and relative sources."""
    spec = parse(MODELS, "specs/f.yaml", "/specs").spec
    assert isinstance(spec, Spec)
    assert (spec.places.filename, spec.base_dir, spec.models[0].source_path) == ("specs/f.yaml", "/specs", "/specs/a")


def test_hosts_are_one_mapping_or_a_list_of_mappings() -> None:
    """A list of one equals the mapping itself."""
    uniform = parse("hosts: {instance: trn2.48xlarge, count: 2, lnc: 1}\n" + MODELS).spec
    many = parse("hosts: [{instance: trn2.48xlarge, count: 2, lnc: 1}]\n" + MODELS).spec
    assert uniform is not None
    assert (uniform, uniform.hosts) == (many, (HostsSpec(instance="trn2.48xlarge", count=2, lnc=1),))


def test_problems_of_all_hosts_in_a_list_are_reported_at_once() -> None:
    """Each at the line and column of its own item."""
    text = """\
hosts:
  - {instance: inf2.48xlarge, cuont: 2}
  - instance: trn1.32xlarge
    count: none
    reserve: {cores: ["8-x"], memory_gib: x}
  - 3
  - {instance: trn9.32xlarge}
models: {a: {source: ./a}}
"""
    assert brief(problems(text)) == [
        "unknown-key 2:31",
        "wrong-type 4:5",
        "bad-range 5:15",
        "wrong-type 5:31",
        "wrong-type 6:5",
        "unknown-instance 7:6",
    ]


def test_a_type_without_lnc_is_planned_all_the_same() -> None:
    """So that the other problems of the hosts are reported too."""
    spec = parse("hosts: {instance: inf2.xlarge, lnc: 2}\n" + MODELS).spec
    assert spec is not None
    assert (spec.hosts, spec.broken) == ((HostsSpec(instance="inf2.xlarge"),), frozenset())


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ("spread: host", "spread", Spread(host=1)),
        ("spread: {host: 3}", "spread", Spread(host=3)),
        ("anti_affinity: true", "spread", Spread(host=1)),
        ("anti_affinity: false", "spread", None),
        ("max_per_host: 2", "spread", Spread(host=2)),
        ("load_in_8bit: true", "quantize", "int8"),
        ("load_in_8bit: false", "quantize", None),
        ("quantize: int8", "quantize", "int8"),
        ("quantize:", "quantize", None),
        ("host_memory_gib: 12", "host_memory_gib", 12.0),
        ("gqa: replicated-heads", "group_query_attention", "replicated-heads"),
    ],
)
def test_keys_of_other_tools_are_read_as_intended(fields: str, field: str, value: object) -> None:
    """Reported as unknown keys, and checked by their meaning."""
    spec = parse(model(fields)).spec
    assert spec is not None
    assert getattr(spec.models[0], field) == value


def test_settings_of_engines_are_read_by_engine() -> None:
    """A misspelt engine counts as what it was meant to be; a relative interpreter begins at the spec file, also one
    that looks like another user's home."""
    text = (
        "engines:\n  transformers_neuronx: {python: envs/tnx/bin/python}\n  cpu: {python: /usr/bin/python3}\n"
        "  vllm: {python: ~nosuchuser/python}\n" + MODELS
    )
    parsed = parse(text, "f.yaml", "/specs")
    assert parsed.spec is not None
    (problem,) = parsed.problems
    assert (problem.id, problem.where) == ("unknown-key", "f.yaml:2:3")
    assert problem.hint == 'did you mean "transformers-neuronx"?'
    assert parsed.spec.python_for("transformers-neuronx") == "/specs/envs/tnx/bin/python"
    assert parsed.spec.python_for("vllm") == "/specs/~nosuchuser/python"
    assert (parsed.spec.python_for("cpu"), parsed.spec.python_for("nxd-inference")) == ("/usr/bin/python3", None)


def test_an_engines_mistake_names_the_field_of_the_model() -> None:
    """`engine` at the top is not `engines` misspelt."""
    (problem,) = parse("engine: cpu\n" + MODELS, "f.yaml").problems
    assert problem.hint == "set engine in a model or in defaults"
