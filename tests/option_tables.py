"""placements/rules/options/tables.py, made from the recorded contracts: ``python -m tests.option_tables`` writes it
anew.

What a contract cannot tell, the kind of an option whose default is None or an expression, stands in ``KINDS``.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
CONTRACTS = ROOT / "tests" / "contracts"
TABLES = ROOT / "placements" / "options" / "tables.py"

TNX = "transformers_neuronx"
NXD = "neuronx_distributed_inference"
CONFIG = f"{NXD}.models.config"
LORA = f"{NXD}.modules.lora_serving.config.LoraServingConfig"
CONFIGS = {  # of each package, the classes whose options a spec may give
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
PLAIN = frozenset({"bool", "int", "float", "str", "list", "mapping"})  # kinds that a literal default tells
NESTED = {  # names that mean another thing in another class
    f"{TNX}.NeuronConfig.kv_cache_quant": "mapping:KVCacheQuantizationConfig",
    f"{NXD}.NeuronConfig.on_device_sampling_config": "mapping:OnDeviceSamplingConfig",
}


class Found(NamedTuple):
    """One option of one class: its default as source text in each version that has it, oldest first."""

    name: str
    defaults: Mapping[str, str]


def contract(package: str) -> Any:
    """The whole recorded contract of a package."""
    return json.loads((CONTRACTS / f"{package}.json").read_text())


def versions(recorded: Any) -> list[str]:
    """Those that the contract speaks of, oldest first."""
    found = {*recorded["snapshots"], *recorded["deltas"]}
    return sorted(found, key=lambda name: ("main" in name, [int(part) for part in name.split("-")[0].split(".")]))


def class_of(recorded: Any, version: str, dotted: str) -> Any:
    """One class of a snapshot."""
    module, _, name = dotted.rpartition(".")
    return recorded["snapshots"][version]["modules"][module]["classes"][name]


def options(recorded: Any, dotted: str) -> Iterator[Found]:
    """What the class can be given, in the order of the newest snapshot that has it."""
    history = recorded["option_history"].get(dotted)
    if history is not None:
        yield from (Found(name, defaults) for name, defaults in history.items())
        return
    found: dict[str, dict[str, str]] = {}
    for version in versions(recorded):
        for name, default in _signature(recorded, version, dotted).items():
            found.setdefault(name, {})[version] = default
    yield from (Found(name, defaults) for name, defaults in found.items())


def _signature(recorded: Any, version: str, dotted: str) -> dict[str, str]:
    """Parameters and what is taken out of **kwargs. Of a version that is recorded as a difference only, those of a
    changed signature; none where that does not tell all."""
    if version in recorded["snapshots"]:
        known = class_of(recorded, version, dotted)
        parameters = known["methods"]["__init__"]["params"][1:]
        named = {p["name"]: p.get("default", "<no default>") for p in parameters if p["kind"] != "VAR_KEYWORD"}
        taken = known.get("kwargs_options", ())
        own = {o["name"]: o["default"] for o in taken if o["access"] in ("pop", "get") and o["method"] == "__init__"}
        return {**named, **own}
    delta, init, primary = recorded["deltas"][version], f"{dotted}.__init__", recorded["primary"]
    known = class_of(recorded, primary, dotted)
    taken = {option["name"] for option in known.get("kwargs_options", ())}
    if (taken and recorded["option_history"]) or dotted in delta["removed"]:
        return {}  # an older NxD Inference: what its class took out of **kwargs is recorded for three classes only
    newest = _signature(recorded, primary, dotted)
    named = _read(delta["changed"][init]["here"]) if init in delta["changed"] else newest
    return {**named, **{name: default for name, default in newest.items() if name in taken}}


def _read(signature: str) -> dict[str, str]:
    (function,) = ast.parse(f"def f{signature}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    pairs = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return {a.arg: "<no default>" if d is None else ast.unparse(d) for a, d in pairs if a.arg != "self"}


def kind(table: str, found: Found) -> str:
    """bool, int, float, str, list, mapping, any; two of them with a bar between; enum:A,B; mapping:Table."""
    if f"{table}.{found.name}" in NESTED:
        return NESTED[f"{table}.{found.name}"]
    if found.name in KINDS:
        return KINDS[found.name]
    for default in reversed(found.defaults.values()):
        try:
            value = ast.literal_eval(default)
        except (ValueError, SyntaxError):
            continue
        name = {"dict": "mapping", "tuple": "list"}.get(type(value).__name__, type(value).__name__)
        if name in PLAIN:
            return name
    raise KeyError(f"{table}.{found.name} has no kind: say in KINDS what it is")


def tables() -> dict[str, list[Found]]:
    """Every table by its name: a configuration, or the constructor of a family's class."""
    made: dict[str, list[Found]] = {}
    for package, dotted in CONFIGS.items():
        recorded = contract(package)
        for name in dotted:
            made[f"{package}.{name.rpartition('.')[2]}"] = list(options(recorded, name))
        if package == TNX:
            for family, exported in recorded["snapshots"][recorded["primary"]]["registries"][REGISTRY].items():
                if family != "code_llama":  # llama's, by another name
                    made[f"{TNX}:{family}"] = list(_constructor(recorded, exported.rpartition(".")[2]))
    return made


def _constructor(recorded: Any, name: str) -> Iterator[Found]:
    """The keywords of ``from_pretrained`` that a class takes, but for its configuration."""
    modules = recorded["snapshots"][recorded["primary"]]["modules"]
    (dotted,) = [f"{module}.{name}" for module, held in modules.items() if name in held.get("classes", {})]
    yield from (found for found in options(recorded, dotted) if found.name not in ("config", "debug"))


def text() -> str:
    """The module, as ruff would format it."""
    lines = [
        '"""The options of the Neuron engines, as their sources have them. Made from the recorded contracts by',
        'tests/option_tables.py; do not edit."""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "from types import MappingProxyType",
        "",
        "from placements.rules.options.option import Option",
        "",
        "TABLES: Mapping[str, Mapping[str, Option]] = MappingProxyType(",
        "    {",
    ]
    for table, found in tables().items():
        newest = versions(contract(table.partition(":")[0].partition(".")[0]))
        lines += [f'        "{table}": MappingProxyType(', "            {"]
        for one in found:
            lines += _entry(one.name, _given(table, one, newest))
        lines += ["            }", "        ),"]
    lines += [
        "    }",
        ")",
        '"""By class, package.Class, and by family, package:model_type, for what a family\'s constructor takes."""',
    ]
    return "\n".join(lines) + "\n"


def _entry(name: str, given: str) -> list[str]:
    line = f'                "{name}": Option({given}),'
    return [line] if len(line) <= 120 else [line.partition(given)[0], f"{' ' * 20}{given}", f"{' ' * 16}),"]


def _given(table: str, found: Found, known: list[str]) -> str:
    had = [version for version in known if version in found.defaults]
    given = [kind(table, found), found.defaults[had[-1]], *([] if had == known else [had[0], had[-1]])]
    return ", ".join(json.dumps(word, ensure_ascii=False) for word in given)


if __name__ == "__main__":
    TABLES.write_text(text())
