"""Each pair of options of an NxD Inference replica, over the package's own code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from placements.engines.nxd_inference.capabilities import NXD_FUSED_QKV, NXD_UNQUANTIZED, NXD_WINDOW
from placements.facts.versions import reaches
from tests.checkpoints import WINDOW
from tests.closed.lane_record import count_compared
from tests.closed.nxd_lane import real_nxdi as real_nxdi
from tests.closed.pairs import Row, all_pairs
from tests.closed.test_nxdi import nxd as nxd
from tests.closed.test_nxdi import pytestmark as pytestmark
from tests.doubles import Neuron
from tests.workers import nxdi_traffic
from tests.workers.conftest import checkpoint as checkpoint
from tests.workers.nxdi_traffic import (
    DECODE,
    FULL,
    MAX_LEN,
    PREFILL,
    Checkpoints,
    allow_fp8,
    arrivals,
    cpu,
    families,
    opened,
    refused,
    served,
)
from tests.workers.nxdi_traffic import sources as sources
from workers.engines.nxd_inference import package
from workers.engines.nxd_inference.block_engine import NxdBlockEngine
from workers.engines.nxd_inference.engine import NxdEngine
from workers.engines.nxd_inference.package import import_package
from workers.messages.engine_protocol import EngineLoadError

OPTIONS: Mapping[str, Sequence[Any]] = {
    "family": ["llama", "qwen2", FULL, "mistral", "mistral-window", "mixtral"],
    "tp_degree": [1, 2],
    "slots": [1, 3],
    "dtype": ["fp32", "bf16"],
    "sampling": ["host", "device"],
    "draft_k": [0, 1, 4],
    "fuse_qkv": [None, True],
    "quantize": [None, "int8", "fp8"],
    "quantize_kv": [None, "fp8"],
    "prefill_buckets": [PREFILL, [64]],
    "decode_buckets": [DECODE, [MAX_LEN]],
}
# How far below the largest logit of float32 a token may be, as a part of the largest.
SLACK = {"bf16": 0.1, "int8": 0.1, "fp8": 0.3}


def is_allowed(row: Row) -> bool:
    """Returns whether the adapter accepts the options in the newest version. With a draft, the device samples."""
    if row["draft_k"] and (row["quantize"] or row["sampling"] == "host" or row["family"] == "mistral-window"):
        return False
    if row["family"] == "mistral-window" and row["prefill_buckets"][0] < WINDOW:
        return False
    unfused = row["family"] not in {*NXD_FUSED_QKV, FULL}
    return not ((row["fuse_qkv"] and unfused) or (row["quantize"] and row["family"] in NXD_UNQUANTIZED))


def slack(row: Row) -> float:
    """Returns the sum of the options' own."""
    return nxdi_traffic.TIE + sum(SLACK.get(str(value), 0.0) for value in row.values())


def gap(source: Path, prompts: Mapping[str, list[int]], answers: Mapping[str, list[int]]) -> float:
    """Returns by how much the worst token's logit is below the largest, given the tokens before it; a part of it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(source)).eval()
    worst = 0.0
    for id, tokens in answers.items():
        count_compared(len(tokens))
        with torch.no_grad():
            logits = model(torch.tensor([[*prompts[id], *tokens[:-1]]])).logits[0, len(prompts[id]) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        worst = max(worst, float(((logits.amax(-1) - chosen) / logits.abs().amax(-1)).max()))
    return worst


@pytest.mark.parametrize("row", all_pairs(OPTIONS, is_allowed), ids=lambda row: "-".join(map(str, row.values())))
def test_answers_are_those_of_the_model(
    row: Row, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: the tokens of float32, and nearly the best ones where numbers are rounded."""
    if row["family"] not in families(import_package().version):
        pytest.skip("a family of a later version")
    allow_fp8(monkeypatch, {name: value for name, value in row.items() if value is not None})
    source, requests = sources(row["family"]), arrivals(4)
    fields = {name: value for name, value in row.items() if name != "family" and value is not None}
    if row["draft_k"]:
        fields |= {"draft_source": str(source), "sampling": "host"}
    try:
        engine = opened(source, tmp_path, **fields)
    except EngineLoadError as error:
        if error.id != "bad-engine-option":
            raise
        pytest.skip(error.what)  # in an earlier version
    answers = served(engine, requests)
    assert gap(source, {id: prompt for id, prompt, _, _ in requests}, answers) <= slack(row)
    assert {id: len(answers[id]) for id in answers} == {id: count for id, _, count, leaves in requests if not leaves}


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral", {"fuse_qkv": True}),
        ("mixtral", {"fuse_qkv": True}),
        (FULL, {"fuse_qkv": True}),
        ("mixtral", {"quantize": "int8"}),
        ("qwen2", {"quantize": "int8"}),
    ],
)
def test_what_the_adapter_refuses_fails_in_the_package(
    family: str, fields: Row, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it compiles, with an error that does not name the option."""
    version = import_package().version
    is_later = reaches(version, "0.9")
    if family not in families(version) or (family == "mistral" and not is_later) or (family == FULL and is_later):
        pytest.skip("nothing is refused in this version")
    buckets = {"prefill_buckets": [64], "decode_buckets": [MAX_LEN]}
    error = refused(lambda: opened(sources(family), tmp_path, **buckets, **fields))
    assert error.hint == f"remove `{next(iter(fields))}`"
    monkeypatch.setattr(package, "_check_class", lambda *_: None)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        opened(sources(family), tmp_path, **buckets, **fields)
    assert not isinstance(caught.value, EngineLoadError)


@pytest.mark.parametrize("beside", [{}, {"draft_k": 2}, {"engine_options": {"prefix_cache": True}}], ids=str)
def test_a_window_that_the_adapter_refuses_is_not_kept(
    beside: Row, nxd: Neuron, sources: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package fails, or answers as a model without one."""
    if not beside and reaches(import_package().version, NXD_WINDOW):
        pytest.skip("it is kept in this version")
    source, buckets = sources("mistral-window"), [128, 256]
    kind = NxdBlockEngine if "engine_options" in beside else NxdEngine
    fields = {"max_len": 256, "prefill_buckets": buckets, "decode_buckets": buckets, **beside}
    if "draft_k" in beside:
        fields["draft_source"] = str(source)
    assert refused(lambda: opened(source, tmp_path, kind, **fields)).id == "window-not-kept"
    monkeypatch.setattr(package, "window_of", lambda *_: None)
    expected = served(cpu(source), arrivals(4))
    with pytest.raises((AssertionError, RuntimeError)) as caught:  # noqa: PT012 - by the package, or by the answers
        answers = served(opened(source, tmp_path, kind, **fields), arrivals(4))
        assert nxdi_traffic.wrong(source, arrivals(4), expected, answers) == []
    assert not isinstance(caught.value, EngineLoadError)


@pytest.mark.parametrize("k", range(1, 17))
def test_a_draft_of_each_length(k: int, nxd: Neuron, sources: Checkpoints, tmp_path: Path) -> None:
    """The tokens are those without a draft, up to the end of a slot."""
    source = sources("llama")
    requests: list[nxdi_traffic.Arrival] = [("short", [7, 8, 9], 12, False), ("full", [11] * 60, MAX_LEN - 60, False)]
    buckets = {"prefill_buckets": [64], "decode_buckets": [MAX_LEN]}
    engine = opened(source, tmp_path, tp_degree=1, slots=2, draft_source=str(source), draft_k=k, **buckets)
    answers = served(engine, requests)
    assert nxdi_traffic.wrong(source, requests, served(cpu(source), requests), answers) == []
