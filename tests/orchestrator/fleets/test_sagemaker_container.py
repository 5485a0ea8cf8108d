"""A container's life as SageMaker drives it, with five models on cores for three."""

from __future__ import annotations

import json
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fleet import LiveFleet, until
from tests.sagemaker_runtime import ENDPOINT, SageMakerRuntime

pytestmark = pytest.mark.live

SPEC = "version: 1\nmodels:\n  any: {engine: echo, tp_degree: 8, max_batch: 4, engine_options: {step_ms: 20}}\n"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
STREAM_TOKENS = 400  # 8 s
LOAD_S = 120.0


class SageMaker:
    """The control plane: it loads models, unloads others after a 507, and sends requests."""

    def __init__(self, fleet: LiveFleet) -> None:
        self.fleet = fleet
        self.http = httpx.Client(base_url=fleet.url, timeout=LOAD_S)

    def folder(self, name: str) -> Path:
        folder = self.fleet.home / "models" / name / "model"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "corewright.yaml").write_text(SPEC)
        return folder

    def load(self, name: str) -> int:
        answer = self.http.post("/models", json={"model_name": name, "url": str(self.folder(name))})
        if answer.status_code == 507:
            assert "no room" in answer.json()["error"]["message"]
        return answer.status_code

    def unload(self, name: str) -> int:
        return self.http.delete(f"/models/{name}").status_code

    def loaded(self) -> set[str]:
        return {row["modelName"] for row in self.http.get("/models").json()["models"]}

    def invoke(self, name: str, **fields: Any) -> httpx.Response:
        target = {"X-Amzn-SageMaker-Target-Model": f"{name}.tar.gz"}
        return self.http.post(f"/models/{name}/invoke", json={**CHAT, **fields}, headers=target)


class Watch(threading.Thread):
    """Pings the container and reads its status again and again."""

    def __init__(self, fleet: LiveFleet) -> None:
        super().__init__(daemon=True)
        self.fleet, self.over = fleet, threading.Event()
        self.pings: Counter[int] = Counter()
        self.shared: list[Any] = []  # states with a core that two replicas hold

    def run(self) -> None:
        with httpx.Client(base_url=self.fleet.url, timeout=10) as http:
            while not self.over.wait(0.2):
                self.pings[http.get("/ping").status_code] += 1
                rows = [row for model in self.fleet.status()["models"] for row in model["replicas"]]
                held = Counter(core for row in rows if row["state"] == "ready" for core in _cores(row["cores"]))
                if any(count > 1 for count in held.values()):
                    self.shared.append(rows)


def _cores(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def test_more_models_than_fit_are_loaded_refused_unloaded_and_served() -> None:
    with LiveFleet("", verb=("serve-sagemaker", "--multi-model")) as fleet:
        fleet.wait_ready()
        control, watch = SageMaker(fleet), Watch(fleet)
        watch.start()
        names = list("abcde")
        with ThreadPoolExecutor(8) as pool:
            storm = dict(zip(names, pool.map(control.load, names), strict=True))
            assert Counter(storm.values()) == {200: 3, 507: 2}
            first, *others = (name for name in names if storm[name] == 200)
            refused = [name for name in names if storm[name] == 507]
            assert control.loaded() == {first, *others}
            assert control.load(first) == 409
            assert [control.invoke(name).status_code for name in refused] == [404, 404]

            began = threading.Event()
            stream = pool.submit(_stream, control, first, began)
            assert began.wait(30)
            assert control.unload(first) == 200
            assert control.invoke(first).status_code == 404
            assert until(lambda: control.load(refused[0]) == 200, LOAD_S, "the refused model is loaded")
            assert stream.result(60).endswith("data: [DONE]\n\n")  # it was drained

            answers = list(pool.map(control.invoke, [*others, refused[0]] * 8))
            assert {answer.status_code for answer in answers} == {200}
            assert {answer.json()["model"] for answer in answers} == {*others, refused[0]}
            _use_the_sdk(control, [*others, refused[0]])
        watch.over.set()
        watch.join(30)
        assert set(watch.pings) == {200}
        assert watch.shared == []
        assert fleet.stop(signal.SIGTERM) == 0
        assert fleet.processes() == []


def _use_the_sdk(control: SageMaker, loaded: list[str]) -> None:
    """A new target takes the place of the model that was not used for longest, and then is there."""
    runtime = SageMakerRuntime(control.fleet.url, folder_of=lambda target: str(control.folder(target)))
    runtime.used = list(loaded)
    try:
        for _ in range(2):
            answer = runtime.client().invoke_endpoint(
                EndpointName=ENDPOINT, ContentType="application/json", TargetModel="new", Body=json.dumps(CHAT)
            )
            assert json.load(answer["Body"])["object"] == "chat.completion"
        assert runtime.unloaded == loaded[:1]
        assert len(control.loaded()) == 3
    finally:
        runtime.close()


def _stream(control: SageMaker, name: str, began: threading.Event) -> str:
    text = ""
    body = {**CHAT, "stream": True, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
    with control.http.stream("POST", f"/models/{name}/invoke", json=body) as answer:
        assert answer.status_code == 200
        for piece in answer.iter_text():
            text += piece
            began.set()
    return text
