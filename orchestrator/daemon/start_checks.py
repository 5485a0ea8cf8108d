"""Checks of this machine before `up` starts a process."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.gateway.http.http_server import bind
from orchestrator.process.failure import Failed
from workers.host.host_facts import ROOT_VARIABLE


def check_host_root() -> None:
    """Raises Failed if the variable for the host's root, in containers, names no folder."""
    root = os.environ.get(ROOT_VARIABLE)
    if root is not None and not (root.startswith("/") and Path(root).is_dir()):
        message = f"{ROOT_VARIABLE} must be the absolute path of a folder, not {root!r}"
        hint = "set it to the mount point of the host's root; outside containers unset it"
        raise Failed("setting-wrong", message, hint)


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Raise Failed for a port in use. Binds without SO_REUSEPORT, with which a second fleet would share the port."""
    try:
        bind(host, port, shared=False).close()
    except OSError as error:
        what = f"{host}:{port} cannot be bound: {error.strerror}"
        raise Failed("port-in-use", what, f"choose another {option}") from None
