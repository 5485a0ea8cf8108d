"""All replicas of a version load the same content, until somebody asks for what the source has now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.control.effects import Survivor
from orchestrator.control.journal.journal import Journal
from orchestrator.control.journal.journal_records import Pin, Revision
from tests.orchestrator.control.test_prefetch import spec
from tests.orchestrator.elsewhere import alone as alone
from tests.orchestrator.fakes import FakeCluster, Played, play, starting_fleet
from workers.messages.replica_config import Origin

SOURCE = "s3://models/one"


class Backwards(FakeCluster):
    """Ray names actors in no order."""

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        living, lost = await super().survivors()
        return living[::-1], lost


@starting_fleet(spec())
async def test_the_content_stays_the_same_after_the_controller_and_all_replicas_died(
    played: Played, tmp_path: Path
) -> None:
    """The source has changed meanwhile."""
    await played.settled()
    played.cluster.contents[SOURCE] = "2"
    await played.kill()
    await played.cluster.find("m/0").die("want of memory")
    async with Played(tmp_path, played.cluster, spec(), journal=played.journal) as second:
        await second.settled()
        await second.kill()
    assert [config.source for config in played.cluster.started] == [f"/store/{SOURCE}@1"] * 2


def test_a_restart_keeps_the_new_content_after_the_controller_has_died(tmp_path: Path) -> None:
    """One of three is restarted; those that still load the old content do not bring it back."""
    cluster = Backwards()
    cluster.load_s = 5.0

    async def story(played: Played) -> None:
        await played.settled()
        cluster.contents[SOURCE] = "2"
        await played.operator.restart("m", "tester")
        await played.until(lambda: any(r["epoch"] == 2 for r in played.ready("m")), "one of them is new", 600.0)
        await played.kill()
        async with Played(tmp_path, cluster, spec(replicas=3), journal=played.journal) as second:
            await second.settled()
            assert "SourceChanged" not in second.happened()
            await second.kill()
        assert [replica.config.source for replica in cluster.living()] == [f"/store/{SOURCE}@2"] * 3

    play(tmp_path, spec(replicas=3), story, cluster=cluster)


@starting_fleet(spec(degree=24))
async def test_a_restart_during_a_fetch_gets_the_latest_content(played: Played) -> None:
    """The running fetch is given up."""
    await played.settled()
    played.cluster.fetch_s = 100.0
    await played.apply(spec("s3://models/two", degree=24))
    await played.until(lambda: played.cluster.fetching, "it is fetched", 60.0)
    played.cluster.contents["s3://models/two"] = "2"
    await played.operator.restart("m", "tester")
    await played.settled()
    assert played.cluster.started[-1].source == "/store/s3://models/two@2"
    assert len(played.cluster.stopped_fetches) == 1


def test_a_new_fleet_resolves_its_sources_again(tmp_path: Path) -> None:
    """The journal keeps the content of versions for one `up`, also through its compaction."""
    path = tmp_path / "journal"
    pin = Pin(model="m", version="v", origin=Origin(source=SOURCE, artifact="k"))
    journal = Journal(path)
    journal.append(pin)
    journal.append(Pin(model="m", version="w", origin=Origin(source=SOURCE, artifact="l")))
    journal.append(Pin(model="m", version="w", origin=None))
    journal.close()
    journal = Journal(path)
    (kept,) = journal.state().pins.values()
    assert (kept.model, kept.version, kept.origin) == ("m", "v", pin.origin)
    fields: dict[str, Any] = {"by": "up", "text": "", "file": "", "base_dir": "", "of": None, "plan": {}}
    journal.append(Revision(number=1, cause="apply", **fields))
    assert len(journal.state().pins) == 1
    journal.append(Revision(number=2, cause="up", **fields))
    assert not journal.state().pins
    journal.close()
