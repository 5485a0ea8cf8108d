"""A real fleet: what it counts is on its page, what it serves is in its logs and traces."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.docs.test_observability import documented
from tests.doubles.machine import build_machine
from tests.fleet import LiveFleet, until
from tests.orchestrator.gateway.test_metrics import increase
from tests.orchestrator.gateway.test_tracing import SAMPLED, TRACE, Collector
from tests.orchestrator.promql import Page

pytestmark = pytest.mark.live
SPEC = """\
version: 1
name: watched
hosts: {emulate: inf2.48xlarge}
defaults: {engine: echo, max_len: 512}
models:
  chat: {tp_degree: 8, max_batch: 4}
  small: {}
"""
REQUESTS = 5


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    server = Collector()
    yield server
    server.close()


@pytest.fixture(scope="module")
def fleet(collector: Collector) -> Iterator[LiveFleet]:
    """One that has answered ``REQUESTS`` requests, of which the first is traced, and refused one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COREWRIGHT_LOG_FORMAT", "json")
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        live = LiveFleet(SPEC)
    try:
        live.wait_ready()
        for i in range(REQUESTS):
            headers = {"x-request-id": f"request-{i}", **({"traceparent": SAMPLED} if i == 0 else {})}
            body = {"model": "chat", "prompt": "a secret prompt", "max_tokens": 8}
            assert live.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert live.http.post("/v1/completions", json={"model": "nobody", "prompt": "x"}).status_code == 404
        yield live
    finally:
        live.stop()


def scrape(fleet: LiveFleet, accept: str = "") -> Page:
    answer = fleet.http.get("/metrics", headers={"accept": accept} if accept else {})
    assert answer.status_code == 200
    return Page.read(answer.text)


def test_served_requests_are_counted(fleet: LiveFleet) -> None:
    """By the gateway and by the replica, which reports within seconds."""
    metrics = scrape(fleet)
    of = {"model_name": "chat", "engine": "0"}

    assert metrics.value("vllm:request_success_total", **of, finished_reason="length") == REQUESTS
    assert metrics.value("vllm:generation_tokens_total", **of) == 8 * REQUESTS
    assert metrics.value("vllm:time_to_first_token_seconds_count", **of) == REQUESTS
    assert metrics.value("vllm:inter_token_latency_seconds_count", **of) == 7 * REQUESTS
    assert metrics.value("vllm:num_requests_running", **of) == 0
    assert metrics.value("corewright_requests_refused_total", model="", status="404", code="model_not_found") == 1
    assert metrics.value("corewright_replicas", model="chat", state="ready") == 1
    assert metrics.value("corewright_decisions_total", action="place") == 2

    def is_measured() -> bool:
        tokens = scrape(fleet).value("corewright_generation_tokens_total", model="chat", replica="0")
        return tokens >= 8 * REQUESTS

    until(is_measured, 20.0, "the replica has told what it counts")


def test_the_page_has_exactly_the_described_metrics(fleet: LiveFleet) -> None:
    """Except those that this fleet cannot have: devices, a certificate."""
    rows = documented()
    metrics = scrape(fleet)
    names = {name + ("_total" if kind == "counter" else "") for name, kind in metrics.kinds.items()}
    assert names <= rows.keys()
    missing = {name for name in rows.keys() - names if name.startswith(("vllm:", "corewright_"))}
    assert missing == {"corewright_certificate_expiry_timestamp_seconds", "corewright_neuroncore_memory_total_bytes"}


def test_prometheus_gets_openmetrics(fleet: LiveFleet) -> None:
    """By its Accept header."""
    answer = fleet.http.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_every_line_of_the_gateways_log_is_json_and_each_request_is_one(fleet: LiveFleet) -> None:
    """With its id, its model and its replica, and without its prompt."""

    def requests() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (fleet.home / "logs/gateway.log").read_text().splitlines()]
        return [row for row in lines if row["logger"] == "orchestrator.access" and row["path"] == "/v1/completions"]

    logged = until(lambda: len(requests()) == REQUESTS + 1 and requests(), 10.0, "the requests are in the log")
    assert [row["request_id"] for row in logged[:REQUESTS]] == [f"request-{i}" for i in range(REQUESTS)]
    assert {(row["status"], row["model"], row["replica"]) for row in logged[:REQUESTS]} == {(200, "chat", "chat/0")}
    assert {row["completion_tokens"] for row in logged[:REQUESTS]} == {8}
    assert logged[-1]["status"] == 404
    assert "secret" not in (fleet.home / "logs/gateway.log").read_text()
    for line in (fleet.home / "logs/controller.log").read_text().splitlines():
        json.loads(line)


