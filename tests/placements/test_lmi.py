"""The spec of an LMI container's models, and what becomes of each of its settings."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placements.engines.registry import Engine
from placements.engines.vllm.flags import FIELDS, FLAGS, REFUSED
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Machine
from placements.lmi.importing import UNNAMED, Imported, LmiModel, import_lmi
from placements.lmi.rows import ROWS
from placements.lmi.settings import UnreadableSettings, read_environment, read_properties
from placements.lmi.vllm_rows import VLLM_ROWS
from placements.planner.plan import plan
from placements.planner.spec_hosts import hosts_for
from placements.rules.checks import check
from placements.spec.parse import parse
from placements.spec.schema import ModelSpec
from tests.placements.lmi_configs import CONFIGS, PARAMETERS

# Of DJL Serving 0.28 and 0.33: the fields of TransformerNeuronXProperties and of Properties, those of LMI's page, and
# the properties of a model that DJL Serving itself reads.
HANDLER = """
model_id revision trust_remote_code rolling_batch rolling_batch_strategy tensor_parallel_degree cluster_size batch_size
enable_streaming max_rolling_batch_size dtype output_formatter input_formatter waiting_steps mpi_mode tgi_compat
bedrock_compat enable_lora draft_model_id spec_length model_dir neuron_optimize_level
enable_mixed_precision_accumulation enable_saturate_infinity n_positions unroll load_in_8bit low_cpu_mem_usage
load_split_model context_length_estimate amp quantize compiled_graph_path draft_model_compiled_path
speculative_draft_model speculative_length draft_model_tp_size task save_mp_checkpoint_path group_query_attention
model_loader fuse_qkv fuse_mlp fused_rmsnorm_qkv qkv_tiling weight_tiling mlp_out_weight_transpose attention_layout
collectives_layout cache_layout partition_schema all_reduce_dtype cast_logits_dtype sequence_parallel_norm_threshold
on_device_embedding on_device_embedding_config on_device_generation shard_over_sequence compilation_worker_count
sequence_parallel multi_node neuron_cc_pipeline_factor neuron_quant
"""
SERVER = """
engine job_queue_size max_dynamic_batch_size max_batch_delay max_idle_time load_on_devices minWorkers maxWorkers
entryPoint model_loading_timeout predict_timeout parallel_loading s3url handler
"""
FOLDER = "/opt/ml/model"
VALUES = ["", "true", "false", "None", "0", "1", "4", "24", "128,512", "2048,x", "max", "auto", "vllm", "disable"]
VALUES += ["fp16", "static_int8", "shard-over-heads", "BSH", "float16", "s3://models/m", "org/model", "nc0;nc8", "*"]
VALUES += [
    "djl_python.transformers_neuronx",
    "model.py",
    "optimum",
    "text-generation",
    "{{model}}",
    "# !: \\u00e4",
    "-7",
    '{"tp_degree": 2, "context_encoding_buckets": [128, 7], "fused_qkv": true}',
    "{'context_encoding_buckets': '128', 'fused_qkv': (True, None)}",
    "[1, 2]",
    "fp8",
    "auto",
    "0.5",
]


def imported(*properties: str, environment: str = "", **options: object) -> Imported:
    files = read_properties("\n".join(properties), "serving.properties")
    model = LmiModel("m", files, read_environment(environment, "env"))
    return import_lmi([model], **options)  # type: ignore[arg-type]


def model_of(result: Imported) -> ModelSpec:
    parsed = parse(result.spec, "spec")
    assert parsed.spec is not None, parsed.problems
    return parsed.spec.models[0]


def fate(result: Imported, written: str) -> tuple[str, str]:
    [outcome] = [outcome for outcome in result.outcomes if outcome.written == written]
    return outcome.fate, outcome.what


def test_a_comment_behind_a_value_is_explained_and_a_byte_order_mark_is_skipped() -> None:
    """No field is then LMI's default in place of the refused value."""
    result = imported("\ufeffoption.model_id=org/model", "option.tensor_parallel_degree=12  # all cores")
    assert fate(result, "option.model_id") == ("mapped", "source")
    assert fate(result, "option.tensor_parallel_degree")[1].endswith(
        "# begins a comment only at the beginning of a line"
    )
    assert "    tp_degree" not in result.spec
    assert "    replicas" not in result.spec


@pytest.mark.parametrize("name", [*HANDLER.split(), *SERVER.split()])
def test_every_property_of_lmi_has_a_row(name: str) -> None:
    assert name in ROWS


