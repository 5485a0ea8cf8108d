"""From S3 to ready: how fast a checkpoint comes, against boto3's TransferManager and against a single GET.

    .venv/bin/python -m benchmarks.coldstart
    .venv/bin/python -m benchmarks.coldstart --gigabytes 0.5 --rounds 1

The S3 is an asyncio server of ranges in a process of its own, each connection of which is capped at 90 MB/s, as S3's
are. Everything is in memory on one machine: what is compared are the clients. Each way fetches the same checkpoint of
four shards and some small files in a fresh process, from the listing until the tensors of all shards are mapped; the
ways take turns in each round, and ratios are medians of the rounds' ratios. What has arrived is compared, byte for
byte, with what the server has; one difference ends the run.

- *ours*: listed, fetched, each object compared with S3's CRC64NVME.
- *stored*: the same into the store of a host, as a fleet does it, which publishes it under the digests of its files.
- *boto3*: the TransferManager at its defaults, all files at once. It compares nothing: S3 gives no checksum of a range.
- *single*: one GET of each file, one after the other, by boto3; compared with S3's CRC64NVME.
- *503*: ours, while one of twenty GETs is answered with 503 Slow Down.

CPU is user and system time of the fetching process, for each GB.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.coldstart_parts import checkpoint
from benchmarks.coldstart_parts.fetcher import PREFIX
from benchmarks.gateway_parts.child import Child
from benchmarks.report import Target, finish

PARTS = "benchmarks.coldstart_parts."
RATE = 90e6  # bytes/s of a connection
SHARE_503 = 0.05
TARGETS = {
    "over_boto3": Target(1.4),
    "over_single_get": Target(10.0),
    "time_with_503_over_without": Target(1.15, at_least=False),
    "cpu_s_per_gb_over_boto3": Target(1.0, at_least=False),
    "stored_over_boto3": Target(1.4),
    "stored_over_single_get": Target(10.0),
    "stored_cpu_s_per_gb_over_boto3": Target(1.0, at_least=False),
}
WAYS = {"ours": "transfer", "503": "transfer", "stored": "store", "boto3": "boto", "single": "single"}


class Bench:
    """The server, and the folder of everything."""

    def __init__(self, stack: contextlib.ExitStack, size: int) -> None:
        memory = Path("/dev/shm")
        place = memory if memory.is_dir() and shutil.disk_usage(memory).free > 3 * size else None
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cwc-", dir=place)))
        (self._folder / "s3" / PREFIX).mkdir(parents=True)
        self._sums = checkpoint.write(self._folder / "s3" / PREFIX, size)
        settings = {"root": str(self._folder / "s3"), "rate": RATE}
        settings["checksums"] = {f"{PREFIX}/{name}": crc for name, crc in self._sums.items()}
        self._server = stack.enter_context(Child(PARTS + "ranges", settings))

    def run(self, way: str) -> dict[str, Any]:
        """Raises RuntimeError when what arrived is not what was there."""
        self._server.ask({"share_503": SHARE_503 if way == "503" else 0.0})
        folder = self._folder / "fetched"
        folder.mkdir()
        settings = {"way": WAYS[way], "folder": str(folder), "port": self._server.ready["port"]}
        with Child(PARTS + "fetcher", settings) as child:
            ready = child.ready
        seen = self._server.ask({"share_503": 0.0})
        if checkpoint.sums(folder) != self._sums:
            raise RuntimeError(f"{way}: something else has arrived than was sent")
        shutil.rmtree(folder)
        ready["cpu_s_per_gb"] = ready["cpu_s"] / (ready["bytes"] / 1e9)
        refused = f", {seen['refused']} answered with 503" if seen["refused"] else ""
        print(
            f"{way:<8} {ready['bytes'] / ready['seconds'] / 1e9:.2f} GB/s in {ready['seconds']:.2f} s,"
            f" {ready['cpu_s_per_gb']:.2f} CPU s/GB; {seen['requests']} requests on {seen['connections']}"
            f" connections{refused}",
            flush=True,
        )
        return ready


def run(size: int, rounds: int) -> dict[str, float]:
    ratios: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        bench = Bench(stack, size)
        bench.run("ours")  # the first one finds memory that nobody has touched yet
        for _ in range(rounds):
            results = {way: bench.run(way) for way in WAYS}
            seconds = {way: item["seconds"] for way, item in results.items()}
            cpu = {way: item["cpu_s_per_gb"] for way, item in results.items()}
            ratios["over_boto3"].append(seconds["boto3"] / seconds["ours"])
            ratios["over_single_get"].append(seconds["single"] / seconds["ours"])
            ratios["time_with_503_over_without"].append(seconds["503"] / seconds["ours"])
            ratios["cpu_s_per_gb_over_boto3"].append(cpu["ours"] / cpu["boto3"])
            ratios["stored_over_boto3"].append(seconds["boto3"] / seconds["stored"])
            ratios["stored_over_single_get"].append(seconds["single"] / seconds["stored"])
            ratios["stored_cpu_s_per_gb_over_boto3"].append(cpu["stored"] / cpu["boto3"])
            ratios["gb_per_s"].append(results["ours"]["bytes"] / seconds["ours"] / 1e9)
    return {name: statistics.median(each) for name, each in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    finish("coldstart", run(int(options.gigabytes * 1e9), options.rounds), TARGETS)


if __name__ == "__main__":
    main()
