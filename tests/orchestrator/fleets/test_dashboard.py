"""The demo in Ray's real dashboard, through its pages in headless Chromium: what a user finds there is true.

With UPDATE_SCREENSHOTS=1 the pictures of docs/ray-dashboard.md are taken anew; otherwise they go to a temporary folder.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from playwright.sync_api import Locator, Page, expect, sync_playwright

from orchestrator.cluster.own_ray import BOARD, UID
from orchestrator.cluster.ray_names import ray_name
from orchestrator.process.home import Home
from tests.fleet import LiveFleet, until
from workers.serving.replica_metrics import METRICS

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[3]
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
AGENT_PORT = 52365  # where Ray's agents listen unless told otherwise; without one the dashboard has no logs
PAGE_S = 40.0  # two cores, and Ray's pages ask again every 4 s
BACK_S = 60.0
SELDOM = ("corewright_spec_decode", "corewright_prefix_cache")  # no model of the demo has a draft or such a cache
EXPORTED_S = 40.0  # Ray exports every 10 s
CORES = {"assistant/0": "0-7", "helpdesk/0": "8-9", "helpdesk/1": "10-11", "storyteller/0": "12"}


class Grafana:
    """Plays Grafana and Prometheus: healthy, with the boards' names as pages. ``asked`` has the addresses of boards."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked
        answers = {"/api/health": b'{"database": "ok"}', "/api/v1/query": b'{"status": "success"}'}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path.startswith("/d/"):
                    asked.append(self.path)
                self.send_response(200)
                self.send_header("content-type", "application/json" if path in answers else "text/html")
                self.end_headers()
                self.wfile.write(answers.get(path, b"<!doctype html><p>a board"))

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def grafana() -> Iterator[Grafana]:
    played = Grafana()
    yield played
    played.close()