@given(
    settings=st.dictionaries(
        st.sampled_from([*ROWS, "unknown"]) | st.sampled_from([*VLLM_ROWS, *FLAGS, *FIELDS, *REFUSED]),
        st.sampled_from(VALUES),
        max_size=12,
    ),
    loader=st.sampled_from(["", "tnx", "optimum", "vllm", "nxdi"]),
    in_environment=st.booleans(),
    engine=st.sampled_from([None, "transformers-neuronx", "nxd-inference", "optimum-neuron", "vllm"]),
)
def test_any_settings_give_a_valid_spec_twice_the_same_and_a_fate_for_each(
    settings: dict[str, str], loader: str, in_environment: bool, engine: Engine | None
) -> None:
    """With any loader of LMI, and on any engine: what it does not support is refused."""
    settings = {"model_loader": loader, **settings}
    lines = [f"option.{name}={value}" for name, value in settings.items()]
    variables = "\n".join(f"OPTION_{name}={value}" for name, value in settings.items())
    once, again = (
        imported("option.model_id=org/model", *([] if in_environment else lines), environment=variables, engine=engine)
        for _ in range(2)
    )
    assert once == again
    parsed = parse(once.spec, "spec")
    assert parsed.spec is not None
    problems = (*parsed.problems, *(check(parsed.spec, hosts_for(parsed.spec, Machine((0,)))) if parsed.ok else ()))
    errors = {problem.id for problem in problems if problem.severity == "error"}
    assert errors <= ({"missing-key"} if once.refused else set())  # the source, where no setting is one
    told = [outcome.written for outcome in once.outcomes]
    expected = [f"OPTION_{name}" for name, value in settings.items() if value]
    assert sorted({name for name in told if name.startswith("OPTION_")}) == sorted(expected)


def test_the_quick_start_of_lmis_page_behaves_as_in_the_container() -> None:
    """Its file and its environment give the same model; LMI's defaults are written out."""
    file = imported(
        "engine=Python",
        "option.model_id=org/model",
        "option.entryPoint=djl_python.transformers_neuronx",
        "option.rolling_batch=auto",
        "option.tensor_parallel_degree=4",
        "option.max_rolling_batch_size=8",
        "option.model_loading_timeout=1600",
    )
    variables = imported(
        environment="HF_MODEL_ID=org/model\nOPTION_ENTRYPOINT=djl_python.transformers_neuronx\n"
        "OPTION_ROLLING_BATCH=auto\nTENSOR_PARALLEL_DEGREE=4\nOPTION_MAX_ROLLING_BATCH_SIZE=8\n"
        "OPTION_MODEL_LOADING_TIMEOUT=1600\n"
    )
    model = model_of(file)
    assert (model.source, model.engine, model.tp_degree) == ("org/model", "transformers-neuronx", 4)
    assert (model.max_batch, model.max_len, model.dtype) == (8, 128, "fp16")
    assert (model.threads, model.max_queue, model.deadlines.start_s) == ("lmi", 1000, 1600)
    assert model.replicas.min == model.replicas.max == 6  # one on each 4 of 24 cores
    assert model_of(variables) == model
    assert not file.refused
    assert not variables.refused


def test_a_property_of_the_file_counts_before_the_environment() -> None:
    """As in DJL Serving, whose environment fills only what the file lacks."""
    result = imported(
        "option.model_id=org/model",
        "option.tensor_parallel_degree=2",
        "option.tensor_parallel_degree=4",
        environment="OPTION_TENSOR_PARALLEL_DEGREE=8\nTENSOR_PARALLEL_DEGREE=max\nHF_MODEL_ID=other/model\n",
    )
    assert (model_of(result).tp_degree, model_of(result).source) == (4, "org/model")
    assert fate(result, "OPTION_TENSOR_PARALLEL_DEGREE") == (
        "dropped",
        "option.tensor_parallel_degree of serving.properties:3 counts",
    )


def test_max_is_all_cores_of_the_instance() -> None:
    result = imported("option.model_id=m", "option.tensor_parallel_degree=max", instance="inf2.24xlarge")
    assert model_of(result).tp_degree == 12


def test_later_versions_of_lmi_have_other_defaults() -> None:
    """From 0.30 on, batches roll by default and a slot has all positions, 4096 at most."""
    old, new = (model_of(imported("option.model_id=m", version=version)) for version in ((0, 29), (0, 30)))
    assert [(model.max_batch, model.max_len) for model in (old, new)] == [(1, 128), (32, 4096)]


def test_a_static_batch_is_the_number_of_slots() -> None:
    result = imported("option.model_id=m", "batch_size=4")
    assert model_of(result).max_batch == 4


