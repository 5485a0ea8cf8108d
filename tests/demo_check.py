"""`make demo-check`: install the wheel, start `corewright demo` in an empty folder, send each model a streamed and a
plain request, and one of them another by curl, and stop it by `corewright down`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from openai import OpenAI

from tests.fleet import LiveFleet
from tests.installed_wheel import InstalledWheel

QUESTION = "What is a NeuronCore?"
MESSAGES = [{"role": "user", "content": QUESTION}]
END_S = 40


class Checks:
    def __init__(self) -> None:
        self.passed = self.failed = 0

    def check(self, good: bool, what: str, otherwise: str = "") -> None:
        self.passed, self.failed = self.passed + good, self.failed + (not good)
        print(f"{'ok  ' if good else 'FAIL'} {what}" + ("" if good else otherwise))


def ask(client: OpenAI, model: str) -> tuple[str, str]:
    """The plain and the streamed answer to the same question."""
    plain = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, stream=True)  # type: ignore[arg-type]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)  # type: ignore[union-attr]
    return plain.choices[0].message.content or "", streamed


def curl(url: str, model: str) -> str:
    """The answer to the README's command."""
    body = json.dumps({"model": model, "messages": MESSAGES, "temperature": 0})
    command = [
        "curl",
        "--silent",
        "--show-error",
        "--max-time",
        "60",
        "-H",
        "content-type: application/json",
        "-d",
        body,
    ]
    sent = subprocess.run([*command, f"{url}/v1/chat/completions"], capture_output=True, text=True, check=False)
    return json.loads(sent.stdout)["choices"][0]["message"]["content"] if sent.returncode == 0 else sent.stderr


def main() -> int:
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="cwt-", dir="/tmp") as folder:
        wheel = InstalledWheel(Path(folder))
        fleet = LiveFleet(None, arguments=("--dashboard",), secure=True, wheel=wheel)
        try:
            fleet.wait_ready()
            client = OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60)
            for model in [card.id for card in client.models.list()]:
                plain, streamed = ask(client, model)
                good = bool(plain.strip()) and plain == streamed
                checks.check(good, f"{model}: {plain!r}", f" but streamed {streamed!r}")
            answer = curl(fleet.url, model)
            checks.check(answer == plain, f"{model} by curl: {answer!r}")
            down = fleet.corewright("down")
            checks.check(down.returncode == 0, "corewright down", f": {down.stdout}{down.stderr}")
            code, left = fleet.process.wait(END_S), fleet.processes()
            checks.check(code == 0 and not left, f"the fleet ended: exit code {code}, {len(left)} processes left")
            checks.check(not wheel.reads, "nothing of the checkout was read", f", but {sorted(wheel.reads)}")
        finally:
            if checks.failed or not checks.passed:
                print(fleet.output(), file=sys.stderr)
            fleet.clean()
    print(f"{checks.passed} passed, {checks.failed} failed")
    return 1 if checks.failed or not checks.passed else 0


if __name__ == "__main__":
    sys.exit(main())
