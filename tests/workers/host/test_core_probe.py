"""Claims of cores without a model, as `corewright verify` measures them on an emulated host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec

from workers.host import json_process
from workers.host.core_probe import Claimed, ClaimRefused, ProbeRequest

MAX_WAIT_S = 20.0


def test_the_cores_of_a_killed_probe_are_free_although_a_fork_held_them(tmp_path: Path) -> None:
    """The fork ends with the probe. Otherwise every later claim would be refused until a reboot."""
    folder, log = tmp_path / "claims", str(tmp_path / "log")
    request = ProbeRequest(cores=[0, 1], claims=str(folder), limit_s=MAX_WAIT_S)

    def replies(process: Any) -> Any:
        return msgspec.json.decode(next(cast(Any, process.stdout)), type=Claimed | ClaimRefused)

    def probe() -> Any:
        return json_process.running(
            ("workers.host.core_probe",), request, python=None, env={}, log_file=log, limit_s=2 * MAX_WAIT_S
        )

    with probe() as holder:
        assert isinstance(replies(holder), Claimed)
        with probe() as following:
            refusal = replies(following)
            assert (type(refusal), refusal.fault) == (ClaimRefused, "cores-taken")
            holder.kill()
            assert isinstance(replies(following), Claimed)
