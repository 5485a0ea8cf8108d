"""Writes the options.json of engines from the recorded contracts: ``python -m tests.option_tables``.

``KINDS`` holds the kinds that a contract does not show: those of options whose default is None or an expression.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
CONTRACTS = ROOT / "tests" / "contracts"

TNX = "transformers_neuronx"
NXD = "neuronx_distributed_inference"
FILES = {  # package -> its options
    TNX: ROOT / "placements" / "engines" / "transformers_neuronx" / "options.json",
    NXD: ROOT / "placements" / "engines" / "nxd_inference" / "options.json",
}
CONFIG = f"{NXD}.models.config"
LORA = f"{NXD}.modules.lora_serving.config.LoraServingConfig"
CONFIGS = {  # package -> the classes whose options a spec may set
    TNX: (
        f"{TNX}.config.NeuronConfig",
        f"{TNX}.config.QuantizationConfig",
        f"{TNX}.config.KVCacheQuantizationConfig",
        f"{TNX}.config.GenerationConfig",
        f"{TNX}.sparse_attn_utils.SparseAttnConfig",
    ),
    NXD: (
        f"{CONFIG}.NeuronConfig",
        f"{CONFIG}.MoENeuronConfig",
        f"{CONFIG}.OnDeviceSamplingConfig",
        f"{CONFIG}.ChunkedPrefillConfig",
        f"{CONFIG}.HybridShardingConfig",
        f"{CONFIG}.TensorCaptureConfig",
        f"{CONFIG}.TensorReplacementConfig",
        LORA,
    ),
}
REGISTRY = f"{TNX}.modeling_auto.NEURON_MODEL_FOR_CAUSAL_LM_MAPPING"

_FLOATS = "float32,float16,bfloat16"
_LAYOUTS = "enum:BSH,HSB,SBH"
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("all_reduce_dtype", "cast_logits_dtype"), f"enum:{_FLOATS}"),
    **dict.fromkeys(("attention_layout", "collectives_layout", "cache_layout"), _LAYOUTS),
    **dict.fromkeys(("attn_kernel_enabled", "expert_mlp_nki_kernel_enabled", "moe_fused_nki_kernel_enabled"), "bool"),
    **dict.fromkeys(("router_topk_nki_kernel_enabled", "shared_mlp_nki_kernel_enabled", "lm_head_pad"), "bool"),
    **dict.fromkeys(("deterministic_threshold", "capacity_factor", "quantize_clamp_bound"), "float"),
    **dict.fromkeys(("gate_clamp_upper_limit", "gate_clamp_lower_limit"), "float"),
    **dict.fromkeys(("up_clamp_upper_limit", "up_clamp_lower_limit"), "float"),
    **dict.fromkeys(("attention_dtype", "rpl_reduce_dtype", "torch_dtype", "activation_quantization_type"), "str"),
    **dict.fromkeys(("amp", "target", "tag", "lora_ckpt_json", "quantized_checkpoints_path"), "str"),
    **dict.fromkeys(("ref_dir", "neuron_dir"), "str"),
    **dict.fromkeys(("buckets", "context_encoding_buckets", "token_generation_buckets", "prefix_buckets"), "list"),
    **dict.fromkeys(("modules_to_not_convert", "draft_model_modules_to_not_convert", "medusa_tree"), "list"),
    **dict.fromkeys(("token_generation_batches", "target_modules", "modules_to_capture"), "list"),
    **dict.fromkeys(("lora_ckpt_paths", "lora_ckpt_paths_cpu"), "list|mapping"),
    **dict.fromkeys(("quantization_block_axis", "quantization_block_size", "eos_token_id"), "int|list"),
    **dict.fromkeys(("batch_size", "n_positions", "context_length_estimate"), "int|list"),
    **dict.fromkeys(("kv_quant_config", "dma_order_config", "router_config", "tf_map", "module_map"), "mapping"),
    **dict.fromkeys(("blockwise_matmul_config", "sparse_mask_dict", "sparse_attn_config"), "mapping"),
    **dict.fromkeys(("token_tree_config", "neuron_config", "continuous_batching", "group_query_attention"), "any"),
    **dict.fromkeys(("ctx_batch_size", "tkg_batch_size", "max_batch_size", "kv_cache_batch_size"), "int"),
    **dict.fromkeys(("spec_batch_size", "pa_block_size", "pa_num_blocks", "max_new_tokens", "max_length"), "int"),
    **dict.fromkeys(("max_context_length", "n_active_tokens", "scratchpad_page_size", "world_size"), "int"),
    **dict.fromkeys(("logical_nc_config", "logical_neuron_cores", "local_ranks_size", "padded_hidden_size"), "int"),
    **dict.fromkeys(("padded_intermediate_size", "windowed_context_encoding_size", "compilation_worker_count"), "int"),
    **dict.fromkeys(("unroll", "context_unroll", "init_n_active_tokens", "global_top_k"), "int"),
    **dict.fromkeys(("max_intermediate_tensors",), "int"),
    "top_k_kernel_enabled": "bool",
    "sparse_attn": "mapping:SparseAttnConfig",
    "quant": "mapping:QuantizationConfig",
    "on_device_generation": "mapping:GenerationConfig",
    "chunked_prefill_config": "mapping:ChunkedPrefillConfig",
    "hybrid_sharding_config": "mapping:HybridShardingConfig",
    "lora_config": "mapping:LoraServingConfig",
    "tensor_capture_config": "mapping:TensorCaptureConfig",
    "tensor_replacement_config": "mapping:TensorReplacementConfig",
}
PLAIN = frozenset({"bool", "int", "float", "str", "list", "mapping"})  # kinds that a literal default shows
NESTED = {  # names with another meaning in another class
    f"{TNX}.NeuronConfig.kv_cache_quant": "mapping:KVCacheQuantizationConfig",
    f"{NXD}.NeuronConfig.on_device_sampling_config": "mapping:OnDeviceSamplingConfig",
}


class RecordedOption(NamedTuple):
    """One option of one class: its default as source text in each version that has it, oldest first."""

    name: str
    defaults: Mapping[str, str]


def contract(package: str) -> Any:
    """Returns the recorded contract of a package."""
    return json.loads((CONTRACTS / f"{package}.json").read_text())


def versions(recorded: Any) -> list[str]:
    """Returns the versions in a contract, oldest first."""
    names = {*recorded["snapshots"], *recorded["deltas"]}
    return sorted(names, key=lambda name: ("main" in name, [int(part) for part in name.split("-")[0].split(".")]))


def class_of(recorded: Any, version: str, dotted: str) -> Any:
    """Returns one class of a snapshot."""
    module, _, name = dotted.rpartition(".")
    return recorded["snapshots"][version]["modules"][module]["classes"][name]


def options(recorded: Any, dotted: str) -> Iterator[RecordedOption]:
    """Yields the options of a class, in the order of the newest snapshot that has it."""
    history = recorded["option_history"].get(dotted)
    if history is not None:
        yield from (RecordedOption(name, defaults) for name, defaults in history.items())
        return
    by_name: dict[str, dict[str, str]] = {}
    for version in versions(recorded):
        for name, default in _signature(recorded, version, dotted).items():
            by_name.setdefault(name, {})[version] = default
    yield from (RecordedOption(name, defaults) for name, defaults in by_name.items())


def _signature(recorded: Any, version: str, dotted: str) -> dict[str, str]:
    """Returns the defaults of parameters and of options read from **kwargs, by name.

    For a version that is recorded as a difference: those of its changed signature; empty if that is incomplete.
    """
    if version in recorded["snapshots"]:
        known = class_of(recorded, version, dotted)
        parameters = known["methods"]["__init__"]["params"][1:]
        named = {p["name"]: p.get("default", "<no default>") for p in parameters if p["kind"] != "VAR_KEYWORD"}
        keywords = known.get("kwargs_options", ())
        own = {o["name"]: o["default"] for o in keywords if o["access"] in ("pop", "get") and o["method"] == "__init__"}
        return {**named, **own}
    delta, init, primary = recorded["deltas"][version], f"{dotted}.__init__", recorded["primary"]
    known = class_of(recorded, primary, dotted)
    keywords = {option["name"] for option in known.get("kwargs_options", ())}
    if (keywords and recorded["option_history"]) or dotted in delta["removed"]:
        return {}  # **kwargs of an older NxD Inference are recorded for three classes only
    newest = _signature(recorded, primary, dotted)
    named = _read(delta["changed"][init]["here"]) if init in delta["changed"] else newest
    return {**named, **{name: default for name, default in newest.items() if name in keywords}}


def _read(signature: str) -> dict[str, str]:
    (function,) = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    pairs = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {a.arg: "<no default>" if d is None else ast.unparse(d) for a, d in pairs if a.arg != "self"}


def kind(table: str, option: RecordedOption) -> str:
    """Returns the kind of an option, in the notation of ``Option.read``."""
    if f"{table}.{option.name}" in NESTED:
        return NESTED[f"{table}.{option.name}"]
    if option.name in KINDS:
        return KINDS[option.name]
    for default in reversed([*option.defaults.values()]):
        try:
            value = ast.literal_eval(default)
        except (ValueError, SyntaxError):
            continue
        name = {"dict": "mapping", "tuple": "list"}.get(type(value).__name__, type(value).__name__)
        if name in PLAIN:
            return name
    raise KeyError(f"{table}.{option.name} has no kind: add it to KINDS")


def tables() -> dict[str, list[RecordedOption]]:
    """Returns the options of each configuration class and of each family's constructor, by table name."""
    by_table: dict[str, list[RecordedOption]] = {}
    for package, dotted in CONFIGS.items():
        recorded = contract(package)
        for name in dotted:
            by_table[f"{package}.{name.rpartition('.')[2]}"] = list(options(recorded, name))
        if package == TNX:
            for family, exported in recorded["snapshots"][recorded["primary"]]["registries"][REGISTRY].items():
                if family != "code_llama":  # llama's, by another name
                    by_table[f"{TNX}:{family}"] = list(_constructor(recorded, exported.rpartition(".")[2]))
    return by_table


