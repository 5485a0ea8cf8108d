"""Which replica has been sent the beginning of a prompt; tests/properties/test_prefixes.py has the rest."""

from __future__ import annotations

import subprocess
import sys

from orchestrator.dispatch.replica_choice import PrefixIndex, chain


def test_the_oldest_prompt_is_forgotten_first_and_from_its_end() -> None:
    """Ten blocks of room: a third prompt of four leaves the first with its beginning only."""
    memory = PrefixIndex(blocks=10)
    prompts = [[number] * 64 for number in range(3)]
    for prompt in prompts:
        memory.add(chain(prompt, 16))
    assert [memory.share(chain(prompt, 16)) for prompt in prompts] == [0.5, 1.0, 1.0]
    memory.add(chain(prompts[0], 16))
    assert [memory.share(chain(prompt, 16)) for prompt in prompts] == [1.0, 0.5, 1.0]


def test_digests_are_the_same_in_every_process() -> None:
    """So that two runs decide alike."""
    code = "from orchestrator.dispatch.replica_choice import chain; print(chain(range(64), 16))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(chain(range(64), 16))