@pytest.fixture(scope="module")
def fleet(grafana: Grafana) -> Iterator[LiveFleet]:
    with socket.socket() as other, pytest.MonkeyPatch.context() as patch:  # as if another Ray had been there first
        with contextlib.suppress(OSError):
            other.bind(("0.0.0.0", AGENT_PORT))
            other.listen()
        for name in ("RAY_GRAFANA_HOST", "RAY_PROMETHEUS_HOST"):
            patch.setenv(name, grafana.url)
        with LiveFleet(None, arguments=("--dashboard",), secure=True) as live:
            yield live.wait_ready()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.environ.get("UPDATE_SCREENSHOTS") == "1":
        return ROOT / "docs" / "images"
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def page(fleet: LiveFleet, pictures: Path) -> Iterator[Page]:
    """A browser that has logged in, as a user does."""
    if not CHROMIUM.exists():
        pytest.fail(f"there is no {CHROMIUM}: apt-get install -y --no-install-recommends chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_context(viewport={"width": 1280, "height": 720}).new_page()
        page.set_default_timeout(PAGE_S * 1000)
        expect.set_options(timeout=PAGE_S * 1000)
        page.goto(address(fleet))
        field = page.get_by_placeholder("Enter your authentication token")
        expect(page.locator(".MuiDialog-container")).to_have_css("opacity", "1")  # it fades in
        page.screenshot(path=pictures / "ray-dashboard-login.png")
        field.fill(Home(fleet.home).ray_token_file.read_text())
        page.get_by_role("button", name="Submit").click()
        expect(field).to_be_hidden()
        yield page
        browser.close()


def address(fleet: LiveFleet) -> str:
    record = Home(fleet.home).read_record()
    assert record is not None
    assert record.dashboard_url is not None
    return record.dashboard_url


def visit(page: Page, fleet: LiveFleet, tab: str) -> None:
    page.goto(f"{address(fleet)}/#/{tab}")


def row_of(page: Page, text: str | re.Pattern[str]) -> Locator:
    return page.get_by_role("row").filter(has_text=text)


def in_log(page: Page, text: str) -> Locator:
    """That line in the page's log. On a busy machine Ray's viewer gives up now and then, and says to no end that it has
    "Failed to load": then the page is loaded again, as a user would."""
    shown, failed = page.get_by_text(text).first, page.get_by_text("Failed to load").first

    def loaded() -> bool:
        shown.or_(failed).first.wait_for(state="attached")
        if shown.count() == 0:
            page.reload()
            return False
        return True

    until(loaded, PAGE_S, f"{text!r} in the log")
    return shown


def test_the_dashboard_requires_the_fleets_token(fleet: LiveFleet, page: Page) -> None:
    """Without the token of the home it shows nothing."""
    assert httpx.get(f"{address(fleet)}/api/v0/actors").status_code == 401


def test_the_actors_tab_shows_the_models_and_their_cores(fleet: LiveFleet, page: Page, pictures: Path) -> None:
    """Each replica has a row with its model in the class, its name and its cores."""
    visit(page, fleet, "actors")
    for id, cores in CORES.items():
        row = row_of(page, f"{id}@nc{cores}")
        expect(row).to_contain_text(f"Replica[{id.partition('/')[0]}]")
        expect(row).to_contain_text(re.compile(rf"{id}\.\d+"))
        expect(row).to_contain_text("ALIVE")
    expect(row_of(page, "ControllerActor")).to_contain_text("controller")
    page.screenshot(path=pictures / "ray-dashboard-actors.png")


def test_an_actors_page_shows_the_path_of_its_log(fleet: LiveFleet, page: Page, pictures: Path) -> None:
    """The page of one replica has its cores, its process, and the name under which the Logs tab shows its log."""
    visit(page, fleet, "actors")
    row_of(page, "helpdesk/1@nc").get_by_role("link").first.click()
    expect(page.get_by_text("helpdesk/1@nc10-11", exact=True)).to_be_visible()
    expect(page.get_by_text(str(fleet.replica("helpdesk/1")["pid"]), exact=True)).to_be_visible()
    log = in_log(page, "replica-helpdesk-1.log in the Logs tab")
    log.scroll_into_view_if_needed()
    expect(log).to_be_in_viewport()
    page.screenshot(path=pictures / "ray-dashboard-actor.png")


def test_the_logs_tab_has_a_log_for_each_replica(fleet: LiveFleet, page: Page, pictures: Path) -> None:
    """A replica's log is listed by its model's name, and its page shows the lines."""
    visit(page, fleet, "logs")
    page.get_by_text("Node ID:").first.click()
    page.get_by_label("File Name").fill("replica-")
    for id in CORES:
        expect(page.get_by_text(f"replica-{id.replace('/', '-')}.log", exact=True)).to_be_visible()
    page.screenshot(path=pictures / "ray-dashboard-logs.png")
    page.get_by_text("replica-helpdesk-1.log", exact=True).click()
    expect(in_log(page, "ready after")).to_be_visible()
    page.screenshot(path=pictures / "ray-dashboard-log.png")


def test_the_serve_tab_shows_the_gateway_healthy(fleet: LiveFleet, page: Page, pictures: Path) -> None:
    """The gateway is a Serve application, and is healthy while it listens."""
    visit(page, fleet, "serve")
    expect(row_of(page, "HEALTHY")).to_contain_text("gateway")
    expect(row_of(page, "RUNNING")).to_contain_text("corewright-demo")
    page.screenshot(path=pictures / "ray-dashboard-serve.png")


def test_the_cluster_tab_shows_the_cores_and_the_processes(fleet: LiveFleet, page: Page, pictures: Path) -> None:
    """Each core is a resource of its host, in use or free, and each process has its model in its title."""
    visit(page, fleet, "cluster")
    host = row_of(page, "corewright-host")
    expect(host).to_contain_text("1.0/1.0 nc12")
    expect(host).to_contain_text("0.0/1.0 nc13")
    for model in ("assistant", "helpdesk", "storyteller"):
        row = row_of(page, f"ray::Replica[{model}]").first
        expect(row).to_contain_text("ALIVE")
    row_of(page, "ray::Replica[").first.scroll_into_view_if_needed()
    page.screenshot(path=pictures / "ray-dashboard-cluster.png")


def test_process_titles_name_the_model(fleet: LiveFleet) -> None:
    """In `ps` and `top`."""
    for id in CORES:
        title = " ".join(psutil.Process(fleet.replica(id)["pid"]).cmdline())
        assert title.startswith(f"ray::Replica[{id.partition('/')[0]}]")


def exported(fleet: LiveFleet) -> dict[tuple[str, str, str], float]:
    """The fleet's metrics as Prometheus reads them: (name, model, replica) -> value; of cores (name, host, state)."""
    [discovery] = (Home(fleet.home).ray / "session_latest").glob("prom_metrics_service_discovery.json")
    values = {}
    for target in json.loads(discovery.read_text())[0]["targets"]:
        try:
            answer = httpx.get(f"http://{target}/metrics")
        except httpx.TransportError:  # Ray lists fixed ports too, which another Ray of this machine may have had
            continue
        for line in answer.text.splitlines():
            match = re.fullmatch(r"(ray_corewright_\w+)\{(.*)\} (\S+)", line)
            if match:
                tags = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                keys = ("host", "state") if match[1] == "ray_corewright_cores" else ("model", "replica")
                values[match[1], tags[keys[0]], tags[keys[1]]] = float(match[3])
    return values


def test_prometheus_finds_every_metric_of_every_replica(fleet: LiveFleet) -> None:
    """Gauges exist for idle replicas too, and counters grow with the work."""
    answer = fleet.http.post("/v1/completions", json={"model": "assistant", "prompt": "What", "max_tokens": 4})
    answer.raise_for_status()
    produced = answer.json()["usage"]["completion_tokens"]
    own = [m for m in METRICS if not m.field.startswith("server.")]
    always = [m.name for m in own if not m.is_counter or not m.name.startswith(SELDOM)]

    def complete() -> bool:
        values = exported(fleet)
        everyone = all((f"ray_{name}", *id.split("/")) in values for name in always for id in CORES)
        return everyone and values["ray_corewright_generation_tokens_total", "assistant", "0"] >= produced + 2

    until(complete, EXPORTED_S, "every metric is exported")
    assert exported(fleet)["ray_corewright_slots", "assistant", "0"] == 4


def test_prometheus_finds_the_cores_of_each_host_by_state(fleet: LiveFleet) -> None:
    """Leased, free, quarantined and reserved cores add up to every core of the host."""

    def cores() -> dict[str, float]:
        return {key[2]: value for key, value in exported(fleet).items() if key[0] == "ray_corewright_cores"}

    exported_states = until(lambda: len(states := cores()) == 5 and states, EXPORTED_S, "the cores are exported")
    assert exported_states == {"leased": 13, "free": 11, "cordoned": 0, "quarantined": 0, "reserved": 0}


def ray_command(fleet: LiveFleet, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Ray's own command line on this fleet, as a dashboard user has it."""
    record = Home(fleet.home).read_record()
    assert record is not None
    env = {
        **fleet.env,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(Home(fleet.home).ray_token_file),
        "RAY_ADDRESS": record.ray_address,
    }
    ray = str(Path(sys.executable).with_name("ray"))
    return subprocess.run([ray, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_metrics_tab_embeds_the_replicas_board(fleet: LiveFleet, page: Page, grafana: Grafana) -> None:
    """As its part for Ray Data, of this Ray's session; a Grafana of Ray's configuration has it in that file."""
    visit(page, fleet, "metrics")
    page.get_by_role("tab", name="Ray Data").click()
    expect(page.frame_locator("iframe").locator("p")).to_have_text("a board")

    def boards() -> list[str]:
        return [path for path in grafana.asked if path.startswith(f"/d/{UID}/?")]

    until(boards, PAGE_S, "the board is opened")
    assert "var-SessionName=session_" in boards()[-1]
    assert "var-datasource=Prometheus" in boards()[-1]
    (provisioned,) = Home(fleet.home).ray.glob("session_2*/metrics/grafana/dashboards/data_grafana_dashboard.json")
    assert provisioned.read_bytes() == BOARD.read_bytes()


@pytest.mark.parametrize("how", ["its process", "ray kill-actor"])
def test_a_replica_killed_there_restarts(fleet: LiveFleet, page: Page, pictures: Path, how: str) -> None:
    """By the pid of its row, or by Ray's own command: a new actor on the same cores, and the old one is shown dead."""
    before = fleet.replica("helpdesk/0")
    if how == "its process":
        visit(page, fleet, "actors")
        shown = row_of(page, "helpdesk/0@nc").filter(has_text="ALIVE")
        pid = int(shown.get_by_role("cell").filter(has_text=re.compile(rf"^{before['pid']}$")).inner_text())
        psutil.Process(pid).kill()
    else:
        record, name = Home(fleet.home).read_record(), f"helpdesk/0.{before['epoch']}"
        assert record is not None
        done = ray_command(fleet, "kill-actor", "--name", name, "--namespace", ray_name(record.name), "--force")
        assert done.returncode == 0, done.stderr

    def back() -> Any:
        now = fleet.replica("helpdesk/0")
        return now["state"] == "ready" and now["pid"] != before["pid"] and now

    after = until(back, BACK_S, "the replica is back")
    assert after["cores"] == before["cores"]
    visit(page, fleet, "actors")
    page.get_by_label("Name").fill("helpdesk/0")
    expect(row_of(page, f"helpdesk/0.{before['epoch']}").filter(has_text="DEAD")).to_be_visible()
    expect(row_of(page, f"helpdesk/0.{after['epoch']}").filter(has_text="ALIVE")).to_be_visible()
    if how == "its process":
        page.screenshot(path=pictures / "ray-dashboard-killed.png")
