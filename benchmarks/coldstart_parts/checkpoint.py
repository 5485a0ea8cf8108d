"""A checkpoint for the benchmark: small files and shards of safetensors, of random bytes."""

from __future__ import annotations

import json
import random
from pathlib import Path

from workers.artifacts.sources.checksums import crc_of

SHARDS = 4
BLOCK = random.Random(5).randbytes(2**25)  # repeated: the bytes must not be compressible, no more
SMALL = {
    "config.json": b'{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
    "generation_config.json": b"{}",
    "tokenizer.json": BLOCK[: 2**21],
    "tokenizer_config.json": b"{}",
}


def write(folder: Path, size: int) -> dict[str, int]:
    """About ``size`` bytes in ``folder``; the CRC64NVME of each file by its name."""
    for name, data in SMALL.items():
        (folder / name).write_bytes(data)
    for number in range(SHARDS):
        path = folder / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        left = size // SHARDS
        # a name of its own: the store keeps equal files once
        header = json.dumps({f"weight.{number}": {"dtype": "U8", "shape": [left], "data_offsets": [0, left]}}).encode()
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            while left:
                left -= file.write(memoryview(BLOCK)[: min(left, len(BLOCK))])
    return sums(folder)


def sums(folder: Path) -> dict[str, int]:
    """The CRC64NVME of each file below ``folder``, by its name."""
    checksums, add = {}, crc_of("crc64nvme")
    for path in sorted(folder.iterdir()):
        if path.is_file():
            crc = 0
            with path.open("rb") as file:
                while data := file.read(2**20):
                    crc = add(data, crc)
            checksums[path.name] = crc
    return checksums
