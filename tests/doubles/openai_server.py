"""A double of vLLM's server: `python -m vllm.entrypoints.cli.main serve MODEL FLAGS` of `make_vllm`'s interpreter.

Its tokens are those of the echo engine. As in vLLM, they come from a worker process below an engine process: a stopped
worker hangs requests while ``/health`` is 200; both processes survive the server, and the server ends after either of
them. A bias of 100 forces a token. Files plan what goes wrong:

- ``MODEL.loading``: the socket is bound and refuses connections until this FIFO has been written to.
- ``MODEL/faults.json``: ``chunk``, tokens in each event; ``after``, tokens of each answer before ``error`` (an error
  event), ``end`` (no finish reason) or ``reset`` (no end of the response) as ``do`` says.

``MODEL/received.jsonl`` gets the body of each completion. A LoRA adapter puts its weights, if they are not zeros,
before the prompt; as in vLLM, one without modules is an error.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import base64
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.doubles.machine import make_interpreter
from workers.engines.echo.engine import echo_tokens

VERSION = "0.32.0"
MOST_LOGPROBS = 20
FLAGS = ("block-size", "dtype", "generation-config", "tensor-parallel-size")  # without an effect here
SWITCHES = ("disable-uvicorn-access-log", "enable-prefix-caching", "enforce-eager", "trust-remote-code")
Body = dict[str, Any]
# What a request must satisfy besides its lengths and ids, with the values of fields that it does not name.
RULES: tuple[tuple[str, Any, Callable[[Any], bool]], ...] = (
    ("max_tokens", 16, lambda value: isinstance(value, int) and value >= 1),
    ("temperature", 1.0, lambda value: 0 <= value <= 2),
    ("top_p", 1.0, lambda value: 0 < value <= 1),
    ("top_k", 0, lambda value: value >= -1),
    ("min_p", 0.0, lambda value: 0 <= value <= 1),
    ("repetition_penalty", 1.0, lambda value: value > 0),
    ("presence_penalty", 0.0, lambda value: -2 <= value <= 2),
    ("frequency_penalty", 0.0, lambda value: -2 <= value <= 2),
    ("logprobs", 0, lambda value: value >= -1),
    ("stop_token_ids", [], lambda value: all(isinstance(id, int) for id in value)),
)


def lora_weights(text: str) -> bytes:
    """A file of weights whose adapter puts this text before the prompt."""
    tensor = {"dtype": "U8", "shape": [len(text)], "data_offsets": [0, len(text)]}
    header = json.dumps({"base_model.model.layers.0.o_proj.lora_A.weight": tensor}).encode()
    return len(header).to_bytes(8, "little") + header + text.encode()


def prefix_of(adapter: Path) -> list[int]:
    """The ids that an adapter puts before the prompt. Raises ValueError for one without modules."""
    raw = (adapter / "adapter_model.safetensors").read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    if not json.loads(raw[8:end]):
        raise ValueError("Worker failed with error ''")
    return [id for id in raw[end:] if id]


def make_vllm(folder: Path, version: str = VERSION) -> Path:
    """Returns the Python of a new environment whose vLLM is the double."""
    python = make_interpreter(folder, neuron=False, instead={"vllm": version})
    package = next(folder.glob("lib/python3.*/site-packages")) / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text("import sys\nfrom tests.doubles.openai_server import main\nmain(sys.argv[1:])\n")
    return python


class Refused(Exception):
    """The request gets an error with this status."""

    def __init__(self, status: int, message: str, type: str = "BadRequestError") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": type, "param": None, "code": status}}


class Engine:
    """The processes that give tokens, in the order of the questions."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._waiting: list[asyncio.Future[int]] = []

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**24
        )
        assert self._process.stdout is not None
        await self._process.stdout.readline()  # it is up
        self._handle = os.pidfd_open(self._process.pid)  # `wait` also waits for the worker to close the pipe
        asyncio.get_running_loop().add_reader(self._handle, self._end)
        self._reading = asyncio.create_task(self._read(self._process.stdout))

    async def next_token(self, ids: list[int]) -> int:
        """Raises Refused when the engine is dead."""
        if self.ended.is_set():
            raise Refused(500, "the engine is dead", "InternalServerError")
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(ids).encode() + b"\n")
        return await answer

    async def _read(self, output: asyncio.StreamReader) -> None:
        while line := await output.readline():
            answer = self._waiting.pop(0)
            if not answer.done():
                answer.set_result(int(line))

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._handle)
        self.ended.set()
        for answer in self._waiting:
            if not answer.done():
                answer.set_exception(Refused(500, "the engine is dead", "InternalServerError"))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class Server:
    """The routes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._model = Path(options.model)
        self._names: list[str] = options.served_model_name
        self._max_len: int = options.max_model_len
        self._vocab_size: int = json.loads((self._model / "config.json").read_text())["vocab_size"]
        generation = self._model / "generation_config.json"
        eos = json.loads(generation.read_text())["eos_token_id"] if generation.exists() else []
        self._eos: list[int] = eos if isinstance(eos, list) else [eos]
        self._most: int = options.max_num_queued_reqs or sys.maxsize
        self._slots = asyncio.Semaphore(options.max_num_seqs)
        self._pools = options.runner == "pooling"
        self._requests = self._running = 0
        self._max_rank: int = options.max_lora_rank if options.enable_lora else 0
        self._adapters = {name: Path(at) for name, _, at in (text.partition("=") for text in options.lora_modules)}
        for folder in self._adapters.values():
            prefix_of(folder)
        self.engine = Engine()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**24, middlewares=[_authenticate])
        if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1":
            app.add_routes(
                [web.post("/v1/load_lora_adapter", self._load), web.post("/v1/unload_lora_adapter", self._unload)]
            )
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", lambda _: _json({"version": VERSION})),
                web.get("/v1/models", self._list_models),
                web.get("/metrics", self._metrics),
            ]
        )
        if self._pools:
            app.add_routes([web.post("/v1/embeddings", self._embed)])
        else:
            app.add_routes([web.post(f"/v1/{name}", self._complete) for name in ("completions", "chat/completions")])
        return app

    async def _embed(self, request: web.Request) -> web.Response:
        """A vector is the number of its tokens, their sum and the last one, over the largest of the three."""
        body: Body = await request.json()
        inputs: list[list[int]] = body["input"]
        if any(not 0 < len(ids) <= self._max_len for ids in inputs):
            return _refusal(400, "BadRequestError", "the lengths are not possible")
        data = []
        for index, ids in enumerate(inputs):
            row = array.array("f", [number / max(1, *ids, sum(ids)) for number in (len(ids), sum(ids), ids[-1])])
            data.append({"object": "embedding", "index": index, "embedding": base64.b64encode(row.tobytes()).decode()})
        count = sum(map(len, inputs))
        usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0}
        return await _json(
            {"id": "embd-0", "object": "list", "created": 0, "model": body["model"], "data": data[::-1], "usage": usage}
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.ended.is_set() else 200)

    async def _list_models(self, request: web.Request) -> web.Response:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "vllm", "root": str(self._model), "parent": None}
            | {"max_model_len": self._max_len}
            for name in self._names
        ]
        models += [
            {"id": name, "object": "model", "root": str(path), "parent": self._names[0]}
            for name, path in self._adapters.items()
        ]
        return await _json({"object": "list", "data": models})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body.get("lora_name"), Path(body.get("lora_path") or "")
        if not name or not body.get("lora_path") or name in self._names:
            return _refusal(400, "InvalidUserInput", "a name and a path are needed")
        if name in self._adapters:
            return _refusal(400, "InvalidUserInput", f"The lora adapter '{name}' has already been loaded.")
        if not (path / "adapter_config.json").is_file():
            return _refusal(404, "NotFoundError", f"the adapter '{name}' is not in {path}")
        rank = json.loads((path / "adapter_config.json").read_text())["r"]
        if rank > self._max_rank:
            return _refusal(500, "InternalServerError", f"LoRA rank {rank} is greater than {self._max_rank}.")
        try:
            prefix_of(path)
        except ValueError as error:
            return _refusal(500, "InternalServerError", f"Call to add_lora method failed: {error}")
        self._adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json()).get("lora_name")
        if name not in self._adapters:
            return _refusal(404, "NotFoundError", f"The lora adapter '{name}' cannot be found.")
        del self._adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self._names[0]}"}}'
        values = {"running": self._running, "waiting": self._requests - self._running}
        lines = [f"vllm:num_requests_{name}{labels} {value:.1f}\n" for name, value in values.items()]
        return web.Response(text="".join(lines))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        if self._requests >= self._most:
            return web.Response(status=503, text="Service Unavailable")
        self._requests += 1
        try:
            return await self._answer(request)
        except Refused as error:
            return web.json_response(error.body, status=error.status)
        finally:
            self._requests -= 1

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            body: Body = await request.json()
        except ValueError:
            raise Refused(400, "the body is not JSON") from None
        with (self._model / "received.jsonl").open("a") as log:
            log.write(json.dumps(body) + "\n")
        if body.get("model") not in (*self._names, *self._adapters, None):
            raise Refused(404, "there is no such model", "NotFoundError")
        body["model"] = body.get("model") or self._names[0]
        answer = Answer(body, request.path.endswith("/chat/completions"), request.headers.get("X-Request-Id", "0"))
        if (adapter := self._adapters.get(body.get("model", ""))) is not None:
            answer.before = prefix_of(adapter)
        self._check(answer)
        if not body.get("stream"):
            self._check_in_engine(answer)
            ids: list[int] = []
            finish: str | None = None
            async with self._slot():
                while finish is None:
                    token, finish = await self._next(answer, ids)
                    ids.append(token)
            return web.json_response(answer.whole(ids, finish))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            self._check_in_engine(answer)
            if answer.chat:
                await response.write(_event(answer.role()))
            if not await self._stream(answer, response):
                return response
        except Refused as error:
            await response.write(_event(error.body))
        await response.write(b"data: [DONE]\n\n")
        return response

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        async with self._slots:
            self._running += 1
            try:
                yield
            finally:
                self._running -= 1

    async def _stream(self, answer: Answer, response: web.StreamResponse) -> bool:
        """Returns whether the response ends as HTTP says."""
        faults = json.loads(path.read_text()) if (path := self._model / "faults.json").exists() else {}
        ids: list[int] = []
        chunk: list[int] = []
        finish: str | None = None
        async with self._slot():
            while finish is None:
                if len(ids) == faults.get("after"):
                    if faults["do"] == "error":
                        raise Refused(500, "planned", "InternalServerError")
                    return self._cut(response) if faults["do"] == "reset" else True
                token, finish = await self._next(answer, ids)
                ids.append(token)
                chunk.append(token)
                if finish is not None or len(chunk) >= faults.get("chunk", 1) or len(ids) == faults.get("after"):
                    await response.write(_event(answer.chunk(chunk, finish, first=len(ids) == len(chunk))))
                    chunk = []
        if answer.body.get("stream_options", {}).get("include_usage"):
            await response.write(_event(answer.chunk_of([], usage=answer.usage(len(ids)))))
        return True

    @staticmethod
    def _cut(response: web.StreamResponse) -> bool:
        transport = response._req.transport if response._req is not None else None
        assert transport is not None
        transport.abort()
        return False

    async def _next(self, answer: Answer, ids: list[int]) -> tuple[int, str | None]:
        body, count = answer.body, len(ids) + 1
        ending = {*body.get("stop_token_ids", ()), *([] if body.get("ignore_eos") else self._eos)}
        token = await self.engine.next_token(answer.before + answer.prompt + ids)
        forced = [int(id) for id, bias in (body.get("logit_bias") or {}).items() if bias >= 100]
        if forced and not (forced[0] in ending and count <= body.get("min_tokens", 0)):
            token = forced[0]
        if token in ending and count > body.get("min_tokens", 0):
            return token, "stop"
        most = min(body.get("max_tokens") or 16, self._max_len - len(answer.prompt))
        return token, "length" if count >= most else None

    def _check(self, answer: Answer) -> None:
        """Raises Refused for what vLLM checks before it answers; fields that it does not know pass."""
        body = answer.body
        for name, default, holds in RULES:
            value = body.get(name)
            if not holds(default if value is None else value):
                raise Refused(400, f"{name} is {value}")
        prompt = answer.prompt
        if not 0 < len(prompt) < self._max_len or body.get("min_tokens", 0) > (body.get("max_tokens") or 16):
            raise Refused(400, "the lengths are not possible")
        if any(id < 0 for id in prompt):
            raise Refused(400, "an id is negative")
        if body.get("n", 1) > 1 and body.get("temperature") == 0:
            raise Refused(400, "several greedy answers")

    def _check_in_engine(self, answer: Answer) -> None:
        """Raises Refused for what only vLLM's engine checks, when a stream has begun."""
        body = answer.body
        if not all(int(id) < self._vocab_size for id in [*answer.prompt, *(body.get("logit_bias") or {})]):
            raise Refused(400, "an id is outside the vocabulary")
        if (body.get("logprobs") or 0) > MOST_LOGPROBS:
            raise Refused(400, "too many logprobs")
        schema = (body.get("structured_outputs") or {}).get("json", {})
        if schema.get("type", "object") not in ("object", "array", "string", "number", "integer", "boolean", "null"):
            raise Refused(400, "the schema has an unknown type")


