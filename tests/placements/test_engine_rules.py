"""Each rule about what a model asks of its engine, through the text of a spec."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from placements.facts.checkpoints import Checkpoint
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.resources.memory import estimate
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.problems import Problem
from placements.spec.schema import Buckets, ModelSpec
from tests.placements.fleets import LAPTOP, brief
from tests.published_configs import PUBLISHED

TRACED = "engine: torch-neuronx\n    kind: embedding"
BUCKETS = (Buckets(prefill=(512,)), Buckets(prefill=(128, 512)), Buckets())
INF2, TRN1, TRN2 = ("inf2.48xlarge", "trn1.32xlarge", "trn2.48xlarge")
TNX, NXD = "transformers-neuronx", "nxd-inference"


def topk(most: int) -> str:
    """The most that is sampled from on the device, at 6:50."""
    options = f"engine_options: {{on_device_sampling_config: {{global_topk: {most}}}}}"
    return f"sampling: device\n    max_batch: 2\n    {options}"


def shaped(family: str, heads: int = 16, vocab: int = 1000) -> Checkpoint:
    """A small model of the family."""
    return Checkpoint(family, heads, heads, 1, heads * 64, 4096, 64, vocab, None, False, 1_000_000)


def checked(
    fields: str,
    checkpoint: Checkpoint | None = None,
    machine: str = INF2,
    draft: Checkpoint | None = None,
    hosts: str = "instance",
) -> list[Problem]:
    """Of one model whose fields begin at 4:5."""
    text = f"hosts: {{{hosts}: {machine}}}\nmodels:\n  a:\n    {fields}\n    source: ./a\n"
    parsed = parse(text, "f.yaml")
    assert parsed.spec is not None
    checkpoints: Mapping[str, Checkpoint] = {"a": checkpoint} if checkpoint else {}
    drafts: Mapping[str, Checkpoint] = {"a": draft} if draft else {}
    return [*parsed.problems, *check(parsed.spec, hosts_for(parsed.spec, LAPTOP), checkpoints, drafts)]


@pytest.mark.parametrize(
    ("engine", "family", "machine", "expected"),
    [
        (TNX, "gpt2", INF2, []),
        (TNX, "gptj", INF2, ["family-unsupported 4:5"]),
        ("auto", "gptj", INF2, ["family-unsupported 4:5"]),
        (TNX, "qwen2", INF2, ["family-unsupported 4:5"]),
        (TNX, "gpt_bigcode", TRN1, ["family-unsupported 4:5"]),
        (TNX, "llama", TRN2, ["engine-unsupported-here 4:5"]),
        (TNX, "qwen2", TRN2, ["engine-unsupported-here 4:5"]),  # once
        (NXD, "llama", INF2, []),
        (NXD, "qwen3", TRN1, []),
        (NXD, "gpt2", INF2, ["family-unsupported 4:5"]),
        (NXD, "mistral", INF2, []),  # by the class of llama
        (NXD, "mistral", TRN2, []),
        ("auto", "mistral", INF2, []),
        ("auto", "mistral", TRN2, []),
        ("auto", "gpt2", TRN1, []),
        ("auto", "gpt2", TRN2, ["family-unsupported 4:5"]),
        ("auto", "gpt_bigcode", INF2, ["family-unsupported 4:5"]),
        ("optimum-neuron", "gpt_neox", INF2, ["family-unsupported 4:5"]),
        ("cpu", "gpt_bigcode", TRN2, []),
    ],
)
def test_an_engine_supports_the_family_on_the_machine(
    engine: str, family: str, machine: str, expected: list[str]
) -> None:
    """By the tables of `engines`; an engine that does not run there is not checked for its families."""
    assert brief(checked(f"engine: {engine}", shaped(family), machine)) == expected


def test_the_reason_why_a_class_is_not_used_is_reported() -> None:
    """GPT-J's answers wrongly on transformers-neuronx."""
    (problem,) = checked(f"engine: {TNX}", shaped("gptj"))
    assert "attends only to position 0" in problem.what


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
}
NEOX = LLAMA | {"model_type": "gpt_neox", "hidden_act": "gelu_new"}
OPT = LLAMA | {"model_type": "opt", "ffn_dim": 256, "max_position_embeddings": 2048}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 1, "n_positions": 2048, "vocab_size": 1000}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, []),
        (LLAMA | {"head_dim": 16, "hidden_act": "silu", "attention_bias": False, "rope_theta": 500_000.0}, []),
        (LLAMA | {"head_dim": 32}, ["family-unsupported"]),
        (LLAMA | {"attention_bias": True}, ["family-unsupported"]),
        (LLAMA | {"mlp_bias": True}, ["family-unsupported"]),
        (LLAMA | {"hidden_act": "gelu"}, ["family-unsupported"]),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}, []),
        (LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}, ["rotary-misread"]),
        (NEOX, []),
        (NEOX | {"hidden_act": "gelu"}, ["activation-approximated"]),
        (NEOX | {"hidden_act": None}, ["activation-approximated"]),  # what transformers takes is gelu
        (NEOX | {"hidden_act": "gelu_fast"}, []),
        (NEOX | {"hidden_act": "relu"}, ["family-unsupported"]),
        (NEOX | {"use_parallel_residual": False}, ["family-unsupported"]),
        (GPT2, []),
        (GPT2 | {"activation_function": "gelu"}, ["activation-approximated"]),
        (GPT2 | {"activation_function": "relu"}, ["family-unsupported"]),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, ["family-unsupported"]),
        (OPT, []),
        (OPT | {"activation_function": "gelu"}, ["family-unsupported"]),
        (OPT | {"ffn_dim": 128}, []),
        (OPT | {"word_embed_proj_dim": 32}, ["family-unsupported"]),
    ],
)
@pytest.mark.parametrize("engine", [TNX, "cpu"])
def test_a_model_that_transformers_neuronx_computes_differently_is_reported(
    config: dict[str, Any], expected: list[str], engine: str
) -> None:
    """By config.json: a feature missing in its class is an error, an approximation a warning."""
    problems = checked(f"engine: {engine}\n    max_batch: 1", Checkpoint.from_config(config))
    assert [problem.id for problem in problems] == (expected if engine == TNX else [])