def test_cores_of_load_on_devices_are_pins() -> None:
    model = model_of(imported("option.model_id=m", "option.tensor_parallel_degree=8", "load_on_devices=nc0;nc8"))
    assert [str(pin) for pin in model.cores] == ["0-7", "8-15"]
    assert model.replicas.min == 2


def test_a_draft_has_lmis_default_length() -> None:
    draft = model_of(imported("option.model_id=m", "option.speculative_draft_model=s3://models/d")).draft
    assert draft is not None
    assert (draft.source, draft.k) == ("s3://models/d", 5)


def test_the_checkpoints_code_is_trusted_only_on_request() -> None:
    lines = ("option.model_id=m", "option.trust_remote_code=true")
    assert [model_of(imported(*lines, trust_remote_code=trust)).trust_remote_code for trust in (False, True)] == [
        False,
        True,
    ]


VLLM = ("option.model_id=org/model", "option.rolling_batch=vllm", "option.tensor_parallel_degree=8")


@pytest.mark.parametrize(
    "config",
    [
        '{"on_device_sampling_config": {"global_topk": 64}, "context_encoding_buckets": [512, 4096]}',
        "{'on_device_sampling_config': {'global_topk': 64}, 'context_encoding_buckets': (512, 4096)}",
    ],
)
def test_options_of_the_vllm_loader_are_those_of_vllm(config: str) -> None:
    """LMI hands its properties to vLLM by their own names, and reads mappings as literals of Python. Lengths in the
    options of NxD Inference become buckets."""
    result = imported(
        *VLLM,
        "option.max_model_len=4096",
        "option.enable_prefix_caching=true",
        f"option.override_neuron_config={config}",
        "option.max_logprobs=50",
    )
    model = model_of(result)
    assert not result.refused
    assert (model.engine, list(model.buckets.prefill or ())) == ("vllm", [512, 4096])
    assert model.engine_options == {
        "prefix_cache": True,
        "additional_config": {"override_neuron_config": {"on_device_sampling_config": {"global_topk": 64}}},
        "max_logprobs": 50,
    }


@pytest.mark.parametrize(
    ("loader", "line", "expected"),
    [
        ("vllm", "option.quantize=awq", ("refused", "'awq' is none of fp8, fbgemm_fp8, neuron_quant")),
        ("tnx", "option.quantize=awq", ("refused", "'awq' is none of static_int8")),
        ("vllm", "option.fuse_qkv=true", ("dropped", "LMI does not pass it to vLLM")),
        ("tnx", "option.fuse_qkv=true", ("mapped", "fuse_qkv")),
        ("vllm", "option.max_num_seqs=4", ("mapped", "max_batch")),
        ("vllm", "option.block_size=many", ("refused", "'many' is not a whole number")),
        ("vllm", "option.lora_modules=[]", ("refused", "write `adapters`")),
        ("tnx", "option.max_logprobs=50", ("dropped", "LMI's Neuron handler does not read it")),
        ("vllm", "option.nonsense=50", ("dropped", "neither LMI nor a recorded version of vLLM reads it")),
    ],
)
def test_each_loader_of_lmi_has_properties_of_its_own(loader: str, line: str, expected: tuple[str, str]) -> None:
    result = imported("option.model_id=m", f"option.model_loader={loader}", line)
    assert fate(result, line.partition("=")[0]) == expected


def test_a_refused_option_leaves_the_others() -> None:
    """A flag of a version of vLLM that the hosts do not run."""
    result = imported(*VLLM, "option.max_logprobs=50", "option.performance_mode=throughput")
    assert fate(result, "option.performance_mode")[0] == "refused"
    assert model_of(result).engine_options == {"max_logprobs": 50}


@pytest.mark.parametrize("handler", ["djl_python.lmi_vllm.vllm_async_service", "djl_python.transformers_neuronx"])
def test_the_handler_chooses_the_loader(handler: str) -> None:
    result = imported("option.model_id=m", f"option.entryPoint={handler}")
    assert model_of(result).engine == ("vllm" if "vllm" in handler else "transformers-neuronx")
    assert not result.refused


DESCRIBED = {
    "ModelName": "m",
    "PrimaryContainer": {
        "Image": "0.dkr.ecr.us-east-1.amazonaws.com/djl-inference:0.30.0-neuronx-sdk2.20.1",
        "ModelDataSource": {"S3DataSource": {"S3Uri": "s3://bucket/prefix/", "S3DataType": "S3Prefix"}},
        "Environment": {"OPTION_TENSOR_PARALLEL_DEGREE": "4", "OPTION_MAX_ROLLING_BATCH_SIZE": "4"},
    },
}


