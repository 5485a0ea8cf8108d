"""lm-evaluation-harness gives a model the same scores through the gateway and with transformers.

By the files and commands of docs/evaluate.md; `make clients` installs it.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.clients.installed import installed_python, run
from tests.clients.place import DEMO, Place
from tests.docs.pages import DOCS, ROOT, blocks

PAGE = DOCS / "evaluate.md"
RUN_S = 300.0

pytestmark = pytest.mark.clients


class Scores:
    """The files that a run of the harness has written."""

    def __init__(self, folder: Path) -> None:
        (results,) = folder.rglob("results_*.json")
        self.tables: dict[str, dict[str, Any]] = json.loads(results.read_text())["results"]
        self._folder = folder

    def responses(self, task: str) -> list[Any]:
        """The results of each sample: texts, or log likelihoods and whether they are the best ones."""
        (samples,) = self._folder.rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line)["resps"] for line in samples.read_text().splitlines()]

    def likelihoods(self, task: str) -> list[float]:
        parts = [part for sample in self.responses(task) for response in sample for part in response]
        return [float(part[0] if isinstance(part, list) else part) for part in parts]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Scores, Scores]:
    """The scores of the fleet, and those of transformers."""
    python, folder = installed_python(), tmp_path_factory.mktemp("evaluate")
    for block in blocks(PAGE):
        language, _, title = block.language.partition(" title=")
        if language in ("yaml", "json"):
            file = folder / title.strip('"')
            file.write_text(block.text)
    place = Place(tmp_path_factory.mktemp("model"))
    try:
        for block in (block for block in blocks(PAGE) if block.language == "bash"):
            line = block.text.replace(f"{DEMO.relative_to(ROOT)}", str(DEMO)).replace(
                "http://127.0.0.1:8080", place.url
            )
            command = shlex.split(line.replace("--include_path tasks", "--include_path ."))
            assert command.pop(0) == "lm_eval"
            run([str(python), "-m", "lm_eval", *command], folder, timeout_s=RUN_S)
    finally:
        place.close()
    return Scores(folder / "fleet"), Scores(folder / "transformers")


def test_every_score_is_that_of_transformers(scores: tuple[Scores, Scores]) -> None:
    """The tasks are multiple choice, generated answers and perplexity."""
    fleet, transformers = scores

    assert fleet.tables.keys() == {"terms", "answers", "texts"}
    for task, table in transformers.tables.items():
        for name, value in table.items():
            if isinstance(value, float):
                assert fleet.tables[task][name] == pytest.approx(value, rel=1e-4), (task, name)
    assert 0 < fleet.tables["terms"]["acc,none"] < 1, "a task that tells models apart"


@pytest.mark.parametrize("task", ["terms", "texts"])
def test_every_log_likelihood_is_that_of_transformers(scores: tuple[Scores, Scores], task: str) -> None:
    fleet, transformers = scores

    assert fleet.likelihoods(task) == pytest.approx(transformers.likelihoods(task), abs=1e-3)
    if task == "terms":
        best = [[[part[1] for part in response] for response in sample] for sample in fleet.responses(task)]
        assert best == [[[part[1] for part in r] for r in sample] for sample in transformers.responses(task)]


def test_answers_are_those_of_transformers(scores: tuple[Scores, Scores]) -> None:
    fleet, transformers = scores

    assert fleet.responses("answers") == transformers.responses("answers")