def test_a_draft_is_checked_like_its_model() -> None:
    """At the line of the draft."""
    draft = Checkpoint.from_config(LLAMA | {"head_dim": 32})
    problems = checked(f"engine: {TNX}\n    draft: {{source: ./d}}", Checkpoint.from_config(LLAMA), draft=draft)
    assert brief(problems) == ["family-unsupported 5:5"]


def test_a_run_of_a_draft_fits_into_the_longest_prompt() -> None:
    """Runs have at least as many tokens as there are slots."""
    fields = f"engine: {TNX}\n    draft: {{source: ./d, k: 3}}\n    buckets: {{prefill: [4]}}\n    max_batch: "
    assert brief(checked(f"{fields}4", shaped("llama"), draft=shaped("llama"))) == []
    (problem,) = checked(f"{fields}8", shaped("llama"), draft=shaped("llama"))
    assert (problem.id, "verifies 8 tokens" in problem.what) == ("draft-unsupported", True)


def test_an_engine_that_supports_the_family_is_suggested() -> None:
    (problem,) = checked(f"engine: {NXD}", shaped("opt"))
    assert problem.what == "the engine nxd-inference does not serve opt, the family of a"
    assert problem.hint == "use transformers-neuronx"


@pytest.mark.parametrize(
    ("family", "window", "machine", "expected"),
    [
        ("mistral", 1024, INF2, []),
        ("qwen2", 1024, INF2, ["window-not-kept 5:5"]),
        ("qwen2", 2048, INF2, []),
        ("qwen2", None, INF2, []),
        ("qwen2", 1024, TRN2, ["window-not-kept 5:5"]),
    ],
)
def test_a_window_that_would_be_left_out_is_as_long_as_a_slot(
    family: str, window: int | None, machine: str, expected: list[str]
) -> None:
    """Else the answers would be others than the model's."""
    checkpoint = replace(shaped(family), window=window)
    assert brief(checked(f"engine: {NXD}\n    max_len: 2048", checkpoint, machine)) == expected
    assert brief(checked(f"engine: {TNX}\n    max_len: 2048", replace(shaped("mistral"), window=window))) == []


@pytest.mark.parametrize("beside", ["draft: {source: ./d}", "engine_options: {prefix_cache: true}"])
def test_no_window_is_kept_beside_a_draft_or_a_prefix_cache(beside: str) -> None:
    """The kernels that this needs are not used."""
    checkpoint = replace(shaped("mistral"), window=1024)
    text = f"engine: {NXD}\n    max_len: 2048\n    {beside}"
    assert brief(checked(text, checkpoint, draft=shaped("mistral"))) == ["window-not-kept 5:5"]
    assert brief(checked(text, shaped("mistral"), draft=shaped("mistral"))) == []


@pytest.mark.parametrize(("prefill", "expected"), [("[512, 2048]", ["bad-buckets 6:25"]), ("[1024, 2048]", [])])
def test_no_bucket_of_prompts_is_shorter_than_a_window(prefill: str, expected: list[str]) -> None:
    """Its graph would read beyond the bucket's end. A window that no slot reaches does not count."""
    text = f"engine: {NXD}\n    max_len: 2048\n    buckets: {{prefill: {prefill}}}"
    assert brief(checked(text, replace(shaped("mistral"), window=1024))) == expected
    assert brief(checked(text, replace(shaped("mistral"), window=2048))) == []


