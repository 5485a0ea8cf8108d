"""Notices of EC2 are read from a metadata service that demands a session's token, as version 2 of the real one does."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from workers.host import instance_metadata
from workers.host.instance_metadata import INTERRUPTION, REBALANCE, VARIABLE, MetadataService, NoticeWatch
from workers.messages.status import Notice

ACTION = '{"action": "terminate", "time": "2026-11-24T12:02:00Z"}'
AT = 1_795_521_720.0


class Service(ThreadingHTTPServer):
    """Instance metadata: by path its values; every other path is not found."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.values: dict[str, str] = {}
        self.tokens: set[str] = set()
        self.refuses = False
        self.read = threading.Semaphore(0)  # released after each value that was asked for

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Requests(BaseHTTPRequestHandler):
    server: Service

    def do_PUT(self) -> None:
        lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.server.refuses:
            self._reply(403)
        elif self.path != "/latest/api/token" or not lifetime.isdigit() or not 1 <= int(lifetime) <= 21_600:
            self._reply(400)
        else:
            token = secrets.token_urlsafe(40)
            self.server.tokens.add(token)
            self._reply(200, token)

    def do_GET(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            self._reply(401)
        else:
            value = self.server.values.get(self.path)
            self._reply(404 if value is None else 200, value or "<html>not found</html>")
        self.server.read.release()

    def _reply(self, status: int, body: str = "") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    server = Service()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_instance_without_a_notice_stays(service: Service) -> None:
    assert MetadataService(service.address).notice() is None


def test_an_interruption_has_a_deadline_and_a_recommendation_has_none(service: Service) -> None:
    """The recommendation comes first, and is still there when the interruption follows."""
    client = MetadataService(service.address)
    service.values[REBALANCE] = '{"noticeTime": "2026-11-24T11:40:00Z"}'
    assert client.notice() == Notice(cause="rebalance recommendation")
    service.values[INTERRUPTION] = ACTION
    assert client.notice() == Notice(cause="spot interruption", until=AT)


def test_a_token_that_has_expired_is_renewed(service: Service) -> None:
    client = MetadataService(service.address)
    client.notice()
    service.tokens.clear()
    service.values[INTERRUPTION] = ACTION
    assert client.notice() == Notice(cause="spot interruption", until=AT)
    assert len(service.tokens) == 1


@pytest.mark.parametrize("value", ["", "{}", '{"time": "tomorrow"}', "[]"])
def test_a_notice_that_cannot_be_read_is_an_error_not_a_time(service: Service, value: str) -> None:
    service.values[INTERRUPTION] = value
    with pytest.raises(OSError, match="has no time"):
        MetadataService(service.address).notice()


def test_a_service_that_refuses_or_is_not_there_is_an_error(service: Service) -> None:
    service.refuses = True
    with pytest.raises(OSError, match="no token"):
        MetadataService(service.address).notice()
    service.shutdown()
    service.server_close()
    with pytest.raises(OSError, match="refused"):
        MetadataService(service.address).notice()


def test_the_last_notice_stays_while_the_service_is_silent(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance that ends may lose its network first; a notice that the service takes back is over."""
    monkeypatch.setenv(VARIABLE, service.address)
    monkeypatch.setattr(instance_metadata, "PERIOD_S", 0.01)
    service.values[INTERRUPTION] = ACTION
    watch = NoticeWatch()

    def after_reads(number: int) -> Notice | None:
        for _ in range(number):
            assert service.read.acquire(timeout=10.0)
        return watch.notice

    after_reads(3)
    assert after_reads(1) == Notice(cause="spot interruption", until=AT)
    service.tokens.clear()
    service.refuses = True
    assert after_reads(3) == Notice(cause="spot interruption", until=AT)
    service.refuses = False
    service.values.clear()
    while after_reads(1) is not None:
        pass
    watch.close()
