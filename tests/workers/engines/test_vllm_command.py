"""The command line and the environment of `vllm serve`, by plugin and version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from placements.engines.vllm.capabilities import Plugin, Version
from placements.spec.sections import Deadlines
from tests.replica_configs import replica_config
from workers.engines.server.server_process import Address
from workers.engines.vllm.engine import VllmInstallation, arguments, environment, server_command
from workers.messages.replica_config import ReplicaConfig

CORES = {"NEURON_RT_VISIBLE_CORES": "8-15", "NEURON_CC_FLAGS": "-O1"}


def config(**fields: Any) -> ReplicaConfig:
    whole: dict[str, Any] = {"model": "big", "engine": "vllm", "source": "/m", "dtype": "bf16", "slots": 4}
    whole |= {"max_len": 100, "tp_degree": 8, "env": CORES}
    whole["deadlines"] = Deadlines(start_s=900.0, compile_s=900.0)
    return replica_config(**{**whole, **fields})


def command_line(plugin: Plugin, version: Version, **fields: Any) -> list[str]:
    """The arguments after the model."""
    return arguments(config(**fields), VllmInstallation(version, plugin), Address(path="/s"))[1:]


def command(plugin: Plugin, version: Version, **fields: Any) -> str:
    """The arguments, joined."""
    return " ".join(["/m", *command_line(plugin, version, **fields)])


def env(plugin: Plugin, version: Version = (0, 13)) -> dict[str, str]:
    return environment(config(), VllmInstallation(version, plugin), Path("/f"))


COMMON = "--max-num-seqs 4 --max-model-len 100 --generation-config vllm --disable-uvicorn-access-log"


def test_the_cpu_back_end_runs_in_one_process_without_the_degree() -> None:
    """The golden command line on an emulated host."""
    assert command("cpu", (0, 32), dtype="fp32") == (
        f"/m --served-model-name big --dtype float32 --tensor-parallel-size 1 {COMMON} --no-enable-prefix-caching "
        "--max-num-queued-reqs 12 --enforce-eager --uds /s"
    )


def test_the_server_finds_the_commands_of_its_own_interpreter_first() -> None:
    """Its plugin calls the compiler by its name."""
    installed = VllmInstallation((0, 13), "nxd", scripts="/opt/vllm/bin")
    assert environment(config(), installed, Path("/f"))["PATH"].split(":")[0] == "/opt/vllm/bin"


def test_nxd_inference_has_one_block_for_each_slot_and_samples_on_the_host() -> None:
    """The golden command line of the plugin on NxD Inference."""
    assert command("nxd", (0, 13)) == (
        f"/m --served-model-name big --dtype bfloat16 --tensor-parallel-size 8 {COMMON} --no-enable-prefix-caching "
        '--num-gpu-blocks-override 4 --additional-config {"override_neuron_config":{"on_device_sampling_config":null}} '
        "--uds /s"
    )


def test_nxd_inference_caches_prefixes_in_blocks_that_hold_all_slots() -> None:
    """Flags and override name the same number; options of the spec stay in the override."""
    line = command(
        "nxd",
        (0, 13),
        sampling="device",
        quantize="int8",
        quantize_kv="fp8",
        prefill_buckets=[64, 100],
        decode_buckets=[100],
        engine_options={
            "prefix_cache": True,
            "additional_config": {"override_neuron_config": {"quantized_checkpoints_path": "/q"}},
        },
    )
    assert "--enable-prefix-caching --block-size 32 --num-gpu-blocks-override 16 " in line
    override = json.loads(line.partition("--additional-config ")[2].removesuffix(" --uds /s"))
    assert override["override_neuron_config"] == {
        "quantized_checkpoints_path": "/q",
        "context_encoding_buckets": [64, 100],
        "token_generation_buckets": [100],
        "quantized": True,
        "quantization_dtype": "int8",
        "kv_cache_quant": True,
        "is_prefix_caching": True,
        "is_block_kv_layout": True,
        "pa_num_blocks": 16,
        "pa_block_size": 32,
    }


def test_the_newer_plugin_gets_buckets_and_kv_type_by_its_own_names() -> None:
    """The golden command line of vLLM Neuron; the longest decode length is implied."""
    line = command(
        "neuron", (0, 24), max_len=512, quantize_kv="fp8", prefill_buckets=[128, 256], decode_buckets=[256, 512]
    )
    assert line == (
        "/m --served-model-name big --dtype bfloat16 --tensor-parallel-size 8 "
        f"{COMMON.replace('100', '512')} --no-enable-prefix-caching --block-size 32 --kv-cache-dtype fp8 "
        '--max-num-batched-tokens 256 --additional-config {"neuron_config":{"num_batched_tokens_buckets":[128,256],'
        '"decode_context_length_buckets":[256]}} --uds /s'
    )


def test_a_draft_is_named_with_its_method() -> None:
    """As JSON after one flag."""
    line = command("neuron", (0, 24), draft_source="/d", draft_k=3, draft_method="eagle3")
    assert (
        '--speculative-config {"model":"/d","method":"eagle3","num_speculative_tokens":3,"max_model_len":100} ' in line
    )


def test_a_vllm_without_unix_sockets_listens_on_the_loopback() -> None:
    """An address with a port becomes host and port."""
    line = arguments(config(), VllmInstallation((0, 13), "nxd"), Address(port=4242))
    assert line[-4:] == ["--host", "127.0.0.1", "--port", "4242"]


def test_a_command_of_the_spec_gets_the_flags() -> None:
    """In place of the module of vLLM."""
    installed, address = VllmInstallation((0, 13), "nxd"), Address(path="/s")
    flags = arguments(config(), installed, address)
    assert server_command("/p", config(), installed, address) == [
        "/p",
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        *flags,
    ]
    launched = config(server_launch=["numactl", "/opt/vllm", "serve"])
    assert server_command("/p", launched, installed, address) == ["numactl", "/opt/vllm", "serve", *flags]


def test_each_plugin_gets_its_cores_by_its_own_variable() -> None:
    """The newer plugin refuses the variable of the older one, and the compiler's flags would replace its own."""
    old, new, cpu = env("nxd"), env("neuron"), env("cpu")
    assert (old["NEURON_RT_VISIBLE_CORES"], old.get("NEURON_VISIBLE_DEVICES")) == ("8-15", None)
    assert (new.get("NEURON_RT_VISIBLE_CORES"), new["NEURON_VISIBLE_DEVICES"]) == (None, "8-15")
    assert (old["NEURON_CC_FLAGS"], new.get("NEURON_CC_FLAGS")) == ("-O1", None)
    assert (old["VLLM_PLUGINS"], new["VLLM_PLUGINS"], cpu.get("VLLM_PLUGINS")) == ("neuron", "neuron", None)
    assert new["PROMETHEUS_MULTIPROC_DIR"] == "/f/metrics"


def test_the_back_end_is_named_from_0_29_on() -> None:
    """It is the default there, but only setting it enables the Precompile Cache."""
    named = [env("neuron", version).get("VLLM_NEURON_BACKEND") for version in ((0, 24), (0, 29), (0, 33))]
    assert named == [None, "neuron_native", "neuron_native"]
    assert "VLLM_NEURON_BACKEND" not in env("nxd", (0, 29)) | env("cpu", (0, 29))


def test_the_time_limits_of_vllm_are_the_deadline_of_the_start() -> None:
    """Otherwise a compile longer than ten minutes ends the server."""
    limits = {name for name, value in env("neuron").items() if value == "1800"}
    assert limits == {
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
        "VLLM_NEURON_COMPILATION_TIMEOUT",
        "NEURON_LIBTORCH_COMPILATION_TIMEOUT",
    }