def test_replicas_run_only_on_machines_that_their_engine_supports() -> None:
    """One of two types may be suitable; a model that suits none has no place."""
    text = "hosts: [{instance: trn2.3xlarge}, {instance: inf2.xlarge}]\n"
    text += f"models:\n  a: {{engine: {TNX}, source: ./a, neff_cache: s3://neffs/a}}\n"
    spec = parse(text, "f.yaml").spec
    assert spec is not None
    hosts = hosts_for(spec, LAPTOP)
    checkpoints = {"a": shaped("llama")}
    assert check(spec, hosts, checkpoints) == ()
    assert [p.host for p in plan(spec, hosts, checkpoints).placements] == ["inf2.xlarge/0"]
    assert plan(spec, hosts[:1], checkpoints).unplaced[0].model == "a"


@pytest.mark.parametrize(
    ("engine", "family", "expected"),
    [
        (TNX, "gpt_neox", ["heads-not-divisible 4:5"]),
        ("auto", "gpt_neox", ["heads-not-divisible 4:5"]),  # it can become no other engine
        (TNX, "opt", []),
        (NXD, "llama", []),
    ],
)
def test_heads_are_padded_only_by_classes_that_can(engine: str, family: str, expected: list[str]) -> None:
    """allow_head_padding does not help classes that would fail at the load."""
    fields = f"tp_degree: 8\n    allow_head_padding: true\n    engine: {engine}"
    assert brief(checked(fields, shaped(family, heads=12))) == expected


@pytest.mark.parametrize(
    ("engine", "more", "expected"),
    [
        (TNX, "", ["undocumented-degree 4:5"]),
        (TNX, "\n    allow_degrees: [16]", []),
        (NXD, "", []),
        ("auto", "", []),
    ],
)
def test_16_on_trn1_is_documented_for_nxd_inference_only(engine: str, more: str, expected: list[str]) -> None:
    """The guides differ."""
    assert brief(checked(f"tp_degree: 16\n    engine: {engine}{more}", None, TRN1)) == expected


@pytest.mark.parametrize(
    ("engine", "family", "fields", "expected"),
    [
        (TNX, "llama", "quantize_kv: int8", ["quantize-unsupported 4:5"]),
        (TNX, "llama", "quantize_kv: fp8", []),
        (TNX, "gpt_neox", "quantize_kv: fp8", ["quantize-unsupported 4:5"]),
        (TNX, "opt", "quantize_kv: fp8", ["quantize-unsupported 4:5"]),
        (TNX, "opt", "quantize: fp8", []),
        (NXD, "llama", "quantize_kv: fp8", []),
        (NXD, "llama", "quantize_kv: int8", ["quantize-unsupported 4:5"]),
        (NXD, "llama", "quantize: fp8", []),
        (NXD, "mixtral", "quantize: int8", ["quantize-unsupported 4:5"]),
        (NXD, "qwen2", "quantize: fp8", ["quantize-unsupported 4:5"]),
        (NXD, "qwen2", "quantize_kv: fp8", []),
        ("auto", "llama", "quantize_kv: int8", ["quantize-unsupported 4:5"]),
        ("auto", "llama", "quantize_kv: fp8", []),
        ("auto", "qwen2", "quantize_kv: int8", ["quantize-unsupported 4:5"]),
        ("cpu", "llama", "quantize_kv: fp8", ["quantize-unsupported 4:5"]),
        ("echo", "llama", "quantize: fp8", ["quantize-unsupported 4:5"]),
    ],
)
def test_one_byte_types_are_for_engines_that_support_them(
    engine: str, family: str, fields: str, expected: list[str]
) -> None:
    """Weights and the KV cache, by engine and family."""
    assert brief(checked(f"{fields}\n    engine: {engine}", shaped(family))) == expected


def test_buckets_have_an_effect_on_the_cpu_if_it_compiles() -> None:
    fields = "buckets: {prefill: [8]}\n    engine: cpu"
    assert brief(checked(f"{fields}\n    engine_options: {{compile: true}}")) == []
    assert brief(checked(f"{fields}\n    engine_options: {{compile: false}}")) == ["setting-unsupported 4:5"]


@pytest.mark.parametrize(
    "fields", ["sampling: device", "buckets: {prefill: [8]}", "fuse_qkv: false", "compiler: {flags: -x}"]
)
@pytest.mark.parametrize("engine", ["cpu", "echo"])
def test_settings_for_neuron_devices_are_rejected_on_the_host(engine: str, fields: str) -> None:
    """They would have no effect; on emulated hosts `auto` is cpu."""
    assert brief(checked(f"{fields}\n    engine: {engine}")) == ["setting-unsupported 4:5"]
    assert brief(checked(fields, hosts="emulate")) == ["setting-unsupported 4:5"]
    assert brief(checked(fields, shaped("llama"))) == []


