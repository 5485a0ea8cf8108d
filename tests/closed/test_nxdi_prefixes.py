"""Prefix caching of NxD Inference, over the package's own code."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from placements.facts.versions import reaches
from tests.checkpoints import VOCAB_SIZE
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.closed.test_nxdi import nxd as nxd
from tests.closed.test_nxdi import pytestmark as pytestmark
from tests.closed.test_nxdi import states
from tests.doubles import Neuron
from tests.workers import nxdi_traffic
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.nxdi_traffic import FULL, Arrival, Checkpoints, families, opened, served
from tests.workers.nxdi_traffic import sources as sources
from workers.engines.cpu.engine import CpuEngine
from workers.engines.nxd_inference.block_engine import BlockPool, NxdBlockEngine
from workers.engines.nxd_inference.package import import_package
from workers.messages.engine_protocol import EngineLoadError, Reuse

LONGEST = 384
SIZES: dict[str, Any] = {
    "max_len": LONGEST,
    "prefill_buckets": [128, 256, LONGEST],
    "decode_buckets": [128, 256, LONGEST],
}


def shared(count: int = 9, seed: int = 3, longest: int = LONGEST) -> list[Arrival]:
    """Prompts that begin as others do, from not at all to nearly wholly; every third is followed by one that leaves in
    the middle."""
    rng = random.Random(seed)
    common = [rng.randrange(6, VOCAB_SIZE) for _ in range(longest)]
    requests: list[Arrival] = []
    for number in range(count):
        own = [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
        prompt = common[: rng.choice([0, 100, 130, 200, longest - 80])] + own
        requests.append((str(number), prompt, rng.randrange(4, 25), False))
        if number % 3 == 0:
            requests.append((f"leaves{number}", common[:140], 40, True))
    return requests


class Counted(NxdBlockEngine):
    """The adapter, with the prompts that begin with a cached prefix."""

    def load(self) -> None:
        self.starts: list[int] = []
        super().load()
        self.starts.clear()  # those of the warm-up

    def prefill_from(self, slots: Sequence[int], prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> Any:
        self.starts += starts
        return super().prefill_from(slots, prompts, starts)


def cached(source: Path, compiled: Path, kind: Any = Counted, options: Any = None, **fields: Any) -> Any:
    """A loaded adapter with a prefix cache."""
    engine_options = {"prefix_cache": True, **(options or {})}
    return opened(source, compiled, kind, **{**SIZES, **fields, "engine_options": engine_options})


def wrong(
    source: Path, requests: Sequence[Arrival], answers: dict[str, list[int]], longest: int = LONGEST
) -> list[str]:
    """The requests whose tokens are not those of the cpu engine, without a prefix cache."""
    engine = CpuEngine(source, slots=4, max_len=longest, threads=1)
    engine.load()
    return nxdi_traffic.wrong(source, requests, served(engine, requests), answers)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2", FULL, "mistral", "mixtral"])
def test_answers_are_those_without_a_prefix_cache(
    family: str, degree: int, nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """While requests arrive, share beginnings of any length, and leave."""
    if family not in families(import_package().version):
        pytest.skip("a family of a later version")
    if family == "mixtral" and not reaches(import_package().version, "0.5"):
        pytest.skip("0.4 runs the experts of prompts from 128 tokens on with a type of the compiler's kernels")
    engine = cached(sources(family), tmp_path, tp_degree=degree)
    assert wrong(sources(family), shared(), served(engine, shared())) == []
    assert {128, 256} <= {*engine.starts}


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"sampling": "device"}, {}),
        ({"fuse_qkv": True}, {}),
        ({"slots": 2}, {}),
        ({}, {"pa_block_size": 16}),
        ({}, {"pa_block_size": 128, "pa_num_blocks": 40}),
        ({}, {"prefix_buckets": [32, 96, 160, 288]}),
        ({}, {"sequence_parallel_enabled": True}),
        ({"max_len": 300, "prefill_buckets": [128, 300], "decode_buckets": [150, 300]}, {}),
        ({"max_len": 512, "prefill_buckets": [], "decode_buckets": []}, {}),
    ],
)
def test_other_fields_change_no_answer(
    fields: dict[str, Any], options: dict[str, Any], nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Lengths that are no multiples of a block, and 512: the package has a graph of its own for up to 512 tokens."""
    longest = fields.get("max_len", LONGEST)
    requests = shared(longest=longest)
    engine = cached(sources("llama"), tmp_path, options=options, **fields)
    assert wrong(sources("llama"), requests, served(engine, requests), longest) == []
    assert any(engine.starts)


