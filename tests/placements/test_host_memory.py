"""The host memory of replicas, and of compiling them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from placements.engines.memory import COMPILE_WORKER_GIB, COMPILER_GIB, COMPILER_THREADS, GIB, PROCESS_GIB
from placements.engines.registry import Engine
from placements.engines.vllm.capabilities import release_for
from placements.engines.vllm.memory import VLLM_GIB
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES
from placements.resources.host_memory import (
    compilers_at_once,
    host_memory,
)
from tests.placements.fleets import LLAMA_2_7B, model
from tests.placements.test_memory import LLAMA_31_8B, LLAMA_31_70B, OPT_13B

PROCESS_SPARE_GIB = 0.5  # of PROCESS_GIB, beside the imports


def test_loading_needs_the_whole_checkpoint() -> None:
    """For any degree, and every engine on Neuron."""
    loads = [
        host_memory(model("m", tp), LLAMA_31_8B, engine).load
        for tp in (1, 8)
        for engine in ("auto", "transformers-neuronx", "nxd-inference", "optimum-neuron")  # type: Engine
    ]
    assert loads == pytest.approx([8_030_261_248 * 2 / GIB + PROCESS_GIB] * 8)


def test_vllm_has_two_more_processes() -> None:
    """Returns whether it loads or serves."""
    engines: tuple[Engine, ...] = ("nxd-inference", "vllm")
    alone, vllm = (host_memory(model("m", 8), LLAMA_31_8B, engine) for engine in engines)
    assert (vllm.load - alone.load, vllm.serving - alone.serving) == pytest.approx((VLLM_GIB, VLLM_GIB))


def test_the_later_plugin_of_vllm_has_a_process_for_each_core() -> None:
    """The one on NxD Inference uses all cores in one process."""
    none, nxd, own = (
        host_memory(model("m", 8), LLAMA_31_8B, "vllm", release=release).load
        for release in (None, release_for("inf2"), release_for("trn2"))
    )
    assert (nxd, own - none) == (none, pytest.approx(7 * PROCESS_GIB))


def test_files_in_a_wider_dtype_need_more_to_load() -> None:
    """fp32 on the disk, bf16 on the device; int8 is made of what is loaded, and saves nothing here."""
    wide = replace(LLAMA_31_8B, stored_bytes=4)
    loads = [
        host_memory(model("m", 8, quantize="int8"), checkpoint, "auto").load - PROCESS_GIB
        for checkpoint in (LLAMA_31_8B, replace(LLAMA_31_8B, stored_bytes=2), wide)
    ]
    assert loads == [loads[0], loads[0], 2 * loads[0]]


def test_a_load_of_quantized_shards_needs_a_byte_for_each_weight() -> None:
    """On NeuronX Distributed, whose compile has saved them; embeddings and norms are not quantized."""
    whole, quantized = (
        host_memory(model("m", 8, quantize=quantize), LLAMA_31_8B, "nxd-inference").load for quantize in (None, "int8")
    )
    groups = LLAMA_31_8B.groups
    kept = groups.embedding + groups.head + groups.small + groups.positions
    assert whole - quantized == pytest.approx((LLAMA_31_8B.parameters - kept) / GIB)


def test_serving_keeps_the_embedding_of_transformers_neuronx() -> None:
    """With learned positions; nothing of the model on engines of NxD."""
    kept = [
        host_memory(model("m", 2), OPT_13B, engine).serving - PROCESS_GIB
        for engine in ("transformers-neuronx", "auto", "nxd-inference")  # type: Engine
    ]
    table = (50272 + 2050) * 5120 * 2 / GIB
    assert kept == pytest.approx([table, table, 0])


def test_the_cpu_engine_serves_from_the_hosts_memory() -> None:
    """Weights, cache and the longest prompt in fp32, undivided."""
    need = host_memory(model("m", 8, max_batch=2, max_len=1024), LLAMA_2_7B, "cpu")
    kv = 2 * 32 * 32 * 128 * 1024 * 2 * 4
    prompt = 4 * 1024 * (3 * 11008 + 6 * 4096) + 5 * 1024**2
    assert (need.load, need.compile) == (pytest.approx(PROCESS_GIB + (6_738_415_616 * 4 + kv + prompt) / GIB), 0)
    assert need.serving == need.load


@pytest.mark.parametrize(
    ("family", "dtype", "length", "hidden", "ffn", "heads", "measured"),
    [
        ("llama", "bf16", 2048, 2048, 8192, 32, 0.22),
        ("llama", "bf16", 2048, 8192, 4096, 32, 0.33),
        ("llama", "fp32", 2048, 8192, 4096, 32, 0.48),
        ("llama", "bf16", 8192, 1024, 4096, 8, 0.37),
        ("llama", "fp32", 8192, 512, 1024, 8, 0.47),
        ("llama", "bf16", 16384, 512, 1024, 8, 0.93),
        ("gpt2", "bf16", 2048, 8192, 2048, 16, 0.30),
        ("opt", "bf16", 2048, 8192, 2048, 32, 0.26),
        ("qwen3", "bf16", 2048, 6144, 4096, 32, 0.28),
        ("mixtral", "fp32", 1024, 4096, 4096, 16, 0.22),
        ("gptj", "bf16", 2048, 4096, 2048, 16, 0.84),
        ("gptj", "fp32", 2048, 4096, 2048, 16, 0.96),
        ("bloom", "bf16", 2048, 1024, 4096, 16, 0.91),
        ("bloom", "fp32", 2048, 1024, 4096, 16, 1.09),
    ],
)
def test_the_longest_prompt_of_the_cpu_engine_is_counted(
    family: str, dtype: str, length: int, hidden: int, ffn: int, heads: int, measured: float
) -> None:
    """``measured``: by how much the peak of a prefill exceeded the memory after the load and the KV cache that the
    prompt filled, in GiB (two layers; torch 2.13, transformers 5.23)."""
    shape = Checkpoint(family, heads, heads, 0, hidden, ffn, 64, 0, None, True, 0)
    counted = host_memory(model("m", max_len=length, dtype=dtype), shape, "cpu").serving - PROCESS_GIB
    assert counted - PROCESS_SPARE_GIB < measured < counted + PROCESS_SPARE_GIB


def test_chunks_of_a_prompt_need_fewer_scores() -> None:
    """Those of a chunk with the whole prompt, at a time."""
    shape = Checkpoint("bloom", 16, 16, 0, 1024, 4096, 64, 0, None, True, 0)
    whole, chunked = (
        host_memory(model("m", engine="cpu", max_len=2048, engine_options=options), shape).serving
        for options in ({}, {"prefill_chunk": 128})
    )
    assert whole - chunked == pytest.approx(16 * (16 * 2048 * (2048 - 128)) / GIB)


def test_echo_needs_only_its_process() -> None:
    """It has no model."""
    need = host_memory(model("m", 8), LLAMA_2_7B, "echo")
    assert (need.load, need.serving, need.compile) == (PROCESS_GIB, PROCESS_GIB, 0)


def test_a_draft_is_loaded_beside_its_model() -> None:
    """Both checkpoints count."""
    alone, both = (host_memory(model("m", 8), LLAMA_31_8B, "auto", draft) for draft in (None, LLAMA_31_8B))
    assert both.load - PROCESS_GIB == 2 * (alone.load - PROCESS_GIB)


def test_an_8b_model_is_not_compiled_on_32_gib() -> None:
    """The compile was killed there (trn1.2xlarge)."""
    need = host_memory(model("m", 1, max_len=64), LLAMA_31_8B, "nxd-inference")
    assert (need.compile, need.compile > TOPOLOGIES["trn1.2xlarge"].memory_gib) == (COMPILE_WORKER_GIB, True)


@pytest.mark.parametrize(("given", "serving"), [(40.0, 2.0), (1.5, 1.5)])
def test_host_memory_can_be_set(given: float, serving: float) -> None:
    """host_memory_gib replaces the estimate for loading; serving needs no more than that."""
    need = host_memory(model("m", 8, host_memory_gib=given), LLAMA_31_8B, "transformers-neuronx")
    assert (need.load, round(need.serving, 1)) == (given, serving)


def test_host_memory_is_printed_in_gib() -> None:
    """The largest concern first."""
    assert str(host_memory(model("m", 8), LLAMA_31_8B, "auto")) == "load 16.0, serving 2.0, compile 108.0 GiB"


@pytest.mark.parametrize(
    ("engine", "fields", "at_once"),
    [
        ("nxd-inference", {"max_len": 2048}, 9),  # 128 to 2048 for prompts and steps; the first step graph alone
        ("nxd-inference", {"max_len": 100}, 1),
        ("nxd-inference", {"max_len": 2048, "buckets": {"prefill": [2048], "decode": [1024, 2048]}}, 2),
        ("vllm", {"max_len": 2048}, 9),
        ("nxd-inference", {"max_len": 2048, "buckets": {"prefill": list(range(64, 2049, 64))}}, COMPILER_THREADS),
        ("optimum-neuron", {"max_len": 2048}, 1),
        ("transformers-neuronx", {"max_len": 2048, "max_batch": 1}, 10),
        ("transformers-neuronx", {"max_len": 2048, "max_batch": 4}, 6),  # continuous batching: one for steps
        ("transformers-neuronx", {"max_len": 2048, "compiler": {"workers": 3}}, 3),
        ("cpu", {}, 0),
    ],
)
def test_compilers_run_at_once(engine: Engine, fields: dict[str, Any], at_once: int) -> None:
    """NxD Inference compiles all graphs of a model in parallel; transformers-neuronx does, up to its workers."""
    assert compilers_at_once(model("m", 8, **fields), LLAMA_31_8B, engine) == at_once


def test_many_compilers_need_more_memory_than_one() -> None:
    """Twelve GiB for each; 64 at least."""
    need = [host_memory(model("m", 8, max_len=length), LLAMA_31_8B, "nxd-inference").compile for length in (128, 8192)]
    assert need == [COMPILE_WORKER_GIB, 13 * COMPILER_GIB]


def test_shards_are_held_beside_the_checkpoint_until_they_are_saved() -> None:
    """On NeuronX Distributed a large model needs as much as its checkpoint again; transformers-neuronx does not."""
    need = {
        engine: host_memory(model("m", 32, max_len=128), LLAMA_31_70B, engine).compile
        for engine in ("optimum-neuron", "transformers-neuronx")  # type: Engine
    }
    weights = LLAMA_31_70B.parameters * 2 / GIB
    assert need == {"optimum-neuron": pytest.approx(weights), "transformers-neuronx": COMPILE_WORKER_GIB}


def test_embedding_on_the_device_frees_the_host() -> None:
    """on_device_embedding of transformers-neuronx; GPT-NeoX ignores it."""
    neox = Checkpoint("gpt_neox", 64, 64, 44, 6144, 24576, 96, 50432, 2048, False, 20_554_567_680)
    on_device = {"on_device_embedding": True}
    serving = [
        host_memory(model("m", 8, engine_options=options), checkpoint, "transformers-neuronx").serving
        for checkpoint in (OPT_13B, neox)
        for options in ({}, on_device)
    ]
    assert (serving[0] > 1.4, serving[1], serving[2]) == (True, PROCESS_GIB, serving[3])
