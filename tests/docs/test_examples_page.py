"""docs/examples.md: its estimates are those of `corewright advise` for the specs that it names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main as cli
from placements.spec.parse import parse
from placements.spec.schema import ModelSpec, Spec
from tests.docs.pages import DOCS, EXAMPLES, blocks
from tests.published_configs import PUBLISHED

PAGE = DOCS / "examples.md"
BEGIN, END = "<!-- generated: estimates -->\n", "<!-- end of generated -->"
NAMES = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "llama-3.3-70b", "chat-and-embeddings")
HEADER = "| spec | model | cores | tokens/s | TTFT p50 | TTFT p99 | TPOT p50 | $/M tokens | error |"


def spec_named(name: str) -> Spec:
    path = EXAMPLES / f"{name}.yaml"
    spec = parse(path.read_bytes(), path.name, str(EXAMPLES)).spec
    assert spec is not None
    return spec


def advised(model: ModelSpec, instance: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The line of `advise` with the degree, the batch and the weights of a model."""
    checkpoint = folder / model.name
    checkpoint.mkdir(exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(PUBLISHED[model.source]))
    (folder / "prices.yaml").write_text(next(block.text for block in blocks(PAGE) if block.language == "text"))
    shape = ["--degree", str(model.tp_degree), "--batch", str(model.max_batch), "--max-len", str(model.max_len)]
    where = ["--engine", model.engine, "--instance", instance, "--prices", str(folder / "prices.yaml"), "-o", "json"]
    assert cli.run(["advise", str(checkpoint), *shape, *where]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    (line,) = [line for line in lines if line["weights"] == (model.quantize or "bf16")]
    return dict(line)


def row(name: str, model: ModelSpec, line: dict[str, Any] | None) -> str:
    """A row of the table; without a line, of a model that `advise` does not estimate."""
    cores = f"{model.replicas.min} x {model.tp_degree}"
    shown = ["-"] * 6
    if line is not None:
        tokens = line["tokens_per_s_per_host"] / line["replicas_per_host"] * model.replicas.min
        times = (line["ttft_ms"]["p50"], line["ttft_ms"]["p99"], line["tpot_ms"]["p50"])
        shown = [f"{tokens:.0f}", *(f"{time:.0f} ms" for time in times)]
        shown += [f"{line['dollars_per_million_tokens']:.2f}", f"{line['speed']['decode_error']:.0%}"]
    return f"| {' | '.join([name, model.name, cores, *shown])} |"


def test_the_estimates_are_those_of_advise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For the degree, the batch, the length and the weights of each spec. UPDATE_GOLDEN=1 writes them anew."""
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    rows = [HEADER, "|---|---|---|---|---|---|---|---|---|"]
    for name in NAMES:
        spec = spec_named(name)
        (group,) = spec.hosts
        assert group.instance is not None
        for model in spec.models:
            known = model.kind == "generate"
            rows.append(row(name, model, advised(model, group.instance, tmp_path, capsys) if known else None))
    wanted = "\n".join(rows) + "\n"
    above, _, rest = PAGE.read_text().partition(BEGIN)
    shown, _, below = rest.partition(END)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(above + BEGIN + wanted + END + below)
        shown = wanted
    assert shown == wanted


def test_every_example_is_on_the_page() -> None:
    """Those of Optimum's page are on the page of sizes; two have pages of their own."""
    linked = set(re.findall(r"examples/([\w.-]+)\.yaml\)", PAGE.read_text()))
    others = {"on-inf2", "inf2-48xlarge-chat"}
    assert linked | others == {path.stem for path in EXAMPLES.glob("*.yaml") if not path.stem.startswith("optimum-")}
    assert set(NAMES) <= linked
