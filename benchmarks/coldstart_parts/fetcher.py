"""A process that fetches a checkpoint, in one of the ways that are compared, and says what it took."""

from __future__ import annotations

import os
import resource
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway_parts.child import argument, say

BUCKET = "models"
PREFIX = "llama"
CHUNK = 2**20  # that a single GET is read by


def boto(folder: Path) -> None:
    """boto3's TransferManager at its defaults, with all files given to it at once."""
    import boto3
    from boto3.s3.transfer import TransferConfig, create_transfer_manager

    client = boto3.client("s3")
    objects = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/")["Contents"]
    with create_transfer_manager(client, TransferConfig()) as manager:
        futures = [
            manager.download(BUCKET, item["Key"], str(folder / item["Key"].rpartition("/")[2])) for item in objects
        ]
        for future in futures:
            future.result()


def single(folder: Path) -> None:
    """One GET of each file, one after the other."""
    import boto3

    client = boto3.client("s3")
    for item in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/")["Contents"]:
        body = client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"]
        with (folder / item["Key"].rpartition("/")[2]).open("wb") as file:
            for data in body.iter_chunks(CHUNK):
                file.write(data)


def transfer(folder: Path) -> None:
    """Ours, without the store."""
    from workers.artifacts.fetch.progress import Progress
    from workers.artifacts.fetch.transfer import S3Remote

    remote = S3Remote(f"s3://{BUCKET}/{PREFIX}")
    remote.fetch(remote.listing(), folder, Progress("benchmark"), threading.Event())


def store(folder: Path) -> None:
    """Ours: into the store, as the host of a fleet does it; links lead from where the files are looked for."""
    from workers.artifacts.sources.open_source import SourceQuery
    from workers.artifacts.store.store import Store

    artifact = Store(folder / "store").get(SourceQuery(source=f"s3://{BUCKET}/{PREFIX}").open())
    for name in artifact.files:
        (folder / name).symlink_to(Path(artifact.folder) / name)


WAYS = {"boto": boto, "single": single, "transfer": transfer, "store": store}


def warm(way: str) -> None:
    """Imports are no part of what is compared: in a fleet they happened long before."""
    import boto3  # noqa: F401
    import obstore  # noqa: F401
    from boto3.s3 import transfer as _  # noqa: F401

    if way == "store":
        import workers.artifacts.sources.open_source
        import workers.artifacts.store.store  # noqa: F401


def open_shards(folder: Path) -> int:
    """What an engine does first: map the tensors. Gives their bytes."""
    from safetensors import safe_open

    size = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="np") as shard:
            size += sum(shard.get_slice(name).get_shape()[0] for name in shard.keys())  # noqa: SIM118 - no mapping
    return size


def main() -> None:
    """Argument: the way, the folder, the port of the server. Says what it took."""
    settings: dict[str, Any] = argument()
    os.environ.update(
        AWS_ENDPOINT_URL_S3=f"http://127.0.0.1:{settings['port']}",
        AWS_ACCESS_KEY_ID="benchmark",
        AWS_SECRET_ACCESS_KEY="benchmark",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
    )
    folder = Path(settings["folder"])
    warm(settings["way"])
    began, used = time.monotonic(), cpu_s()
    WAYS[settings["way"]](folder)
    size = open_shards(folder)
    say({"seconds": time.monotonic() - began, "cpu_s": cpu_s() - used, "bytes": size})


def cpu_s() -> float:
    """In user mode and in the kernel, of all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
