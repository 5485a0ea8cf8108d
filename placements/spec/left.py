"""Values of a spec that were removed, with what to use instead: answered by an error for one release."""

from __future__ import annotations

from collections.abc import Mapping

LEFT: Mapping[str, str] = {
    "update.strategy: borrow": "use auto; to keep a model serving that has one replica, leave cores free for surge, or "
    "unload an idle model before the apply",
}
"""The field and the value -> what to use instead."""
