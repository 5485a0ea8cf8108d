"""The arguments and results of actor calls."""

from __future__ import annotations

import copyreg
import pickle
from typing import Any

import msgspec

from workers.messages.status import Phase, ReplicaStatus

STATUS = ReplicaStatus(version=9, phase=Phase.READY, pid=4711, started=12.5, live=2)


def test_a_message_of_another_version_is_read_without_its_further_fields() -> None:
    """Machines may have different versions of corewright with the same protocol."""
    reduction: Any = copyreg.dispatch_table[ReplicaStatus](STATUS)
    decode, (kind, data) = reduction
    wide = msgspec.msgpack.encode({**msgspec.msgpack.decode(data), "added": [1]})
    assert decode(kind, wide) == STATUS


def test_a_message_is_pickled() -> None:
    assert pickle.loads(pickle.dumps(STATUS)) == STATUS