def described(**changes: Any) -> str:
    """The output of `describe-model`, as for each of JumpStart's models."""
    container = {**DESCRIBED["PrimaryContainer"], **changes}  # type: ignore[dict-item]
    return json.dumps({"ModelName": "m", "Containers": [container]})


@pytest.mark.parametrize(
    "changes",
    [{}, {"ModelDataSource": None, "ModelDataUrl": "s3://bucket/prefix/"}, {"Environment": {"HF_MODEL_ID": FOLDER}}],
)
def test_the_source_of_a_sagemaker_model_is_its_data(changes: Mapping[str, Any]) -> None:
    """Its environment names no model, or the folder that SageMaker copies the data to."""
    result = imported(environment=described(**changes))
    assert model_of(result).source == "s3://bucket/prefix/"
    assert not result.refused


def test_the_image_of_a_sagemaker_model_names_the_version_of_lmi() -> None:
    """From 0.30 on, a slot has 4096 positions; a version that is given counts."""
    environment = json.dumps(DESCRIBED)
    models = [model_of(imported(environment=environment, version=version)) for version in (None, (0, 29))]
    assert [model.max_len for model in models] == [4096, 128]


@pytest.mark.parametrize(
    ("changes", "written", "what"),
    [
        ({"ModelDataSource": None}, "option.model_id", "S3Uri of the ModelDataSource"),
        ({"ModelDataSource": None, "ModelDataUrl": "s3://b/m.tar.gz"}, "ModelDataSource", "unpack it to a prefix"),
    ],
)
def test_a_sagemaker_model_without_usable_data_gets_a_line_to_fill_in(
    changes: Mapping[str, Any], written: str, what: str
) -> None:
    result = imported(environment=described(**changes))
    assert result.refused
    assert what in fate(result, written)[1]
    assert "    # source: s3://..." in result.spec


@pytest.mark.parametrize("degree", ["3", "two"])
def test_a_refused_degree_has_no_default(degree: str) -> None:
    """The spec says that it is missing, and counts no copies by another degree."""
    result = imported("option.model_id=m", f"option.tensor_parallel_degree={degree}")
    lines = [line.split()[:2] for line in result.spec.splitlines()]
    assert ["#", "refused:"] in lines
    assert not {"tp_degree:", "replicas:", "allow_head_padding:"} & {line[0] for line in lines}


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("hubToken", True),
        ("MAX_TOTAL_TOKENS", False),
        ("KEYSPACE", False),
        ("TOKENIZERS_PARALLELISM", False),
    ],
)
def test_a_name_is_that_of_a_secret_by_whole_words(name: str, is_secret: bool) -> None:
    result = imported("option.model_id=m", environment=f"{name}=1")
    assert ("secret" in fate(result, name)[1]) == is_secret


def test_secrets_are_named_and_never_copied() -> None:
    result = imported(environment="HF_MODEL_ID=m\nHF_TOKEN=hf_abcdef\nAWS_SECRET_ACCESS_KEY=hf_abcdef\n")
    assert fate(result, "HF_TOKEN")[0] == fate(result, "AWS_SECRET_ACCESS_KEY")[0] == "dropped"
    assert "hf_abcdef" not in result.spec + "".join(map(str, result.outcomes))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("option.entryPoint=model.py", "code of their own"),
        ("option.dtype=int4", "none of fp32, fp16, bf16"),
        ("option.n_positions=1", "at least 2"),
        ("option.tensor_parallel_degree=two", "not a whole number"),
        ("option.task=feature-extraction", "`kind`"),
        ("option.cluster_size=2", "one machine"),
        ("engine=OnnxRuntime", "Python engine"),
    ],
)
def test_a_setting_without_a_replacement_is_refused_with_its_line(line: str, reason: str) -> None:
    """The rest of the spec is valid."""
    result = imported("option.model_id=m", line)
    [refused] = [outcome for outcome in result.outcomes if outcome.fate == "refused"]
    assert (refused.where, refused.written) == ("serving.properties:2", line.partition("=")[0])
    assert reason in refused.what
    model_of(result)


def test_without_a_model_the_import_says_so() -> None:
    result = imported("option.dtype=fp16")
    assert fate(result, "option.model_id") == ("refused", UNNAMED)