@pytest.mark.parametrize(
    ("engine", "family", "fields", "expected"),
    [
        (TNX, "mistral", "sampling: device", []),
        (TNX, "gpt2", "sampling: device", []),
        (TNX, "mixtral", "sampling: device", ["setting-unsupported 4:5"]),
        ("auto", "gpt_neox", "sampling: device", ["setting-unsupported 4:5"]),
        ("auto", "llama", "sampling: device", []),
        (NXD, "llama", "sampling: device", []),
        (NXD, "llama", "compiler: {workers: 2}", ["setting-unsupported 4:16"]),
        (TNX, "llama", "compiler: {workers: 2}", []),
        ("auto", "llama", "compiler: {workers: 2}", []),
        (NXD, "llama", "engine_options: {on_device_sampling_config: {}}", ["setting-unsupported 4:22"]),
        (NXD, "llama", topk(100_000), ["out-of-range 6:50"]),
        (NXD, "llama", topk(0), ["out-of-range 6:50"]),
        (NXD, "llama", topk(256), []),
        (NXD, "llama", "engine_options: {enable_eagle_speculation: true}", ["unknown-engine-option 4:22"]),
        (NXD, "llama", "engine_options: {attention_dp_degree: 2}", ["unknown-engine-option 4:22"]),
        (NXD, "llama", "engine_options: {flash_decoding_enabled: true}", ["unknown-engine-option 4:22"]),
        (TNX, "gpt2", "engine_options: {prompt_batch_size: 4}", []),
        (TNX, "gpt2", "engine_options: {prompt_batch_size: 2}", ["out-of-range 4:22"]),
        (TNX, "llama", "engine_options: {prompt_batch_size: 4}", ["unknown-engine-option 4:22"]),
        (TNX, "llama", "engine_options: {attn_output_transposed: true}", []),
        (TNX, "opt", "engine_options: {attn_output_transposed: true}", ["setting-unsupported 4:22"]),
        (TNX, "mistral", "engine_options: {mlp_out_weight_transpose: true}", ["setting-unsupported 4:22"]),
        (TNX, "llama", "engine_options: {shard_over_sequence: true}", ["setting-unsupported 4:22"]),
        (TNX, "mixtral", "engine_options: {shard_over_sequence: false}", []),
        ("auto", "llama", "engine_options: {skip_warmup: true}", ["unknown-engine-option 4:22"]),
        ("optimum-neuron", "llama", "engine_options: {skip_warmup: true}", ["unknown-engine-option 4:22"]),
        ("optimum-neuron", "llama", "engine_options: {prefill_chunk_size: 512}", []),
        ("optimum-neuron", "llama", "engine_options: {prefill_chunk_size: many}", ["wrong-type 4:22"]),
        ("optimum-neuron", "llama", "buckets: {prefill: [128]}", ["setting-unsupported 4:5"]),
        ("optimum-neuron", "llama", "compiler: {optlevel: 2}", ["setting-unsupported 4:5"]),
        ("optimum-neuron", "llama", "sampling: device", []),
        ("optimum-neuron", "mixtral", "sampling: device", ["setting-unsupported 4:5"]),
        ("optimum-neuron", "qwen2", "tp_degree: 2\n    sampling: device", ["setting-unsupported 5:5"]),
        ("cpu", "llama", "engine_options: {prefill_chunk: [1]}", ["wrong-type 4:22"]),
        ("cpu", "llama", "engine_options: {prefill_chunk: null}", ["wrong-type 4:22"]),
        ("cpu", "llama", "engine_options: {prefill_chunk: {a: 1}}", ["wrong-type 4:22"]),
    ],
)
def test_settings_are_those_of_the_engine(engine: str, family: str, fields: str, expected: list[str]) -> None:
    """For this family, and at their place."""
    checkpoint = shaped(family)
    assert brief(checked(f"{fields}\n    engine: {engine}", checkpoint)) == expected


def test_a_nested_option_is_reported_at_its_own_place() -> None:
    """Line and column of the inner key; the types as YAML reads them."""
    fields = (
        "engine: nxd-inference\n    sampling: device\n    engine_options:\n      skip_warmup: on\n"
        "      on_device_sampling_config:\n        global_topk: many\n        top_kk: 1"
    )
    assert brief(checked(fields)) == ["wrong-type 9:9", "unknown-engine-option 10:9"]


@pytest.mark.parametrize(
    ("machine", "expected"),
    [(INF2, ["unknown-engine-option 4:22"]), (TRN1, ["unknown-engine-option 4:22"]), (TRN2, [])],
)
def test_an_option_of_a_version_that_does_not_run_there_is_rejected(machine: str, expected: list[str]) -> None:
    """0.9 needs trn2."""
    assert (
        brief(checked(f"engine_options: {{enable_ve_data_parallel: true}}\n    engine: {NXD}", None, machine))
        == expected
    )


