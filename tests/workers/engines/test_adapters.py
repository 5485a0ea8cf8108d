"""The flags for LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from placements.engines.vllm.capabilities import Plugin
from tests.replica_configs import replica_config
from workers.engines.server.server_process import Address
from workers.engines.vllm.engine import VllmInstallation, arguments
from workers.messages.engine_protocol import EngineLoadError


def command(
    folder: Path, *settings: Any, plugin: Plugin = "cpu", version: tuple[int, int] = (0, 16), **options: Any
) -> list[str]:
    """The command line with one adapter for each of these adapter_config.json."""
    adapters = {}
    for name, content in zip("xyz", settings, strict=False):
        adapters[name] = str(folder / name)
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps(content))
    config = replica_config(
        model="m",
        engine="vllm",
        source=str(folder),
        dtype="fp32",
        slots=4,
        max_len=64,
        adapters=adapters,
        engine_options=options,
    )
    return arguments(config, VllmInstallation(version, plugin), Address("/s"))


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_largest_rank_is_rounded_up(tmp_path: Path) -> None:
    """vLLM accepts only some values."""
    words = command(tmp_path, {"r": 4}, {"r": 20})

    assert "--enable-lora" in words
    assert (value(words, "--max-lora-rank"), value(words, "--max-loras"), value(words, "--max-cpu-loras")) == (
        "32",
        "9",
        "9",
    )


def test_no_more_adapters_are_loaded_than_the_option_allows(tmp_path: Path) -> None:
    """Beside the empty one of the model itself. Adapters of usual ranks can be added later: 16 is the least rank of a
    server."""
    words = command(tmp_path, {"r": 4}, {"r": 8}, max_loras=1)

    assert (value(words, "--max-loras"), value(words, "--max-cpu-loras")) == ("2", "2")
    assert value(words, "--max-lora-rank") == "16"
    assert (value(words, "--served-model-name"), value(words, "--lora-modules")) == ("m@base", "m=empty-adapter")


def test_a_server_without_adapters_reserves_room_for_max_loras(tmp_path: Path) -> None:
    words = command(tmp_path, max_loras=2, max_lora_rank=64)

    assert "--enable-lora" in words
    assert (value(words, "--max-loras"), value(words, "--max-lora-rank")) == ("3", "64")
    assert "--enable-lora" not in command(tmp_path)


def test_nxd_inference_gets_all_adapters_at_the_start(tmp_path: Path) -> None:
    words = command(tmp_path, {"r": 8}, {"r": 8}, plugin="nxd")
    at = words.index("--lora-modules")

    assert words[at + 1 : at + 3] == [f"m:x={tmp_path}/x", f"m:y={tmp_path}/y"]


@pytest.mark.parametrize(("plugin", "version"), [("neuron", (0, 24)), ("nxd", (0, 11))])
def test_plugins_without_lora_are_refused(tmp_path: Path, plugin: Plugin, version: tuple[int, int]) -> None:
    with pytest.raises(EngineLoadError) as caught:
        command(tmp_path, {"r": 8}, plugin=plugin, version=version)
    assert caught.value.id == "adapters-unsupported"


@pytest.mark.parametrize("settings", [{}, {"r": 0}, {"r": 513}, {"r": "8"}, {"r": 8, "peft_type": "IA3"}, [], 8])
def test_an_adapter_without_a_usable_rank_is_refused(tmp_path: Path, settings: Any) -> None:
    with pytest.raises(EngineLoadError) as caught:
        command(tmp_path, settings)
    assert caught.value.id == "adapter-unusable"