def _constructor(recorded: Any, name: str) -> Iterator[RecordedOption]:
    """Yields the keywords that a class accepts in ``from_pretrained``, without its configuration."""
    modules = recorded["snapshots"][recorded["primary"]]["modules"]
    (dotted,) = [f"{module}.{name}" for module, held in modules.items() if name in held.get("classes", {})]
    yield from (option for option in options(recorded, dotted) if option.name not in ("config", "debug"))


def text(package: str) -> str:
    """Returns the JSON file of a package: an object for each table, one line for each option."""
    blocks = []
    for table, options_found in tables().items():
        if table.partition(":")[0].partition(".")[0] != package:
            continue
        known = versions(contract(table.partition(":")[0].partition(".")[0]))
        rows = (f"    {_json(option.name)}: {_json(_row(table, option, known))}" for option in options_found)
        blocks.append(f"  {_json(table)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _row(table: str, option: RecordedOption, known: list[str]) -> dict[str, str]:
    """The arguments of ``Option.read``; first and last only for an option that some version does not have."""
    versions_with = [version for version in known if version in option.defaults]
    row = {"kind": kind(table, option), "default": option.defaults[versions_with[-1]]}
    return row if versions_with == known else {**row, "first": versions_with[0], "last": versions_with[-1]}


if __name__ == "__main__":
    for package, path in FILES.items():
        path.write_text(text(package))