@pytest.mark.parametrize(
    ("fields", "family", "expected"),
    [
        ("buckets: {prefill: [128, 512], decode: [512, 2048]}", None, []),
        ("buckets: {prefill: [128, 128]}", None, ["bad-buckets 4:30"]),
        ("buckets: {prefill: [512, 128]}", None, ["bad-buckets 4:30"]),
        ("buckets: {prefill: [128, 4096]}", None, ["bad-buckets 4:30"]),
        ("buckets: {decode: [512, 1024]}", None, ["bad-buckets 4:29"]),
        ("buckets: {decode: [4096]}", None, ["bad-buckets 4:24"]),
        ("buckets: {prefill: [128]}", "gpt_neox", ["bad-buckets 4:5"]),
        ("buckets: {decode: [1024, 2048]}", "gpt_neox", ["bad-buckets 4:5"]),
        ("buckets: {decode: [2048]}", "gpt_neox", []),
    ],
)
def test_buckets_are_consistent(fields: str, family: str | None, expected: list[str]) -> None:
    """Ascending, none beyond max_len, the last of the KV cache equal to it; and the family has them."""
    checkpoint = shaped(family) if family else None
    assert brief(checked(f"{fields}\n    max_len: 2048\n    engine: {TNX}", checkpoint)) == expected


@pytest.mark.parametrize(
    ("engine", "fields", "expected"),
    [
        (NXD, "buckets: {prefill: [1, 128]}", ["bad-buckets 4:25"]),
        (NXD, "buckets: {prefill: [5, 128]}", []),
        (NXD, "buckets: {prefill: [5, 128]}\n    draft: {source: ./d}", ["bad-buckets 4:25"]),  # k is 4
        (TNX, "buckets: {prefill: [1, 128]}", ["bad-buckets 4:25"]),
        (TNX, "buckets: {prefill: [5, 128]}\n    draft: {source: ./d}", []),
        ("auto", "buckets: {prefill: [1]}", ["bad-buckets 4:25"]),
        ("auto", "buckets: {prefill: [5, 128]}\n    draft: {source: ./d}", ["bad-buckets 4:25"]),
        ("cpu", "buckets: {prefill: [1]}", ["setting-unsupported 4:5"]),
    ],
)
def test_a_prompt_bucket_must_differ_from_a_step(engine: str, fields: str, expected: list[str]) -> None:
    """Both packages distinguish them by their width alone."""
    assert brief(checked(f"{fields}\n    engine: {engine}")) == expected


def test_buckets_are_not_checked_against_an_unknown_max_len() -> None:
    """It depends on the checkpoint if neither the spec nor config.json has it."""
    fields = f"buckets: {{decode: [512]}}\n    engine: {NXD}"
    assert brief(checked(fields)) == []
    assert brief(checked(fields, shaped("llama"))) == ["bad-buckets 4:24"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("quantize: int8, engine_options: {quantized_checkpoints_path: ./q}", []),
        ("quantize: fp8, engine_options: {quantization_dtype: f8e5m2}", []),
        ("quantize: fp8, engine_options: {quantization_dtype: f8e4m3, quantized_checkpoints_path: /q}", []),
        ("engine_options: {quantized_checkpoints_path: ./q}", ["setting-unsupported"]),
        ("engine_options: {quantization_dtype: f8e4m3}", ["setting-unsupported"]),
        ("quantize: int8, engine_options: {quantization_dtype: f8e5m2}", ["unknown-value"]),
        ("quantize: int8, engine_options: {quantized_checkpoints_path: s3://b/q}", ["bad-source"]),
        ("quantize: int8, engine_options: {quantized_checkpoints_path: q}", ["bad-source"]),
        ("quantize: int8, engine_options: {quantized_checkpoints_path: 7}", ["wrong-type"]),
    ],
)
def test_a_quantized_checkpoint_requires_quantize(fields: str, expected: list[str]) -> None:
    """It is a folder of the host, and its type is one that ``quantize`` has."""
    text = fields.replace(", engine_options", "\n    engine_options")
    assert [problem.id for problem in checked(f"{text}\n    engine: {NXD}")] == expected


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("{optlevel: 1, flags: --enable-saturate-infinity}", []),
        ("{flags: -O3 --verbose=35}", []),
        ("{flags: --auto-cast=all}", ["bad-compiler-flags"]),
        ("{flags: --tensorizer-options=-x --logfile=/a}", ["bad-compiler-flags", "bad-compiler-flags"]),
        ("{optlevel: 1, flags: -O3}", ["bad-compiler-flags"]),
        ("{optlevel: 2, flags: --optlevel=3}", ["bad-compiler-flags"]),
        ("{flags: --cache_dir=s3://x --lnc=1}", ["bad-compiler-flags", "bad-compiler-flags"]),
        ("{flags: --target trn1}", ["bad-compiler-flags"]),
    ],
)
def test_compiler_flags_must_not_repeat_fields(compiler: str, expected: list[str]) -> None:
    """The two could conflict, and the key of the cache has the flags."""
    assert [problem.id for problem in checked(f"compiler: {compiler}\n    engine: {NXD}")] == expected