def test_models_of_one_container_share_its_cores() -> None:
    """Each gets one replica and a name of its own."""
    models = [LmiModel(name, read_properties("option.model_id=gpt2", name), ()) for name in ("a b", "a-b", "a-b")]
    parsed = parse(import_lmi(models).spec, "spec")
    assert parsed.spec is not None
    assert [(model.name, model.replicas.max) for model in parsed.spec.models] == [
        ("a-b", 1),
        ("a-b-2", 1),
        ("a-b-3", 1),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "HF_MODEL_ID=org/model\n# a comment\nexport TENSOR_PARALLEL_DEGREE='8'\n",
        '{"HF_MODEL_ID": "org/model", "TENSOR_PARALLEL_DEGREE": 8}',
        '{"PrimaryContainer": {"Environment": {"HF_MODEL_ID": "org/model", "TENSOR_PARALLEL_DEGREE": "8"}}}',
        '[{"name": "HF_MODEL_ID", "value": "org/model"}, {"name": "TENSOR_PARALLEL_DEGREE", "value": "8"}]',
    ],
)
def test_an_environment_is_read_from_lines_and_from_json(text: str) -> None:
    """As of `docker run --env-file`, SageMaker's CreateModel and a task definition."""
    model = model_of(imported(environment=text))
    assert (model.source, model.tp_degree) == ("org/model", 8)


@pytest.mark.parametrize("text", ["HF_MODEL_ID: m\n", "{", '{"a": {"b": {}}}', "[1]"])
def test_an_unreadable_environment_is_an_error_with_its_file(text: str) -> None:
    with pytest.raises(UnreadableSettings, match=r"^env:"):
        read_environment(text, "env")


@pytest.mark.parametrize(("degree", "pads"), [(1, False), (8, False), (12, True), (24, True)])
def test_heads_are_padded_where_lmis_engine_pads_them(degree: int, pads: bool) -> None:
    """transformers-neuronx pads the 40 heads of Llama-2-13b on 12 cores without a setting; other engines decide by
    their own fields."""
    lines = ("option.model_id=m", f"option.tensor_parallel_degree={degree}")
    assert model_of(imported(*lines)).allow_head_padding == pads
    assert not model_of(imported(*lines, engine="nxd-inference")).allow_head_padding


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shapes_of_lmis_models_have_their_published_sizes(name: str) -> None:
    assert round(Checkpoint.from_config(CONFIGS[name]).parameters / 1e6) == PARAMETERS[name]


GROUPS = ("transformers_neuronx_handler_list", "transformers_neuronx_aot_handler_list")
REFUSALS = {"gpt-j-6b": ("family-unsupported",)}
"""The problems of LMI's configurations that are not planned, by source: the engine attends to position 0 only."""


def lmi_configurations(group: str) -> dict[str, dict[str, object]]:
    """The configurations of LMI's own tests, by name."""
    tree = ast.parse((Path(os.environ["DJL_SOURCE"]) / "tests/integration/llm/prepare.py").read_text())
    [table] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == group
    ]
    assert table
    return {str(name): dict(options) for name, options in table.items()}


needs_djl = pytest.mark.skipif(
    "DJL_SOURCE" not in os.environ, reason="DJL_SOURCE names no checkout of djl-serving 0.28"
)


@pytest.mark.real
@needs_djl
@pytest.mark.parametrize("group", GROUPS)
def test_the_neuron_configurations_of_lmis_own_tests_import(group: str) -> None:
    """Each gives a valid spec; only other kinds of model are refused."""
    for name, options in lmi_configurations(group).items():
        result = imported(*(f"{key}={value}" for key, value in options.items()))
        model_of(result)
        assert result.refused == ("diffusion" in name), (name, result.outcomes)


@pytest.mark.real
@needs_djl
@pytest.mark.parametrize("group", GROUPS)
def test_the_neuron_configurations_of_lmis_own_tests_are_planned(group: str) -> None:
    """On inf2.48xlarge with the shapes of their models, as many replicas as LMI loads; the rest is refused for the
    problem that is expected."""
    for name, options in lmi_configurations(group).items():
        if "diffusion" in name:
            continue
        [source] = [part for part in CONFIGS if part in str(options["option.model_id"])]
        parsed = parse(imported(*(f"{key}={value}" for key, value in options.items())).spec, "spec")
        assert parsed.spec is not None
        hosts = hosts_for(parsed.spec, Machine((0,)))
        [model] = parsed.spec.models
        shapes = {model.name: Checkpoint.from_config(CONFIGS[source])}
        problems = check(parsed.spec, hosts, shapes)
        errors = tuple(problem.id for problem in problems if problem.severity == "error")
        assert errors == REFUSALS.get(source, ()), (name, problems)
        if not errors:
            result = plan(parsed.spec, hosts, shapes)
            assert not result.unplaced, (name, result.unplaced)
            assert len(result.placements) == 24 // model.tp_degree, name
