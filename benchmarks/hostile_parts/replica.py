"""The attacked replica: a small model with random weights on the cpu engine, which returns logprobs and follows JSON
schemas, behind the real batcher and the real data plane."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import workers
from benchmarks.gateway_parts.child import argument, say
from benchmarks.gateway_parts.engine import EPOCH, TOKEN
from orchestrator.process.version import corewright_version
from tests.checkpoints import make_checkpoint
from workers.batching.batcher import Batcher
from workers.engines.cpu.engine import CpuEngine
from workers.messages.wire import Welcome
from workers.serving.dataplane import DataPlane
from workers.text.tokenizer import load_tokenizer


def main() -> None:
    """Argument: ``socket``, ``source`` (a folder to create), ``slots``, ``max_len``. Reports when it listens."""
    settings = argument()
    source = Path(settings["source"])
    source.mkdir()
    make_checkpoint(source, "llama", hidden=32, layers=1, heads=2)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "max_position_embeddings": settings["max_len"]}))
    engine = CpuEngine(source, slots=settings["slots"], max_len=settings["max_len"], threads=1)
    engine.load()
    tokenizer = load_tokenizer("cpu", str(source))
    batcher = Batcher(engine, tokenizer, lambda events: plane.emit(events))
    batcher.warm_guides()
    spec = engine.spec
    package = str(Path(workers.__file__).parent)
    longest = spec.prefill_buckets[-1]
    welcome = Welcome(corewright_version(), package, spec.slots, spec.max_len, longest, spec.vocab_size)
    plane = DataPlane(Path(settings["socket"]), welcome=welcome, token=TOKEN, epoch=EPOCH, batcher=batcher)
    plane.start()
    threading.Thread(target=batcher.run, daemon=True).start()
    say({})
    sys.stdin.read()


if __name__ == "__main__":
    main()
