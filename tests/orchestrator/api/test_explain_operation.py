"""A running fleet says why its models lie where they do, and what would have to move: on a fake cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.api.schemas import OperationRefused
from tests.orchestrator.fakefleet import EXPLAINED, WINDOW
from tests.orchestrator.fakes import FakeCluster, Played, virtually

SCATTERED = """\
version: 1
hosts: {emulate: inf2.24xlarge}
defaults: {engine: echo}
models:
  small: {replicas: 3, cores: ["1", "6", "10"]}
"""
LOOSE = SCATTERED.replace(', cores: ["1", "6", "10"]', "")
WITH_BIG = LOOSE + "  big: {tp_degree: 8}\n"


def preview_of_a_scattered_fleet(tmp_path: Path, text: str, ask: str, **arguments: Any) -> dict[str, Any]:
    """Returns a preview of a fleet with three scattered replicas that may move."""

    async def story() -> dict[str, Any]:
        async with Played(tmp_path, FakeCluster(), SCATTERED) as played:
            await played.settled()
            await played.apply(LOOSE)
            await played.settled()
            verb = getattr(played.operator, ask)
            answer: dict[str, Any] = await verb(text, "spec.yaml", str(tmp_path), **arguments)
            return answer

    return virtually(story)


def keys(value: Any) -> Any:
    """Returns the keys of a JSON value at every depth; of a list, those of its first item."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    return keys(value[0]) if isinstance(value, list) and value else None


def test_a_window_is_opened_by_the_fewest_moves(tmp_path: Path) -> None:
    """Replicas at 1, 6 and 10 of twelve cores: one of them goes, and eight are free."""
    preview = preview_of_a_scattered_fleet(tmp_path, LOOSE, "propose", defrag=8)
    assert len(preview["moves"]) == 1
    assert preview["window"]["host"] == "inf2.24xlarge/0"
    assert preview["load_s"] == preview["moves"][0]["load_s"]
    first, _, last = preview["window"]["cores"].partition("-")
    taken = {int(placement["cores"]) for placement in preview["placements"]}
    assert taken.isdisjoint(range(int(first), int(last) + 1))
    assert {**keys(preview), "placements": None} == {**keys(WINDOW), "placements": None}


def test_explain_shows_why_a_new_model_has_no_place(tmp_path: Path) -> None:
    """Eight cores are free, but not contiguous; and which replica would have to move."""
    preview = preview_of_a_scattered_fleet(tmp_path, WITH_BIG, "explain", model="big")
    assert preview["fits"] is False
    assert preview["failed"][0]["id"] == "no-room"
    assert "small (priority 0) holds 3 cores with 3 replicas" in preview["failed"][0]["details"]
    first = preview["suggestions"][0]
    assert first["id"] == "move"
    assert first["moves"][0]["model"] == "small"
    assert keys(preview).keys() == keys(EXPLAINED).keys()
    assert keys(first) == keys(EXPLAINED["suggestions"][0])


def test_explain_reports_that_running_replicas_stay(tmp_path: Path) -> None:
    """With the fleet's own spec."""
    preview = preview_of_a_scattered_fleet(tmp_path, LOOSE, "explain", model="small")
    assert preview["fits"] is True
    assert [replica["cores"] for replica in preview["replicas"]] == ["1", "6", "10"]
    assert all("it runs there already; running replicas stay" in replica["why"] for replica in preview["replicas"])


def test_explain_reports_a_cordon_and_the_command_that_lifts_it(tmp_path: Path) -> None:
    async def story() -> dict[str, Any]:
        async with Played(tmp_path, FakeCluster(), LOOSE) as played:
            await played.settled()
            await played.operator.cordon("inf2.24xlarge/0", "4-11", True, "ada")
            return await played.operator.explain(WITH_BIG, "spec.yaml", str(tmp_path), "big")

    preview = virtually(story)
    assert any(line.startswith("8 cores are cordoned: 4-11") for line in preview["failed"][0]["details"])
    assert preview["suggestions"][0]["change"] == "corewright uncordon inf2.24xlarge/0"


@pytest.mark.parametrize(
    ("text", "model", "refusal"),
    [
        (LOOSE, "big", ("model-unknown", 404)),
        (LOOSE.replace("24xlarge", "48xlarge"), "small", ("hosts-changed", 409)),
        ("[", "small", ("spec-invalid", 422)),
    ],
)
def test_an_impossible_explanation_is_rejected_with_the_reason(
    tmp_path: Path, text: str, model: str, refusal: tuple[str, int]
) -> None:
    with pytest.raises(OperationRefused) as refused:
        preview_of_a_scattered_fleet(tmp_path, text, "explain", model=model)
    assert (refused.value.problem.id, refused.value.status) == refusal


def test_a_spec_with_errors_is_explained_too(tmp_path: Path) -> None:
    """They are the constraints that fail."""
    text = WITH_BIG.replace("tp_degree: 8", "tp_degree: 7")
    preview = preview_of_a_scattered_fleet(tmp_path, text, "explain", model="big")
    assert preview["failed"][0]["id"] == "illegal-degree"
    assert preview["suggestions"][0]["change"] == "tp_degree: 4"
