"""A stand-in for SageMaker's runtime, between a client of AWS's SDK and a container.

SageMaker's own code is closed. Each rule below is from one of these documents:

[api]     the model of the service `sagemaker-runtime` 2017-05-13, which botocore installs: paths, headers, errors and
          their statuses, the members of the stream
[code]    "Custom Inference Code with Hosting Services" of the SageMaker developer guide: /invocations on port 8080
[multi]   "Custom Containers Contract for Multi-Model Endpoints": /models, `model_name` as an opaque name, 409 and 507,
          the header of the target model
[invoke]  "Invoke a Multi-Model Endpoint": ModelNotReadyException after 60 s, loads of up to 360 s
[quotas]  "Amazon SageMaker AI endpoints and quotas": 25 MB of payload, 60 s for an answer, 8 minutes for a stream
[frames]  "Event stream encoding" of Amazon Transcribe's guide, the format that botocore's `eventstream` reads
[reports] errors that users have reported on GitHub: aws/amazon-sagemaker-examples 1026 and 1216 (the target model of an
          endpoint with one model), aws/sagemaker-python-sdk 1119 (no answer in time), and the texts of ModelError
"""

from __future__ import annotations

import hashlib
import http.client
import json
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
from botocore.config import Config  # type: ignore[import-untyped]

ENDPOINT = "chat"
PREFIX = "x-amzn-sagemaker-"
TARGET = f"{PREFIX}target-model"
WHOLE, STREAM = f"/endpoints/{ENDPOINT}/invocations", f"/endpoints/{ENDPOINT}/invocations-response-stream"  # [api]
FORWARDED = ("content-type", f"{PREFIX}custom-attributes", f"{PREFIX}inference-id")  # [api]: others are stripped
STATUSES = {"ValidationError": 400, "ModelError": 424, "ModelNotReadyException": 429, "InternalFailure": 500}  # [api]
MAX_PAYLOAD_BYTES = 25 * 2**20  # [quotas]; the length of the blob in [api] is 6 MiB
ANSWER_S, STREAM_S, LOAD_S = 60.0, 480.0, 360.0  # [quotas], [invoke]
NO_ANSWER = "Your invocation timed out while waiting for a response from container primary."  # [reports]
PART_BYTES = 8192


class Refusal(Exception):
    """An error of the service, by its name in [api]."""

    def __init__(self, kind: str, message: str, **members: Any) -> None:
        super().__init__(message)
        self.kind, self.members = kind, {"Message": message, **members}


class SageMakerRuntime:
    """An endpoint with one container, on a port of its own."""

    def __init__(
        self,
        container: str,
        *,
        folder_of: Callable[[str], str] | None = None,
        answer_s: float = ANSWER_S,
        stream_s: float = STREAM_S,
    ) -> None:
        """``folder_of`` makes it a multi-model endpoint: it returns the folder of a target model, as downloaded."""
        self.container = urlsplit(container).netloc
        self.folder_of = folder_of
        self.answer_s, self.stream_s = answer_s, stream_s
        self.used: list[str] = []  # loaded models, the last used one last
        self.unloaded: list[str] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"runtime": self}))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def client(self) -> Any:
        return boto3.client(
            "sagemaker-runtime",
            endpoint_url=f"http://127.0.0.1:{self._server.server_port}",
            region_name="us-east-1",
            aws_access_key_id="any",
            aws_secret_access_key="any",
            config=Config(retries={"max_attempts": 0}, read_timeout=120),
        )

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def open(self, headers: Mapping[str, str], body: bytes, accept: str | None) -> _Answer:
        """Returns the container's answer to an invocation, or raises Refusal."""
        if len(body) > MAX_PAYLOAD_BYTES:
            raise Refusal("ValidationError", f"The payload has more than {MAX_PAYLOAD_BYTES} bytes.")
        target = headers.get(TARGET)
        if (target is None) is (self.folder_of is not None):  # [reports]
            lacks = f"Endpoint {ENDPOINT} is not a multi-model endpoint and does not support target model header."
            raise Refusal("ValidationError", lacks if target else "The request is missing a target model header.")
        sent = {name: headers[name] for name in FORWARDED if name in headers}
        if accept is not None:
            sent["accept"] = accept
        path = "/invocations"  # [code]
        if target is not None:
            path = f"/models/{self.load(target)}/invoke"
            sent[TARGET] = target
        answer = _Answer(self.container, "POST", path, sent, body, self.answer_s)
        if answer.status >= 400:
            raise _model_error(answer.status, answer.read())
        return answer

    def load(self, target: str) -> str:
        """Returns the name of a model that the container has loaded, after others were unloaded for it."""
        assert self.folder_of is not None
        name = hashlib.sha256(target.encode()).hexdigest()[:32]  # [multi]: opaque
        with self.lock:
            while name not in self.used:
                body = {"model_name": name, "url": self.folder_of(target)}
                answer = self._control("POST", "/models", body)
                if answer.status in (200, 409):
                    self.used.append(name)
                elif answer.status == 507 and self.used:
                    self.unloaded.append(self.used.pop(0))
                    assert self._control("DELETE", f"/models/{self.unloaded[-1]}").status == 200
                else:
                    raise _model_error(answer.status, answer.read())
            self.used.append(self.used.pop(self.used.index(name)))
        return quote(name)

    def _control(self, method: str, path: str, body: Any = None) -> _Answer:
        sent = b"" if body is None else json.dumps(body).encode()
        answer = _Answer(self.container, method, path, {"content-type": "application/json"}, sent, LOAD_S)
        if answer.status < 400:
            answer.read()
        return answer


