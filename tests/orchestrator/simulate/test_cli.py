"""`corewright simulate` and `corewright trace export`, as a user gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from orchestrator.cli import trace as command
from orchestrator.cli.main import run
from orchestrator.control.resolve.spec_file import load
from orchestrator.simulate.run import Joint, simulate
from orchestrator.simulate.scenario import Arrival, scenario_of

SPEC = """\
hosts: {emulate: inf2.48xlarge}
models:
  chat: {engine: echo, engine_options: {step_ms: 20}, tp_degree: 8, replicas: {min: 1, max: 2}, aliases: [gpt]}
  small: {engine: echo, engine_options: {step_ms: 10}, replicas: {min: 0, max: 4}, objectives: {ttft_ms: 500}}
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(SPEC)
    return str(path)


def arguments_of(spec: str, *more: str, kind: str = "poisson") -> list[str]:
    return ["simulate", spec, "--generate", kind, "--rate", "2", "--duration", "60", *more]


def data(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_run_is_printed_as_a_table(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Models, a plot of the cores, and the assumed speeds."""
    assert run(arguments_of(spec)) == 0
    text = capsys.readouterr().out
    assert text.startswith("poisson, 2 requests/s for 1 min, lengths chat, seed 0\n")
    assert " s per column:\nchat  |" in text
    assert "chat: step 20 ms" in text


def test_a_run_is_printed_as_json(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each model with its figures; all requests are counted."""
    assert run(arguments_of(spec, "-o", "json")) == 0
    (report,) = data(capsys)["runs"]
    assert report["requests"] == report["answered"] + report["refused"] + report["lost"] + report["open"]
    assert [model["model"] for model in report["models"]] == ["chat", "small"]
    assert report["models"][1]["objectives"] == {"ttft_ms": 500.0}
    assert report["cost"] is None


def test_priced_hosts_have_a_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For all their cores, used or not."""
    path = tmp_path / "spec.yaml"
    path.write_text("hosts: {emulate: inf2.48xlarge, price_per_core_hour: 0.5}\nmodels: {chat: {engine: echo}}\n")
    assert run(arguments_of(str(path), "-o", "json")) == 0
    (report,) = data(capsys)["runs"]
    assert report["cost"] == pytest.approx(24 * 0.5 * report["duration_s"] / 3600, abs=0.01)


def test_every_key_of_the_json_is_described(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In docs/simulate.md."""
    run(arguments_of(spec, "-o", "json"))
    (report,) = data(capsys)["runs"]
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
    keys = {*report, *report["models"][0]} - {"models", "model"}
    assert sorted(key for key in keys if f"`{key}`" not in page) == []


def test_two_specs_are_shown_side_by_side(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the same load."""
    other = tmp_path / "other.yaml"
    other.write_text(SPEC.replace("min: 1", "min: 2"))
    assert run(arguments_of(spec, "--against", str(other), "-o", "json")) == 0
    first, two = data(capsys)["runs"]
    assert first["requests"] == two["requests"]
    assert first["core_hours"] < two["core_hours"]
    assert run(arguments_of(spec, "--against", str(other))) == 0
    header = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("TOTAL"))
    assert "spec.yaml" in header
    assert "other.yaml" in header


def test_the_number_of_hosts_may_differ_from_the_specs(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """To find out how many are needed."""
    assert run(arguments_of(spec, "--hosts", "3", "-o", "json")) == 0
    assert data(capsys)["runs"][0]["cores"] == 72


def test_without_scaling_nothing_starts(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--policy fixed: small is at zero and stays there; its requests are rejected in the end."""
    assert run(arguments_of(spec, "--policy", "fixed", "-o", "json")) == 0
    (report,) = data(capsys)["runs"]
    assert report["starts"] == 0
    assert report["models"][1]["refused"] == report["models"][1]["requests"] > 0


def test_a_trace_is_played(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Aliases are known."""
    trace = tmp_path / "trace.csv"
    trace.write_text("time,model,prompt_tokens,output_tokens\n0,chat,10,5\n1,gpt,10,5\n2,small,10,5000\n")
    assert run(["simulate", spec, "--trace", str(trace), "-o", "json"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["load"] == f"{trace}: 3 requests in 2 s"
    assert [model["answered"] for model in report["runs"][0]["models"]] == [2, 1]
    assert captured.err == "1 request of small is longer than its slots and cut to 2048 tokens\n"


def test_requests_for_unknown_models_are_dropped_and_counted(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export of `trace export` may be older than the spec."""
    trace = tmp_path / "trace.csv"
    trace.write_text("time,model,prompt_tokens,output_tokens\n0,chat,10,5\n1,old,10,5\n2,older,10,5\n3,old,1,1\n")
    assert run(["simulate", spec, "--trace", str(trace), "-o", "json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "3 requests are dropped: their models are not in the spec: old (2), older (1)\n"
    assert json.loads(captured.out)["runs"][0]["requests"] == 1


def test_a_long_list_of_invalid_lines_ends_with_the_number_of_others(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twenty are listed."""
    trace = tmp_path / "trace.csv"
    trace.write_text("time,model,prompt_tokens,output_tokens\n" + "0,chat,0,5\n" * 1254)
    assert run(["simulate", spec, "--trace", str(trace)]) == 1
    report = capsys.readouterr().err
    assert report.count("trace-wrong") == 20
    assert report.endswith("\nand 1234 more\n")


def test_cut_synthetic_requests_are_reported(spec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The number for each model, and the length: the figures are of shorter ones."""
    assert run(arguments_of(spec, "--lengths", "9999:2", "-o", "json")) == 0
    captured = capsys.readouterr()
    counts = {model["model"]: model["requests"] for model in json.loads(captured.out)["runs"][0]["models"]}
    assert captured.err == "".join(
        f"{counts[name]} requests of {name} are longer than its slots and cut to 2048 tokens\n" for name in counts
    )


def test_warnings_of_the_spec_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `validate` and `plan` do: the speeds of a model without its config.json are a guess."""
    path = tmp_path / "spec.yaml"
    path.write_text("hosts: {emulate: inf2.48xlarge}\nmodels: {chat: {source: ./none, max_len: 2048}}\n")
    assert run(arguments_of(str(path))) == 0
    assert "checkpoint-unreadable" in capsys.readouterr().err


def test_encoders_have_batches_instead_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer is there after the batch, and a request with too many tokens for one input has several."""
    path = tmp_path / "spec.yaml"
    encoder = (
        "{engine: echo, kind: embedding, max_len: 64, max_batch: 4, max_wait_ms: 5, engine_options: {step_ms: 20}}"
    )
    path.write_text(f"models: {{e: {encoder}}}\n")
    assert run(arguments_of(str(path), "--lengths", "512:128", "-o", "json")) == 0
    captured = capsys.readouterr()
    model = json.loads(captured.out)["runs"][0]["models"][0]
    assert (model["latency_ms"], model["output_tokens_per_s"], captured.err) == (model["ttft_ms"], 0.0, "")
    assert 40.0 <= model["latency_ms"]["p50"] < 60.0  # eight inputs, two batches
    assert run(arguments_of(str(path))) == 0
    assert "e: batch of 4 inputs at most 20 ms + 0 ms/token, load 6 s" in capsys.readouterr().out


def test_bad_lines_of_a_trace_are_reported(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With their place, and nothing is simulated: trace-wrong."""
    trace = tmp_path / "trace.csv"
    trace.write_text("time,model,prompt_tokens,output_tokens\n0,chat,0,5\n")
    assert run(["simulate", spec, "--trace", str(trace)]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{trace}:2: error: trace-wrong: prompt_tokens")
    assert captured.out == ""


def test_a_page_is_written(spec: str, tmp_path: Path) -> None:
    """Whole, with a plot of the cores, and nothing from elsewhere."""
    page = tmp_path / "page.html"
    assert run(arguments_of(spec, "--html", str(page))) == 0
    text = page.read_text()
    assert "Cores by model over time" in text
    assert text.rstrip().endswith("</html>")
    assert "http://" not in text
    assert "https://" not in text
    pictures = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text)]
    assert len(pictures) == 3  # cores, and a distribution of each model
    assert len(pictures[0].findall("polygon")) == 2


def test_measured_speeds_are_used(spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And shown as measured."""
    speeds = tmp_path / "speeds.json"
    speeds.write_text('{"chat": {"step_ms": 7, "load_s": 3}}')
    assert run(arguments_of(spec, "--speeds", str(speeds), "-o", "json")) == 0
    speed = data(capsys)["runs"][0]["models"][0]["speed"]
    assert (speed["step_ms"], speed["load_s"]) == (7.0, 3.0)
    assert (speed["source"].split(",")[0], speed["measured_requests"]) == ("measured", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace"),
        (["--generate", "poisson", "--trace", "x"], "cannot be combined with --generate"),
        (["--generate", "tides"], "not one of poisson"),
        (["--generate", "poisson", "--policy", "best"], "not one of auto"),
        (["--generate", "poisson", "--lengths", "long"], "--lengths"),
        (["--generate", "poisson", "--share", "chat"], "MODEL="),
        (["--generate", "poisson", "--share", "gone=2"], "no model"),
        (["--generate", "poisson", "--begins", "monday"], "--begins"),
    ],
)
def test_wrong_usage_is_64(spec: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the correct usage."""
    assert run(["simulate", spec, *arguments]) == 64
    assert message in capsys.readouterr().err


def test_an_impossible_run_is_an_error_with_an_id(
    spec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each exits with 1."""
    bad, other, two = tmp_path / "bad.yaml", tmp_path / "other.yaml", tmp_path / "two.yaml"
    bad.write_text("models: {a: {engine: echo, tp_degree: 5}}\n")
    other.write_text("models: {b: {engine: echo}}\n")
    two.write_text("hosts: [{emulate: inf2.48xlarge}, {emulate: trn1.32xlarge}]\nmodels: {a: {engine: echo}}\n")
    (tmp_path / "speeds.json").write_text("[]")
    cases = {
        "spec-invalid": arguments_of(str(bad)),
        "no-model-in-common": arguments_of(spec, "--against", str(other)),
        "hosts-of-two-types": arguments_of(str(two), "--hosts", "2"),
        "speeds-wrong": arguments_of(spec, "--speeds", str(tmp_path / "speeds.json")),
        "trace-unreadable": ["simulate", spec, "--trace", str(tmp_path / "none.csv")],
        "output-unwritable": arguments_of(spec, "--html", str(tmp_path / "no" / "page.html")),
    }
    for id, arguments in cases.items():
        assert run(arguments) == 1
        assert f"error: {id}:" in capsys.readouterr().err


def test_schedules_are_active_at_their_times(tmp_path: Path) -> None:
    """On the virtual clock, which starts at a date."""
    path = tmp_path / "spec.yaml"
    schedule = "scaling: {schedules: [{start: 0 8 * * *, end: 0 18 * * *, min: 2}]}"
    path.write_text(f"models: {{a: {{engine: echo, replicas: {{min: 0, max: 3}}, {schedule}}}}}\n")
    scenario = scenario_of(load(str(path)))
    outcome = simulate(scenario, [Arrival(19 * 3600.0, "a", 10, 10)], Joint(), record=True)
    risen = outcome.decisions[0]
    assert (risen.at // 3600, risen.after) == (8, 2)


class PlayedFleet:
    """Answers with two pages."""

    def get(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        assert path == "trace"
        first = query["after"] == ""
        requests = [
            {
                "time": 1_700_000_000.0 + i,
                "model": "chat",
                "prompt_tokens": 10 + i,
                "output_tokens": 11,
                "key": "",
                "first_ms": 20.0 + 0.5 * (10 + i),
                "decode_ms": 200.0,
            }
            for i in (range(30, 60) if first else range(30))
        ]
        return {
            "requests": requests,
            "next": "g:1",
            "more": first,
            "speeds": {"chat": {"load_s": 4.0, "shape": {"tp_degree": 5}}, "small": {"load_s": None}},
        }


def test_a_fleets_requests_are_exported(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of their times, with the speeds; `simulate` reads both."""
    monkeypatch.setattr(command, "the_fleet", PlayedFleet)
    trace, speeds = tmp_path / "trace.csv", tmp_path / "speeds.json"
    assert run(["trace", "export", "--out", str(trace), "--speeds", str(speeds)]) == 0
    assert "60 requests" in capsys.readouterr().err
    report = json.loads(speeds.read_text())["chat"]
    assert (report["load_s"], report["step_ms"]) == (4.0, pytest.approx(20.0, rel=0.025))
    assert (report["requests"], report["shape"]) == (60, {"tp_degree": 5})
    assert report["prefill_token_ms"] == pytest.approx(0.5, rel=0.1)
    assert report["prefill_base_ms"] == pytest.approx(20.0, abs=4.0)
    assert run(["simulate", spec, "--trace", str(trace), "--speeds", str(speeds), "-o", "json"]) == 0
    assert data(capsys)["runs"][0]["models"][0]["answered"] == 60


def test_requests_to_an_earlier_revision_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their replicas may have had another shape; they are still exported."""

    class Updated(PlayedFleet):
        def get(self, *arguments: Any) -> Any:
            page = super().get(*arguments)
            page["speeds"]["chat"]["since"] = 1_700_000_030.0
            return page

    monkeypatch.setattr(command, "the_fleet", Updated)
    trace, speeds = tmp_path / "trace.csv", tmp_path / "speeds.json"
    assert run(["trace", "export", "--out", str(trace), "--speeds", str(speeds)]) == 0
    report = json.loads(speeds.read_text())["chat"]
    assert (report["requests"], "since" in report, len(trace.read_text().splitlines())) == (30, False, 61)


@pytest.mark.parametrize(("since", "count"), [("1700000040", None), ("2023-11-14T22:14:00Z", 20), ("60s", 0)])
def test_an_export_may_exclude_older_requests(
    since: str, count: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By an age or a time: requests to earlier fleets are recorded too. 22:14:00 is 1_700_000_040."""
    monkeypatch.setattr(command, "the_fleet", PlayedFleet)
    code = run(["trace", "export", "--since", since])
    captured = capsys.readouterr()
    if count is None:
        assert (code, "neither an age" in captured.err) == (64, True)
    else:
        assert (code, len(captured.out.splitlines()) - 1) == (0 if count else 1, count)
