"""The version of corewright."""

from __future__ import annotations


def corewright_version() -> str:
    """Returns the version of the installed distribution. Raises RuntimeError if corewright is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # takes 15 ms; most commands skip it

    try:
        return version("corewright")
    except PackageNotFoundError:
        raise RuntimeError("corewright is not installed; run `pip install -e .` in its folder") from None
