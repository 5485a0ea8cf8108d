from __future__ import annotations

from typing import Any

import pytest

from placements.engines.options import (
    FIELDS,
    PACKAGED,
    TABLES,
    UNSERVED,
    Finding,
    Option,
    Scope,
    check_options,
    known_options,
)
from placements.engines.registry import Engine
from placements.spec.schema import ModelSpec
from tests import option_tables

NXD = "neuronx_distributed_inference"
TNXE: Engine = "transformers-neuronx"
NXDE: Engine = "nxd-inference"
NO = "unknown-engine-option"


def findings(given: dict[str, Any], engine: Engine = "nxd-inference", family: str | None = "llama") -> list[Finding]:
    """On inf2, where 0.8 is the last NxD Inference."""
    newest = "0.8" if engine == "nxd-inference" else ""
    return list(check_options(Scope(engine, family, newest, "inf2"), given, ModelSpec.model_fields))


def test_the_tables_are_those_of_the_recorded_contracts() -> None:
    """``python -m tests.option_tables`` writes them anew."""
    assert {path.read_text() for path in option_tables.FILES.values()} == {
        *map(option_tables.text, option_tables.FILES)
    }


def test_the_tables_have_what_the_contracts_record() -> None:
    """Every option of the history, its newest default, and the versions that have it."""
    history = option_tables.contract(NXD)["option_history"][f"{NXD}.models.config.NeuronConfig"]
    table = TABLES[f"{NXD}.NeuronConfig"]
    assert table.keys() == history.keys()
    assert table["save_sharded_checkpoint"] == Option.read("bool", "False")
    assert table["attention_dp_degree"] == Option.read("int", "1", "0.5", "0.9")
    assert table["enable_ve_data_parallel"] == Option.read("bool", "False", "0.9", "0.9")


def test_lora_options_have_the_versions_of_their_signatures() -> None:
    """Differences of signatures are read as history."""
    table = TABLES[f"{NXD}.LoraServingConfig"]
    assert (table["max_loras_on_cpu"].last, table["enable_base_model_only"].first) == ("0.6", "0.9")


@pytest.mark.parametrize("table", TABLES)
def test_every_default_has_its_options_type(table: str) -> None:
    """If the source has a literal."""
    wrong = []
    for name, option in TABLES[table].items():
        try:
            value = eval(option.default, {"__builtins__": {}}, {"float": float, "dict": dict})
        except (NameError, SyntaxError, TypeError):
            continue  # an expression of the package's own
        if not option.accepts(value):
            wrong.append(name)
    assert wrong == []


def test_fields_that_replace_options_exist() -> None:
    """And the options do, too."""
    known_fields = {*ModelSpec.model_fields, "hosts", "max_len, and buckets"}
    for table, names in [*FIELDS.items(), *UNSERVED.items()]:
        held = {
            name
            for item, options in TABLES.items()
            if item == table or item.startswith(f"{table}:")
            for name in options
        }
        assert names.keys() <= held, table
    for names in FIELDS.values():
        assert {field.partition(".")[0] for field in names.values()} <= known_fields


def test_every_family_has_the_keywords_of_its_constructor() -> None:
    """GPT-2's class alone takes prompt_batch_size; an unknown family may have any."""
    having = [
        f
        for f in ("gpt2", "llama", "gpt_neox", None)
        if "prompt_batch_size" in known_options(Scope("transformers-neuronx", f, "", ""))
    ]
    assert having == ["gpt2", None]


@pytest.mark.parametrize(
    ("engine", "family", "given"),
    [
        ("nxd-inference", "llama", {"qkv_kernel_enabled": True, "cc_pipeline_tiling_factor": 1}),
        ("nxd-inference", "llama", {"on_device_sampling_config": {"global_topk": 64, "deterministic": True}}),
        ("nxd-inference", "llama", {"lora_config": None, "async_mode": False, "attention_dtype": None}),
        ("nxd-inference", "mixtral", {"glu_type": "glu", "hybrid_sharding_config": {"moe_cte_tp_degree": 8}}),
        ("nxd-inference", None, {"capacity_factor": 1}),
        ("nxd-inference", "llama", {"quantize_clamp_bound": 1200, "quantization_block_size": [128, 128]}),
        ("transformers-neuronx", "llama", {"attention_layout": "BSH", "unroll": 4, "sequence_parallel_norm": True}),
        ("transformers-neuronx", "llama", {"fuse_mlp": False, "has_pre_attention_norm": True}),
        ("transformers-neuronx", "gpt2", {"prompt_batch_size": 4, "reorder_cache": False}),
        ("transformers-neuronx", "gpt2", {"sparse_attn": {"causal": True}, "all_reduce_dtype": "bfloat16"}),
    ],
)
def test_options_of_the_package_are_accepted(engine: Engine, family: str | None, given: dict[str, Any]) -> None:
    """By their own names, with their own types; an int is a number too."""
    assert findings(given, engine, family) == []