@pytest.mark.parametrize(
    ("engine", "family", "drafting", "more", "expected"),
    [
        ("cpu", "opt", "gpt2", "", []),
        ("echo", "opt", "gpt2", "", ["draft-unsupported 4:5"]),
        ("optimum-neuron", "llama", "llama", "", ["draft-unsupported 4:5"]),
        (TNX, "llama", "llama", "", []),
        (TNX, "llama", "gpt2", "", []),
        (TNX, "opt", "llama", "", ["draft-unsupported 4:5"]),
        (TNX, "llama", "opt", "", ["draft-unsupported 4:5"]),
        (TNX, "gpt2", "gpt2", "", ["draft-unsupported 4:5"]),
        (TNX, "gpt2", "gpt2", "max_batch: 1", []),
        (TNX, "llama", "llama", "sampling: device", ["draft-unsupported 4:5"]),
        (NXD, "llama", "llama", "sampling: device", []),
        (NXD, "llama", "llama", "quantize: int8", ["draft-unsupported 4:5"]),
        (NXD, "llama", "qwen2", "", ["draft-unsupported 4:5"]),
        ("auto", "llama", "gpt2", "", []),  # transformers-neuronx can
        ("auto", "qwen2", "llama", "", ["draft-unsupported 4:5"]),
    ],
)
def test_a_draft_must_be_supported_by_the_engine(
    engine: str, family: str, drafting: str, more: str, expected: list[str]
) -> None:
    """By the families of both, and by the other fields of the model."""
    fields = f"draft: {{source: ./d}}\n    engine: {engine}" + (f"\n    {more}" if more else "")
    assert brief(checked(fields, shaped(family), draft=shaped(drafting))) == expected


def test_a_draft_has_its_models_vocabulary_and_heads_for_its_cores() -> None:
    """It runs on the same cores; on the host's CPUs heads do not matter."""
    fields = "draft: {source: ./d}\n    tp_degree: 8\n    engine: "
    assert brief(checked(fields + TNX, shaped("llama"), draft=shaped("llama", vocab=999))) == ["bad-draft 4:5"]
    assert brief(checked(fields + TNX, shaped("llama"), draft=shaped("llama", 12))) == ["heads-not-divisible 4:5"]
    padded = f"{fields}{TNX}\n    allow_head_padding: true"
    assert brief(checked(padded, shaped("llama"), draft=shaped("llama", 12))) == []
    assert brief(checked(fields + "cpu", shaped("llama"), draft=shaped("llama", 12))) == []


@pytest.mark.parametrize("value", ["010", "[1, 010]", "{a: 010}", "!x 1"])
def test_an_unreadable_option_is_reported_once(value: str) -> None:
    """By the YAML reader; the rules then skip the options."""
    problems = checked(f"engine_options: {{skip_warmup: {value}, misspelt: 1}}\n    engine: {NXD}")
    assert [problem.id for problem in problems] in (["yaml-number"], ["yaml-tag"])


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("bert", None),
        ("xlm-roberta", None),
        ("deberta-v2", "AWS documents no trace of it"),
        ("modernbert", "AWS documents no trace of it"),
        ("qwen3", "AWS documents no trace of a decoder that gives embeddings"),
    ],
)
@pytest.mark.parametrize("fields", [TRACED, "kind: embedding"])
def test_encoders_without_a_documented_trace_are_refused_with_the_reason(
    family: str, why: str | None, fields: str
) -> None:
    """Also with engine auto, which is torch-neuronx for encoders on Neuron devices; not on emulated ones."""
    problems = checked(fields, shaped(family))
    text = f"the engine torch-neuronx does not serve {family}, the family of a: {why}"
    assert [problem.what for problem in problems] == ([] if why is None else [text])
    assert checked("kind: embedding", shaped(family), hosts="emulate") == []


def test_an_encoder_that_fits_with_one_length_only_gets_that_as_its_remedy() -> None:
    """Neither a degree nor a quantization, which encoders do not have."""
    checkpoint = Checkpoint("bert", 16, 16, 24, 2048, 8192, 128, 30_000, 512, False, 3_000_000_000)
    (problem,) = checked(TRACED, checkpoint)
    assert (problem.id, problem.hint) == ("hbm-exceeded", "one length needs 7.54 GiB: buckets: {prefill: [512]}")


def test_each_length_of_an_encoder_has_weights_of_its_own_on_the_core() -> None:
    """The planner counts them all, and the scores of a whole compiled batch."""
    checkpoint = replace(shaped("bert"), parameters=1_000_000_000, max_positions=512)
    specs = (ModelSpec(name="a", source="./a", kind="embedding", max_batch=4, buckets=b) for b in BUCKETS)
    one, two, default = (estimate(spec, checkpoint, "torch-neuronx") for spec in specs)
    assert (two.weights, default.weights) == (2 * one.weights, 4 * one.weights)
    long = ModelSpec(name="a", source="./a", kind="embedding", max_len=4096, max_batch=32)
    assert (
        estimate(long, replace(checkpoint, max_positions=4096), "torch-neuronx").scratch == 8 * 16 * 4096**2 * 2 / 2**30
    )


