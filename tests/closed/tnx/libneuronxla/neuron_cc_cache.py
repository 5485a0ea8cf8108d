"""See ``tests.closed.compile_cache``."""

from tests.closed.compile_cache import CacheUrl, CompileCache, CompileCacheFs, CompileCacheS3, create_compile_cache

__all__ = ["CacheUrl", "CompileCache", "CompileCacheFs", "CompileCacheS3", "create_compile_cache"]
