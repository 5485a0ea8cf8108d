"""The compiler's persistent cache, as far as the packages ask for it: its place, and classes that Optimum subclasses.

The compiler's stand-in reads and writes the files itself.
"""

from __future__ import annotations

import os


class CacheUrl:
    """The place of the cache."""

    def __init__(self, url: str) -> None:
        self.url = url

    @classmethod
    def get_cache_url(cls, cache_dir: str | None = None) -> CacheUrl:
        return cls(cache_dir or os.environ.get("NEURON_COMPILE_CACHE_URL", "/var/tmp/neuron-compile-cache"))

    def is_s3(self) -> bool:
        return self.url.startswith("s3://")


class CompileCache:
    """A cache at a place. transformers-neuronx asks it only for ``download_artifacts``, which it lacks."""

    def __init__(self, cache_url: CacheUrl) -> None:
        self.cache_url = cache_url
        self.cache_path = cache_url.url


class CompileCacheFs(CompileCache):
    """One in a folder."""


class CompileCacheS3(CompileCache):
    """One in a bucket."""


def create_compile_cache(cache_url: CacheUrl) -> CompileCache:
    return CompileCacheS3(cache_url) if cache_url.is_s3() else CompileCacheFs(cache_url)
