"""Hostile folders of models in a real fleet: `validate`, `plan`, `up` and `apply`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.fleet import LiveFleet, until
from tests.orchestrator.gateway.test_hostile_models import ENDLESS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

TINY = Path(__file__).parents[3] / "placements" / "examples" / "models" / "tiny"
HEAD = "version: 1\nhosts: {emulate: inf2.48xlarge}\ndefaults: {engine: cpu, tp_degree: 1, max_len: 128}\nmodels:\n"


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Copies of the model of the examples: a good one, two that fail when they are used, three that cannot load."""
    for name in ("good", "endless", "regex", "nested", "header", "huge"):
        shutil.copytree(TINY, tmp_path / name)
    (tmp_path / "endless" / "chat_template.jinja").write_text(ENDLESS)
    file = tmp_path / "regex" / "tokenizer.json"
    content = json.loads(file.read_text())
    pattern = {"Regex": "(a+)+[bc]"}
    content["pre_tokenizer"] = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps(content))
    (tmp_path / "nested" / "tokenizer.json").write_text("[" * 100_000)
    (tmp_path / "header" / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with (tmp_path / "huge" / "tokenizer.json").open("wb") as stream:
        stream.truncate(2**37)
    return tmp_path


def spec(folders: Path, *names: str) -> str:
    return HEAD + "".join(f"  {name}: {{source: {folders / name}}}\n" for name in names)


@pytest.fixture
def live(folders: Path) -> Iterator[LiveFleet]:
    with LiveFleet(spec(folders, "good", "endless", "regex")) as fleet:
        yield fleet


def chat(live: LiveFleet, model: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "a" * 40}], "max_tokens": 4}
    return httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)


def test_bad_folders_do_not_affect_the_fleet_and_its_good_model(live: LiveFleet, folders: Path) -> None:
    """A model that cannot load is rejected by each command with its id; one that fails in use gets a 500; the end of
    the fleet also ends the tokenizer processes.
    """
    live.wait_ready()
    until(lambda: chat(live, "good").status_code == 200, 120, "the good model answers")
    bad = folders / "bad.yaml"
    bad.write_text(spec(folders, "good", "nested", "header", "huge"))
    for command in (["validate", str(bad)], ["plan", str(bad)], ["apply", str(bad), "--yes"]):
        began = time.monotonic()
        refused = live.corewright(*command)
        output = refused.stdout + refused.stderr
        assert refused.returncode != 0, (command, output)
        assert output.count("bad-tokenizer") == 2, (command, output)
        assert "weights-broken" in output, (command, output)
        assert "Traceback" not in output
        assert time.monotonic() - began < 30
    for model in ("endless", "regex"):
        failed = chat(live, model)
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "tokenizer_failed")
    assert chat(live, "good").status_code == 200
    apart = [psutil.Process(pid) for pid in live.named_pids("tokenizer_process")]
    assert apart
    assert live.stop() == 0
    assert psutil.wait_procs(apart, timeout=10)[1] == []
