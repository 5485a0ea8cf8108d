"""docs/tutorials/: what a reader of a tutorial sees is what happens."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect, sync_playwright

from orchestrator.cli import main as cli
from tests.docs.pages import DOCS, Block, blocks
from tests.fleet import LiveFleet
from tests.installed_wheel import InstalledWheel
from tests.orchestrator.console.conftest import CHROMIUM, FLAGS

TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
LAPTOP = DOCS / "tutorials" / "laptop.md"
ANSWER = "A NeuronCore is one compute core of an AWS Inferentia or Trainium chip."
CHAT = "while curl"  # the block that goes on beside the others


def plan_of(page: Path) -> str:
    """The core map that a page shows of its spec."""
    (shown,) = [part for block in blocks(page) for part in block.text.split("$ ") if part.startswith("corewright plan")]
    return shown.partition("\n")[2].removesuffix("...\n")


def spec_of(page: Path) -> str:
    """The fleet.yaml of a page: a block of its own, or what a session prints."""
    for block in blocks(page):
        if block.language == "yaml":
            return block.text
        if "$ cat fleet.yaml\n" in block.text:
            return block.text.partition("$ cat fleet.yaml\n")[2]
    raise AssertionError(f"{page.name} has no fleet.yaml")


@pytest.mark.parametrize("name", ["inf2", "from-lmi"])
def test_the_plan_of_a_tutorial_is_what_the_command_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first lines, without access to the hub or S3."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    page = DOCS / "tutorials" / f"{name}.md"
    (tmp_path / "fleet.yaml").write_text(spec_of(page))
    assert cli.run(["plan", "fleet.yaml"]) == 2
    assert capsys.readouterr().out.startswith(plan_of(page))


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_one_numbered_path(page: Path) -> None:
    """Steps from 1 on, then where to go next."""
    headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
    assert [heading.partition(".")[0] for heading in headings[:-1]] == [str(n) for n in range(1, len(headings))]
    assert headings[-1] == "Next"


def masked(text: str) -> set[str]:
    """The lines of an output without the numbers, which differ between runs and machines."""
    return {" ".join(re.sub(r"\d+(?:\.\d+)?", "N", line).split()) for line in text.splitlines() if line.strip()}


class Reader:
    """Carries out the laptop's tutorial with a fleet of its own, whose address differs from the page's."""

    def __init__(self, wheel: InstalledWheel) -> None:
        self.wheel, self.folder = wheel, wheel.empty
        self.times: list[str] = []  # of each command
        init = next(line for block in self.blocks("2. Start") for line in block.text.splitlines() if " init " in line)
        command = [str(wheel.command), *init.split()[1:]]
        subprocess.run(command, cwd=self.folder, env=wheel.environment, check=True, capture_output=True)
        began = time.monotonic()
        self.fleet = LiveFleet(self.folder / "fleet.yaml", wheel=wheel)
        self.fleet.wait_ready()
        self._took(began, "corewright up fleet.yaml")
        self.environment = {**self.fleet.env, "PATH": f"{wheel.command.parent}:{os.environ['PATH']}"}

    def _took(self, began: float, command: str) -> None:
        self.times.append(f"{time.monotonic() - began:6.1f} s  {command.strip().splitlines()[0]}")

    def blocks(self, section: str) -> list[Block]:
        return [block for block in blocks(LAPTOP) if block.section == section and block.language in ("sh", "console")]

    def commands(self, text: str) -> str:
        """Commands for this fleet, in this environment instead of the page's."""
        shown = text.replace("http://127.0.0.1:8080", self.fleet.url)
        return "\n".join(line for line in shown.splitlines() if not line.startswith("source ")) + "\n"

    def shell(self, text: str) -> str:
        """The output of commands, each of which succeeds; `plan` exits with 2 if it shows changes."""
        began = time.monotonic()
        ran = subprocess.run(
            ["bash", "-c", self.commands(text)],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode in ((0, 2) if " plan " in text else (0,)), ran.stdout + ran.stderr
        self._took(began, self.commands(text))
        return ran.stdout + ran.stderr

    def look_at_the_console(self) -> str:
        """Logs in as `corewright console` says. Returns the label of core 0."""
        shown = json.loads(self.fleet.corewright("console", "-o", "json").stdout)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            try:
                page = browser.new_page()
                page.goto(shown["url"])
                page.get_by_label("Token of the fleet").fill(shown["key"])
                page.keyboard.press("Enter")
                core = page.get_by_role("button", name=re.compile("^core 0,"))
                expect(core).to_be_visible(timeout=30_000)
                return core.get_attribute("aria-label") or ""
            finally:
                browser.close()

    def follow(self, section: str) -> str:
        """Runs the blocks of a section, and compares what a session shows: each of its lines is in the output."""
        outputs = []
        for block in self.blocks(section):
            if block.text.startswith(CHAT):
                continue
            for part in block.text.split("$ ")[1:] if block.language == "console" else [block.text]:
                command, _, shown = part.partition("\n") if block.language == "console" else (part, "", "")
                outputs.append(self.shell(command))
                assert masked(shown) - {"..."} <= masked(outputs[-1]), outputs[-1]
        return "\n".join(outputs)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    reader = Reader(InstalledWheel(tmp_path))
    try:
        yield reader
    finally:
        reader.fleet.clean()


@pytest.mark.live
def test_the_laptops_tutorial_is_what_happens(reader: Reader, capsys: pytest.CaptureFixture[str]) -> None:
    """With the wheel in an empty folder: each command succeeds, sessions print what the page shows, the console shows
    the core map, and the client of step 4 gets only 200. The time of each command is printed."""
    assert reader.follow("3. Send requests").count(ANSWER) == 3
    if CHROMIUM.exists():
        assert "assistant/0, ready" in reader.look_at_the_console()
    (chat,) = [block for block in reader.blocks("4. Change a model while it serves") if block.text.startswith(CHAT)]
    client = subprocess.Popen(
        ["bash", "-c", reader.commands(chat.text)], stdout=subprocess.PIPE, text=True, env=reader.environment
    )
    try:
        reader.follow("4. Change a model while it serves")
        assert client.poll() is None, "a request has failed"
    finally:
        client.terminate()
    assert set(client.communicate()[0].split()) == {"200"}
    reader.follow("5. Stop")
    assert reader.fleet.process.wait(40) == 0
    assert reader.fleet.processes() == []
    assert reader.wheel.reads == set()
    with capsys.disabled():
        print("", *reader.times, sep="\n")  # noqa: T201
