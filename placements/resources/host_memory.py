"""Estimates the host memory of a replica, and of compiling it, from config.json."""

from __future__ import annotations

from dataclasses import dataclass

from placements.facts import vllm
from placements.facts.checkpoints import Checkpoint
from placements.facts.engines import BYTES, HOST_ENGINES, TNX_CONTINUOUS, TNX_UNPADDED, Engine
from placements.resources.memory import GIB, embeds_on_device, kv_cache, on_nxd
from placements.spec.schema import ModelSpec

PROCESS_GIB = 1.0
"""A replica's process without a model. Importing torch and transformers takes 0.32 GiB (measured on CPU); the share of
the Neuron runtime is not documented, so this is a conservative guess."""

SCORE_FAMILIES = frozenset({"bloom", "gptj"})
"""The families whose attention scores the CPU engine holds for all heads: transformers 5 has no fused attention for
them. For the others it holds the mask, which is the same for all heads."""

SCORE_BYTES = 16
"""Of each score: its number in fp32 before and after the softmax, with its mask (13 to 16 were measured)."""

VLLM_GIB = 1.2
"""The processes of vLLM beside the one with the model, its API server and EngineCore: 0.56 to 0.64 and 0.53 to 0.61
GiB (measured with vLLM 0.32 on CPU)."""

COMPILE_WORKER_GIB = 64.0
"""The least for compiling: neuron_parallel_compile starts one worker for each 64 GiB of the host. A compile of
Llama-3.1-8B with NxD Inference, tp 1, was killed on 32 GiB while it generated graphs (trn1.2xlarge)."""

COMPILER_GIB = 12.0
"""Each compiler process, if there are many: NxD Inference 0.8 compiled Trinity-Nano (6 billion parameters, tp 1, length
2048, ten graphs of which nine at once) in the 123 GB of inf2.8xlarge (its contrib/models/Trinity/README.md)."""

COMPILER_THREADS = 32
"""The most compilers that NxD Inference runs at once: its ThreadPoolExecutor has min(32, CPUs + 4) threads
(neuronx-distributed, trace/model_builder.py)."""

SHORTEST_GRAPH = 128  # tokens; default lengths double from here to max_len in both packages

CPU_COMPILE_GIB = 3.0
"""torch.compile without the model: two g++ processes at once, and torch's own graphs. Not measured for large models: a
conservative guess."""


@dataclass(frozen=True)
class HostMemory:
    """The host memory that one replica needs, in GiB."""

    serving: float  # while it serves
    load: float  # the peak from its start until it serves; at least ``serving``
    compile: float  # in addition, while a graph is compiled; 0 for engines that compile nothing

    def __str__(self) -> str:
        return f"load {self.load:.1f}, serving {self.serving:.1f}, compile {self.compile:.1f} GiB"


def host_memory(
    model: ModelSpec,
    checkpoint: Checkpoint,
    engine: Engine | None = None,
    draft: Checkpoint | None = None,
    release: vllm.VllmNeuron | None = None,
) -> HostMemory:
    """Returns the host memory of a replica; ``engine`` as in `estimate`, ``release`` is that of vllm-neuron.

    - Loading: the process and the whole checkpoint, in the dtype of its files or of serving, whichever is wider.
      transformers-neuronx reads safetensors layer by layer but other files at once, and config.json does not show the
      format, so that the whole checkpoint counts too. The model's ``host_memory_gib`` replaces this.
      Replicas on NeuronX Distributed map the shards that were saved when the model was compiled: 1.4 GB were measured
      for 12 GB of them, and the rest is page cache, which may be as large as the checkpoint.
    - Serving on Neuron: the process, and the embeddings if the engine may be transformers-neuronx, which embeds on the
      host unless ``on_device_embedding`` is set. On the host's CPUs: the process, weights, KV cache, and what the
      longest prompt needs while it is processed, which a load does not try.
    - vLLM has two more processes, VLLM_GIB; with its later plugin also a process for each further core.
    - Compiling: COMPILER_GIB for each of the ``compilers_at_once``, and COMPILE_WORKER_GIB at least. On NeuronX
      Distributed, which holds the shards of all cores beside the checkpoint before it saves them, at least as much as
      the checkpoint. On the host's CPUs torch.compile, if the model enables it.
    """
    engine = engine or model.engine
    width = BYTES[model.dtype_on(engine)]
    held = tuple(each for each in (checkpoint, draft) if each is not None)
    if engine == "echo":
        serving = loading = PROCESS_GIB
    elif engine == "cpu":
        alone = model.model_copy(update={"tp_degree": 1, "group_query_attention": None})
        length = model.length(checkpoint)
        sizes = sum(each.parameters * width + kv_cache(alone, each, engine, length) for each in held)
        if model.kind == "generate":
            sizes += max(_longest_prompt(model, each, length, width) for each in held)
        serving = loading = PROCESS_GIB + sizes / GIB  # tensors are mapped from the files and converted one by one
    else:
        on_host = engine == "auto" or (engine == "transformers-neuronx" and not embeds_on_device(model, checkpoint))
        embeddings = sum(each.groups.embedding + each.groups.positions for each in held) if on_host else 0
        files = sum(each.parameters * max(width, each.stored_bytes or 0) for each in held)
        files *= 2 if engine == "torch-neuronx" else 1  # the checkpoint, and the trace that is being loaded
        serving, loading = PROCESS_GIB + embeddings * width / GIB, PROCESS_GIB + files / GIB
    if engine == "vllm":
        others = VLLM_GIB
        if release is not None and release.back_end == "neuron":
            others += (model.tp_degree - 1) * PROCESS_GIB
        serving, loading = serving + others, loading + others
    if model.host_memory_gib is not None:
        loading = model.host_memory_gib
    on_cpu = CPU_COMPILE_GIB if engine == "cpu" and model.engine_options.get("compile") is True else 0.0
    compiling = on_cpu if engine in HOST_ENGINES else _compile(model, checkpoint, engine, held)
    return HostMemory(min(serving, loading), loading, compiling)


