"""During an upgrade two versions meet: today's code reads what the previous version wrote (tests/golden/previous), and
what a newer one adds is ignored. See `tests.recorded_version`."""

from __future__ import annotations

import asyncio
import base64
import copyreg
import inspect
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.on_ray.controller_actor import ControllerActor
from orchestrator.on_ray.host_actor import HostActor
from orchestrator.records.journal import Journal
from orchestrator.records.journal_fold import failed_cores
from tests.orchestrator.elsewhere import forbid_remote_sources
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.recorded_version import SPEC, frames, messages
from workers.messages.actor_message import _decoded
from workers.messages.wire import FrameReader, Message
from workers.serving.replica import Replica

RECORDED = Path(__file__).parent / "golden" / "previous"
_reader: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
ACTORS: dict[str, type] = {
    "Replica": Replica,
    "HostActor": HostActor.__ray_metadata__.modified_class,  # type: ignore[attr-defined]
    "ControllerActor": ControllerActor,
}


@pytest.mark.parametrize("name", ["journal", "journal-compacted"])
def test_a_controller_continues_from_the_previous_versions_journal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its revision, manual scale, cordons, drain, broken cores and epochs hold."""
    forbid_remote_sources(monkeypatch, tmp_path)
    shutil.copy(RECORDED / name, tmp_path / "journal")

    async def live() -> None:
        journal = Journal(tmp_path / "journal", clock=asyncio.get_running_loop().time)
        assert journal.damage == []
        before = journal.state()
        cluster = FakeCluster()
        async with Played(tmp_path, cluster, "", journal=journal, fleet="recorded", restarted=True) as played:
            await asyncio.sleep(600.0)
            current = played.controller.state.current.revision
            assert (current.number, current.text) == (3, SPEC.format(batch=2))
            assert len(played.ready("chat")) == 3, "as scaled by hand"
            assert len(played.ready("small")) == 2
            for config in cluster.started:
                assert config.epoch > before.epochs[f"{config.model}/{config.replica}"]
            broken = {(record.host, record.core) for record in failed_cores(before)}
            used = {(replica.config.host, core) for replica in cluster.living() for core in replica.config.cores}
            assert len(broken) == 2
            assert not used & (broken | {("inf2.48xlarge/0", core) for core in range(20, 24)})
            assert "inf2.48xlarge/1" not in {host for host, _ in used}, "it is drained"
            assert cluster.violations == []
        journal.close()

    virtually(live)


def test_frames_of_the_previous_version_are_read() -> None:
    """Each message of a connection, as it was recorded."""
    assert FrameReader().feed((RECORDED / "frames.bin").read_bytes()) == frames()


def _widened(value: Any) -> Any:
    """Returns a decoded message with a field more in each struct."""
    if isinstance(value, list):
        return [_widened(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {**{key: _widened(item) for key, item in value.items()}, "added_by_a_newer_version": [1]}
    return value


@pytest.mark.parametrize("message", frames(), ids=lambda message: type(message).__name__)
def test_a_frame_of_a_newer_version_is_read_without_its_new_fields(message: Message) -> None:
    """An old gateway can use a new replica, and the reverse."""
    wide = msgspec.msgpack.encode(_widened(msgspec.msgpack.decode(msgspec.msgpack.encode(message))))
    assert _reader.decode(wide) == message


@pytest.mark.parametrize("name", messages())
def test_values_of_actor_calls_are_read_from_the_previous_and_for_the_next_version(name: str) -> None:
    """As recorded; as this version sends them; and with fields that it does not have."""
    value = messages()[name]
    recorded = json.loads((RECORDED / "messages.json").read_text())[name]
    assert pickle.loads(base64.b64decode(recorded)) == value
    assert pickle.loads(pickle.dumps(value)) == value
    reduction: Any = copyreg.dispatch_table[type(value)](value)
    decode, (kind, data) = reduction
    assert decode is _decoded
    fields = {**msgspec.msgpack.decode(data), "added_by_a_newer_version": [1]}
    assert _decoded(kind, msgspec.msgpack.encode(fields)) == value


def test_actors_accept_the_calls_of_the_previous_version() -> None:
    """Its controller, gateways and host actors call them by these parameters, in this order."""
    for call, parameters in json.loads((RECORDED / "calls.json").read_text()).items():
        actor, _, method = call.partition(".")
        today = list(inspect.signature(getattr(ACTORS[actor], method)).parameters.values())[1:]
        assert [parameter.name for parameter in today[: len(parameters)]] == parameters, call
        assert all(parameter.default is not parameter.empty for parameter in today[len(parameters) :]), call
