"""Which corewright this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def corewright_version() -> str:
    """The version of the installed distribution. Raises RuntimeError when the source is used without installing it."""
    try:
        return version("corewright")
    except PackageNotFoundError:
        raise RuntimeError("corewright is not installed; run `pip install -e .` in its folder") from None