def _longest_prompt(model: ModelSpec, checkpoint: Checkpoint, length: int, width: int) -> int:
    """Returns the bytes that the CPU engine needs for a prefill of as many tokens as it ever processes at once, for one
    layer: the numbers of the feed-forward layer and of the residual stream in fp32, and the attention's scores or mask.
    The peaks of 14 shapes were 0.5 to 1.0 of it, with experts 1.5 (tests/placements/test_host_memory.py)."""
    longest = max(model.buckets.prefill, default=length)
    chunk = model.engine_options.get("prefill_chunk")
    chunk = min(longest, chunk) if isinstance(chunk, int) else longest
    numbers = longest * (3 * checkpoint.ffn + 6 * checkpoint.hidden)
    score = SCORE_BYTES * checkpoint.heads if checkpoint.model_type in SCORE_FAMILIES else 1 + width
    return 4 * numbers + chunk * longest * score


def _compile(model: ModelSpec, checkpoint: Checkpoint, engine: Engine, held: tuple[Checkpoint, ...]) -> float:
    """Returns the GiB for compiling on Neuron, beside the checkpoint."""
    compilers = COMPILER_GIB * compilers_at_once(model, checkpoint, engine)
    width = BYTES[model.dtype_on(engine)]
    shards = sum(each.parameters for each in held) * width / GIB if on_nxd(engine, checkpoint) else 0.0
    return max(COMPILE_WORKER_GIB, compilers, shards)


def compilers_at_once(model: ModelSpec, checkpoint: Checkpoint, engine: Engine) -> int:
    """Returns the compiler processes that a compile of the model runs at once; ``engine`` as in `memory.estimate`.

    1. transformers-neuronx: one for each graph, at most ``compiler.workers``. Families with continuous batching have
       one decode graph by default.
    2. NxD Inference, also below vLLM: one for each graph but the first decode graph, which is compiled alone before the
       others, since it decides the layout of the weights.
    3. Optimum Neuron has a prefill and a decode graph, which are compiled one after the other, likewise; torch-neuronx
       compiles its traces one by one.
    """
    if engine in HOST_ENGINES or engine in ("optimum-neuron", "torch-neuronx", "server"):
        return 0 if engine in HOST_ENGINES or engine == "server" else 1  # 3
    ladder = _doubling(model.length(checkpoint))
    prefill, decode = len(model.buckets.prefill) or ladder, len(model.buckets.decode) or ladder
    if on_nxd(engine, checkpoint):
        return min(COMPILER_THREADS, max(1, prefill + decode - 1))  # 2
    if checkpoint.model_type in TNX_UNPADDED:
        prefill, decode = 0, 1  # one graph serves both
    elif not model.buckets.decode and model.max_batch > 1 and checkpoint.model_type in TNX_CONTINUOUS:
        decode = 1
    return min(prefill + decode, model.compiler.workers or prefill + decode)  # 1


def _doubling(longest: int) -> int:
    """Returns the number of lengths that double from SHORTEST_GRAPH up to ``longest``."""
    return max(0, (longest - 1) // SHORTEST_GRAPH).bit_length() + 1