# known failures

QWEN3_8B = Checkpoint.from_config(PUBLISHED["Qwen/Qwen3-8B"])


@pytest.mark.parametrize(
    ("engine", "machine", "hosts", "more", "is_known"),
    [
        (NXD, INF2, "instance", "", True),
        ("auto", INF2, "instance", "", True),
        ("vllm", INF2, "instance", "engines: {vllm: {python: /v/bin/python}}", True),
        ("vllm", INF2, "instance", 'engines: {vllm: {python: /v/bin/python, plugin: "0.2"}}', False),  # neuronx-cc 2.22
        (NXD, TRN1, "instance", "", False),
        (NXD, TRN2, "instance", "", False),
        ("auto", INF2, "emulate", "", False),
        ("server", INF2, "instance", "", False),
    ],
)
def test_a_failure_that_others_report_is_a_warning(
    engine: str, machine: str, hosts: str, more: str, is_known: bool
) -> None:
    """The report applies to the machines and the planned releases only."""
    own = ", server: {command: [serve], slots: 4}" if engine == "server" else ", tp_degree: 8"
    text = f"hosts: {{{hosts}: {machine}}}\n{more}\nmodels:\n  a:\n    {{source: ./a, engine: {engine}{own}}}\n"
    parsed = parse(text, "f.yaml")
    assert parsed.spec is not None
    problems = check(parsed.spec, hosts_for(parsed.spec, LAPTOP), {"a": QWEN3_8B})
    known = [problem for problem in problems if problem.id == "known-failure"]
    assert len(known) == is_known
    assert all(problem.severity == "warning" and "#1303" in problem.what and problem.hint for problem in known)


@pytest.mark.parametrize(
    ("hosts", "compiler", "count"),
    [("instance", "2.23.6484.0+3b612583", 1), ("instance", "2.22.12471.0", 0), ("emulate", "2.23.6484.0+3b612583", 0)],
)
def test_installed_packages_decide_which_failures_are_known(hosts: str, compiler: str, count: int) -> None:
    """They replace the planned release. On an emulated host they compile nothing."""
    parsed = parse(f"hosts: {{{hosts}: {INF2}}}\nmodels: {{a: {{source: ./a, engine: {NXD}, tp_degree: 8}}}}\n", "f")
    assert parsed.spec is not None
    installed = {NXD: {"neuronx-cc": compiler}}
    problems = check(parsed.spec, hosts_for(parsed.spec, LAPTOP), {"a": QWEN3_8B}, installed=installed)
    assert [problem.id for problem in problems].count("known-failure") == count


# What the engine supports of config.json

METHODS = (
    *("awq", "gptq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "mxfp4", "nvfp4", "quanto", "hqq"),
    *("eetq", "aqlm", "auto-round", "bitnet", "torchao", "quark", "modelopt", "neuron_quant", ""),
)
ROPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "of-tomorrow")
VLLM_NEURON, VLLM_NXD = "vLLM Neuron", "vllm-neuron 0.4"


def read_as(engine: str, config: Mapping[str, Any], fields: str = "", draft: Checkpoint | None = None) -> list[Problem]:
    """The problems of what the engine reads of config.json; a release of vLLM's plugin is its machine's."""
    machine = {"cpu": INF2, TNX: INF2, VLLM_NXD: INF2, "optimum-neuron": INF2}.get(engine, TRN2)
    name = "vllm" if engine in (VLLM_NEURON, VLLM_NXD) else engine
    problems = checked(f"engine: {name}\n    max_len: 1024{fields}", Checkpoint.from_config(config), machine, draft)
    return [each for each in problems if each.id in ("weights-quantized", "rotary-unsupported", "rotary-inexact")]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", ["cpu", TNX, NXD, "auto", "optimum-neuron", VLLM_NXD, VLLM_NEURON])
def test_an_engine_refuses_weights_that_it_cannot_read_as_they_are_quantized(engine: str, method: str) -> None:
    """The problem is at the source and names the method. Only vLLM Neuron reads some: those of ModelOpt in FP8."""
    config = LLAMA | {"quantization_config": {"quant_method": method, "quant_algo": "FP8", "config_groups": {"g": {}}}}
    problems = read_as(engine, config)
    if engine == VLLM_NEURON and method == "modelopt":
        assert problems == []
    else:
        (problem,) = problems
        assert (problem.id, problem.severity) == ("weights-quantized", "error")
        assert f" by {method or 'an unnamed method'}" in problem.what


