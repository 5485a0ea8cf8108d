"""Advice: what is recommended is planned, fits the limits, and is not beaten by another candidate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.advise.advice import WITHIN, Advice, SizingQuestion, advise, candidates
from orchestrator.control.resolve.spec_file import examine, this_machine
from orchestrator.process.failure import Failed
from orchestrator.simulate.run import Fixed, simulate
from orchestrator.simulate.scenario import scenario_of
from orchestrator.simulate.workload import Lengths, Workload
from placements.facts.checkpoints import Checkpoint
from placements.planner.plan import plan
from placements.spec.problems import has_errors

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SMALL = ("inf2.8xlarge", "inf2.48xlarge")


@pytest.fixture(autouse=True, scope="module")
def few_batches() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.advise.advice.BATCHES", (2, 16))
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "llama-3-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture(scope="module")
def advice(source: str) -> Advice:
    return advise(SizingQuestion(source, instances=SMALL, rps=6.0, ttft_ms=1500, tpot_ms=60))


def test_what_is_recommended_is_planned(advice: Advice) -> None:
    """Its spec has no error, and all its replicas have cores, on the hosts that it names."""
    for line in advice.lines:
        file = examine(line.spec, "spec.yaml", ".", this_machine(), folders="ignore")
        assert file.spec is not None
        assert not has_errors(file.problems)
        placed = plan(file.spec, file.hosts, file.checkpoints)
        assert placed.complete
        assert len(placed.placements) == line.replicas
        assert len({placement.host for placement in placed.placements}) <= line.hosts == len(file.hosts)


def test_what_is_recommended_is_within_the_limits(advice: Advice) -> None:
    """By a simulation of the spec itself, with the speeds of its estimates."""
    for line in advice.lines:
        file = examine(line.spec, "spec.yaml", ".", this_machine(), folders="ignore")
        assert file.spec is not None
        name = file.spec.models[0].name
        load = Workload("poisson", (name,), 6.0, 200.0, seed=1, lengths=Lengths.parse("512:128"))
        outcome = simulate(scenario_of(file), load, Fixed({name: line.replicas}))
        assert outcome.measured[name].attainment >= WITHIN - 0.01


def test_no_line_beats_another(advice: Advice) -> None:
    assert len(advice.lines) > 1
    assert not [(a, b) for a in advice.lines for b in advice.lines if a is not b and a.beats(b)]


def test_the_cheapest_line_is_first(advice: Advice) -> None:
    costs = [line.cost for line in advice.lines]
    assert costs == sorted(costs)


def test_int8_weights_hide_no_others(advice: Advice) -> None:
    """The quality of their answers may differ."""
    assert {line.candidate.weights for line in advice.lines} == {"bf16", "int8"}


def test_every_candidate_is_a_line_or_has_a_reason_or_is_beaten(source: str, advice: Advice) -> None:
    count = len(list(candidates(advice.question, Checkpoint.from_config(LLAMA))))
    left_out = sum(map(len, advice.left_out.values()))
    assert advice.compared == count
    assert 0 < left_out <= count - len(advice.lines)
    assert all(reason.what for reasons in advice.left_out.values() for _, reason in reasons)


def test_times_are_as_long_as_the_errors_of_estimates_allow(advice: Advice) -> None:
    for line in advice.lines:
        assert line.tpot_ms.p50 >= line.speed.step_s * 1000 / (1 - line.speed.decode_error) - 1e-6
        assert line.ttft_ms.p50 >= line.speed.prefill_base_s * 1000 / (1 - line.speed.prefill_error)


def test_prices_decide_between_types(source: str) -> None:
    """A machine that costs as much as hundreds of small ones is left for them."""
    for large, cheapest in ((500.0, "inf2.8xlarge"), (1.0, "inf2.48xlarge")):
        prices = {"inf2.8xlarge": 1.0, "inf2.48xlarge": large}
        line = advise(SizingQuestion(source, instances=SMALL, rps=0.5, prices=prices)).lines[0]
        assert line.candidate.instance == cheapest
        dollars = line.hosts * prices[cheapest] / (0.5 * 128 * 3600) * 1e6
        assert line.dollars_per_million == pytest.approx(dollars)


def test_a_load_that_nothing_serves_is_an_error_with_the_nearest_candidate(source: str) -> None:
    with pytest.raises(Failed) as caught:
        advise(SizingQuestion(source, instances=("inf2.8xlarge",), ttft_ms=3))
    problem = caught.value.problem
    assert problem.id == "nothing-serves-load"
    assert "by ttft, at best: a prompt takes up to" in problem.what
    assert "by hbm-exceeded, at best: llama-3-8b does not fit" in problem.what


def test_a_source_without_a_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=r"checkpoint-unreadable: .*config\.json"):
        advise(SizingQuestion(str(tmp_path)))


def test_the_slot_holds_a_prompt_and_its_output(source: str) -> None:
    """A power of two, unless it is given."""
    assert SizingQuestion(source, prompt_tokens=512, output_tokens=512).slot == 1024
    assert SizingQuestion(source, prompt_tokens=512, output_tokens=513).slot == 2048
    assert SizingQuestion(source, max_len=1500).slot == 1500


def test_degrees_that_do_not_divide_the_heads_are_padded(source: str) -> None:
    chosen = list(candidates(SizingQuestion(source, instances=("inf2.48xlarge",)), Checkpoint.from_config(LLAMA)))
    assert {candidate.tp_degree for candidate in chosen if candidate.padded} == {24}
    assert {candidate.max_batch for candidate in chosen} == {2, 16}