class _Answer:
    """What a container answers to one request."""

    def __init__(self, container: str, method: str, path: str, headers: dict[str, str], body: bytes, wait_s: float):
        self.connection = http.client.HTTPConnection(container, timeout=wait_s)
        try:
            self.connection.request(method, path, body, headers)
            self.response = self.connection.getresponse()
        except TimeoutError:
            self.connection.close()
            raise _model_error(0, NO_ANSWER.encode()) from None
        self.status, self.headers = self.response.status, self.response.headers

    def read(self) -> bytes:
        try:
            return self.response.read()
        except TimeoutError:
            raise _model_error(0, NO_ANSWER.encode()) from None
        finally:
            self.connection.close()

    def parts(self, within_s: float) -> Iterator[bytes]:
        """Yields the body as it arrives. Raises Refusal for one that breaks off."""
        if self.connection.sock is not None:
            self.connection.sock.settimeout(within_s)
        try:
            while part := self.response.read1(PART_BYTES):
                yield part
        except TimeoutError:
            code, what = "ModelInvocationTimeExceeded", "The model did not finish sending the response in time."
            raise Refusal("ModelStreamError", what, ErrorCode=code) from None
        except (OSError, http.client.HTTPException):
            code, what = "StreamBroken", "The connection to the model was closed."
            raise Refusal("ModelStreamError", what, ErrorCode=code) from None
        finally:
            self.connection.close()


class _Handler(BaseHTTPRequestHandler):
    runtime: SageMakerRuntime
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        streamed = self.path == STREAM
        if streamed:
            headers.pop(TARGET, None)  # [api]: only InvokeEndpoint has one
        try:
            if self.path not in (WHOLE, STREAM):
                raise Refusal("ValidationError", f"Endpoint of {self.path} not found.")
            answer = self.runtime.open(headers, body, headers.get(f"{PREFIX}accept" if streamed else "accept"))
            if streamed:
                self._stream(answer)
            else:
                self._whole(answer)
        except Refusal as error:
            sent = json.dumps(error.members).encode()
            self.send_response(STATUSES[error.kind])
            self.send_header("x-amzn-errortype", error.kind)
            self._end({"content-type": "application/json", "content-length": str(len(sent))})
            self.wfile.write(sent)

    def _whole(self, answer: _Answer) -> None:
        body = answer.read()
        self.send_response(200)
        self._attributes(answer)
        self._end({"content-type": answer.headers["content-type"], "content-length": str(len(body))})
        self.wfile.write(body)

    def _stream(self, answer: _Answer) -> None:
        self.send_response(200)
        self._attributes(answer)
        self.send_header(f"{PREFIX}content-type", answer.headers["content-type"])  # [api]
        self._end({"content-type": "application/vnd.amazon.eventstream", "transfer-encoding": "chunked"})
        try:
            for part in answer.parts(self.runtime.stream_s):
                self._chunk(_frame({":message-type": "event", ":event-type": "PayloadPart"}, part))
        except Refusal as error:
            kinds = {":message-type": "exception", ":exception-type": error.kind, ":content-type": "application/json"}
            self._chunk(_frame(kinds, json.dumps(error.members).encode()))
        self._chunk(b"")

    def _attributes(self, answer: _Answer) -> None:
        name = f"{PREFIX}custom-attributes"
        self.send_header("x-amzn-invoked-production-variant", "all")
        if name in answer.headers:  # [api]: else the client gets none
            self.send_header(name, answer.headers[name])

    def _end(self, headers: Mapping[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def _model_error(status: int, body: bytes) -> Refusal:
    """The container's body is a text of the error; its headers are lost."""
    side = "client" if 400 <= status < 500 else "server"
    text = body.decode(errors="replace")
    code = f"{side.upper()}_ERROR_FROM_MODEL"
    what = f'Received {side} error ({status}) from primary with message "{text}".'
    return Refusal("ModelError", what, ErrorCode=code, OriginalStatusCode=status, OriginalMessage=text)


def _frame(headers: Mapping[str, str], payload: bytes) -> bytes:
    """Returns a message: its lengths, their checksum, the headers (of type 7: text), the payload and a checksum."""
    written = b"".join(
        struct.pack("!B", len(name)) + name.encode() + struct.pack("!BH", 7, len(value)) + value.encode()
        for name, value in headers.items()
    )
    prelude = struct.pack("!II", 16 + len(written) + len(payload), len(written))
    prelude += struct.pack("!I", zlib.crc32(prelude))
    message = prelude + written + payload
    return message + struct.pack("!I", zlib.crc32(message))
