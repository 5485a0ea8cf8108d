"""What lies under deploy/observability asks for what there is, and the docs tell of all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cluster.settings import SETTINGS
from orchestrator.gateway.telemetry.exposition import page as page_of
from tests.docs.test_links import test_a_command_in_a_page_is_one_that_can_be_given as check_commands
from tests.docs.test_links import test_every_relative_link_resolves as check_links
from tests.orchestrator.fakes import virtually
from tests.orchestrator.played_page import played_families
from tests.orchestrator.promql import Page, Selector, grouped, selectors
from workers.messages.metric_family import MetricFamily

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "observability"
METRICS, RUNBOOKS = ROOT / "docs" / "metrics.md", ROOT / "docs" / "runbooks.md"
DASHBOARD = json.loads((DEPLOY / "corewright-grafana.json").read_text())
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "corewright-alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES}
PROMETHEUS_OWN = {"up"}  # what Prometheus itself tells of each target
OF_AN_INSTANCE = {"instance_type", "instance_id", "instance_name", "availability_zone", "region", "subnet_id"}


Played = tuple[list[MetricFamily], Page]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """All families of a fleet that is played, and their page."""
    families = virtually(partial(played_families, tmp_path_factory.mktemp("played")))
    return families, Page.read(page_of(families)[0].decode())


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def unanswered(expression: str, page: Page, variables: Mapping[str, str]) -> list[Selector]:
    """The selectors of an expression that select nothing from the page."""
    return [
        selector
        for selector in selectors(expression)
        if selector.name not in PROMETHEUS_OWN and not page.selected(selector, variables)
    ]


def labels_of(selector: Selector, page: Page) -> set[str]:
    return {label for labels in page.series.get(selector.name, ()) for label in labels}


def test_every_family_of_the_fake_fleet_has_a_series(played: Played) -> None:
    """Otherwise the following tests would check little."""
    families, _ = played
    assert [family.name for family in families if not family.points] == []


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_selects_existing_series(name: str, played: Played) -> None:
    """By name and by labels; labels that it groups by and that its text uses are labels of what it selects."""
    _, page = played
    rule = ALERTS[name]
    used = selectors(rule["expr"])
    known = {label for selector in used for label in labels_of(selector, page)} | {"instance", "job", "le"}
    text = " ".join(rule["annotations"].values())

    assert used
    assert unanswered(rule["expr"], page, {}) == []
    assert grouped(rule["expr"]) <= known
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= known
    kept = grouped(rule["expr"]) if rule["expr"].startswith(("sum by", "histogram_quantile")) else known
    assert set(re.findall(r"\$labels\.(\w+)", text)) <= kept


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_a_panel_selects_existing_series(panel: dict[str, Any], played: Played) -> None:
    """For every model and for one; its legend uses labels that its series have."""
    _, page = played
    for target in panel["targets"]:
        expression = target["expr"]
        assert selectors(expression)
        assert unanswered(expression, page, {"model": ".*"}) == []
        model = "vectors" if "encoded" in expression else "small"
        assert unanswered(expression, page, {"model": model}) == []
        known = {label for selector in selectors(expression) for label in labels_of(selector, page)}
        kept = grouped(expression) if " by (" in expression else known
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept & known


def test_the_dashboard_shows_every_important_metric(played: Played) -> None:
    """The others are listed here, with the reason."""
    families, _ = played
    unshown = {
        "corewright_routed_slots",  # corewright_slots is shown; this one is for an alert
        "corewright_kv_cache_usage_ratio",  # only of the engine vllm, as the next two
        "corewright_server_requests_waiting",
        "corewright_server_preemptions",
        "corewright_queue_length",  # vllm:num_requests_waiting is shown
        "corewright_requests_waiting",  # a replica has none but for an instant
        "corewright_demand_requests",  # the gateways tell it each for itself, as vllm:num_requests_*
        "corewright_host_starting",  # for an alert
        "corewright_host_cores",  # the sum of corewright_cores
        "corewright_ready",  # a condition
        "corewright_model_available",
        "corewright_model_placed",
        "corewright_model_reachable",
        "corewright_replica_given_up",
        "corewright_unknown_fields",  # a hint for whoever develops a client
        "corewright_controller_age_seconds",
        "corewright_rollout_since_timestamp_seconds",
        "corewright_journal_sequence",
        "corewright_neuroncore_memory_total_bytes",
        "vllm:gpu_cache_usage_perc",  # an earlier name
        "vllm:time_per_output_token_seconds",  # an earlier name
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_max_num_generation_tokens",
        "execution_status",
        "system_memory_total_bytes",
        "system_memory_used_bytes",
        "neuron_hardware_info",
    }
    text = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    names = {family.name for family in families}
    shown = {name for name in names if re.search(rf"\b{re.escape(name)}(_total|_bucket|_sum|_count)?\b(?!_)", text)}
    assert (names - shown, shown & unshown) == (unshown, set())


def test_the_panels_do_not_overlap() -> None:
    """Unique ids and places, none beyond 24 columns; and every panel uses the selected data source."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    sources = {json.dumps(part["datasource"]) for panel in panels() for part in (panel, *panel["targets"])}
    assert sources == {json.dumps({"type": "prometheus", "uid": "${datasource}"})}
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "model"]


