"""What was removed, with what to use instead: answered by an error for one release."""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "up --upgrade": "stop the fleet with `corewright down`, and start it with `corewright up` of the other version; "
    "or start a second fleet beside it",
    **dict.fromkeys(
        ("hosts roll", "hosts continue", "hosts stop"),
        "use `corewright drain HOST --wait`, `hosts wait HOST` and `uncordon HOST` for one host after the other",
    ),
    **dict.fromkeys(
        ("bench latency", "bench throughput"), "use `corewright bench`, which measures latency and tokens/s together"
    ),
    **dict.fromkeys(
        ("bench serving", "bench encoding"), "use guidellm or `vllm bench serve`; docs/bench.md has the commands"
    ),
}
"""The words that begin a command line, and an option anywhere after them."""

SETTINGS: Mapping[str, str] = dict.fromkeys(
    ("store_memory", "store_memory_bytes"),
    "remove the setting: the kernel's page cache keeps fetched models in memory while there is room",
)
"""Settings by name."""

VALUES: Mapping[str, str] = {
    "update.strategy: borrow": "use auto; to keep a model serving that has one replica, leave cores free for surge, or "
    "unload an idle model before the apply",
}
"""The field of a spec and its value."""