def test_the_traced_request_is_one_trace_of_both_processes(fleet: LiveFleet, collector: Collector) -> None:
    """And untraced requests have no trace."""
    spans: dict[str, str] = {}

    def arrived() -> bool:
        while not collector.received.empty():
            _, _, request = collector.received.get()
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                for scope in resource.scope_spans:
                    assert {span.trace_id.hex() for span in scope.spans} == {TRACE}
                    spans.update({span.name: service for span in scope.spans})
        return len(spans) == 6

    until(arrived, 20.0, "all spans have come")
    gateway, replica = "corewright-gateway", "corewright-replica"
    assert spans == {
        "text_completion chat": gateway,
        "queue": gateway,
        "replica chat/0": gateway,
        "llm_request": replica,
        "prefill": replica,
        "decode": replica,
    }


def test_device_measurements_of_a_host_are_on_the_page(tmp_path: Path) -> None:
    """From the only neuron-monitor that runs for the metrics, which ends with the fleet."""
    machine = build_machine(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine.env.items():
            patch.setenv(name, value)
        live = LiveFleet(SPEC.replace("{emulate: inf2.48xlarge}", "{instance: inf2.48xlarge}"))

    def measured() -> Page | None:
        page = scrape(live)
        return page if "neuron_hardware_info" in page.series else None

    def watching() -> list[int]:
        """The tools that run for the metrics; the facts of the host are read by others, for moments."""
        pids = []
        for process in psutil.process_iter(["pid", "cmdline"]):
            command = process.info["cmdline"] or []
            if str(machine.root) in " ".join(command) and command[:1] == ["/bin/sh"]:
                pids.append(process.info["pid"])
        return pids

    try:
        live.wait_ready()
        metrics = until(measured, 30.0, "the devices are measured")
        (info,) = metrics.series["neuron_hardware_info"]
        assert (info["host"], info["neuron_device_count"], info["instance_type"]) == (
            live.status()["hosts"][0]["name"],
            "12",
            "inf2.48xlarge",
        )
        assert len(metrics.series["hardware_ecc_events_total"]) == 48
        assert len(watching()) == 1
    finally:
        live.stop()
    until(lambda: not watching(), 20.0, "the tool has ended")


def test_the_counters_of_two_gateways_are_correct_when_one_is_killed() -> None:
    """Whichever gateway a scrape reaches, Prometheus' sum of increases is the number of answers."""
    live = LiveFleet(SPEC, arguments=("--no-dashboard", "--gateways", "2"))
    scrapes: list[dict[str, float]] = []

    def counted() -> dict[str, float]:
        """Answers by gateway, as one scrape tells them; each on a connection of its own, to any gateway."""
        page = Page.read(httpx.get(f"{live.url}/metrics", timeout=10.0).text)
        values: dict[str, float] = {}
        for (name, labels), value in page.values.items():
            label = dict(labels)
            if name == "vllm:request_success_total" and label["model_name"] == "chat" and label["engine"] == "0":
                values[label["gateway"]] = values.get(label["gateway"], 0.0) + value
        scrapes.append(values)
        return values

    def ask(times: int) -> None:
        for _ in range(times):
            body = {"model": "chat", "prompt": "x", "max_tokens": 2}
            assert httpx.post(f"{live.url}/v1/completions", json=body, timeout=30.0).status_code == 200

    def both() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return counted().keys() == {"0", "1"}
        return False

    try:
        live.wait_ready()
        until(both, 30.0, "both gateways are told of")
        scrapes[:] = [dict.fromkeys("01", 0.0)]
        ask(20)
        assert sum(counted().values()) == 20
        killed = psutil.Process(live.named_pids(":gateway")[0])
        killed.kill()
        killed.wait(10.0)  # its command line is gone before its socket is closed
        ask(10)
        counted()
        until(both, 30.0, "the other one is back")
        ask(10)
        counted()
    finally:
        live.stop()
    grown = {name: increase([scrape.get(name) for scrape in scrapes]) for name in "01"}
    assert sum(grown.values()) == 40
