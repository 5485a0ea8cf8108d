"""Ray's cause of an actor's death, in few words."""

from __future__ import annotations

from ray.exceptions import RayError

CRASHED = "its process ended without an error: killed by a signal (out of memory?), or crashed"
DISCONNECTED = "the connection to its process was closed"  # Ray does not know why, or has lost the connection only


def cause_of_death(error: RayError) -> str:
    """Returns the cause, without Ray's advice and frames."""
    text = str(error)
    if "killed by `ray.kill`" in text:
        return "it was killed"
    if "SYSTEM_ERROR" in text:  # Ray noticed only the closed connection
        return CRASHED
    if "is not schedulable" in text:
        return "its host is lost"
    if "temporarily unavailable" in text:  # the connection was closed before Ray knows the cause
        return DISCONNECTED
    if "creation task" in text:
        return text.strip().splitlines()[-1]
    return text.splitlines()[0] if text else type(error).__name__
