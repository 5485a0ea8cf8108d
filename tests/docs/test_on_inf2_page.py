"""docs/on-inf2.md and what it points to: the example, the systemd unit, the ids of its last table."""

from __future__ import annotations

import os
import re
import shlex
from configparser import ConfigParser
from pathlib import Path

import pytest
from typer.main import get_command

from orchestrator.cli import main as cli
from orchestrator.messages.controller_settings import DRAIN_S
from placements.engines.evidence import REPORTS, SERVED_WITH, ModelVariant, served_on
from placements.facts.checkpoints import Checkpoint
from placements.facts.known_failures import KNOWN_FAILURES
from placements.spec.parse import parse
from placements.spec.problems import has_errors
from tests.docs.pages import DOCS, blocks
from tests.published_configs import PUBLISHED

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "on-inf2.md"
EXAMPLE = ROOT / "placements" / "examples" / "on-inf2.yaml"
UNIT = ROOT / "deploy" / "systemd" / "corewright.service"
END_S = 10.0  # of a fleet after its drain: "all within 30 s", docs/architecture.md


def report_rows() -> list[str]:
    """The table of reports of compiled and served models."""
    rows = ["| model | engines | what was run | SDK | machine | degree | seen | confidence | source |"]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for report in REPORTS:
        engines = ", ".join(f"`{engine}`" for engine in report.engines.split())
        cells = (report.model, engines, report.ran, report.sdk, report.instance, report.tp_degree or "-")
        rows.append(f"| {' | '.join((*cells, report.seen, report.confidence, report.source))} |")
    return rows


def failure_rows() -> list[str]:
    """The table of known failures that need a model."""
    rows = ["| what fails | what helps | confidence | source |", "|---|---|---|---|"]
    for failure in KNOWN_FAILURES:
        if failure.engines not in ("", "any"):
            cells = (failure.what, failure.helps, failure.confidence, failure.source.replace(" ", ", "))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


@pytest.mark.parametrize(("name", "rows"), [("reports", report_rows()), ("failures", failure_rows())])
def test_the_page_lists_what_others_report(name: str, rows: list[str]) -> None:
    """UPDATE_GOLDEN=1 writes the tables anew."""
    begin, end, wanted = f"<!-- generated: {name} -->\n", "<!-- end of generated -->", "\n".join(rows) + "\n"
    above, _, rest = PAGE.read_text().partition(begin)
    shown, _, below = rest.partition(end)
    if os.environ.get("UPDATE_GOLDEN"):
        PAGE.write_text(above + begin + wanted + end + below)
        shown = wanted
    assert shown == wanted


def test_each_model_of_the_page_was_served_by_others_on_its_release() -> None:
    """The degree is that of the report, and the page names the sources."""
    spec = parse(EXAMPLE.read_bytes(), EXAMPLE.name, str(EXAMPLE.parent)).spec
    assert spec is not None
    evidence = PAGE.read_text().partition("| choice | evidence |")[2].partition("\n\n")[0]
    downloads = dict(re.findall(r"^hf download (\S+) --local-dir (\S+)$", PAGE.read_text(), re.MULTILINE))
    assert sorted(downloads.values()) == sorted(model.source for model in spec.models)
    for source, folder in downloads.items():
        variant = ModelVariant.of(Checkpoint.from_config(PUBLISHED[source]))
        reports = [each for each in served_on("inf2") if each.is_of(variant, SERVED_WITH, "inf2")]
        (model,) = [model for model in spec.models if model.source == folder]
        assert [int(report.tp_degree) for report in reports] == [model.tp_degree]
        assert reports[0].source.partition(":")[0] in evidence
        assert f"SDK {reports[0].sdk}" in evidence


def test_no_spec_of_a_page_names_a_model_that_fails_on_inf2() -> None:
    """The ids of the known failures have the names of the models."""
    failing = {row.id.removesuffix("-inf2") for row in KNOWN_FAILURES if row.id.endswith("-inf2")}
    assert "qwen3-8b" in failing
    pages = [page for page in DOCS.rglob("*.md") if page.name != "errors.md"]  # errors.md shows the warnings
    specs = [block for page in pages for block in blocks(page) if block.language == "yaml"]
    on_inf2 = [block for block in specs if "inf2" in block.text]
    assert len(on_inf2) > 10
    named = [(block.page, name) for block in on_inf2 for name in failing if name in block.text.lower()]
    assert named == []


def unit() -> ConfigParser:
    """The sections of the unit; Environment, which may be given twice, is the last one."""
    parser = ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return parser


def test_the_page_prints_the_example_whole() -> None:
    """The wheel has none: it is copied from the page."""
    shown = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert shown[0] == EXAMPLE.read_text()
    for other in shown[1:]:  # what is added later is a spec without errors as well
        assert not has_errors(parse(other.encode(), "page.yaml", "/").problems)


def test_a_first_start_has_the_hours_that_the_page_says() -> None:
    """Each model of the example may compile for as long as the page says."""
    spec = parse(EXAMPLE.read_bytes(), EXAMPLE.name, str(EXAMPLE.parent)).spec
    assert spec is not None
    assert {model.deadlines.compile_s for model in spec.models} == {4 * 3600}
    assert "`deadlines.compile_s`, four hours" in " ".join(PAGE.read_text().split())


def test_the_causes_of_the_last_table_are_ids_that_exist() -> None:
    """With an entry in docs/errors.md."""
    table = PAGE.read_text().partition("## When it does not start")[2]
    ids = re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)
    entries = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    assert len(ids) > 3
    assert set(ids) <= set(entries)


def test_the_unit_gives_a_fleet_the_time_to_end() -> None:
    """SIGTERM to `up` alone, and no kill before the drain and the end are over."""
    service = unit()["Service"]
    assert (service["KillSignal"], service["KillMode"]) == ("SIGTERM", "mixed")
    assert (service["Restart"], service["OOMPolicy"]) == ("on-failure", "continue")  # `down` ends with exit code 0
    assert float(service["TimeoutStopSec"]) >= DRAIN_S + END_S


def test_the_unit_starts_up_in_a_home_that_systemd_makes() -> None:
    """By a command that parses, with the engine's Python first on the PATH."""
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    up = get_command(cli.app).commands["up"]  # type: ignore[attr-defined]

    assert f"Environment=COREWRIGHT_HOME=/var/lib/{service['StateDirectory']}\n" in UNIT.read_text()
    assert f"Environment=XDG_RUNTIME_DIR=%t/{service['RuntimeDirectory']}\n" in UNIT.read_text()
    assert (Path(command[0]).name, command[1]) == ("corewright", "up")
    assert up.make_context("up", command[2:]).params["spec"] == "/etc/corewright/fleet.yaml"
    assert service["Environment"].startswith(f"PATH={Path(command[0]).parent}:")
    assert "](../deploy/systemd/corewright.service)" in PAGE.read_text()
