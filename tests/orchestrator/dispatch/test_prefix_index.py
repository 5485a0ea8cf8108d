"""Which replica has been sent the beginning of a prompt, and a session's last request."""

from __future__ import annotations

import subprocess
import sys

from orchestrator.dispatch.prefix_index import PrefixIndex, Sessions, chain

PROMPT = list(range(1000, 1160))


def test_the_share_is_that_of_the_blocks_from_the_beginning_on() -> None:
    """Whole blocks count, up to the first that differs; what is left over at the end is not looked at."""
    memory = PrefixIndex()
    memory.add(chain(PROMPT, 16))
    assert memory.share(chain(PROMPT, 16)) == 1.0
    assert memory.share(chain([*PROMPT, *range(160)], 16)) == 0.5
    assert memory.share(chain([*PROMPT[:85], 1, *PROMPT[86:]], 16)) == 0.5
    assert memory.share(chain([1, *PROMPT[1:]], 16)) == 0.0
    assert memory.share(chain([*PROMPT, 7, 8], 16)) == 1.0


def test_a_prompt_of_less_than_a_block_is_nowhere() -> None:
    """Nothing could be saved."""
    memory = PrefixIndex()
    memory.add(chain([1, 2, 3], 16))
    assert (memory.share(chain([1, 2, 3], 16)), len(memory)) == (0.0, 0)


def test_the_oldest_prompt_is_forgotten_first_and_from_its_end() -> None:
    """Ten blocks of room: a third prompt of four leaves the first with its beginning only."""
    memory = PrefixIndex(blocks=10)
    prompts = [[number] * 64 for number in range(3)]
    for prompt in prompts:
        memory.add(chain(prompt, 16))
    assert [memory.share(chain(prompt, 16)) for prompt in prompts] == [0.5, 1.0, 1.0]
    memory.add(chain(prompts[0], 16))
    assert [memory.share(chain(prompt, 16)) for prompt in prompts] == [1.0, 0.5, 1.0]


def test_of_a_prompt_longer_than_the_memory_the_beginning_is_kept() -> None:
    """Only that part can be shared with another prompt."""
    memory = PrefixIndex(blocks=4)
    memory.add(chain(PROMPT, 16))
    assert (len(memory), memory.share(chain(PROMPT, 16))) == (4, 0.4)


def test_digests_are_the_same_in_every_process() -> None:
    """So that two runs decide alike."""
    code = "from orchestrator.dispatch.prefix_index import chain; print(chain(range(64), 16))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(chain(range(64), 16))


def test_a_session_expires_after_its_time_without_requests() -> None:
    """To the second."""
    sessions = Sessions[str](ttl_s=10.0)
    sessions.put("a", "r0", 0.0)
    assert (sessions.get("a", 9.9), sessions.get("b", 9.9)) == ("r0", None)
    sessions.put("a", "r1", 9.0)
    assert (sessions.get("a", 18.9), sessions.get("a", 19.0), len(sessions)) == ("r1", None, 0)


def test_old_sessions_are_evicted() -> None:
    """Beyond the maximum the least recently used one; expired ones when another arrives."""
    sessions = Sessions[int](most=2, ttl_s=10.0)
    for number, session in enumerate("abac"):
        sessions.put(session, number, float(number))
    assert [sessions.get(session, 4.0) for session in "abc"] == [2, None, 3]
    sessions.put("d", 4, 12.5)
    assert len(sessions) == 2
    sessions.put("e", 5, 100.0)
    assert len(sessions) == 1
