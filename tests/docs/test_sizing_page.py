"""docs/sizing.md shows what `corewright advise` prints, and predictions beside measurements."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.cli import main as cli
from orchestrator.simulate.scenario import SimModel
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import TOPOLOGIES
from placements.resources.estimate import speed
from placements.spec.parse import parse
from tests.docs.pages import DOCS, EXAMPLES, Block, blocks, rows, section, words
from tests.placements.test_estimate import BOUNDS

SIZING = DOCS / "sizing.md"
LENGTH = 1024  # tokens at the end of a row of Optimum's page
PROMPTS = (256, 512, 768)
LLAMA_13B = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40}


def block_in(title: str, language: str) -> Block:
    (found,) = (block for block in blocks(SIZING) if block.section == title and block.language == language)
    return found


@pytest.mark.parametrize("title", ["A first run", "Buckets for recorded prompts"])
def test_a_session_is_what_happens(
    title: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the letter, with the files that the page shows. UPDATE_GOLDEN=1 writes it anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    checkpoint = tmp_path / "models" / "llama-2-7b"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text(block_in("A first run", "json").text)
    (tmp_path / "trace.csv").write_text(block_in("Buckets for recorded prompts", "csv").text)
    shown = block_in(title, "console").text
    command, _, output = shown.removeprefix("$ ").partition("\n")
    assert cli.run(command.split()[1:]) == 0
    printed = capsys.readouterr()
    if os.environ.get("UPDATE_GOLDEN"):
        page = SIZING.read_text()
        SIZING.write_text(page.replace(f"```console\n{shown}```", f"```console\n$ {command}\n{printed.out}```"))
        blocks.cache_clear()
        output = printed.out
    assert printed.err + printed.out == output


def test_the_prices_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(block_in("A first run", "json").text)
    (tmp_path / "prices.yaml").write_text(block_in("Prices", "text").text)
    arguments = ["advise", ".", "--prices", "prices.yaml", "--instance", "inf2.xlarge", "--instance", "inf2.8xlarge"]
    assert cli.run([*arguments, "-o", "json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    assert {line["instance"] for line in lines} == {"inf2.xlarge"}
    assert all(line["dollars_per_million_tokens"] > 0 for line in lines)


def test_the_errors_are_those_that_the_estimates_are_held_to() -> None:
    """The bounds of the tests of estimates."""
    shown = rows(section(SIZING, "Estimates and measurements"))[2 : 2 + len(BOUNDS)]
    assert [tuple(row) for row in shown] == [
        (name, *(f"{error:.0%}" for bounds in kinds for error in bounds)) for name, kinds in BOUNDS.items()
    ]


def test_predictions_stand_beside_measurements() -> None:
    """Of the four rows of Optimum's page, as `speed` estimates them. UPDATE_GOLDEN=1 writes them anew."""
    llama = json.loads(block_in("A first run", "json").text)
    inf2 = TOPOLOGIES["inf2.48xlarge"]
    for name, degree, batch, shown, measured in rows(section(SIZING, "Estimates and measurements"))[4 + len(BOUNDS) :]:
        size, variant = name.removeprefix("Llama ").lower().split(" - ")
        path = EXAMPLES / f"optimum-llama-2-{size}-{variant}.yaml"
        spec = parse(path.read_text(), path.name, str(EXAMPLES)).spec
        assert spec is not None
        (model,) = spec.models
        assert (str(model.tp_degree), str(model.max_batch)) == (degree, batch)
        checkpoint = Checkpoint.from_config(llama | (LLAMA_13B if size == "13b" else {}))
        replica = SimModel.of(model, speed(model, checkpoint, "optimum-neuron", inf2), checkpoint, "optimum-neuron")
        seconds = [
            replica.prefill_s((prompt,) * model.max_batch) + (LENGTH - prompt - 1) * replica.speed.step_s
            for prompt in PROMPTS
        ]
        predicted = " / ".join(f"{value:.1f}" for value in seconds)
        if os.environ.get("UPDATE_GOLDEN"):
            before, after = f"| {shown} | {measured} |", f"| {predicted} | {measured} |"
            SIZING.write_text(SIZING.read_text().replace(before, after))
            shown = predicted
        assert shown == predicted, name
        assert len(measured.split(" / ")) == len(PROMPTS)


def test_every_reason_of_advice_is_described() -> None:
    """Those that are not problems of a spec."""
    described = words(section(SIZING, "How candidates are compared"))
    assert {"ttft", "tpot", "load", "hosts"} <= set(described)
