"""`make demo-check`: start `corewright demo`, send each model one streamed and one plain request, stop it again."""

from __future__ import annotations

import sys

from openai import OpenAI

from tests.fleet import LiveFleet

QUESTION = "What is a NeuronCore?"


def ask(client: OpenAI, model: str) -> tuple[str, str]:
    """The plain and the streamed answer to the same question."""
    messages = [{"role": "user", "content": QUESTION}]
    plain = client.chat.completions.create(model=model, messages=messages, temperature=0)  # type: ignore[arg-type]
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True)  # type: ignore[arg-type]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)  # type: ignore[union-attr]
    return plain.choices[0].message.content or "", streamed


def main() -> int:
    passed = failed = 0
    fleet = LiveFleet(None, arguments=("--dashboard",), secure=True)
    try:
        fleet.wait_ready()
        client = OpenAI(base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=60)
        for model in [card.id for card in client.models.list()]:
            plain, streamed = ask(client, model)
            good = bool(plain.strip()) and plain == streamed
            passed, failed = passed + good, failed + (not good)
            print(f"{'ok  ' if good else 'FAIL'} {model}: {plain!r}" + ("" if good else f" but streamed {streamed!r}"))
        code = fleet.stop()
        good = code == 0 and not fleet.processes()
        passed, failed = passed + good, failed + (not good)
        print(
            f"{'ok  ' if good else 'FAIL'} the fleet ended: exit code {code}, {len(fleet.processes())} processes left"
        )
    finally:
        if failed:
            print(fleet.output(), file=sys.stderr)
        fleet.clean()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