def test_quantized_answers_are_those_without_a_prefix_cache(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """Of the same engine."""
    plain = opened(sources("llama"), tmp_path, quantize="int8", **SIZES)
    expected = served(plain, shared())
    plain.close()
    engine = cached(sources("llama"), tmp_path, quantize="int8")
    assert served(engine, shared()) == expected
    assert any(engine.starts)


def test_blocks_of_old_prompts_are_used_again(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """With the fewest blocks that are allowed, and more prompts than they can hold."""
    engine = cached(sources("llama"), tmp_path, slots=2)
    prompts = [prompt for seed in (1, 2, 1, 3) for _, prompt, _, leaves in shared(4, seed) if not leaves]
    requests = [(str(number), prompt, 9, False) for number, prompt in enumerate(prompts)]
    assert wrong(sources("llama"), requests, served(engine, requests)) == []
    assert any(engine.starts)
    pool = engine.prefixes
    assert not pool._empty[2:]
    assert not any(pool._owners)


class ByBlocks(NxdBlockEngine):
    """Begins after any number of blocks, which the package seems to support."""

    def load(self) -> None:
        super().load()
        self.prefixes = BlockPool(32, 48, 4, LONGEST, range(32, 257, 32))


class NextCell(NxdBlockEngine):
    """Writes a prompt one cell late."""

    def _forward(self, slots: Sequence[int], **inputs: Any) -> Any:
        if len(inputs["slot_mapping"][0]) > 1:
            inputs["slot_mapping"] = [[cell + 1 if cell >= 0 else cell for cell in inputs["slot_mapping"][0]]]
        return super()._forward(slots, **inputs)


class OtherBlocks(NxdBlockEngine):
    """Reads the blocks of a step in the wrong order."""

    def _forward(self, slots: Sequence[int], **inputs: Any) -> Any:
        inputs["block_table"] = [table[::-1] for table in inputs["block_table"]]
        return super()._forward(slots, **inputs)


class Overwritten(BlockPool):
    """Gives a new prompt the blocks of another one."""

    def take(self, reuse: Reuse, prompt: Sequence[int]) -> None:
        super().take(reuse, prompt)
        if not self._tables[reuse.slot]:
            self._tables[reuse.slot] = max((list(table) for table in self._tables), key=len)


class Sharing(NxdBlockEngine):
    """Lets a prompt write the blocks of another slot."""

    def load(self) -> None:
        super().load()
        self.prefixes = Overwritten(32, 48, 4, LONGEST, [128, 256])


@pytest.mark.parametrize("mutant", [ByBlocks, NextCell, OtherBlocks, Sharing])
def test_a_mistaken_adapter_does_not_pass(mutant: Any, nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """The package checks none of it. A prefix that does not fill its bucket is attended to with what is behind it:
    without its kernel, the package passes no mask (``attention_base.perform_prefix_prefill``)."""
    engine = cached(sources("llama"), tmp_path, mutant)
    assert wrong(sources("llama"), shared(), served(engine, shared()))


def test_the_device_has_the_blocks_of_the_estimate(nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """And one more, which the package adds."""
    engine = cached(sources("llama"), tmp_path, slots=2, options={"pa_num_blocks": 50})
    assert {tensor.numel() for tensor in states(engine).values()} == {51 * 32 * 16}


@pytest.mark.parametrize(
    ("fields", "options", "part"),
    [
        ({"slots": 1}, {}, "two slots"),
        ({"draft_source": "SELF", "draft_k": 2}, {}, "draft"),
        ({"quantize_kv": "fp8"}, {}, "quantize_kv"),
        ({"max_len": 96, "prefill_buckets": [96], "decode_buckets": [96]}, {}, "at least 128"),
        ({"prefill_buckets": [64, LONGEST]}, {}, "at least 128"),
        ({"prefill_buckets": [LONGEST]}, {}, "no prefix"),
        ({}, {"pa_num_blocks": 47}, "need 48"),
        ({}, {"pa_block_size": 24}, "power of two"),
        ({}, {"prefix_buckets": [100]}, "multiples"),
        ({}, {"attn_tkg_nki_kernel_enabled": True}, "not tested"),
        ({}, {"prefix_cache": False, "pa_num_blocks": 48}, "without a prefix cache"),
    ],
)
def test_what_a_prefix_cache_does_not_support_is_refused(
    fields: dict[str, Any], options: dict[str, Any], part: str, nxd: Neuron, sources: Checkpoints, tmp_path: Path
) -> None:
    """Before a core is claimed."""
    fields = {name: str(sources("llama")) if value == "SELF" else value for name, value in fields.items()}
    with pytest.raises(EngineLoadError, match=part):
        cached(sources("llama"), tmp_path, options=options, **fields)
    assert nxd.held() == {}