@pytest.mark.parametrize(
    ("engine", "fine", "warned"),
    [
        ("cpu", {"linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}, set()),
        (TNX, {"llama3"}, set()),
        (NXD, {"llama3"}, {"linear", "dynamic", "yarn", "longrope"}),
        ("auto", {"llama3"}, {"linear", "dynamic", "yarn", "longrope"}),
        ("optimum-neuron", {"llama3"}, {"linear", "dynamic", "yarn", "longrope"}),
        (VLLM_NXD, {"llama3"}, {"linear", "dynamic", "yarn", "longrope"}),
        (VLLM_NEURON, {"llama3"}, set()),
    ],
)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_an_engine_refuses_rotary_positions_that_it_does_not_compute(
    engine: str, fine: set[str], warned: set[str], rope: str, key: str
) -> None:
    """The model is a llama, in both formats of transformers."""
    problems = [(each.id, each.severity) for each in read_as(engine, LLAMA | {key: {"rope_type": rope}})]
    expected = [("rotary-unsupported", "error")]
    if rope in fine | {"default"}:
        expected = []
    elif rope in warned:
        expected = [("rotary-inexact", "warning")]
    assert problems == expected


@pytest.mark.parametrize(
    ("engine", "family", "expected"),
    [
        ("cpu", "qwen2", []),
        ("cpu", "gpt2", []),  # its positions are learned
        (NXD, "qwen2", ["rotary-unsupported"]),
        (NXD, "qwen3", ["rotary-unsupported"]),
        (NXD, "mixtral", ["rotary-unsupported"]),
        (NXD, "mistral", ["rotary-inexact"]),
        (TNX, "mistral", ["rotary-unsupported"]),
        (TNX, "gpt_neox", ["rotary-unsupported"]),
        ("optimum-neuron", "qwen3", ["rotary-inexact"]),
        (VLLM_NEURON, "qwen3", ["rotary-unsupported"]),
    ],
)
def test_classes_of_other_families_ignore_the_scaling_of_positions(
    engine: str, family: str, expected: list[str]
) -> None:
    """According to the packages' code, only Llama's classes and their subclasses read it."""
    config = GPT2 if family == "gpt2" else LLAMA | {"num_local_experts": 2, "num_key_value_heads": 4}
    config = config | {"model_type": family, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert [each.id for each in read_as(engine, config)] == expected


AWQ = LLAMA | {"quantization_config": {"quant_method": "awq"}}


@pytest.mark.parametrize(
    ("engine", "hint"),
    [
        ("cpu", "use the original checkpoint"),
        (NXD, "use the original checkpoint; to quantize it here, set quantize: int8 or fp8"),
        (VLLM_NXD, "use the original checkpoint"),
        (VLLM_NEURON, "use the original checkpoint or one quantized by modelopt fp8 or compressed-tensors kv"),
    ],
)
def test_the_hint_of_quantized_weights_names_the_methods_of_the_engine(engine: str, hint: str) -> None:
    assert [each.hint for each in read_as(engine, AWQ)] == [hint]


@pytest.mark.parametrize("given", [None, {}])
def test_an_empty_configuration_quantizes_nothing(given: object) -> None:
    assert read_as(NXD, LLAMA | {"quantization_config": given}) == []


@pytest.mark.parametrize(("engine", "expected"), [("cpu", 1), (NXD, 1), (VLLM_NEURON, 0)])
def test_scales_of_the_kv_cache_alone_are_for_vllm_neuron(engine: str, expected: int) -> None:
    """transformers requires the package even then."""
    given = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}, "config_groups": {}}
    assert len(read_as(engine, LLAMA | {"quantization_config": given})) == expected


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        (NXD, "quantized_checkpoints_path: /fp8"),
        (VLLM_NXD, "additional_config: {override_neuron_config: {quantized_checkpoints_path: /fp8}}"),
    ],
)
def test_weights_of_another_folder_replace_quantized_ones(engine: str, options: str) -> None:
    """The source then provides only its configuration and tokenizer; a draft has no other folder."""
    fields = f"\n    quantize: fp8\n    engine_options: {{{options}}}"
    assert read_as(engine, AWQ, fields) == []


def test_a_quantized_draft_is_refused_too() -> None:
    """The problem is at the draft."""
    fields = "\n    draft: {source: ./b}"
    (problem,) = read_as(NXD, LLAMA, fields, Checkpoint.from_config(AWQ))
    assert (problem.id, problem.where) == ("weights-quantized", "f.yaml:6:5")
    assert "the draft of a" in problem.what


def test_engines_that_read_no_checkpoint_accept_any_config() -> None:
    """The echo engine, and vLLM on emulated hosts, which decides itself."""
    config = Checkpoint.from_config(AWQ | {"rope_scaling": {"rope_type": "yarn"}})
    for engine in ("echo", "vllm"):
        problems = checked(f"engine: {engine}\n    max_len: 1024", config, hosts="emulate")
        assert [each.id for each in problems if each.severity == "error"] == []
