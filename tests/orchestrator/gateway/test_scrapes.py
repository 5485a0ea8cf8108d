"""Pages are made one at a time, each for all waiting scrapes."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.gateway.telemetry import exposition as module
from orchestrator.gateway.telemetry.exposition import Page, Scrapes
from tests.orchestrator.fakes import virtually


class Pages:
    """Makes numbered pages, each in ``takes_s``, and remembers when it began."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.began: list[float] = []
        self.at_once = 0
        self.fails = False
        self._takes_s = takes_s

    async def make(self, openmetrics: bool) -> Page:
        self.at_once += 1
        assert self.at_once == 1
        self.began.append(asyncio.get_running_loop().time())
        number = len(self.began)
        await asyncio.sleep(self._takes_s)
        self.at_once -= 1
        if self.fails:
            raise ValueError("no page")
        return b"%d" % number, "openmetrics" if openmetrics else "plain"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop's, which jumps."""
    monkeypatch.setattr(time, "monotonic", lambda: asyncio.get_running_loop().time())


def test_concurrent_scrapes_get_one_page() -> None:
    async def story() -> None:
        pages = Pages()
        scrapes = Scrapes(pages.make)
        assert await asyncio.gather(*(scrapes.page(False) for _ in range(32))) == [(b"1", "plain")] * 32

    virtually(story)


def test_a_scrape_during_a_page_gets_the_next_one() -> None:
    """No page is older than its request: it has every count from before."""

    async def story() -> None:
        scrapes = Scrapes(Pages(takes_s=0.01).make)
        first = asyncio.create_task(scrapes.page(False))
        await asyncio.sleep(0.005)
        late = [asyncio.create_task(scrapes.page(False)) for _ in range(3)]
        assert (await first)[0] == b"1"
        assert [page for page, _ in await asyncio.gather(*late)] == [b"2"] * 3

    virtually(story)


@pytest.mark.parametrize(
    ("takes_s", "apart_s"), [(0.001, 0.001 + module.MIN_PAUSE_S), (0.02, 0.2), (3.0, 3.0 + module.MAX_PAUSE_S)]
)
def test_a_tenth_of_the_time_is_for_pages(takes_s: float, apart_s: float) -> None:
    async def story() -> None:
        pages = Pages(takes_s)
        scrapes = Scrapes(pages.make)

        async def client() -> None:
            for _ in range(3):
                await scrapes.page(False)

        await asyncio.gather(*(client() for _ in range(32)))
        gaps = [b - a for a, b in zip(pages.began, pages.began[1:], strict=False)]
        assert gaps == pytest.approx([apart_s] * 2)

    virtually(story)


def test_each_format_has_its_page() -> None:
    async def story() -> None:
        scrapes = Scrapes(Pages(takes_s=0.01).make)
        kinds = [
            kind for _, kind in await asyncio.gather(*(scrapes.page(openmetrics) for openmetrics in (True, False)))
        ]
        assert kinds == ["openmetrics", "plain"]

    virtually(story)


def test_a_disconnected_scrape_does_not_cancel_the_page_of_others() -> None:
    async def story() -> None:
        scrapes = Scrapes(Pages(takes_s=0.01).make)
        gone, stays = (asyncio.create_task(scrapes.page(False)) for _ in range(2))
        await asyncio.sleep(0.005)
        gone.cancel()
        assert (await stays)[0] == b"1"

    virtually(story)


def test_a_failed_page_is_retried_by_the_next_scrape() -> None:
    async def story() -> None:
        pages = Pages()
        scrapes = Scrapes(pages.make)
        pages.fails = True
        with pytest.raises(ValueError, match="no page"):
            await scrapes.page(False)
        pages.fails = False
        assert (await scrapes.page(False))[0] == b"2"

    virtually(story)