@pytest.mark.parametrize(
    ("engine", "family", "given", "id", "path", "part"),
    [
        (NXDE, "llama", {"qkv_kernel_enable": True}, NO, "", '"qkv_kernel_enabled"?'),
        (NXDE, "llama", {"tp_degree": 8}, NO, "", "set tp_degree"),
        (NXDE, "llama", {"tp_degre": 8}, NO, "", "set tp_degree"),
        (NXDE, "llama", {"seq_len": 8}, NO, "", "set max_len"),
        (NXDE, "llama", {"logical_nc_config": 1}, NO, "", "set hosts.lnc"),
        (NXDE, "llama", {"max_batch": 8}, NO, "", "set the model's field"),
        (NXDE, "llama", {"async_mode": True}, NO, "", "cannot be set: each step"),
        (NXDE, "llama", {"save_sharded_checkpoint": False}, NO, "", "cannot be set: the compiled folder"),
        (NXDE, "llama", {"kv_quant_config": {}}, NO, "", "is set by a field"),
        (
            NXDE,
            "llama",
            {"enable_ve_data_parallel": True},
            NO,
            "",
            "0.9 and later, but the last version for inf2 is 0.8",
        ),
        (NXDE, "llama", {"glu_type": "glu"}, NO, "", "only for mixture-of-experts"),
        (TNXE, "llama", {"fused_qkv": True}, NO, "", "set fuse_qkv"),
        (TNXE, "llama", {"seq_len": 128}, NO, "", "set max_len"),
        (NXDE, "llama", {"fuse_mlp": True}, NO, "", "it is an option of the engine transformers-neuronx"),
        (NXDE, "llama", {"zzz": 1}, NO, "", "docs/spec.md lists"),
        (NXDE, "llama", {"skip_warmup": "yes"}, "wrong-type", "", 'is "yes"; it must be true or false'),
        (NXDE, "llama", {"skip_warmup": 1}, "wrong-type", "", "is 1; it must be true or false"),
        (NXDE, "llama", {"cp_degree": True}, "wrong-type", "", "is true; it must be a whole number"),
        (NXDE, "llama", {"cp_degree": 1.5}, "wrong-type", "", "is 1.5; it must be a whole number"),
        (NXDE, "llama", {"cp_degree": None}, "wrong-type", "", "is null; it must be a whole number"),
        (NXDE, "llama", {"modules_to_not_convert": "lm_head"}, "wrong-type", "", "it must be a list"),
        (NXDE, "llama", {"on_device_sampling_config": 3}, "wrong-type", "", "is 3; it must be a mapping"),
        (NXDE, "llama", {"on_device_sampling_config": {"topk": 5}}, NO, "topk", "its options: "),
        (NXDE, "llama", {"on_device_sampling_config": {"top_k": 5}}, NO, "top_k", "each request sets it"),
        (NXDE, "llama", {"on_device_sampling_config": {"global_topk": "5"}}, "wrong-type", "global_topk", 'is "5"'),
        (TNXE, "llama", {"prompt_batch_size": 4}, NO, "", "for llama, only for gpt2"),
        (TNXE, "llama", {"continuous_batching": {}}, NO, "", "set max_batch"),
        (TNXE, "llama", {"n_positions": 128}, NO, "", "set max_len"),
        (TNXE, "llama", {"fuse_mlp": True}, NO, "", "cannot build"),
        (TNXE, "llama", {"has_pre_attention_norm": False}, NO, "", "a draft of EAGLE"),
        (TNXE, "llama", {"neuron_config": {}}, NO, "", "engine_options holds"),
        (TNXE, "llama", {"attention_layout": "bsh"}, "unknown-value", "", 'did you mean "BSH"?'),
        (TNXE, "llama", {"attention_layout": 3}, "wrong-type", "", "it must be one of BSH, HSB, SBH"),
        (TNXE, "llama", {"all_reduce_dtype": "float8"}, "unknown-value", "", "must be one of float32"),
        (TNXE, "gpt2", {"sparse_attn": {"causal": "no"}}, "wrong-type", "causal", "sparse_attn.causal"),
    ],
)
def test_an_invalid_option_is_reported_once_with_the_remedy(
    engine: Engine, family: str, given: dict[str, Any], id: str, path: str, part: str
) -> None:
    (finding,) = findings(given, engine, family)
    name = next(iter(given))
    assert (finding.id, finding.path) == (id, (name, path) if path else (name,))
    assert part in f"{finding.what} | {finding.hint}"


def test_on_trn2_the_newest_version_has_its_options() -> None:
    """Those that came with 0.9."""
    scope = Scope("nxd-inference", "llama", "0.9", "trn2")
    assert list(check_options(scope, {"enable_ve_data_parallel": True}, {})) == []


def test_the_engines_of_the_options_are_those_of_the_contracts() -> None:
    """One package each; Optimum Neuron has a single option, which is checked as those of corewright's own engines."""
    tabled = PACKAGED.keys()
    assert tabled == set(option_tables.CONFIGS)
