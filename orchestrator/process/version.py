"""Which corewright this is."""

from __future__ import annotations


def corewright_version() -> str:
    """The version of the installed distribution. Raises RuntimeError when the source is used without installing it."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, which most commands need not wait for

    try:
        return version("corewright")
    except PackageNotFoundError:
        raise RuntimeError("corewright is not installed; run `pip install -e .` in its folder") from None
