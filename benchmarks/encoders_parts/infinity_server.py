"""Encodes texts with infinity-emb: runs in an interpreter of its own, which has it, and imports nothing of ours.

Arguments: the model's folder, texts in a batch, torch's threads. Each line of stdin is a JSON list of texts; each is
answered by a line ``infinity SECONDS FIRST`` with the first number of the first vector. An empty line ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


async def main(folder: str, rows: int, threads: int) -> None:
    import torch
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs  # type: ignore[import-not-found]

    torch.set_num_threads(threads)
    engine: Any = AsyncEmbeddingEngine.from_args(
        EngineArgs(
            model_name_or_path=folder,
            engine="torch",
            device="cpu",
            batch_size=rows,
            dtype="float32",
            bettertransformer=False,  # what newer releases of transformers have replaced by sdpa
            model_warmup=False,
        )
    )
    async with engine:
        print("infinity ready", flush=True)
        while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
            texts = json.loads(line)
            began = time.perf_counter()
            vectors, _ = await engine.embed(sentences=texts)
            seconds = time.perf_counter() - began
            print(f"infinity {seconds} {float(vectors[0][0])}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