class Answer:
    """One request, and the objects that answer it."""

    def __init__(self, body: Body, chat: bool, id: str) -> None:
        self.body = body
        self.chat = chat
        text = body["messages"][-1]["content"] if chat else body.get("prompt")
        if chat and not isinstance(text, str):
            text = json.dumps(text)
        self.prompt: list[int] = list(text.encode()) if isinstance(text, str) else text or []
        self.before: list[int] = []  # tokens of an adapter
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id}", "created": int(time.time()), "object": kind}
        self._head |= {"model": body.get("model")}

    def usage(self, count: int) -> Body:
        prompt = len(self.prompt)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def chunk_of(self, choices: list[Body], **more: Any) -> Body:
        head = {**self._head, **({"object": "chat.completion.chunk"} if self.chat else {})}
        return {**head, "choices": choices, **more}

    def role(self) -> Body:
        delta = {"role": "assistant", "content": ""}
        return self.chunk_of([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, ids: list[int], finish: str | None, first: bool) -> Body:
        choice: Body = {"index": 0, "logprobs": self._logprobs(ids), "finish_reason": finish}
        if self.chat:
            return self.chunk_of([{**choice, "delta": {"content": _text(ids)}}])
        if self.body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": self.prompt if first else None}
        return self.chunk_of([{**choice, "text": _text(ids), "stop_reason": self._stop(ids)}])

    def whole(self, ids: list[int], finish: str | None) -> Body:
        choice: Body = {
            "index": 0,
            "logprobs": self._logprobs(ids),
            "finish_reason": finish,
            "stop_reason": self._stop(ids),
        }
        if self.chat:
            choice["message"] = {"role": "assistant", "content": _text(ids)}
        else:
            choice["text"] = _text(ids)
            if self.body.get("return_token_ids"):
                choice |= {"token_ids": ids, "prompt_token_ids": self.prompt}
        return {**self._head, "choices": [choice], "usage": self.usage(len(ids))}

    def _stop(self, ids: list[int]) -> int | None:
        return ids[-1] if ids and ids[-1] in self.body.get("stop_token_ids", ()) else None

    def _logprobs(self, ids: list[int]) -> Body | None:
        count = self.body.get("logprobs")
        if self.chat or count is None:
            return None
        tops = [{f"token_id:{id + place}": -0.5 - place for place in range(max(count, 1))} for id in ids]
        names = [f"token_id:{id}" for id in ids]
        return {
            "tokens": names,
            "token_logprobs": [-0.5] * len(ids),
            "top_logprobs": tops,
            "text_offset": [0] * len(ids),
        }


@web.middleware
async def _authenticate(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    key = os.environ.get("VLLM_API_KEY")
    if key and request.path.startswith("/v1") and request.headers.get("Authorization") != f"Bearer {key}":
        return web.json_response({"error": "Unauthorized"}, status=401)
    answer: web.StreamResponse = await handler(request)
    return answer


def _refusal(status: int, type: str, message: str) -> web.Response:
    return web.json_response(Refused(status, message, type).body, status=status)


def _text(ids: list[int]) -> str:
    return bytes(id for id in ids if id < 256).decode(errors="replace")


def _event(value: Body) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


async def _json(value: Body) -> web.Response:
    return web.json_response(value)


async def serve(options: argparse.Namespace, bound: socket.socket) -> None:
    server = Server(options)
    await server.engine.start()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.2, access_log=None)
    await runner.setup()
    await web.SockSite(runner, bound).start()
    await asyncio.wait(
        [asyncio.create_task(stopping.wait()), asyncio.create_task(server.engine.ended.wait())],
        return_when=asyncio.FIRST_COMPLETED,
    )
    server.engine.kill()
    await runner.cleanup()


def main(arguments: list[str]) -> None:
    """Runs the server until SIGTERM or the end of its engine. Exits with code 2 for flags that vLLM does not have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--served-model-name", nargs="+", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-num-queued-reqs", type=int)
    parser.add_argument("--runner", choices=["auto", "generate", "pooling"], default="auto")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-modules", nargs="+", default=[])
    for name in ("max-loras", "max-cpu-loras", "max-lora-rank"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--uds")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name in FLAGS:
        parser.add_argument(f"--{name}")
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    options = parser.parse_args(arguments)
    bound = socket.socket(socket.AF_UNIX if options.uds else socket.AF_INET)
    bound.bind(options.uds or (options.host, options.port))  # a socket file of before is an error
    with contextlib.suppress(FileNotFoundError):
        Path(f"{options.model}.loading").read_bytes()  # returns when its writer has closed it
    asyncio.run(serve(options, bound))


def engine() -> None:
    """The engine's process, which ends with its worker."""
    if worker := os.fork():
        os.waitpid(worker, 0)
    else:
        work()


def work() -> None:
    """The worker's process: one token for each line of ids. It goes on when its server has gone."""
    print("up", flush=True)  # noqa: T201
    for line in sys.stdin:
        print(echo_tokens(json.loads(line), 1)[0], flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    engine()