def test_the_dashboards_variables_find_their_values(played: Played) -> None:
    """The models come from a metric that has them."""
    _, page = played
    query = next(variable for variable in DASHBOARD["templating"]["list"] if variable["name"] == "model")["definition"]
    match = re.fullmatch(r"label_values\((\w+), (\w+)\)", query)
    assert match is not None
    assert {labels[match[2]] for labels in page.series[match[1]]} == {"chat", "small"}


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    """In the same order, at the address in the alert, with all three parts and the severity."""
    text = RUNBOOKS.read_text()
    entries = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [entry.partition("\n")[0] for entry in entries] == [rule["alert"] for rule in RULES]
    for rule, entry in zip(RULES, entries, strict=True):
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
        assert f"Severity: {rule['labels']['severity']}." in entry
        parts = re.findall(r"^\*\*(Meaning|Diagnosis|Remedy)", entry, re.MULTILINE)
        assert parts == ["Meaning", "Diagnosis", "Remedy"]
        _, diagnosis, remedy = re.split(r"^\*\*(?:Diagnosis|Remedy)\*\*$", entry, flags=re.MULTILINE)
        assert diagnosis.strip().startswith("- ")
        assert remedy.strip().startswith("- ")


def test_an_alert_describes_the_problem_and_its_severity() -> None:
    """Names are unique; a critical alert is worth a page."""
    assert len(ALERTS) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}


def test_prometheus_loads_the_existing_rules() -> None:
    """Its configuration is YAML, has the file of the rules, and its example keeps the key in a file."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert [(DEPLOY / name).is_file() for name in config["rule_files"]] == [True]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert all(job["metrics_path"] == "/metrics" for job in jobs.values())
    assert all(re.fullmatch("corewright.*", name) for name in jobs)  # the alert on `up` asks for these
    remote = jobs["corewright-remote"]
    assert remote["scheme"] == "https"
    assert remote["authorization"].keys() == {"type", "credentials_file"}
    assert "ca_file" in remote["tls_config"]
    (here,) = jobs["corewright"]["static_configs"][0]["targets"]
    assert here == f"127.0.0.1:{next(setting.default for setting in SETTINGS if setting.name == 'port')}"


def documented() -> dict[str, tuple[str, set[str], str, str]]:
    """Type, labels, unit and meaning of each metric in docs/metrics.md."""
    rows: dict[str, tuple[str, set[str], str, str]] = {}
    for line in METRICS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            assert cells[0].strip("`") not in rows, f"{cells[0]} is there twice"
            rows[cells[0].strip("`")] = cells[1], set(re.findall(r"`(\w+)`", cells[2])), cells[3], cells[4]
    return rows


def test_every_metric_is_described_correctly(played: Played) -> None:
    """Name, type and labels are the page's, both ways; unit and meaning are there."""
    families, _ = played
    measured = {
        family.name + ("_total" if family.kind == "counter" else ""): (family.kind, set(family.labels) - OF_AN_INSTANCE)
        for family in families
    }
    rows = documented()
    assert {name: row[:2] for name, row in rows.items()} == measured
    assert all(unit and meaning for _, _, unit, meaning in rows.values())


def test_the_names_follow_prometheus_conventions(played: Played) -> None:
    """Only counters end in _total, times are seconds and sizes bytes, and our own have our prefix."""
    families, _ = played
    for family in families:
        assert not family.name.endswith("_total"), family.name
        assert not re.search(r"_(ms|milliseconds|minutes|mb|kb)(_|$)", family.name)
        foreign = family.name.startswith(("vllm:", "neuron", "execution_", "hardware_", "system_"))
        assert foreign or family.name.startswith("corewright_")


def test_no_label_has_many_values(played: Played) -> None:
    """Labels are of a known list: none grows with requests, keys or time."""
    families, _ = played
    labels = {label for family in families for label in family.labels} - OF_AN_INSTANCE
    assert labels == {
        *("model_name", "engine", "finished_reason", "model", "replica", "state", "host", "type"),
        *(
            "field",  # at most 64 names, see test_unknown_fields.py
            "action",
            "problem",
            "phase",
            "cause",
            "kind",
            "status",
            "code",
        ),
        *("runtime_tag", "neuroncore", "memory_location", "error_type", "status_type", "percentile"),
        *("event_type", "neuron_device_index", "neuron_device_count", "neuroncore_per_device_count"),
    }


@pytest.mark.parametrize("page", [METRICS, RUNBOOKS], ids=lambda page: page.name)
def test_the_pages_have_existing_commands_and_files(page: Path) -> None:
    """Like all pages."""
    check_links(page)
    check_commands(page)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("up", ["up"]),
        ('sum by (le, x) (rate(a_bucket{m="n",o=~"p|q"}[5m])) / on (x) group_left (y) b', ["a_bucket", "b"]),
        ("a == 0 and on (model) b > 0 or vector(0)", ["a", "b"]),
        ("time() - c < 14 * 86400", ["c"]),
        ('vllm:x_total{model_name="$model_name"} offset 5m', ["vllm:x_total"]),
    ],
)
def test_the_names_in_an_expression_are_found(expression: str, names: Sequence[str]) -> None:
    """Metrics, and neither functions, keywords, labels, numbers nor ranges."""
    assert [selector.name for selector in selectors(expression)] == list(names)
